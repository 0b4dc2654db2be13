/* A pretend libnvidia-ml.so.1 for tests: the real `pynvml` loads it, and a text file says what it answers.
 *
 * The file is named by FAKE_NVML_STATE and looked at on every call. Without it the driver "is not loaded". Its lines:
 *
 *   driver 550.54.15              the driver's version
 *   count 4                       what nvmlDeviceGetCount_v2 says; without it, the number of gpu lines
 *   gpu INDEX key=value ...       uuid pci name mig=0|1|none minor total free used reserved util temp, and those below
 *   mig INDEX MIGINDEX key=value  uuid name gi ci total free used reserved util mps: a part of card INDEX
 *   process INDEX PID [MIGINDEX] [memory=BYTES] [sm=PERCENT [at=MICROSECONDS]] [draws|mps]   a process that computes on
 *                                 card INDEX, or on that part of it, or only draws there, or computes through MPS; sm=
 *                                 gives it a sample of utilization, of that time or else of now
 *   field INDEX NUMBER VALUE [link=N] [type=double|uint|ull|sll|usi]   what nvmlDeviceGetFieldValues says; VALUE may be
 *                                 "error CODE". Fields without a line answer NOT_SUPPORTED
 *   xid INDEX CODE                an error that the card's driver tells: lines that come while a set has the card
 *   fault CALL WHERE CODE         the call answers CODE; CALL is a symbol or *, WHERE a card's index or *
 *   hang CALL WHERE               the call does not return while this line is there
 *   slow CALL WHERE MILLISECONDS  the call takes that long, then answers from the state as it is by then
 *   crash CALL WHERE              the call ends the process by SIGSEGV
 *   lost INDEX                    the card has fallen off the bus: whatever asks about it gets GPU_IS_LOST
 *   log PATH                      a line "SYMBOL INDEX" (or "SYMBOL -") is appended there for every call
 *
 * A key that is left out makes the calls that need it answer NOT_SUPPORTED. Text with blanks stands in double quotes.
 * A call on a part has its card's index, also for WHERE. A call without a device, or on one that is gone, matches only
 * WHERE *. The first rule of a kind that matches holds. A line that makes no sense aborts the process.
 *
 * -DWITHOUT_<symbol> leaves that symbol out, to play an older driver.
 */
#include "state.h"

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

static const Fake fake = {.name = "nvml", .variable = "FAKE_NVML_STATE", .own_rule = "lost"};

enum { TEXT = 128, LONG_TEXT = 4096, MAX_DEVICES = 256, MAX_PROCESSES = 256, MAX_HANDLES = 4096, MIG_SLOTS = 7, WHOLE = -1, MAX_FIELDS = 4096, MAX_XIDS = 256 };
#define LOST OWN

/* The keys that hold text come first; from MINOR on all are numbers. */
enum key {
    UUID, PCI, NAME, MIG, MINOR, TOTAL, FREE, USED, RESERVED, UTIL, TEMP, GI, CI,
    /* encoder and decoder in percent, clocks in MHz, milliwatts, KB/s, a mask of reasons, multiprocessors */
    ENCODER, DECODER, SM_CLOCK, MEMORY_CLOCK, MAX_SM_CLOCK, MAX_MEMORY_CLOCK, POWER, LIMIT, FANS, FAN, PSTATE, REASONS,
    SHUTDOWN, SLOWDOWN, MEMORY_MAX, GPU_MAX, SENT, RECEIVED, MPS, GPM, GPM_SM, GPM_TENSOR, GPM_MEMORY, XIDS,
    DEFAULT_LIMIT, MAX_LIMIT, SUPPORTED,
    KEYS
};
static const char *const key_names[] = {
    "uuid", "pci", "name", "mig", "minor", "total", "free", "used", "reserved", "util", "temp", "gi", "ci",
    "encoder", "decoder", "sm_clock", "memory_clock", "max_sm_clock", "max_memory_clock", "power", "limit", "fans", "fan",
    "pstate", "reasons", "shutdown", "slowdown", "memory_max", "gpu_max", "sent", "received", "mps", "gpm", "gpm_sm",
    "gpm_tensor", "gpm_memory", "xids", "default_limit", "max_limit", "supported", NULL};

/* What an nvmlDevice_t points to. An entry is never freed, so that a handle outlives its card, as a real one does. */
struct nvmlDevice_st {
    char identity[TEXT];
    bool part;
};

