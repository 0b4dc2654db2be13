/* A pretend libamdhip64.so.6 for tests: HIP over ROCr over KFD, as far as asking which devices there are.
 *
 * The state is in the file named by FAKE_HIP_STATE, which is looked at on every call. Its lines:
 *
 *   version 60342134               what hipRuntimeGetVersion and hipDriverGetVersion say, and without the line too
 *   function 0                     hipDeviceGetPCIBusId ends in .0 whatever the function, as in older releases
 *   gpu NODE key=value ...         a KFD node: bdf name unique_id accessible=0|1 isa_ok=0|1 hip_ok=0|1
 *   fault CALL [WHERE] STATUS      the call answers STATUS; CALL is a symbol or *, WHERE a GPU or *
 *   hang CALL [WHERE]              the call does not return while this line is there
 *   slow CALL [WHERE] MILLISECONDS the call takes that long, then answers from the state as it is by then
 *   crash CALL [WHERE]             the call ends the process by SIGSEGV
 *
 * Only bdf must be given. A unique_id is hexadecimal, and 0 or none is a card without a UUID, "GPU-XX". With
 * accessible=0 the node cannot be opened and is as if it were not there; with isa_ok=0 ROCr numbers it for its mask,
 * then drops it; with hip_ok=0 HIP does the same. Partitions of a card are lines whose bdf differ in the function only.
 * Text with blanks stands in double quotes.
 *
 * WHERE is the place of the GPU's line among the gpu lines, from 0. A call without a device, or on an ordinal that does
 * not exist, matches only WHERE *. The first rule of a kind that matches holds. A line that makes no sense aborts the
 * process. A line with its symbol is appended to FAKE_HIP_RECORD for every call.
 *
 * The masks are read from the environment by the first call but hipGetErrorName, hipInit or not, and never again.
 *
 * Without the file there is no driver: calls answer hipErrorNoDevice, and the versions are still told, as the library
 * itself has them. So it is where no GPU is left, and where ROCr fails to initialise: HIP ignores that failure.
 *
 * What is not established is here as the runtime's source reads:
 *
 *   - ROCr, an empty token among those looked at: hsa_init throws, so HIP has no device.
 *   - ROCr, a number past 32 bits: what is left of strtol's 64 bits when cut to 32, so 4294967296 is 0.
 *   - ROCr, 0b1: ends the list. Whether the source takes it depends on the C library: a strtol of C23 would.
 *   - ROCr, a prefix of two GPUs' UUID, or the one UUID that partitions share: ends the list.
 *   - HIP, the same: the first of them.
 *   - HIP_VISIBLE_DEVICES of two double quotes: nothing is left within, so it is as if it were not set.
 *   - hipDeviceGetUuid on a card without one: "GPU-XX" from its fifth character on: two X, and zeros.
 *
 * Stricter than AMD's: a buffer of no length is an InvalidValue also for the bus id, and nothing is written.
 *
 * -DWITHOUT_<symbol> leaves that symbol out.
 */
#include "state.h"

typedef int hipError_t;
typedef int hipDevice_t;
typedef struct {
    char bytes[16];
} hipUUID;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_SUPPORTED = 801,
};

static const Fake fake = {.name = "amdhip64", .variable = "FAKE_HIP_STATE", .where_optional = true};

enum { TEXT = 128, MAX_GPUS = 256, BUS_ID = 13, DEFAULT_VERSION = 60342134 };
enum { UUID_MIN = 5, UUID_MAX = 20, UUID_PREFIX = 4 };

typedef struct {
    long place; /* of its line among the gpu lines, or NOWHERE */
    uint64_t node, unique_id;
    unsigned domain, bus, device, function;
    bool accessible, isa_ok, hip_ok;
    char name[TEXT];
} Gpu;

/* `gpu` is the call's if it is about one. */
struct Found {
    Gpu gpu;
    int version, count;
    bool function_0;
};

static struct {
    int version;
    bool function_0;
    unsigned gpus;
    Gpu gpu[MAX_GPUS]; /* by node, once the file is read */
} state;

/* ---- reading the state file ---- */

static bool flag(const char *text) { return position(text, (const char *const[]){"0", "1", NULL}) == 1; }

static uint64_t hexadecimal(const char *text) {
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 16);
    demand(isxdigit((unsigned char)*text) && *end == '\0' && errno == 0, "not a hexadecimal number", text);
    return value;
}

static void parse_address(Gpu *gpu, const char *text) {
    int end = 0;
    int parts = sscanf(text, "%x:%x:%x.%x%n", &gpu->domain, &gpu->bus, &gpu->device, &gpu->function, &end);
    demand(parts == 4 && text[end] == '\0' && gpu->function < 8, "not a PCI address", text);
}

