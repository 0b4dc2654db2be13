/* A pretend libamd_smi.so for tests: the real `amdsmi` loads it, and a text file says what it answers.
 *
 * The file is named by FAKE_AMD_SMI_STATE and looked at on every call. Without it there is no driver. Its lines:
 *
 *   version MAJOR MINOR RELEASE BUILD   the library's; without the line 26 0 2 "26.0.2", which ROCm 7.0.2 has
 *   driver 6.14.14                      the driver's version
 *   gpu N key=value ...                 the keys are in `key_names` below; bdf is DOMAIN:BUS:DEVICE.FUNCTION
 *   fault CALL WHERE STATUS             the call answers STATUS; CALL is a symbol or *, WHERE an N or *
 *   lie CALL WHERE                      the call hides that it could not read: see below
 *   hang CALL WHERE                     the call does not return while this line is there
 *   slow CALL WHERE MILLISECONDS        the call takes that long, then answers from the state as it is by then
 *   crash CALL WHERE                    the call ends the process by SIGSEGV
 *
 * A key that is left out makes the calls that need it answer NOT_SUPPORTED; a call needs all the keys it reads. Text
 * with blanks stands in double quotes. The first rule of a kind that matches holds, and a fault goes before a lie. A
 * call that is not about a GPU matches only WHERE *. A line that makes no sense aborts the process.
 *
 * amdsmi_init looks which GPUs there are, in the order of their lines, and until the next shutdown and init no others
 * are found. GPUs with the same socket= share a socket; one without has its own. N is only what tells the lines apart:
 * a handle stays with its N, and answers NOT_FOUND while there is no such line and for ever after a shutdown.
 *
 * A lie is what AMD's library does when a file of the kernel cannot be read: amdsmi_get_gpu_activity says once more
 * what it said last (at first zeros), amdsmi_get_gpu_memory_total and amdsmi_get_gpu_memory_usage say 0, all with
 * success.
 *
 * Every call appends its symbol as a line to the file that FAKE_AMD_SMI_RECORD names, if it names one.
 *
 * amdsmi_get_gpu_metrics_info aborts the process, whatever the rules say: where the library is newer than the binding,
 * the real one writes past the end of what the binding gave it. All symbols that are not here come from
 * amd_smi_stubs.h, which amd_smi.py makes; they answer NOT_SUPPORTED.
 */
#include "state.h"

/* ---- AMD's types, as the binding has them; tests/test_fake_amd_smi.py compares the two ---- */

typedef uint32_t amdsmi_status_t;
enum {
    SUCCESS = 0,
    INVAL = 1,
    NOT_SUPPORTED = 2,
    NOT_FOUND = 31,
    NOT_INIT = 32,
    DRIVER_NOT_LOADED = 34,
    INSUFFICIENT_SIZE = 41
};
enum { INIT_AMD_GPUS = 2, TYPE_AMD_GPU = 1, MEMORY_VRAM = 0, TEMPERATURE_CURRENT = 0, STRING = 256, UUID_SIZE = 38 };
enum { SENSOR_EDGE, SENSOR_HOTSPOT, SENSOR_VRAM, SENSORS };

typedef struct {
    char market_name[STRING];
    uint32_t vendor_id;
    char vendor_name[STRING];
    uint32_t subvendor_id;
    uint64_t device_id;
    uint32_t rev_id;
    char asic_serial[STRING];
    uint32_t oam_id, num_of_compute_units;
    uint64_t target_graphics_version;
    uint32_t subsystem_id, reserved[21];
} amdsmi_asic_info_t;

typedef struct {
    uint64_t kfd_id;
    uint32_t node_id, current_partition_id, reserved[12];
} amdsmi_kfd_info_t;

typedef struct {
    uint32_t drm_render, drm_card, hsa_id, hip_id;
    char hip_uuid[STRING];
} amdsmi_enumeration_info_t;