/* A card or a part of one. */
struct Found {
    long card; /* the card's index; of a part, its card's */
    long slot; /* the index among the card's parts, or WHOLE */
    nvmlDevice_t handle;
    bool given[KEYS];
    char value[KEYS][TEXT];
};
typedef Found Device;

/* Where it computes; `slot` is WHOLE where that is no part of the card. */
typedef struct {
    long card, slot;
    unsigned pid;
    enum list { COMPUTES, DRAWS, MPS_COMPUTES } list;
    bool sampled;
    unsigned long long memory, sm, at; /* when the sample was taken; 0: now */
} Process;

typedef struct {
    long card;
    unsigned number, link, error;
    nvmlValueType_t type;
    char value[32];
} Field;

typedef struct {
    long card;
    unsigned long long code;
} Xid;

static struct {
    long count, cards;
    unsigned devices, processes, fields, xids;
    char driver[TEXT], log[LONG_TEXT];
    Device device[MAX_DEVICES];
    Process process[MAX_PROCESSES];
    Field field[MAX_FIELDS];
    Xid xid[MAX_XIDS];
} state;

static struct nvmlDevice_st handles[MAX_HANDLES];
static unsigned handle_count, init_count;

/* ---- reading the state file ---- */

static nvmlDevice_t handle_for(const char *identity, bool part) {
    for (unsigned i = 0; i < handle_count; i++)
        if (handles[i].part == part && strcmp(handles[i].identity, identity) == 0)
            return &handles[i];
    demand(handle_count < MAX_HANDLES, "too many devices since the start", identity);
    keep(handles[handle_count].identity, identity, TEXT);
    handles[handle_count].part = part;
    return &handles[handle_count++];
}

static void parse_pair(Device *device, char *pair) {
    const char *value = value_of(pair);
    enum key key = (enum key)position(pair, key_names);
    if (key >= MINOR)
        number(value);
    if (key == MIG)
        position(value, (const char *const[]){"0", "1", "none", NULL});
    keep(device->value[key], value, TEXT);
    device->given[key] = true;
}

static void parse_device(char **rest, bool part) {
    char unnamed[TEXT];
    demand(state.devices < MAX_DEVICES, "too many devices", *rest);
    Device *device = &state.device[state.devices++];
    device->card = (long)number(need_word(rest));
    device->slot = part ? (long)number(need_word(rest)) : WHOLE;
    for (char *pair = next_word(rest); pair != NULL; pair = next_word(rest))
        parse_pair(device, pair);
    snprintf(unnamed, TEXT, "no uuid %ld %ld", device->card, device->slot);
    device->handle = handle_for(device->given[UUID] ? device->value[UUID] : unnamed, part);
    state.cards += !part;
}

static void parse_process(char **rest) {
    demand(state.processes < MAX_PROCESSES, "too many processes", *rest);
    Process *process = &state.process[state.processes++];
    process->card = (long)number(need_word(rest));
    process->pid = (unsigned)number(need_word(rest));
    process->slot = WHOLE;
    process->memory = (unsigned long long)NVML_VALUE_NOT_AVAILABLE;
    for (char *word = next_word(rest); word != NULL; word = next_word(rest)) {
        if (strcmp(word, "draws") == 0)
            process->list = DRAWS;
        else if (strcmp(word, "mps") == 0)
            process->list = MPS_COMPUTES;
        else if (strchr(word, '=') == NULL) {
            demand(process->slot == WHOLE, "one word too many", word);
            process->slot = (long)number(word);
        } else {
            const char *value = value_of(word);
            unsigned which = position(word, (const char *const[]){"memory", "sm", "at", NULL});
            process->sampled = process->sampled || which == 1;
            *(which == 0 ? &process->memory : which == 1 ? &process->sm : &process->at) = number(value);
        }
    }
}

static void parse_field(char **rest) {
    static const char *const types[] = {"double", "uint", "ulong", "ull", "sll", "si", "usi", NULL};
    demand(state.fields < MAX_FIELDS, "too many fields", *rest);
    Field *field = &state.field[state.fields++];
    field->card = (long)number(need_word(rest));
    field->number = (unsigned)number(need_word(rest));
    field->type = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    const char *value = need_word(rest);
    if (strcmp(value, "error") == 0)
        field->error = (unsigned)number(need_word(rest));
    else
        keep(field->value, value, sizeof field->value);
    for (char *word = next_word(rest); word != NULL; word = next_word(rest)) {
        const char *given = value_of(word);
        if (strcmp(word, "link") == 0)
            field->link = (unsigned)number(given);
        else
            field->type = (nvmlValueType_t)position(given, types);
    }
}