static void parse_pair(Gpu *gpu, char *pair) {
    enum { BDF, NAME, UNIQUE_ID, ACCESSIBLE, ISA_OK, HIP_OK };
    const char *value = value_of(pair);
    switch (position(pair, (const char *const[]){"bdf", "name", "unique_id", "accessible", "isa_ok", "hip_ok", NULL})) {
    case BDF:
        return parse_address(gpu, value);
    case NAME:
        return keep(gpu->name, value, TEXT);
    case UNIQUE_ID:
        gpu->unique_id = hexadecimal(value);
        return;
    case ACCESSIBLE:
        gpu->accessible = flag(value);
        return;
    case ISA_OK:
        gpu->isa_ok = flag(value);
        return;
    case HIP_OK:
        gpu->hip_ok = flag(value);
    }
}

static void parse_gpu(char **rest) {
    enum { NO_FUNCTION = 8 };
    demand(state.gpus < MAX_GPUS, "too many GPUs", *rest);
    Gpu *gpu = &state.gpu[state.gpus];
    *gpu = (Gpu){.accessible = true, .isa_ok = true, .hip_ok = true, .function = NO_FUNCTION};
    gpu->place = state.gpus++;
    gpu->node = number(need_word(rest));
    for (char *pair = next_word(rest); pair != NULL; pair = next_word(rest))
        parse_pair(gpu, pair);
    demand(gpu->function != NO_FUNCTION, "a GPU without", "bdf");
}

static void parse_rule(const char *word, char **rest) {
    Rule *rule = new_rule(word);
    keep(rule->call, need_word(rest), WORD);
    parse_where(rule, rest);
}

static void parse_words(const char *first, char **rest) {
    if (strcmp(first, "version") == 0)
        state.version = (int)number(need_word(rest));
    else if (strcmp(first, "function") == 0)
        state.function_0 = position(need_word(rest), (const char *const[]){"0", NULL}) == 0;
    else if (strcmp(first, "gpu") == 0)
        parse_gpu(rest);
    else
        parse_rule(first, rest);
}

static void start_over(void) {
    memset(&state, 0, sizeof state);
    state.version = DEFAULT_VERSION;
}

static int by_node(const void *one, const void *other) {
    const Gpu *a = one, *b = other;
    return (a->node > b->node) - (a->node < b->node);
}

static void complete(void) {
    qsort(state.gpu, state.gpus, sizeof *state.gpu, by_node);
    for (unsigned i = 1; i < state.gpus; i++)
        demand(state.gpu[i - 1].node != state.gpu[i].node, "two GPUs on one", "node");
}

/* ---- lists of GPUs, and what a mask's tokens pick from one ---- */

typedef struct {
    unsigned count;
    const Gpu *gpu[MAX_GPUS];
} List;

enum { NONE = -1 }; /* an index that ends the list */

static bool contains(const List *list, const Gpu *gpu) {
    for (unsigned i = 0; i < list->count; i++)
        if (list->gpu[i] == gpu)
            return true;
    return false;
}

static void add(List *list, const Gpu *gpu) { list->gpu[list->count++] = gpu; }

/* Cuts the next token off, in place. Nothing behind a comma is no token, but nothing before one is. */
static char *next_token(char **rest) { return *rest == NULL || **rest == '\0' ? NULL : strsep(rest, ","); }

/* ---- the masks, as the environment had them at first ---- */

static struct {
    bool read;
    char *rocr; /* NULL: not set */
    char *hip;  /* "": not set */
} masks;

/* What stands between double quotes, which may have blanks around them; any other text is as it is. */
static char *unquoted(const char *text) {
    const char *begin = text + strspn(text, " "), *end = begin + strlen(begin);
    while (end > begin && end[-1] == ' ')
        end--;
    if (*begin != '"' || end - begin < 2 || end[-1] != '"')
        return strdup(text);
    return strndup(begin + 1, (size_t)(end - begin) - 2);
}

/* HIP keeps an empty variable as a blank, so that it counts as set. */
static char *hip_variable(const char *name) {
    const char *value = getenv(name);
    return value == NULL ? strdup("") : unquoted(*value == '\0' ? " " : value);
}

static void read_environment(void) {
    if (masks.read)
        return;
    const char *rocr = getenv("ROCR_VISIBLE_DEVICES");
    masks.rocr = rocr == NULL ? NULL : strdup(rocr);
    masks.hip = hip_variable("HIP_VISIBLE_DEVICES");
    if (*masks.hip == '\0') {
        free(masks.hip);
        masks.hip = hip_variable("CUDA_VISIBLE_DEVICES");
    }
    masks.read = true;
}

/* ---- ROCr ---- */

static char *trimmed_and_upper(char *token) {
    const char *blanks = " \t\n\v\f\r";
    token += strspn(token, blanks);
    for (size_t length = strlen(token); length > 0 && strchr(blanks, token[length - 1]) != NULL; length--)
        token[length - 1] = '\0';
    for (char *c = token; *c != '\0'; c++)
        *c = (char)toupper((unsigned char)*c);
    return token;
}