typedef struct {
    uint32_t gfx_activity, umc_activity, mm_activity, reserved[13];
} amdsmi_engine_usage_t;

typedef struct {
    uint64_t socket_power;
    uint32_t current_socket_power, average_socket_power;
    uint64_t gfx_voltage, soc_voltage, mem_voltage;
    uint32_t power_limit;
    uint64_t reserved[18];
} amdsmi_power_info_t;

typedef struct {
    char driver_version[STRING], driver_date[STRING], driver_name[STRING];
} amdsmi_driver_info_t;

typedef struct {
    uint32_t major, minor, release;
    const char *build;
} amdsmi_version_t;

typedef struct {
    uint64_t as_uint; /* in bits from the lowest: 3 function, 5 device, 8 bus, 48 domain */
} amdsmi_bdf_t;

/* ---- the state ---- */

static const Fake fake = {.name = "amd smi", .variable = "FAKE_AMD_SMI_STATE", .own_rule = "lie"};

enum { TEXT = STRING, MAX_GPUS = 128, MAX_HANDLES = 4096, UNKNOWN_16 = 0xffff };
#define LIE OWN

/* The keys that hold text come first; from VENDOR_ID on all are numbers. */
#define KEYS_OF(_)                                                                                                     \
    _(BDF, bdf) _(SOCKET, socket) _(UUID, uuid) _(NAME, name) _(HIP_UUID, hip_uuid)                                    \
    _(VENDOR_ID, vendor_id) _(DEVICE_ID, device_id)                                                                    \
    _(KFD_ID, kfd_id) _(NODE_ID, node_id) _(PARTITION_ID, partition_id)                                                \
    _(HIP_ID, hip_id) _(HSA_ID, hsa_id) _(DRM_CARD, drm_card) _(DRM_RENDER, drm_render)                                \
    _(GFX, gfx) _(UMC, umc) _(MM, mm)                                                                                  \
    _(VRAM_TOTAL, vram_total) _(VRAM_USED, vram_used)                                                                  \
    _(EDGE, edge) _(HOTSPOT, hotspot) _(VRAM_TEMP, vram_temp) _(POWER, power) _(ENERGY, energy)
#define KEY_SYMBOL(symbol, name) symbol,
#define KEY_NAME(symbol, name) #name,
enum key { KEYS_OF(KEY_SYMBOL) KEYS };
static const char *const key_names[] = {KEYS_OF(KEY_NAME) NULL};

typedef struct {
    long n;
    bool given[KEYS];
    char value[KEYS][TEXT];
} Gpu;

static struct {
    bool driver_given;
    unsigned gpus;
    uint32_t version[3];
    char build[TEXT], driver[TEXT];
    Gpu gpu[MAX_GPUS];
} state;

/* What handles point to. An entry is never freed; it is good while its `session` is the one that is on. */
typedef struct {
    unsigned session;
    char name[TEXT];
} Socket;

typedef struct {
    unsigned session;
    const Socket *socket;
    long n;
    amdsmi_engine_usage_t last;
} Processor;

static Socket sockets[MAX_HANDLES];
static Processor processors[MAX_HANDLES];
static unsigned socket_count, processor_count, session;
static bool initialized;

/* ---- reading the state file ---- */

static uint64_t address(const char *text) {
    uint64_t domain;
    unsigned bus, device, function;
    int end = 0;
    bool fits = sscanf(text, "%" SCNx64 ":%x:%x.%x%n", &domain, &bus, &device, &function, &end) == 4;
    demand(fits && text[end] == '\0' && bus < 256 && device < 32 && function < 8, "not a PCI address", text);
    return domain << 16 | bus << 8 | device << 3 | function;
}

static void parse_pair(Gpu *gpu, char *pair) {
    const char *value = value_of(pair);
    enum key key = (enum key)position(pair, key_names);
    if (key >= VENDOR_ID)
        number(value);
    if (key == BDF)
        address(value);
    keep(gpu->value[key], value, TEXT);
    gpu->given[key] = true;
}