static void parse_xid(char **rest) {
    demand(state.xids < MAX_XIDS, "too many errors", *rest);
    Xid *xid = &state.xid[state.xids++];
    xid->card = (long)number(need_word(rest));
    xid->code = number(need_word(rest));
}

static void parse_rule(const char *word, char **rest) {
    Rule *rule = new_rule(word);
    keep(rule->call, rule->kind == LOST ? "*" : need_word(rest), WORD);
    parse_where(rule, rest);
}

static void parse_words(const char *first, char **rest) {
    if (strcmp(first, "driver") == 0)
        keep(state.driver, need_word(rest), TEXT);
    else if (strcmp(first, "log") == 0)
        keep(state.log, need_word(rest), LONG_TEXT);
    else if (strcmp(first, "count") == 0)
        state.count = (long)number(need_word(rest));
    else if (strcmp(first, "gpu") == 0 || strcmp(first, "mig") == 0)
        parse_device(rest, *first == 'm');
    else if (strcmp(first, "process") == 0)
        parse_process(rest);
    else if (strcmp(first, "field") == 0)
        parse_field(rest);
    else if (strcmp(first, "xid") == 0)
        parse_xid(rest);
    else
        parse_rule(first, rest);
}

static void start_over(void) {
    memset(&state, 0, sizeof state);
    state.count = present ? -1 : 0;
}

static void complete(void) {
    if (state.count < 0)
        state.count = state.cards;
}

/* ---- finding what a call is about; with the lock held ---- */

#define EACH(device) for (const Device *device = state.device; device < state.device + state.devices; device++)

static nvmlReturn_t take(const Device *device, Device *found, nvmlReturn_t otherwise) {
    if (device == NULL)
        return otherwise;
    *found = *device;
    return NVML_SUCCESS;
}

static const Device *at(long card, long slot) {
    EACH(device)
        if (device->card == card && device->slot == slot)
            return device;
    return NULL;
}

/* For the calls without a device: the driver's version in place of a name, and the count in place of a slot. */
static Code the_system(const void *wanted, Device *found) {
    (void)wanted;
    strcpy(found->value[NAME], state.driver);
    found->given[NAME] = state.driver[0] != '\0';
    found->slot = state.count;
    return NVML_SUCCESS;
}

static Code by_handle(const void *wanted, Device *found) {
    EACH(device)
        if (device->handle == wanted) {
            *found = *device;
            return at(found->card, WHOLE) == NULL ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
        }
    for (unsigned i = 0; i < handle_count; i++)
        if (&handles[i] == wanted && !handles[i].part)
            return NVML_ERROR_GPU_IS_LOST;
    return NVML_ERROR_INVALID_ARGUMENT; /* a part that is gone, or never a handle */
}

static Code by_index(const void *wanted, Device *found) {
    unsigned index = *(const unsigned *)wanted;
    found->card = index;
    return index < state.count ? take(at(index, WHOLE), found, NVML_ERROR_UNKNOWN) : NVML_ERROR_INVALID_ARGUMENT;
}