/* The one GPU whose UUID begins so; to ROCr a GPU without one has no text that any token could begin. */
static int rocr_by_uuid(const char *token, const List *all) {
    int found = NONE;
    size_t length = strlen(token);
    if (length < UUID_MIN || length > UUID_MAX)
        return NONE;
    for (unsigned i = 0; i < all->count; i++) {
        char uuid[TEXT];
        snprintf(uuid, sizeof uuid, "GPU-%016" PRIX64, all->gpu[i]->unique_id);
        if (all->gpu[i]->unique_id == 0 || strncmp(uuid, token, length) != 0)
            continue;
        if (found != NONE)
            return NONE;
        found = (int)i;
    }
    return found;
}

static int rocr_by_number(const char *token) {
    const char *digits = token + (*token == '+' || *token == '-');
    if (strncmp(digits, "0B", 2) == 0)
        return NONE;
    char *end;
    int index = (int32_t)strtol(token, &end, 0);
    return *end == '\0' ? index : NONE;
}

/* False if ROCr fails to initialise. No more tokens are looked at than there are GPUs. */
static bool rocr_pick(char *mask, const List *all, List *picked) {
    for (unsigned looks = 0; looks < all->count; looks++) {
        char *token = next_token(&mask);
        if (token == NULL)
            break;
        token = trimmed_and_upper(token);
        if (*token == '\0')
            return false;
        int index = *token == 'G' ? rocr_by_uuid(token, all) : rocr_by_number(token);
        if (index < 0 || (unsigned)index >= all->count || contains(picked, all->gpu[index]))
            break;
        add(picked, all->gpu[index]);
    }
    return true;
}

/* What ROCr hands to HIP. The nodes that cannot be opened it never sees; those of an unknown ISA it numbers. */
static List rocr_devices(void) {
    List all = {0}, picked = {0}, left = {0};
    for (unsigned i = 0; i < state.gpus; i++)
        if (state.gpu[i].accessible)
            add(&all, &state.gpu[i]);
    char *mask = masks.rocr == NULL ? NULL : strdup(masks.rocr);
    if (mask == NULL)
        picked = all;
    else if (!rocr_pick(mask, &all, &picked))
        picked.count = 0;
    free(mask);
    for (unsigned i = 0; i < picked.count; i++)
        if (picked.gpu[i]->isa_ok)
            add(&left, picked.gpu[i]);
    return left;
}

/* ---- HIP ---- */

static void hip_uuid(const Gpu *gpu, char *text) {
    if (gpu->unique_id == 0)
        strcpy(text, "GPU-XX");
    else
        snprintf(text, TEXT, "GPU-%016" PRIx64, gpu->unique_id);
}

/* A token is a number exactly as it prints, or a part of a UUID that has the prefix in it. */
static int hip_index(const char *token, const List *all) {
    bool by_uuid = strstr(token, "GPU-") != NULL;
    for (unsigned i = 0; i < all->count; i++) {
        char text[TEXT];
        if (by_uuid)
            hip_uuid(all->gpu[i], text);
        else
            snprintf(text, sizeof text, "%u", i);
        if (by_uuid ? strstr(text, token) != NULL : strcmp(text, token) == 0)
            return (int)i;
    }
    return NONE;
}

static void hip_pick(char *mask, const List *all, List *picked) {
    for (char *token = next_token(&mask); token != NULL; token = next_token(&mask)) {
        int index = hip_index(token, all);
        if (index == NONE)
            return;
        if (!contains(picked, all->gpu[index]))
            add(picked, all->gpu[index]);
    }
}

/* The process's devices, in the order of their ordinals. */
static List hip_devices(void) {
    List all = rocr_devices(), picked = {0}, left = {0};
    char *mask = strdup(masks.hip);
    if (*mask == '\0')
        picked = all;
    else
        hip_pick(mask, &all, &picked);
    free(mask);
    for (unsigned i = 0; i < picked.count; i++)
        if (picked.gpu[i]->hip_ok)
            add(&left, picked.gpu[i]);
    return left;
}

/* ---- finding what a call is about; with the lock held ---- */

static Code nothing(const void *wanted, Found *found) { return (void)wanted, (void)found, SUCCESS; }

/* For the calls that answer also where there is no device. */
static Code the_system(const void *wanted, Found *found) {
    (void)wanted;
    read_environment();
    *found = (Found){.gpu.place = NOWHERE, .version = state.version, .function_0 = state.function_0};
    found->count = (int)hip_devices().count;
    return SUCCESS;
}

static Code any_device(const void *wanted, Found *found) {
    the_system(wanted, found);
    return found->count == 0 ? NO_DEVICE : SUCCESS;
}