static const Gpu *gpu_at(long n) {
    for (unsigned i = 0; i < state.gpus; i++)
        if (state.gpu[i].n == n)
            return &state.gpu[i];
    return NULL;
}

static void parse_gpu(char **rest) {
    const char *n = need_word(rest);
    demand(state.gpus < MAX_GPUS, "too many GPUs", n);
    demand(gpu_at((long)number(n)) == NULL, "a second line for GPU", n);
    Gpu *gpu = &state.gpu[state.gpus++];
    gpu->n = (long)number(n);
    for (char *pair = next_word(rest); pair != NULL; pair = next_word(rest))
        parse_pair(gpu, pair);
}

static bool can_lie(const char *call) {
    return strcmp(call, "amdsmi_get_gpu_activity") == 0 || strcmp(call, "amdsmi_get_gpu_memory_total") == 0 ||
           strcmp(call, "amdsmi_get_gpu_memory_usage") == 0;
}

static void parse_rule(const char *word, char **rest) {
    Rule *rule = new_rule(word);
    keep(rule->call, need_word(rest), WORD);
    demand(rule->kind != LIE || can_lie(rule->call), "a call that does not lie", rule->call);
    parse_where(rule, rest);
}

static void set_version(uint32_t major, uint32_t minor, uint32_t release, const char *build) {
    state.version[0] = major;
    state.version[1] = minor;
    state.version[2] = release;
    keep(state.build, build, TEXT);
}

static void parse_version(char **rest) {
    uint32_t part[3];
    for (int i = 0; i < 3; i++)
        part[i] = (uint32_t)number(need_word(rest));
    set_version(part[0], part[1], part[2], need_word(rest));
}

static void parse_words(const char *first, char **rest) {
    if (strcmp(first, "version") == 0)
        parse_version(rest);
    else if (strcmp(first, "driver") == 0) {
        keep(state.driver, need_word(rest), TEXT);
        state.driver_given = true;
    } else if (strcmp(first, "gpu") == 0)
        parse_gpu(rest);
    else
        parse_rule(first, rest);
}

static void start_over(void) {
    memset(&state, 0, sizeof state);
    set_version(26, 0, 2, "26.0.2");
}

static void complete(void) {}

/* ---- finding what a call is about; with the lock held ---- */

struct Found {
    Gpu gpu;
    bool lie;
};

static Code the_system(const void *wanted, Found *found) {
    (void)wanted, (void)found;
    return SUCCESS;
}

static Code by_socket(const void *wanted, Found *found) {
    (void)found;
    for (unsigned i = 0; i < socket_count; i++)
        if (&sockets[i] == wanted && sockets[i].session == session)
            return SUCCESS;
    return INVAL;
}

static Code by_processor(const void *wanted, Found *found) {
    for (unsigned i = 0; i < processor_count; i++) {
        if (&processors[i] != wanted || processors[i].session != session)
            continue;
        const Gpu *gpu = gpu_at(processors[i].n);
        found->gpu.n = processors[i].n;
        if (gpu != NULL)
            found->gpu = *gpu;
        return gpu == NULL ? NOT_FOUND : SUCCESS;
    }
    return wanted == NULL ? INVAL : NOT_FOUND;
}

static const Socket *socket_named(const char *name) {
    for (unsigned i = 0; i < socket_count; i++)
        if (sockets[i].session == session && strcmp(sockets[i].name, name) == 0)
            return &sockets[i];
    demand(socket_count < MAX_HANDLES, "too many sockets since the start", name);
    sockets[socket_count].session = session;
    keep(sockets[socket_count].name, name, TEXT);
    return &sockets[socket_count++];
}