static Code by_uuid(const void *wanted, Device *found) {
    if (wanted == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    EACH(device)
        if (device->given[UUID] && strcmp(device->value[UUID], wanted) == 0)
            return take(device, found, NVML_ERROR_NOT_FOUND);
    return NVML_ERROR_NOT_FOUND;
}

typedef struct {
    unsigned domain, bus, device;
} Address;

/* The three forms that nvml.h allows: %x:%x:%x.%x, %x:%x:%x and %x:%x.%x. A function other than 0 is no GPU. */
static bool parse_address(const char *text, Address *to) {
    unsigned function = 0;
    int end = 0;
    bool fits = sscanf(text, "%x:%x:%x%n.%x%n", &to->domain, &to->bus, &to->device, &end, &function, &end) >= 3;
    if (!fits) {
        to->domain = 0;
        fits = sscanf(text, "%x:%x.%x%n", &to->bus, &to->device, &function, &end) == 3;
    }
    return fits && text[end] == '\0' && function == 0;
}

static Code by_address(const void *wanted, Device *found) {
    Address want, have;
    if (wanted == NULL || !parse_address(wanted, &want))
        return NVML_ERROR_INVALID_ARGUMENT;
    EACH(device)
        if (parse_address(device->value[PCI], &have) && memcmp(&have, &want, sizeof have) == 0)
            return take(device, found, NVML_ERROR_NOT_FOUND);
    return NVML_ERROR_NOT_FOUND;
}

typedef struct {
    nvmlDevice_t card;
    unsigned index;
} Slot;

static bool in_mig_mode(const Device *device) {
    return device->slot == WHOLE && strcmp(device->value[MIG], "1") == 0;
}

static Code by_slot(const void *wanted, Device *found) {
    const Slot *slot = wanted;
    TRY(by_handle(slot->card, found));
    if (!in_mig_mode(found) || slot->index >= MIG_SLOTS)
        return NVML_ERROR_INVALID_ARGUMENT;
    return take(at(found->card, slot->index), found, NVML_ERROR_NOT_FOUND);
}

static Code by_part(const void *wanted, Device *found) {
    TRY(by_handle(wanted, found));
    if (found->slot == WHOLE)
        return NVML_ERROR_INVALID_ARGUMENT;
    return take(at(found->card, WHOLE), found, NVML_ERROR_GPU_IS_LOST);
}

/* ---- what every call goes through ---- */

static void log_call(const char *call, long card) {
    char about[TEXT] = " -";
    if (card != NOWHERE)
        snprintf(about, sizeof about, " %ld", card);
    record_call(state.log[0] == '\0' ? NULL : state.log, call, about);
}

static Code answer(const char *call, long card, Code found) {
    const Rule *fault = rule_for(FAULT, call, card);
    if (init_count == 0 && strncmp(call, "nvmlInit", strlen("nvmlInit")) != 0)
        return NVML_ERROR_UNINITIALIZED;
    if (!present && strcmp(call, "nvmlShutdown") != 0)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    if (fault != NULL)
        return (nvmlReturn_t)fault->value;
    return rule_for(LOST, call, card) == NULL ? found : NVML_ERROR_GPU_IS_LOST;
}

static Verdict look(const char *call, Finder *find, const void *wanted, Device *found, bool first) {
    *found = (Device){.card = NOWHERE};
    Code code = find(wanted, found);
    if (first)
        log_call(call, found->card);
    return verdict_on(call, found->card, answer(call, found->card, code));
}

enum { CARDS = 1, PARTS = 2, BOTH = CARDS | PARTS };

/* Enters a call on a handle that is meant for cards, for parts or for both, and that writes to `out`. */
static nvmlReturn_t on(const char *call, nvmlDevice_t handle, int meant_for, const void *out, Device *found) {
    TRY(enter(call, by_handle, handle, found));
    bool fits = (meant_for & (found->slot == WHOLE ? CARDS : PARTS)) != 0;
    return fits && out != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t give_number(const Device *device, enum key key, unsigned *out) {
    if (!device->given[key])
        return NVML_ERROR_NOT_SUPPORTED;
    *out = (unsigned)number(device->value[key]);
    return NVML_SUCCESS;
}

static nvmlReturn_t give_text(const Device *device, enum key key, const char *prefix, char *out, unsigned size) {
    if (out == NULL || !device->given[key])
        return out == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
    if (strlen(prefix) + strlen(device->value[key]) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcat(strcpy(out, prefix), device->value[key]);
    return NVML_SUCCESS;
}

/* Of a card v2 needs reserved= too; elsewhere it may be left out and is 0. */
static nvmlReturn_t give_memory(const Device *device, bool all, nvmlMemory_v2_t *out) {
    if (!device->given[TOTAL] || !device->given[FREE] || !device->given[USED])
        return NVML_ERROR_NOT_SUPPORTED;
    if (all && device->slot == WHOLE && !device->given[RESERVED])
        return NVML_ERROR_NOT_SUPPORTED;
    out->total = number(device->value[TOTAL]);
    out->free = number(device->value[FREE]);
    out->used = number(device->value[USED]);
    out->reserved = device->given[RESERVED] ? number(device->value[RESERVED]) : 0;
    return NVML_SUCCESS;
}

static nvmlReturn_t give_handle(const Device *device, nvmlDevice_t *out) {
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *out = device->handle;
    return NVML_SUCCESS;
}

static nvmlReturn_t count_inits(const char *call, int change) {
    Device found;
    TRY(enter(call, the_system, NULL, &found));
    pthread_mutex_lock(&lock);
    init_count += (unsigned)change;
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

/* ---- the exported calls ---- */

#define CALL(name, ...) EXPORTED(name) nvmlReturn_t name(__VA_ARGS__)

/* How a call begins: FIND, or ON where it has a handle `device` and an `out`. Past it `found` is what it is about. */
#define FIND(find, wanted)                                                                                             \
    Device found;                                                                                                      \
    TRY(enter(__func__, find, wanted, &found))
#define ON(meant_for)                                                                                                  \
    Device found;                                                                                                      \
    TRY(on(__func__, device, meant_for, out, &found))

CALL(nvmlInit_v2, void) { return count_inits(__func__, 1); }
CALL(nvmlInitWithFlags, unsigned flags) { return (void)flags, count_inits(__func__, 1); }
CALL(nvmlShutdown, void) { return count_inits(__func__, -1); }

/* It can be slow, hang or crash like any call, but it has no code to answer. */
EXPORTED(nvmlErrorString) const char *nvmlErrorString(nvmlReturn_t code) {
    static __thread char text[TEXT];
    Device found;
    (void)enter(__func__, the_system, NULL, &found);
    snprintf(text, TEXT, "the fake NVML's words for %d", (int)code);
    return text;
}

#define VERSION_CALL(name, prefix)                                                                                     \
    CALL(name, char *out, unsigned size) {                                                                             \
        FIND(the_system, NULL);                                                                                        \
        return give_text(&found, NAME, prefix, out, size);                                                             \
    }
VERSION_CALL(nvmlSystemGetDriverVersion, "")
VERSION_CALL(nvmlSystemGetNVMLVersion, "12.") /* the driver's behind a CUDA major version */

#define TEXT_CALL(name, key)                                                                                           \
    CALL(name, nvmlDevice_t device, char *out, unsigned size) {                                                        \
        ON(BOTH);                                                                                                      \
        return give_text(&found, key, "", out, size);                                                                  \
    }
TEXT_CALL(nvmlDeviceGetUUID, UUID)
TEXT_CALL(nvmlDeviceGetName, NAME)

#define NUMBER_CALL(name, meant_for, key)                                                                              \
    CALL(name, nvmlDevice_t device, unsigned *out) {                                                                   \
        ON(meant_for);                                                                                                 \
        return give_number(&found, key, out);                                                                          \
    }
NUMBER_CALL(nvmlDeviceGetMinorNumber, CARDS, MINOR)
NUMBER_CALL(nvmlDeviceGetGpuInstanceId, PARTS, GI)
NUMBER_CALL(nvmlDeviceGetComputeInstanceId, PARTS, CI)

#define HANDLE_CALL(name, argument, find, wanted)                                                                      \
    CALL(name, argument, nvmlDevice_t *out) {                                                                          \
        FIND(find, wanted);                                                                                            \
        return give_handle(&found, out);                                                                               \
    }
HANDLE_CALL(nvmlDeviceGetHandleByIndex_v2, unsigned index, by_index, &index)
HANDLE_CALL(nvmlDeviceGetHandleByUUID, const char *uuid, by_uuid, uuid)
HANDLE_CALL(nvmlDeviceGetHandleByPciBusId_v2, const char *address, by_address, address)
HANDLE_CALL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, nvmlDevice_t part, by_part, part)

CALL(nvmlDeviceGetMigDeviceHandleByIndex, nvmlDevice_t device, unsigned index, nvmlDevice_t *out) {
    Slot slot = {device, index};
    FIND(by_slot, &slot);
    return give_handle(&found, out);
}

CALL(nvmlDeviceGetCount_v2, unsigned *out) {
    FIND(the_system, NULL);
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *out = (unsigned)found.slot;
    return NVML_SUCCESS;
}

/* Of a part: its index among the parts of its card. */
CALL(nvmlDeviceGetIndex, nvmlDevice_t device, unsigned *out) {
    ON(BOTH);
    *out = (unsigned)(found.slot == WHOLE ? found.card : found.slot);
    return NVML_SUCCESS;
}

CALL(nvmlDeviceGetPciInfo_v3, nvmlDevice_t device, nvmlPciInfo_t *out) {
    ON(CARDS);
    Address pci;
    if (!parse_address(found.value[PCI], &pci))
        return NVML_ERROR_NOT_SUPPORTED;
    *out = (nvmlPciInfo_t){.domain = pci.domain, .bus = pci.bus, .device = pci.device};
    snprintf(out->busId, sizeof out->busId, NVML_DEVICE_PCI_BUS_ID_FMT, NVML_DEVICE_PCI_BUS_ID_FMT_ARGS(&pci));
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT, pci.domain & 0xffff,
             pci.bus & 0xff, pci.device & 0xff);
    return NVML_SUCCESS;
}

CALL(nvmlDeviceGetMigMode, nvmlDevice_t device, unsigned *out, unsigned *pending) {
    ON(CARDS);
    if (pending == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!found.given[MIG] || strcmp(found.value[MIG], "none") == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    *out = *pending = in_mig_mode(&found) ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

/* nvml.h: zero where MIG is not supported or not enabled. */
CALL(nvmlDeviceGetMaxMigDeviceCount, nvmlDevice_t device, unsigned *out) {
    ON(CARDS);
    *out = in_mig_mode(&found) ? MIG_SLOTS : 0;
    return NVML_SUCCESS;
}

CALL(nvmlDeviceIsMigDeviceHandle, nvmlDevice_t device, unsigned *out) {
    ON(BOTH);
    *out = found.slot != WHOLE;
    return NVML_SUCCESS;
}

/* The first version counts what is reserved as used, as real drivers do. */
CALL(nvmlDeviceGetMemoryInfo, nvmlDevice_t device, nvmlMemory_t *out) {
    ON(BOTH);
    nvmlMemory_v2_t memory;
    TRY(give_memory(&found, false, &memory));
    *out = (nvmlMemory_t){memory.total, memory.free, memory.used + memory.reserved};
    return NVML_SUCCESS;
}

CALL(nvmlDeviceGetMemoryInfo_v2, nvmlDevice_t device, nvmlMemory_v2_t *out) {
    ON(BOTH);
    return out->version == nvmlMemory_v2 ? give_memory(&found, true, out) : NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
}

CALL(nvmlDeviceGetTemperature, nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned *out) {
    ON(CARDS);
    return sensor == NVML_TEMPERATURE_GPU ? give_number(&found, TEMP, out) : NVML_ERROR_INVALID_ARGUMENT;
}

CALL(nvmlDeviceGetTemperatureV, nvmlDevice_t device, nvmlTemperature_t *out) {
    ON(CARDS);
    if (out->version != nvmlTemperature_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (out->sensorType != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    return give_number(&found, TEMP, (unsigned *)&out->temperature); /* signed or not is the reader's affair */
}

/* Memory activity is always one more than the GPU's, so that a test sees when the wrong one was read. */
CALL(nvmlDeviceGetUtilizationRates, nvmlDevice_t device, nvmlUtilization_t *out) {
    ON(BOTH);
    if (in_mig_mode(&found))
        return NVML_ERROR_NOT_SUPPORTED;
    TRY(give_number(&found, UTIL, &out->gpu));
    out->memory = out->gpu + 1;
    return NVML_SUCCESS;
}

/* The instance's number, or nvml.h's "none". */
static unsigned instance(const Device *device, enum key key) {
    return device != NULL && device->given[key] ? (unsigned)number(device->value[key]) : 0xffffffff;
}

/* How many processes of a list are on what was found, a card with those of all its parts; writes the first of them. */
static unsigned list_processes(const Device *found, nvmlProcessInfo_t *infos, unsigned room, enum list list) {
    unsigned count = 0;
    pthread_mutex_lock(&lock);
    for (const Process *process = state.process; process < state.process + state.processes; process++) {
        if (process->card != found->card || (found->slot != WHOLE && process->slot != found->slot))
            continue;
        if (process->list != list)
            continue;
        const Device *part = process->slot == WHOLE ? NULL : at(process->card, process->slot);
        if (count < room)
            infos[count] = (nvmlProcessInfo_t){.pid = process->pid,
                                               .usedGpuMemory = process->memory,
                                               .gpuInstanceId = instance(part, GI),
                                               .computeInstanceId = instance(part, CI)};
        count++;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

/* nvml.h: with too little room it says how much is needed; without any it needs no array. */
#define PROCESS_CALL(name, list)                                                                                       \
    CALL(name, nvmlDevice_t device, unsigned *out, nvmlProcessInfo_t *infos) {                                         \
        ON(BOTH);                                                                                                      \
        const unsigned room = *out;                                                                                    \
        if (room > 0 && infos == NULL)                                                                                 \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                        \
        *out = list_processes(&found, infos, room, list);                                                              \
        return *out > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;                                              \
    }
PROCESS_CALL(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTES)
PROCESS_CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, DRAWS)
PROCESS_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS_COMPUTES)

#include "nvml_watched.h"