static Code by_ordinal(const void *wanted, Found *found) {
    int ordinal = *(const int *)wanted;
    TRY(any_device(NULL, found));
    if (ordinal < 0 || ordinal >= found->count)
        return INVALID_DEVICE;
    found->gpu = *hip_devices().gpu[ordinal];
    return SUCCESS;
}

static Verdict look(const char *call, Finder *find, const void *wanted, Found *found, bool first) {
    *found = (Found){.gpu.place = NOWHERE};
    Code code = find(wanted, found);
    if (first)
        record_call(getenv("FAKE_HIP_RECORD"), call, "");
    const Rule *fault = rule_for(FAULT, call, found->gpu.place);
    return verdict_on(call, found->gpu.place, fault == NULL ? code : (hipError_t)fault->value);
}

/* ---- the exported calls ---- */

#define CALL(name, ...) EXPORTED(name) hipError_t name(__VA_ARGS__)

/* How a call begins; past it `found` is what it is about. */
#define FIND(find, wanted)                                                                                             \
    Found found;                                                                                                       \
    TRY(enter(__func__, find, wanted, &found))

static hipError_t give_number(int value, int *out) {
    if (out == NULL)
        return INVALID_VALUE;
    *out = value;
    return SUCCESS;
}

CALL(hipInit, unsigned flags) {
    FIND(any_device, NULL);
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}

CALL(hipRuntimeGetVersion, int *out) {
    FIND(the_system, NULL);
    return give_number(found.version, out);
}

CALL(hipDriverGetVersion, int *out) {
    FIND(the_system, NULL);
    return give_number(found.version, out);
}

CALL(hipGetDeviceCount, int *out) {
    FIND(the_system, NULL);
    TRY(give_number(found.count, out));
    return found.count == 0 ? NO_DEVICE : SUCCESS;
}

CALL(hipDeviceGet, hipDevice_t *out, int ordinal) {
    FIND(by_ordinal, &ordinal);
    return give_number(ordinal, out);
}

/* What does not fit is left out. */
CALL(hipDeviceGetName, char *out, int size, hipDevice_t device) {
    FIND(by_ordinal, &device);
    if (out == NULL || size <= 0)
        return INVALID_VALUE;
    snprintf(out, (size_t)size, "%s", found.gpu.name);
    return SUCCESS;
}

CALL(hipDeviceGetPCIBusId, char *out, int size, int device) {
    FIND(by_ordinal, &device);
    if (out == NULL || size <= 0)
        return INVALID_VALUE;
    const Gpu *gpu = &found.gpu;
    unsigned function = found.function_0 ? 0 : gpu->function;
    snprintf(out, (size_t)size, "%04x:%02x:%02x.%x", gpu->domain, gpu->bus, gpu->device, function);
    return size < BUS_ID ? INVALID_VALUE : SUCCESS;
}

/* The characters themselves, without an end. */
CALL(hipDeviceGetUuid, hipUUID *out, hipDevice_t device) {
    FIND(by_ordinal, &device);
    char text[TEXT] = {0};
    if (out == NULL)
        return INVALID_VALUE;
    hip_uuid(&found.gpu, text);
    memcpy(out->bytes, text + UUID_PREFIX, sizeof out->bytes);
    return SUCCESS;
}

/* It can be slow, hang or crash like any call, but it has no code to answer. */
EXPORTED(hipGetErrorName) const char *hipGetErrorName(hipError_t code) {
    static const struct {
        hipError_t code;
        const char *name;
    } names[] = {{SUCCESS, "hipSuccess"},
                 {INVALID_VALUE, "hipErrorInvalidValue"},
                 {2, "hipErrorOutOfMemory"},
                 {3, "hipErrorNotInitialized"},
                 {35, "hipErrorInsufficientDriver"},
                 {NO_DEVICE, "hipErrorNoDevice"},
                 {INVALID_DEVICE, "hipErrorInvalidDevice"},
                 {NOT_SUPPORTED, "hipErrorNotSupported"}};
    Found found;
    enter(__func__, nothing, NULL, &found);
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code)
            return names[i].name;
    return "hipErrorUnknown";
}

/* What makes a context or takes memory is there so that a test can see that nobody calls it. */
static hipError_t refused(const char *call) {
    Found found;
    TRY(enter(call, any_device, NULL, &found));
    return NOT_SUPPORTED;
}

#define FORBIDDEN_CALL(name, ...)                                                                                      \
    CALL(name, __VA_ARGS__) { return refused(__func__); }

FORBIDDEN_CALL(hipSetDevice, int device)
FORBIDDEN_CALL(hipMalloc, void **out, size_t size)
FORBIDDEN_CALL(hipStreamCreate, void **out)
FORBIDDEN_CALL(hipCtxCreate, void **out, unsigned flags, hipDevice_t device)