static void look_for_gpus(void) {
    session++;
    for (unsigned i = 0; i < state.gpus; i++) {
        const Gpu *gpu = &state.gpu[i];
        char own[TEXT];
        snprintf(own, TEXT, "the own socket of GPU %ld", gpu->n);
        demand(processor_count < MAX_HANDLES, "too many GPUs since the start", own);
        processors[processor_count++] = (Processor){
            .session = session, .socket = socket_named(gpu->given[SOCKET] ? gpu->value[SOCKET] : own), .n = gpu->n};
    }
}

/* ---- what every call goes through ---- */

static void record(const char *call) { record_call(getenv("FAKE_AMD_SMI_RECORD"), call, ""); }

/* These speak of the library only, so they answer before init and without a driver. */
static bool needs_nothing(const char *call) {
    return strcmp(call, "amdsmi_shut_down") == 0 || strcmp(call, "amdsmi_get_lib_version") == 0 ||
           strcmp(call, "amdsmi_status_code_to_string") == 0;
}

static Code answer(const char *call, long n, Code found) {
    const Rule *fault = rule_for(FAULT, call, n);
    if (!initialized && !needs_nothing(call) && strcmp(call, "amdsmi_init") != 0)
        return NOT_INIT;
    if (!present && !needs_nothing(call))
        return DRIVER_NOT_LOADED;
    return fault == NULL ? found : (amdsmi_status_t)fault->value;
}

static Verdict look(const char *call, Finder *find, const void *wanted, Found *found, bool first) {
    (void)first; /* it is recorded already */
    *found = (Found){.gpu.n = NOWHERE};
    Code code = find(wanted, found);
    found->lie = rule_for(LIE, call, found->gpu.n) != NULL;
    return verdict_on(call, found->gpu.n, answer(call, found->gpu.n, code));
}

/* Records the call even where the state makes no sense. */
static Code begin(const char *call, Finder *find, const void *wanted, Found *found) {
    record(call);
    return enter(call, find, wanted, found);
}

static amdsmi_status_t on(const char *call, Finder *find, const void *wanted, const void *out, Found *found) {
    TRY(begin(call, find, wanted, found));
    return out == NULL ? INVAL : SUCCESS;
}

/* `keys` ends with KEYS. */
static amdsmi_status_t need(const Found *found, const enum key *keys) {
    for (; *keys != KEYS; keys++)
        if (!found->gpu.given[*keys])
            return NOT_SUPPORTED;
    return SUCCESS;
}

static const char *text(const Found *found, enum key key) { return found->gpu.value[key]; }
static uint64_t value(const Found *found, enum key key) { return number(found->gpu.value[key]); }

static int stub(const char *call) {
    Found found;
    TRY(begin(call, the_system, NULL, &found));
    return NOT_SUPPORTED;
}

/* ---- the exported calls; amd_smi.py finds them by the word CALL at the start of a line ---- */

#define CALL(name, ...) amdsmi_status_t name(__VA_ARGS__)

/* How a call begins. Past it `found` is what it is about, and `out` can be written to. */
#define FIND(find, wanted)                                                                                             \
    Found found;                                                                                                       \
    TRY(on(__func__, find, wanted, out, &found))
#define NEED(...) TRY(need(&found, (const enum key[]){__VA_ARGS__, KEYS}))

CALL(amdsmi_init, uint64_t flags) {
    Found found;
    TRY(begin(__func__, the_system, NULL, &found));
    if ((flags & INIT_AMD_GPUS) == 0)
        return NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    if (!initialized)
        look_for_gpus();
    initialized = true;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* Inits are not counted: one shutdown ends them all, and one more does no harm. */
CALL(amdsmi_shut_down, void) {
    Found found;
    TRY(begin(__func__, the_system, NULL, &found));
    pthread_mutex_lock(&lock);
    initialized = false;
    session++;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CALL(amdsmi_get_lib_version, amdsmi_version_t *out) {
    static __thread char build[TEXT];
    FIND(the_system, NULL);
    pthread_mutex_lock(&lock);
    strcpy(build, state.build);
    *out = (amdsmi_version_t){state.version[0], state.version[1], state.version[2], build};
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CALL(amdsmi_status_code_to_string, amdsmi_status_t status, const char **out) {
    static __thread char words[TEXT];
    FIND(the_system, NULL);
    snprintf(words, TEXT, "the fake AMD SMI's words for %" PRIu32, status);
    *out = words;
    return SUCCESS;
}

/* Without `handles` both list calls say how many there are, else they fill in what there is room for. */
CALL(amdsmi_get_socket_handles, uint32_t *out, const void **handles) {
    FIND(the_system, NULL);
    uint32_t have = 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < socket_count; i++)
        if (sockets[i].session == session && (handles == NULL || have < *out)) {
            if (handles != NULL)
                handles[have] = &sockets[i];
            have++;
        }
    pthread_mutex_unlock(&lock);
    *out = have;
    return SUCCESS;
}

CALL(amdsmi_get_processor_handles, const void *socket, uint32_t *out, const void **handles) {
    FIND(by_socket, socket);
    uint32_t have = 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < processor_count; i++)
        if (processors[i].socket == socket && (handles == NULL || have < *out)) {
            if (handles != NULL)
                handles[have] = &processors[i];
            have++;
        }
    pthread_mutex_unlock(&lock);
    *out = have;
    return SUCCESS;
}

CALL(amdsmi_get_processor_type, const void *processor, uint32_t *out) {
    FIND(by_processor, processor);
    *out = TYPE_AMD_GPU;
    return SUCCESS;
}

CALL(amdsmi_get_gpu_device_bdf, const void *processor, amdsmi_bdf_t *out) {
    FIND(by_processor, processor);
    NEED(BDF);
    out->as_uint = address(text(&found, BDF));
    return SUCCESS;
}

CALL(amdsmi_get_gpu_device_uuid, const void *processor, unsigned *length, char *out) {
    FIND(by_processor, processor);
    if (length == NULL || *length < UUID_SIZE)
        return INVAL;
    NEED(UUID);
    if (strlen(text(&found, UUID)) >= *length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text(&found, UUID));
    return SUCCESS;
}

/* What no key says is unknown, so that the binding makes it N/A where it can. */
CALL(amdsmi_get_gpu_asic_info, const void *processor, amdsmi_asic_info_t *out) {
    FIND(by_processor, processor);
    NEED(NAME, VENDOR_ID, DEVICE_ID);
    *out = (amdsmi_asic_info_t){.vendor_id = (uint32_t)value(&found, VENDOR_ID),
                                .vendor_name = "Advanced Micro Devices Inc. [AMD/ATI]",
                                .subvendor_id = UINT32_MAX,
                                .device_id = value(&found, DEVICE_ID),
                                .oam_id = UINT32_MAX,
                                .num_of_compute_units = UINT32_MAX,
                                .target_graphics_version = UINT64_MAX,
                                .subsystem_id = UINT32_MAX};
    strcpy(out->market_name, text(&found, NAME));
    return SUCCESS;
}

CALL(amdsmi_get_gpu_kfd_info, const void *processor, amdsmi_kfd_info_t *out) {
    FIND(by_processor, processor);
    NEED(KFD_ID, NODE_ID, PARTITION_ID);
    *out = (amdsmi_kfd_info_t){.kfd_id = value(&found, KFD_ID),
                               .node_id = (uint32_t)value(&found, NODE_ID),
                               .current_partition_id = (uint32_t)value(&found, PARTITION_ID)};
    return SUCCESS;
}

CALL(amdsmi_get_gpu_enumeration_info, const void *processor, amdsmi_enumeration_info_t *out) {
    FIND(by_processor, processor);
    NEED(DRM_RENDER, DRM_CARD, HSA_ID, HIP_ID, HIP_UUID);
    *out = (amdsmi_enumeration_info_t){.drm_render = (uint32_t)value(&found, DRM_RENDER),
                                       .drm_card = (uint32_t)value(&found, DRM_CARD),
                                       .hsa_id = (uint32_t)value(&found, HSA_ID),
                                       .hip_id = (uint32_t)value(&found, HIP_ID)};
    strcpy(out->hip_uuid, text(&found, HIP_UUID));
    return SUCCESS;
}

CALL(amdsmi_get_gpu_activity, Processor *processor, amdsmi_engine_usage_t *out) {
    FIND(by_processor, processor);
    amdsmi_engine_usage_t now = {0};
    if (!found.lie) {
        NEED(GFX, UMC, MM);
        now.gfx_activity = (uint32_t)value(&found, GFX);
        now.umc_activity = (uint32_t)value(&found, UMC);
        now.mm_activity = (uint32_t)value(&found, MM);
    }
    pthread_mutex_lock(&lock);
    if (!found.lie)
        processor->last = now;
    *out = processor->last;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

#define MEMORY_CALL(name, key)                                                                                         \
    amdsmi_status_t name(const void *processor, uint32_t type, uint64_t *out) {                                        \
        FIND(by_processor, processor);                                                                                 \
        if (type != MEMORY_VRAM)                                                                                       \
            return NOT_SUPPORTED;                                                                                      \
        if (!found.lie)                                                                                                \
            NEED(key);                                                                                                 \
        *out = found.lie ? 0 : value(&found, key);                                                                     \
        return SUCCESS;                                                                                                \
    }
MEMORY_CALL(amdsmi_get_gpu_memory_total, VRAM_TOTAL)
MEMORY_CALL(amdsmi_get_gpu_memory_usage, VRAM_USED)

/* In whole degrees. */
CALL(amdsmi_get_temp_metric, const void *processor, uint32_t sensor, uint32_t metric, int64_t *out) {
    static const enum key keys[SENSORS] = {[SENSOR_EDGE] = EDGE, [SENSOR_HOTSPOT] = HOTSPOT, [SENSOR_VRAM] = VRAM_TEMP};
    FIND(by_processor, processor);
    if (sensor >= SENSORS || metric != TEMPERATURE_CURRENT)
        return NOT_SUPPORTED;
    NEED(keys[sensor]);
    *out = (int64_t)value(&found, keys[sensor]);
    return SUCCESS;
}

/* In watts, as a card of the MI300 series says it: there is no average, so the socket's is the current power. */
CALL(amdsmi_get_power_info, const void *processor, amdsmi_power_info_t *out) {
    FIND(by_processor, processor);
    NEED(POWER);
    *out = (amdsmi_power_info_t){.socket_power = value(&found, POWER),
                                 .current_socket_power = (uint32_t)value(&found, POWER),
                                 .average_socket_power = UNKNOWN_16,
                                 .gfx_voltage = UNKNOWN_16,
                                 .soc_voltage = UNKNOWN_16,
                                 .mem_voltage = UNKNOWN_16,
                                 .power_limit = UNKNOWN_16};
    return SUCCESS;
}

/* In ticks of 15.3 microjoules, which is the library's figure for every card. */
CALL(amdsmi_get_energy_count, const void *processor, uint64_t *out, float *resolution, uint64_t *timestamp) {
    FIND(by_processor, processor);
    if (resolution == NULL || timestamp == NULL)
        return INVAL;
    NEED(ENERGY);
    *out = value(&found, ENERGY);
    *resolution = 15.3f;
    *timestamp = 1;
    return SUCCESS;
}

CALL(amdsmi_get_gpu_driver_info, const void *processor, amdsmi_driver_info_t *out) {
    FIND(by_processor, processor);
    pthread_mutex_lock(&lock);
    bool given = state.driver_given;
    *out = (amdsmi_driver_info_t){.driver_name = "amdgpu", .driver_date = "2015/01/01 00:00"};
    strcpy(out->driver_version, state.driver);
    pthread_mutex_unlock(&lock);
    return given ? SUCCESS : NOT_SUPPORTED;
}

CALL(amdsmi_get_gpu_metrics_info, const void *processor, void *out) {
    (void)processor, (void)out;
    record(__func__);
    fputs("fake amd smi: amdsmi_get_gpu_metrics_info would overwrite memory\n", stderr);
    abort();
}

#define STUB(name)                                                                                                     \
    int name(void) { return stub(__func__); }
#include "amd_smi_stubs.h"

/* ---- how the structs are laid out, for the test that compares them with the binding's ---- */

typedef struct {
    const char *type, *field; /* field is "" for the whole struct */
    size_t offset, size;
} Layout;

#define WHOLE(type) {#type, "", 0, sizeof(type)}
#define FIELD(type, field) {#type, #field, offsetof(type, field), sizeof(((type *)NULL)->field)}

const Layout fake_amd_smi_layout[] = {
    WHOLE(amdsmi_asic_info_t),
    FIELD(amdsmi_asic_info_t, market_name),
    FIELD(amdsmi_asic_info_t, vendor_id),
    FIELD(amdsmi_asic_info_t, vendor_name),
    FIELD(amdsmi_asic_info_t, subvendor_id),
    FIELD(amdsmi_asic_info_t, device_id),
    FIELD(amdsmi_asic_info_t, rev_id),
    FIELD(amdsmi_asic_info_t, asic_serial),
    FIELD(amdsmi_asic_info_t, oam_id),
    FIELD(amdsmi_asic_info_t, num_of_compute_units),
    FIELD(amdsmi_asic_info_t, target_graphics_version),
    FIELD(amdsmi_asic_info_t, subsystem_id),
    FIELD(amdsmi_asic_info_t, reserved),
    WHOLE(amdsmi_kfd_info_t),
    FIELD(amdsmi_kfd_info_t, kfd_id),
    FIELD(amdsmi_kfd_info_t, node_id),
    FIELD(amdsmi_kfd_info_t, current_partition_id),
    FIELD(amdsmi_kfd_info_t, reserved),
    WHOLE(amdsmi_enumeration_info_t),
    FIELD(amdsmi_enumeration_info_t, drm_render),
    FIELD(amdsmi_enumeration_info_t, drm_card),
    FIELD(amdsmi_enumeration_info_t, hsa_id),
    FIELD(amdsmi_enumeration_info_t, hip_id),
    FIELD(amdsmi_enumeration_info_t, hip_uuid),
    WHOLE(amdsmi_engine_usage_t),
    FIELD(amdsmi_engine_usage_t, gfx_activity),
    FIELD(amdsmi_engine_usage_t, umc_activity),
    FIELD(amdsmi_engine_usage_t, mm_activity),
    FIELD(amdsmi_engine_usage_t, reserved),
    WHOLE(amdsmi_power_info_t),
    FIELD(amdsmi_power_info_t, socket_power),
    FIELD(amdsmi_power_info_t, current_socket_power),
    FIELD(amdsmi_power_info_t, average_socket_power),
    FIELD(amdsmi_power_info_t, gfx_voltage),
    FIELD(amdsmi_power_info_t, soc_voltage),
    FIELD(amdsmi_power_info_t, mem_voltage),
    FIELD(amdsmi_power_info_t, power_limit),
    FIELD(amdsmi_power_info_t, reserved),
    WHOLE(amdsmi_driver_info_t),
    FIELD(amdsmi_driver_info_t, driver_version),
    FIELD(amdsmi_driver_info_t, driver_date),
    FIELD(amdsmi_driver_info_t, driver_name),
    WHOLE(amdsmi_version_t),
    FIELD(amdsmi_version_t, major),
    FIELD(amdsmi_version_t, minor),
    FIELD(amdsmi_version_t, release),
    FIELD(amdsmi_version_t, build),
    WHOLE(amdsmi_bdf_t),
    FIELD(amdsmi_bdf_t, as_uint),
    {NULL, NULL, 0, 0},
};
