/* A pretend libze_loader.so.1 for tests: the real `pyzes` loads it, and a text file says what its Sysman answers.
 *
 * The file is named by FAKE_ZE_STATE and looked at on every call. Without it there is no driver. Its lines:
 *
 *   drivers 2                          how many drivers there are; without it one, and with 0 zesInit fails
 *   gpu INDEX key=value ...            driver=0 bdf name device_id integrated=0|1 subdevices type=GPU|VPU uuid
 *   engine GPU INDEX key=value         group=ALL|COMPUTE_ALL|... sub=-1|TILE active timestamp (microseconds) rate
 *   memory GPU INDEX key=value         location=DEVICE|SYSTEM sub physical size free (bytes)
 *                                      read written most (bytes, and bytes a second) timestamp (microseconds)
 *   temperature GPU INDEX key=value    sensor=GPU|GLOBAL|MEMORY|... sub celsius
 *   frequency GPU INDEX key=value      domain=GPU|MEMORY|MEDIA sub actual request highest (MHz)
 *   power GPU INDEX key=value          domain=UNKNOWN|CARD|... sub energy (microjoules) timestamp (microseconds) rate
 *                                      limit default_limit (milliwatts) limited=0|1
 *   fan GPU INDEX key=value            sub rpm
 *   ras GPU INDEX key=value            type=CORRECTABLE|UNCORRECTABLE sub unfilled, and counts: reset programming
 *                                      driver compute non_compute cache display memory scale l3_fabric
 *   fault CALL [WHERE] STATUS          the call answers STATUS; CALL is a symbol or *, WHERE a GPU's index or *
 *   hang CALL [WHERE]                  the call does not return while this line is there
 *   slow CALL [WHERE] MILLISECONDS     the call takes that long, then answers from the state as it is by then
 *   crash CALL [WHERE]                 the call ends the process by SIGSEGV
 *
 * A key that is left out makes the calls that need it answer UNSUPPORTED_FEATURE. Some can be left out freely: driver
 * is then 0, type GPU or CORRECTABLE, domain GPU or UNKNOWN, integrated 0, sub -1 (not on a tile), highest and
 * default_limit -1 (not known), limited 1, and a device without a uuid leaves the caller's bytes as they are, as Intel's
 * driver does. Of hardware errors the categories are those with a count, and `unfilled` more, which the call counts and
 * leaves as the caller had them. Text with blanks stands in double quotes; whole numbers may be hexadecimal.
 *
 * With rate=R a counter moves: from the line's values on `timestamp` grows with CLOCK_MONOTONIC, and `active` (or
 * `energy`) R times as fast. It goes on where it is if the file changes elsewhere or only the rate does.
 *
 * A call without a GPU, or on one that is gone, matches only WHERE *. The first rule of a kind that matches holds.
 * A line that makes no sense aborts the process. A line with its symbol is appended to FAKE_ZE_RECORD for every call.
 *
 * Stricter than Intel's: an `stype` that is not the struct's is an INVALID_ARGUMENT, and so is no array with a count.
 *
 * -DWITHOUT_<symbol> leaves that symbol out, to play an older loader; -DLAYOUTS makes a program that prints structs.
 */
#include "state.h"

/* ---- what Level Zero defines ---- */

typedef int32_t ze_result_t;
enum {
    SUCCESS = 0,
    DEVICE_LOST = 0x70000001,
    UNINITIALIZED = 0x78000001,
    UNSUPPORTED_FEATURE = 0x78000003,
    INVALID_ARGUMENT = 0x78000004,
    INVALID_NULL_HANDLE = 0x78000005,
    INVALID_NULL_POINTER = 0x78000007,
    INVALID_ENUMERATION = 0x7800000c
};
enum { DEVICE_TYPE_GPU = 1, FLAG_INTEGRATED = 1, VENDOR_INTEL = 0x8086, MEM_TYPE_GDDR6 = 17, UUID_BYTES = 16 };

/* The `stype` of each struct that has one. */
enum {
    DEVICE_PROPERTIES = 0x1,
    PCI_PROPERTIES = 0x2,
    ENGINE_PROPERTIES = 0x5,
    FAN_PROPERTIES = 0x7,
    FREQ_PROPERTIES = 0x9,
    MEM_PROPERTIES = 0xb,
    POWER_PROPERTIES = 0xd,
    RAS_PROPERTIES = 0xf,
    TEMP_PROPERTIES = 0x14,
    FREQ_STATE = 0x1b,
    MEM_STATE = 0x1e,
    POWER_LIMIT_EXT_DESC = 0x27,
    POWER_EXT_PROPERTIES = 0x28,
    DEVICE_EXT_PROPERTIES = 0x2d,
    SUBDEVICE_EXP_PROPERTIES = 0x20004
};

typedef uint8_t Bytes[UUID_BYTES];
typedef char Name[256];
typedef char Property[64];
typedef void *Chain;

/* FIELDS_name lists a struct's members, from which come both the struct itself and what -DLAYOUTS prints of it. */
#define MEMBER(type, name) type name;
#define STRUCT(name) typedef struct { FIELDS_##name(MEMBER) } name;
#define HEAD(F) F(int32_t, stype) F(Chain, pNext)

#define FIELDS_base(F) HEAD(F)
#define FIELDS_ze_device_uuid_t(F) F(Bytes, id)
#define FIELDS_zes_uuid_t(F) F(Bytes, id)
#define FIELDS_ze_device_properties_t(F)                                                                               \
    HEAD(F)                                                                                                            \
    F(int32_t, type)                                                                                                   \
    F(uint32_t, vendorId)                                                                                              \
    F(uint32_t, deviceId)                                                                                              \
    F(uint32_t, flags)                                                                                                 \
    F(uint32_t, subdeviceId)                                                                                           \
    F(uint32_t, coreClockRate)                                                                                         \
    F(uint64_t, maxMemAllocSize)                                                                                       \
    F(uint32_t, maxHardwareContexts)                                                                                   \
    F(uint32_t, maxCommandQueuePriority)                                                                               \
    F(uint32_t, numThreadsPerEU)                                                                                       \
    F(uint32_t, physicalEUSimdWidth)                                                                                   \
    F(uint32_t, numEUsPerSubslice)                                                                                     \
    F(uint32_t, numSubslicesPerSlice)                                                                                  \
    F(uint32_t, numSlices)                                                                                             \
    F(uint64_t, timerResolution)                                                                                       \
    F(uint32_t, timestampValidBits)                                                                                    \
    F(uint32_t, kernelTimestampValidBits)                                                                              \
    F(ze_device_uuid_t, uuid)                                                                                          \
    F(Name, name)
#define FIELDS_zes_device_properties_t(F)                                                                              \
    HEAD(F)                                                                                                            \
    F(ze_device_properties_t, core)                                                                                    \
    F(uint32_t, numSubdevices)                                                                                         \
    F(Property, serialNumber)                                                                                          \
    F(Property, boardNumber)                                                                                           \
    F(Property, brandName)                                                                                             \
    F(Property, modelName)                                                                                             \
    F(Property, vendorName)                                                                                            \
    F(Property, driverVersion)
#define FIELDS_zes_device_ext_properties_t(F) HEAD(F) F(zes_uuid_t, uuid) F(int32_t, type) F(uint32_t, flags)
#define FIELDS_zes_subdevice_exp_properties_t(F) HEAD(F) F(uint32_t, subdeviceId) F(zes_uuid_t, uuid)
#define FIELDS_zes_pci_address_t(F) F(uint32_t, domain) F(uint32_t, bus) F(uint32_t, device) F(uint32_t, function)
#define FIELDS_zes_pci_speed_t(F) F(int32_t, gen) F(int32_t, width) F(int64_t, maxBandwidth)
#define FIELDS_zes_pci_properties_t(F)                                                                                 \
    HEAD(F)                                                                                                            \
    F(zes_pci_address_t, address)                                                                                      \
    F(zes_pci_speed_t, maxSpeed)                                                                                       \
    F(uint8_t, haveBandwidthCounters)                                                                                  \
    F(uint8_t, havePacketCounters)                                                                                     \
    F(uint8_t, haveReplayCounters)
#define FIELDS_zes_engine_properties_t(F) HEAD(F) F(uint32_t, type) F(uint8_t, onSubdevice) F(uint32_t, subdeviceId)
#define FIELDS_zes_engine_stats_t(F) F(uint64_t, activeTime) F(uint64_t, timestamp)
#define FIELDS_zes_mem_properties_t(F)                                                                                 \
    HEAD(F)                                                                                                            \
    F(int32_t, type)                                                                                                   \
    F(uint8_t, onSubdevice)                                                                                            \
    F(uint32_t, subdeviceId)                                                                                           \
    F(int32_t, location)                                                                                               \
    F(uint64_t, physicalSize)                                                                                          \
    F(int32_t, busWidth)                                                                                               \
    F(int32_t, numChannels)
#define FIELDS_zes_mem_state_t(F) HEAD(F) F(int32_t, health) F(uint64_t, free) F(uint64_t, size)
#define FIELDS_zes_temp_properties_t(F)                                                                                \
    HEAD(F)                                                                                                            \
    F(int32_t, type)                                                                                                   \
    F(uint8_t, onSubdevice)                                                                                            \
    F(uint32_t, subdeviceId)                                                                                           \
    F(double, maxTemperature)                                                                                          \
    F(uint8_t, isCriticalTempSupported)                                                                                \
    F(uint8_t, isThreshold1Supported)                                                                                  \
    F(uint8_t, isThreshold2Supported)
#define FIELDS_zes_freq_state_t(F)                                                                                     \
    HEAD(F)                                                                                                            \
    F(double, currentVoltage)                                                                                          \
    F(double, request)                                                                                                 \
    F(double, tdp)                                                                                                     \
    F(double, efficient)                                                                                               \
    F(double, actual)                                                                                                  \
    F(uint32_t, throttleReasons)
#define FIELDS_zes_power_energy_counter_t(F) F(uint64_t, energy) F(uint64_t, timestamp)
#define FIELDS_zes_freq_properties_t(F)                                                                                \
    HEAD(F)                                                                                                            \
    F(int32_t, type)                                                                                                   \
    F(uint8_t, onSubdevice)                                                                                            \
    F(uint32_t, subdeviceId)                                                                                           \
    F(uint8_t, canControl)                                                                                             \
    F(uint8_t, isThrottleEventSupported)                                                                               \
    F(double, min)                                                                                                     \
    F(double, max)
#define FIELDS_zes_power_properties_t(F)                                                                               \
    HEAD(F)                                                                                                            \
    F(uint8_t, onSubdevice)                                                                                            \
    F(uint32_t, subdeviceId)                                                                                           \
    F(uint8_t, canControl)                                                                                             \
    F(uint8_t, isEnergyThresholdSupported)                                                                             \
    F(int32_t, defaultLimit)                                                                                           \
    F(int32_t, minLimit)                                                                                               \
    F(int32_t, maxLimit)
#define FIELDS_zes_power_ext_properties_t(F) HEAD(F) F(int32_t, domain) F(Chain, defaultLimit)
#define FIELDS_zes_power_limit_ext_desc_t(F)                                                                           \
    HEAD(F)                                                                                                            \
    F(int32_t, level)                                                                                                  \
    F(int32_t, source)                                                                                                 \
    F(int32_t, limitUnit)                                                                                              \
    F(uint8_t, enabledStateLocked)                                                                                     \
    F(uint8_t, enabled)                                                                                                \
    F(uint8_t, intervalValueLocked)                                                                                    \
    F(int32_t, interval)                                                                                               \
    F(uint8_t, limitValueLocked)                                                                                       \
    F(int32_t, limit)
#define FIELDS_zes_mem_bandwidth_t(F)                                                                                  \
    F(uint64_t, readCounter)                                                                                           \
    F(uint64_t, writeCounter)                                                                                          \
    F(uint64_t, maxBandwidth)                                                                                          \
    F(uint64_t, timestamp)
#define FIELDS_zes_fan_properties_t(F)                                                                                 \
    HEAD(F)                                                                                                            \
    F(uint8_t, onSubdevice)                                                                                            \
    F(uint32_t, subdeviceId)                                                                                           \
    F(uint8_t, canControl)                                                                                             \
    F(uint32_t, supportedModes)                                                                                        \
    F(uint32_t, supportedUnits)                                                                                        \
    F(int32_t, maxRPM)                                                                                                 \
    F(int32_t, maxPoints)
#define FIELDS_zes_ras_properties_t(F) HEAD(F) F(int32_t, type) F(uint8_t, onSubdevice) F(uint32_t, subdeviceId)
#define FIELDS_zes_ras_state_exp_t(F) F(int32_t, category) F(uint64_t, errorCounter)

#define EACH_STRUCT(DO)                                                                                                \
    DO(ze_device_uuid_t)                                                                                               \
    DO(zes_uuid_t)                                                                                                     \
    DO(ze_device_properties_t)                                                                                         \
    DO(zes_device_properties_t)                                                                                        \
    DO(zes_device_ext_properties_t)                                                                                    \
    DO(zes_subdevice_exp_properties_t)                                                                                 \
    DO(zes_pci_address_t)                                                                                              \
    DO(zes_pci_speed_t)                                                                                                \
    DO(zes_pci_properties_t)                                                                                           \
    DO(zes_engine_properties_t)                                                                                        \
    DO(zes_engine_stats_t)                                                                                             \
    DO(zes_mem_properties_t)                                                                                           \
    DO(zes_mem_state_t)                                                                                                \
    DO(zes_temp_properties_t)                                                                                          \
    DO(zes_freq_state_t)                                                                                               \
    DO(zes_power_energy_counter_t)                                                                                     \
    DO(zes_freq_properties_t)                                                                                          \
    DO(zes_power_properties_t)                                                                                         \
    DO(zes_power_ext_properties_t)                                                                                     \
    DO(zes_power_limit_ext_desc_t)                                                                                     \
    DO(zes_mem_bandwidth_t)                                                                                            \
    DO(zes_fan_properties_t)                                                                                           \
    DO(zes_ras_properties_t)                                                                                           \
    DO(zes_ras_state_exp_t)
EACH_STRUCT(STRUCT)
STRUCT(base)

/* ---- what the state file says ---- */

static const Fake fake = {
    .name = "ze_loader", .variable = "FAKE_ZE_STATE", .hexadecimal = true, .where_optional = true};

enum { TEXT = 128, MAX_RECORDS = 1024, MAX_HANDLES = 4096 };

/* What a line, and a handle, is about. No line is about a DRIVER: they are counted. */
enum kind { GPU, ENGINE, MEMORY, TEMPERATURE, FREQUENCY, POWER, FAN, RAS, LINES, DRIVER = LINES, NOTHING };
static const char *const line_names[LINES] = {"gpu", "engine", "memory", "temperature", "frequency", "power", "fan",
                                              "ras"};

static const char *const types[] = {"GPU", "CPU", "FPGA", "MCA", "VPU", NULL}; /* from 1 on */
static const char *const locations[] = {"SYSTEM", "DEVICE", NULL};
static const char *const sensors[] = {"GLOBAL",     "GPU",       "MEMORY",        "GLOBAL_MIN",        "GPU_MIN",
                                      "MEMORY_MIN", "GPU_BOARD", "GPU_BOARD_MIN", "VOLTAGE_REGULATOR", NULL};
static const char *const groups[] = {"ALL",
                                     "COMPUTE_ALL",
                                     "MEDIA_ALL",
                                     "COPY_ALL",
                                     "COMPUTE_SINGLE",
                                     "RENDER_SINGLE",
                                     "MEDIA_DECODE_SINGLE",
                                     "MEDIA_ENCODE_SINGLE",
                                     "COPY_SINGLE",
                                     "MEDIA_ENHANCEMENT_SINGLE",
                                     "3D_SINGLE",
                                     "3D_RENDER_COMPUTE_ALL",
                                     "RENDER_ALL",
                                     "3D_ALL",
                                     "MEDIA_CODEC_SINGLE",
                                     NULL};

static const char *const clock_domains[] = {"GPU", "MEMORY", "MEDIA", NULL};
static const char *const power_domains[] = {"UNKNOWN", "CARD", "PACKAGE", "STACK", "MEMORY", "GPU", NULL};
static const char *const error_types[] = {"CORRECTABLE", "UNCORRECTABLE", NULL};

/* The keys whose values are kept as text come first, then words, then whole numbers, and from RATE on fractions. */
enum key {
    BDF,
    NAME,
    UUID,
    TEXTS,
    TYPE = TEXTS,
    GROUP,
    LOCATION,
    SENSOR,
    CLOCK_DOMAIN,
    POWER_DOMAIN,
    ERROR_TYPE,
    OF_DRIVER,
    DEVICE_ID,
    INTEGRATED,
    SUBDEVICES,
    SUB,
    PHYSICAL,
    SIZE,
    FREE,
    ACTIVE,
    ENERGY,
    TIMESTAMP,
    READ,
    WRITTEN,
    MOST,
    LIMIT,
    DEFAULT_LIMIT,
    LIMITED,
    RPM,
    UNFILLED,
    RESET, /* the categories of errors, in Sysman's order */
    PROGRAMMING,
    DRIVER_ERRORS,
    COMPUTE,
    NON_COMPUTE,
    CACHE,
    DISPLAY,
    MEMORY_ERRORS,
    SCALE,
    L3_FABRIC,
    RATE,
    CELSIUS,
    ACTUAL,
    REQUEST,
    HIGHEST,
    KEYS
};

#define ON_LINE(kind) (1u << (kind))
#define ON_TILES ((1u << LINES) - 1 - ON_LINE(GPU))
#define COUNTERS (ON_LINE(ENGINE) | ON_LINE(POWER))
static const struct {
    const char *name;
    unsigned lines;
    const char *const *words;
} keys[KEYS] = {[BDF] = {"bdf", ON_LINE(GPU), NULL},
                [NAME] = {"name", ON_LINE(GPU), NULL},
                [UUID] = {"uuid", ON_LINE(GPU), NULL},
                [TYPE] = {"type", ON_LINE(GPU), types},
                [GROUP] = {"group", ON_LINE(ENGINE), groups},
                [LOCATION] = {"location", ON_LINE(MEMORY), locations},
                [SENSOR] = {"sensor", ON_LINE(TEMPERATURE), sensors},
                [OF_DRIVER] = {"driver", ON_LINE(GPU), NULL},
                [DEVICE_ID] = {"device_id", ON_LINE(GPU), NULL},
                [INTEGRATED] = {"integrated", ON_LINE(GPU), NULL},
                [SUBDEVICES] = {"subdevices", ON_LINE(GPU), NULL},
                [SUB] = {"sub", ON_TILES, NULL},
                [PHYSICAL] = {"physical", ON_LINE(MEMORY), NULL},
                [SIZE] = {"size", ON_LINE(MEMORY), NULL},
                [FREE] = {"free", ON_LINE(MEMORY), NULL},
                [ACTIVE] = {"active", ON_LINE(ENGINE), NULL},
                [ENERGY] = {"energy", ON_LINE(POWER), NULL},
                [TIMESTAMP] = {"timestamp", COUNTERS | ON_LINE(MEMORY), NULL},
                [READ] = {"read", ON_LINE(MEMORY), NULL},
                [WRITTEN] = {"written", ON_LINE(MEMORY), NULL},
                [MOST] = {"most", ON_LINE(MEMORY), NULL},
                [LIMIT] = {"limit", ON_LINE(POWER), NULL},
                [DEFAULT_LIMIT] = {"default_limit", ON_LINE(POWER), NULL},
                [LIMITED] = {"limited", ON_LINE(POWER), NULL},
                [CLOCK_DOMAIN] = {"domain", ON_LINE(FREQUENCY), clock_domains},
                [POWER_DOMAIN] = {"domain", ON_LINE(POWER), power_domains},
                [ERROR_TYPE] = {"type", ON_LINE(RAS), error_types},
                [RPM] = {"rpm", ON_LINE(FAN), NULL},
                [UNFILLED] = {"unfilled", ON_LINE(RAS), NULL},
                [RESET] = {"reset", ON_LINE(RAS), NULL},
                [PROGRAMMING] = {"programming", ON_LINE(RAS), NULL},
                [DRIVER_ERRORS] = {"driver", ON_LINE(RAS), NULL},
                [COMPUTE] = {"compute", ON_LINE(RAS), NULL},
                [NON_COMPUTE] = {"non_compute", ON_LINE(RAS), NULL},
                [CACHE] = {"cache", ON_LINE(RAS), NULL},
                [DISPLAY] = {"display", ON_LINE(RAS), NULL},
                [MEMORY_ERRORS] = {"memory", ON_LINE(RAS), NULL},
                [SCALE] = {"scale", ON_LINE(RAS), NULL},
                [L3_FABRIC] = {"l3_fabric", ON_LINE(RAS), NULL},
                [RATE] = {"rate", COUNTERS, NULL},
                [CELSIUS] = {"celsius", ON_LINE(TEMPERATURE), NULL},
                [ACTUAL] = {"actual", ON_LINE(FREQUENCY), NULL},
                [REQUEST] = {"request", ON_LINE(FREQUENCY), NULL},
                [HIGHEST] = {"highest", ON_LINE(FREQUENCY), NULL}};

/* What the caller's handles point to. An entry is never freed, so that a handle outlives what it is about.
 * `from`, `stamp` and `rate` are a moving counter's line; the rest is how far it had come at the time `since`. */
typedef struct {
    char identity[2 * TEXT];
    enum kind kind;
    bool moving;
    uint64_t from, stamp;
    double rate, since, grown, passed;
} Handle;

struct Found {
    enum kind kind;
    long gpu, index; /* the GPU's index, and of a part its own */
    Handle *handle;
    bool given[KEYS];
    char text[TEXTS][TEXT];
    uint64_t number[KEYS];
    double real[KEYS];
};
typedef Found Record;

static struct {
    uint64_t drivers;
    unsigned records;
    Record record[MAX_RECORDS];
} state;

static Handle handles[MAX_HANDLES];
static unsigned handle_count;
static bool initialized;

#define EACH(it) for (Record *it = state.record; it < state.record + state.records; it++)

/* ---- reading the state file ---- */

static double fraction(const char *text) {
    char *end;
    double value = strtod(text, &end);
    demand(end != text && *end == '\0', "not a number", text);
    return value;
}

static bool parse_address(const char *text, zes_pci_address_t *to) {
    int end = 0;
    int parts = sscanf(text, "%x:%x:%x.%x%n", &to->domain, &to->bus, &to->device, &to->function, &end);
    return parts == 4 && text[end] == '\0';
}

/* 32 hexadecimal digits, with dashes wherever. */
static bool parse_uuid(const char *text, Bytes to) {
    int digits = 0;
    memset(to, 0, UUID_BYTES);
    for (; *text != '\0'; text++) {
        if (*text == '-')
            continue;
        if (!isxdigit((unsigned char)*text) || digits == 2 * UUID_BYTES)
            return false;
        unsigned digit = isdigit((unsigned char)*text) ? *text - '0' : tolower((unsigned char)*text) - 'a' + 10;
        to[digits / 2] |= (uint8_t)(digits % 2 == 0 ? digit << 4 : digit);
        digits++;
    }
    return digits == 2 * UUID_BYTES;
}

static void parse_text(Record *record, enum key key, const char *value) {
    zes_pci_address_t address;
    Bytes bytes;
    demand(key != BDF || parse_address(value, &address), "not a PCI address", value);
    demand(key != UUID || parse_uuid(value, bytes), "not a UUID", value);
    keep(record->text[key], value, TEXT);
}

static void parse_pair(Record *record, char *pair) {
    const char *value = value_of(pair);
    enum key key = 0;
    while (key < KEYS && (strcmp(keys[key].name, pair) != 0 || (keys[key].lines & ON_LINE(record->kind)) == 0))
        key++;
    demand(key < KEYS, "unknown word", pair);
    if (key < TEXTS)
        parse_text(record, key, value);
    else if (keys[key].words != NULL)
        record->number[key] = position(value, keys[key].words);
    else if (key < RATE)
        record->number[key] = number(value);
    else
        record->real[key] = fraction(value);
    demand(key != INTEGRATED || record->number[key] <= 1, "neither 0 nor 1", value);
    record->given[key] = true;
}

static Record *new_record(enum kind kind, long gpu, long index) {
    demand(state.records < MAX_RECORDS, "too many lines", "drivers, GPUs and parts");
    Record *record = &state.record[state.records++];
    record->kind = kind;
    record->gpu = gpu;
    record->index = index;
    return record;
}

static void parse_record(enum kind kind, char **rest) {
    long gpu = (long)number(need_word(rest));
    Record *record = new_record(kind, gpu, kind == GPU ? gpu : (long)number(need_word(rest)));
    for (char *pair = next_word(rest); pair != NULL; pair = next_word(rest))
        parse_pair(record, pair);
}

static void parse_rule(const char *word, char **rest) {
    Rule *rule = new_rule(word);
    keep(rule->call, need_word(rest), WORD);
    parse_where(rule, rest);
}

static void parse_words(const char *first, char **rest) {
    unsigned kind = 0;
    while (kind < LINES && strcmp(line_names[kind], first) != 0)
        kind++;
    if (strcmp(first, "drivers") == 0)
        state.drivers = number(need_word(rest));
    else if (kind < LINES)
        parse_record((enum kind)kind, rest);
    else
        parse_rule(first, rest);
}

/* ---- handles and moving counters ---- */

static Handle *handle_for(const char *identity, enum kind kind) {
    for (unsigned i = 0; i < handle_count; i++)
        if (handles[i].kind == kind && strcmp(handles[i].identity, identity) == 0)
            return &handles[i];
    demand(handle_count < MAX_HANDLES, "too many handles since the start", identity);
    keep(handles[handle_count].identity, identity, sizeof handles->identity);
    handles[handle_count].kind = kind;
    return &handles[handle_count++];
}

/* A GPU is who its PCI address says, else its UUID, else its index; a part is an index of its GPU. */
static void identify(Record *record) {
    char identity[2 * TEXT];
    const Record *gpu = record->kind == GPU ? record : NULL;
    snprintf(identity, sizeof identity, "%ld", record->index);
    EACH(other)
        if (record->kind < DRIVER && other->kind == GPU && other->gpu == record->gpu)
            gpu = other;
    demand(gpu != NULL || record->kind == DRIVER, "no such GPU for a part", identity);
    if (gpu != NULL) {
        enum key key = gpu->given[BDF] ? BDF : UUID;
        long part = record->kind == GPU ? 0 : record->index;
        if (gpu->given[key])
            snprintf(identity, sizeof identity, "%s %ld", gpu->text[key], part);
        else
            snprintf(identity, sizeof identity, "index %ld %ld", gpu->gpu, part);
    }
    record->handle = handle_for(identity, record->kind);
    EACH(other)
        demand(other == record || other->handle != record->handle, "two lines about the same", identity);
}

static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static enum key counter_of(const Record *record) { return record->kind == POWER ? ENERGY : ACTIVE; }

/* Takes over a counter's line: goes on from where the counter is, or from the line's values if these are new. */
static void follow(const Record *record) {
    Handle *handle = record->handle;
    uint64_t from = record->number[counter_of(record)], stamp = record->number[TIMESTAMP];
    double now = microseconds(), elapsed = now - handle->since;
    bool same = handle->moving && handle->from == from && handle->stamp == stamp;
    handle->grown = same ? handle->grown + handle->rate * elapsed : 0;
    handle->passed = same ? handle->passed + elapsed : 0;
    handle->moving = record->given[RATE];
    handle->rate = record->real[RATE];
    handle->since = now;
    handle->from = from;
    handle->stamp = stamp;
}

static void move_on(Record *copy) {
    const Handle *handle = copy->handle;
    double elapsed = microseconds() - handle->since;
    if (!handle->moving)
        return;
    copy->number[counter_of(copy)] += (uint64_t)(handle->grown + handle->rate * elapsed);
    copy->number[TIMESTAMP] += (uint64_t)(handle->passed + elapsed);
}

static void start_over(void) {
    memset(&state, 0, sizeof state);
    state.drivers = present ? 1 : 0;
}

static void complete(void) {
    for (uint64_t driver = 0; driver < state.drivers; driver++)
        new_record(DRIVER, NOWHERE, (long)driver);
    EACH(record) {
        identify(record);
        if ((ON_LINE(record->kind) & COUNTERS) != 0)
            follow(record);
    }
}

/* ---- what every call goes through ---- */

typedef struct {
    const void *handle;
    enum kind kind;
} Wanted;

/* A copy of what a handle of that kind is about, its counters moved on; with the lock held. */
static Code by_handle(const void *sought, Record *found) {
    const Wanted *wanted = sought;
    if (wanted->kind == NOTHING)
        return SUCCESS;
    if (wanted->handle == NULL)
        return INVALID_NULL_HANDLE;
    EACH(record)
        if (record->handle == wanted->handle && record->kind == wanted->kind) {
            *found = *record;
            move_on(found);
            return SUCCESS;
        }
    for (unsigned i = 0; i < handle_count; i++)
        if (&handles[i] == wanted->handle && handles[i].kind == wanted->kind)
            return DEVICE_LOST;
    return INVALID_ARGUMENT;
}

static Code answer(const char *call, long gpu, Code found) {
    const Rule *fault = rule_for(FAULT, call, gpu);
    if (!present || (!initialized && strcmp(call, "zesInit") != 0))
        return UNINITIALIZED;
    return fault == NULL ? found : (ze_result_t)fault->value;
}

static Verdict look(const char *call, Finder *find, const void *wanted, Record *found, bool first) {
    *found = (Record){.gpu = NOWHERE};
    Code code = find(wanted, found);
    if (first)
        record_call(getenv("FAKE_ZE_RECORD"), call, "");
    return verdict_on(call, found->gpu, answer(call, found->gpu, code));
}

/* Enters a call on a handle of that kind that writes to `out`. */
static ze_result_t on(const char *call, const void *handle, enum kind kind, const void *out, Record *found) {
    TRY(enter(call, by_handle, &(Wanted){handle, kind}, found));
    return out == NULL ? INVALID_NULL_POINTER : SUCCESS;
}

/* Level Zero's two calls: with a count of 0 it becomes the total, otherwise as many are filled as fit. */
static ze_result_t room(uint32_t total, uint32_t *count, const void *out, uint32_t *fill) {
    uint32_t asked = *count;
    if (asked > 0 && out == NULL)
        return INVALID_ARGUMENT;
    *fill = asked < total ? asked : total;
    *count = asked == 0 || asked > total ? total : asked;
    return SUCCESS;
}

static bool belongs(const Record *record, enum kind kind, const Record *owner) {
    if (record->kind != kind || kind == DRIVER)
        return record->kind == kind;
    return kind == GPU ? record->number[OF_DRIVER] == (uint64_t)owner->index : record->gpu == owner->gpu;
}

static ze_result_t list(const Record *owner, enum kind kind, uint32_t *count, void **out) {
    static __thread void *listed[MAX_RECORDS];
    uint32_t total = 0, fill;
    pthread_mutex_lock(&lock);
    EACH(record)
        if (belongs(record, kind, owner))
            listed[total++] = record->handle;
    pthread_mutex_unlock(&lock);
    TRY(room(total, count, out, &fill));
    for (uint32_t i = 0; i < fill; i++)
        out[i] = listed[i];
    return SUCCESS;
}

static void place(const Record *found, uint8_t *on_subdevice, uint32_t *subdevice) {
    *on_subdevice = found->given[SUB] && (int64_t)found->number[SUB] >= 0;
    *subdevice = *on_subdevice ? (uint32_t)found->number[SUB] : 0;
}

/* As Intel's driver does: flags are added to what the caller left there, and a UUID that is not known is left out. */
static void describe(const Record *found, int32_t *type, uint32_t *flags, Bytes uuid) {
    *type = (found->given[TYPE] ? (int32_t)found->number[TYPE] : 0) + DEVICE_TYPE_GPU;
    *flags |= found->number[INTEGRATED] ? FLAG_INTEGRATED : 0;
    if (found->given[UUID])
        parse_uuid(found->text[UUID], uuid);
}

/* ---- the exported calls ---- */

#define CALL(name, ...) EXPORTED(name) ze_result_t name(__VA_ARGS__)

/* How a call begins: ON where it has a `handle` and an `out`. Past it `found` is what it is about. */
#define ON(kind)                                                                                                       \
    Record found;                                                                                                      \
    TRY(on(__func__, handle, kind, out, &found))
#define TYPED(type)                                                                                                    \
    if (out->stype != (type))                                                                                          \
    return INVALID_ARGUMENT
#define NEED(key)                                                                                                      \
    if (!found.given[key])                                                                                             \
    return UNSUPPORTED_FEATURE

CALL(zesInit, uint32_t flags) {
    Record found;
    TRY(enter(__func__, by_handle, &(Wanted){NULL, NOTHING}, &found));
    if (flags > 1)
        return INVALID_ENUMERATION;
    pthread_mutex_lock(&lock);
    bool any = state.drivers > 0;
    initialized |= any;
    pthread_mutex_unlock(&lock);
    return any ? SUCCESS : UNINITIALIZED;
}

CALL(zesDriverGet, uint32_t *count, void **out) {
    Record found;
    TRY(on(__func__, NULL, NOTHING, count, &found));
    return list(&found, DRIVER, count, out);
}

#define LIST_CALL(name, owner, kind)                                                                                   \
    CALL(name, void *handle, uint32_t *count, void **out) {                                                            \
        Record found;                                                                                                  \
        TRY(on(__func__, handle, owner, count, &found));                                                               \
        return list(&found, kind, count, out);                                                                         \
    }
LIST_CALL(zesDeviceGet, DRIVER, GPU)
LIST_CALL(zesDeviceEnumEngineGroups, GPU, ENGINE)
LIST_CALL(zesDeviceEnumMemoryModules, GPU, MEMORY)
LIST_CALL(zesDeviceEnumTemperatureSensors, GPU, TEMPERATURE)
LIST_CALL(zesDeviceEnumFrequencyDomains, GPU, FREQUENCY)
LIST_CALL(zesDeviceEnumPowerDomains, GPU, POWER)
LIST_CALL(zesDeviceEnumFans, GPU, FAN)
LIST_CALL(zesDeviceEnumRasErrorSets, GPU, RAS)

CALL(zesDeviceGetProperties, void *handle, zes_device_properties_t *out) {
    ON(GPU);
    TYPED(DEVICE_PROPERTIES);
    NEED(NAME);
    NEED(DEVICE_ID);
    out->core.vendorId = VENDOR_INTEL;
    out->core.deviceId = (uint32_t)found.number[DEVICE_ID];
    out->numSubdevices = (uint32_t)found.number[SUBDEVICES];
    snprintf(out->core.name, sizeof out->core.name, "%s", found.text[NAME]);
    describe(&found, &out->core.type, &out->core.flags, out->core.uuid.id);
    char *const unknown[] = {out->serialNumber, out->boardNumber, out->brandName,
                             out->modelName,    out->vendorName,  out->driverVersion};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        strcpy(unknown[i], "unknown");
    for (base *next = out->pNext; next != NULL; next = next->pNext) {
        zes_device_ext_properties_t *more = (zes_device_ext_properties_t *)next;
        if (next->stype == DEVICE_EXT_PROPERTIES)
            describe(&found, &more->type, &more->flags, more->uuid.id);
    }
    return SUCCESS;
}

CALL(zesDevicePciGetProperties, void *handle, zes_pci_properties_t *out) {
    ON(GPU);
    TYPED(PCI_PROPERTIES);
    NEED(BDF);
    parse_address(found.text[BDF], &out->address);
    out->maxSpeed = (zes_pci_speed_t){-1, -1, -1};
    out->haveBandwidthCounters = out->havePacketCounters = out->haveReplayCounters = 0;
    return SUCCESS;
}

/* A tile's UUID is its card's with the last byte one higher than the tile's number, as Intel's driver makes them. */
CALL(zesDeviceGetSubDevicePropertiesExp, void *handle, uint32_t *count, zes_subdevice_exp_properties_t *out) {
    Record found;
    uint32_t fill;
    TRY(on(__func__, handle, GPU, count, &found));
    NEED(SUBDEVICES);
    NEED(UUID);
    TRY(room((uint32_t)found.number[SUBDEVICES], count, out, &fill));
    for (uint32_t tile = 0; tile < fill; tile++, out++) {
        TYPED(SUBDEVICE_EXP_PROPERTIES);
        out->subdeviceId = tile;
        parse_uuid(found.text[UUID], out->uuid.id);
        out->uuid.id[UUID_BYTES - 1] += (uint8_t)(tile + 1);
    }
    return SUCCESS;
}

CALL(zesEngineGetProperties, void *handle, zes_engine_properties_t *out) {
    ON(ENGINE);
    TYPED(ENGINE_PROPERTIES);
    NEED(GROUP);
    out->type = (uint32_t)found.number[GROUP];
    place(&found, &out->onSubdevice, &out->subdeviceId);
    return SUCCESS;
}

CALL(zesEngineGetActivity, void *handle, zes_engine_stats_t *out) {
    ON(ENGINE);
    NEED(ACTIVE);
    NEED(TIMESTAMP);
    *out = (zes_engine_stats_t){found.number[ACTIVE], found.number[TIMESTAMP]};
    return SUCCESS;
}

CALL(zesMemoryGetProperties, void *handle, zes_mem_properties_t *out) {
    ON(MEMORY);
    TYPED(MEM_PROPERTIES);
    NEED(LOCATION);
    NEED(PHYSICAL);
    out->type = MEM_TYPE_GDDR6;
    out->location = (int32_t)found.number[LOCATION];
    out->physicalSize = found.number[PHYSICAL];
    out->busWidth = out->numChannels = -1;
    place(&found, &out->onSubdevice, &out->subdeviceId);
    return SUCCESS;
}

CALL(zesMemoryGetState, void *handle, zes_mem_state_t *out) {
    ON(MEMORY);
    TYPED(MEM_STATE);
    NEED(SIZE);
    NEED(FREE);
    out->health = 0;
    out->size = found.number[SIZE];
    out->free = found.number[FREE];
    return SUCCESS;
}

/* The caller's struct has no type. */
CALL(zesMemoryGetBandwidth, void *handle, zes_mem_bandwidth_t *out) {
    ON(MEMORY);
    NEED(READ);
    NEED(WRITTEN);
    NEED(MOST);
    NEED(TIMESTAMP);
    *out = (zes_mem_bandwidth_t){found.number[READ], found.number[WRITTEN], found.number[MOST],
                                 found.number[TIMESTAMP]};
    return SUCCESS;
}

CALL(zesTemperatureGetProperties, void *handle, zes_temp_properties_t *out) {
    ON(TEMPERATURE);
    TYPED(TEMP_PROPERTIES);
    NEED(SENSOR);
    out->type = (int32_t)found.number[SENSOR];
    out->maxTemperature = 0;
    out->isCriticalTempSupported = out->isThreshold1Supported = out->isThreshold2Supported = 0;
    place(&found, &out->onSubdevice, &out->subdeviceId);
    return SUCCESS;
}

CALL(zesTemperatureGetState, void *handle, double *out) {
    ON(TEMPERATURE);
    NEED(CELSIUS);
    *out = found.real[CELSIUS];
    return SUCCESS;
}

CALL(zesFrequencyGetProperties, void *handle, zes_freq_properties_t *out) {
    ON(FREQUENCY);
    TYPED(FREQ_PROPERTIES);
    out->type = (int32_t)found.number[CLOCK_DOMAIN];
    place(&found, &out->onSubdevice, &out->subdeviceId);
    out->canControl = out->isThrottleEventSupported = 0;
    out->min = -1;
    out->max = found.given[HIGHEST] ? found.real[HIGHEST] : -1;
    return SUCCESS;
}

/* What is not known is -1. */
CALL(zesFrequencyGetState, void *handle, zes_freq_state_t *out) {
    ON(FREQUENCY);
    TYPED(FREQ_STATE);
    NEED(ACTUAL);
    out->actual = found.real[ACTUAL];
    out->request = found.given[REQUEST] ? found.real[REQUEST] : -1;
    out->currentVoltage = out->tdp = out->efficient = -1;
    out->throttleReasons = 0;
    return SUCCESS;
}

CALL(zesPowerGetEnergyCounter, void *handle, zes_power_energy_counter_t *out) {
    ON(POWER);
    NEED(ENERGY);
    NEED(TIMESTAMP);
    *out = (zes_power_energy_counter_t){found.number[ENERGY], found.number[TIMESTAMP]};
    return SUCCESS;
}

CALL(zesPowerGetProperties, void *handle, zes_power_properties_t *out) {
    ON(POWER);
    TYPED(POWER_PROPERTIES);
    place(&found, &out->onSubdevice, &out->subdeviceId);
    out->canControl = out->isEnergyThresholdSupported = 0;
    out->defaultLimit = found.given[DEFAULT_LIMIT] ? (int32_t)found.number[DEFAULT_LIMIT] : -1;
    out->minLimit = out->maxLimit = -1;
    for (base *next = out->pNext; next != NULL; next = next->pNext)
        if (next->stype == POWER_EXT_PROPERTIES)
            ((zes_power_ext_properties_t *)next)->domain = (int32_t)found.number[POWER_DOMAIN];
    return SUCCESS;
}

/* Two limits: the sustained one, and a peak, which is a current. */
CALL(zesPowerGetLimitsExt, void *handle, uint32_t *count, zes_power_limit_ext_desc_t *out) {
    enum { UNIT_CURRENT = 1, UNIT_POWER, SUSTAINED = 1, PEAK = 3, TENFOLD = 10 };
    Record found;
    uint32_t fill;
    TRY(on(__func__, handle, POWER, count, &found));
    NEED(LIMIT);
    TRY(room(2, count, out, &fill));
    for (uint32_t i = 0; i < fill; i++, out++) {
        TYPED(POWER_LIMIT_EXT_DESC);
        int32_t limit = (int32_t)found.number[LIMIT];
        out->level = i == 0 ? PEAK : SUSTAINED;
        out->limitUnit = i == 0 ? UNIT_CURRENT : UNIT_POWER;
        out->source = out->interval = 0;
        out->enabledStateLocked = out->intervalValueLocked = out->limitValueLocked = 1;
        out->enabled = !found.given[LIMITED] || found.number[LIMITED] != 0;
        out->limit = i == 0 ? TENFOLD * limit : limit;
    }
    return SUCCESS;
}

CALL(zesFanGetProperties, void *handle, zes_fan_properties_t *out) {
    ON(FAN);
    TYPED(FAN_PROPERTIES);
    place(&found, &out->onSubdevice, &out->subdeviceId);
    out->canControl = 0;
    out->supportedModes = 0;
    out->supportedUnits = 1;
    out->maxRPM = out->maxPoints = -1;
    return SUCCESS;
}

/* Revolutions per minute are unit 0; a fan says no percent. */
CALL(zesFanGetState, void *handle, int32_t unit, int32_t *out) {
    ON(FAN);
    if (unit != 0)
        return UNSUPPORTED_FEATURE;
    NEED(RPM);
    *out = (int32_t)found.number[RPM];
    return SUCCESS;
}

CALL(zesRasGetProperties, void *handle, zes_ras_properties_t *out) {
    ON(RAS);
    TYPED(RAS_PROPERTIES);
    out->type = (int32_t)found.number[ERROR_TYPE];
    place(&found, &out->onSubdevice, &out->subdeviceId);
    return SUCCESS;
}

/* As Intel's driver does: what a source of counts does not tell it leaves as it was, and says that all is well. */
CALL(zesRasGetStateExp, void *handle, uint32_t *count, zes_ras_state_exp_t *out) {
    Record found;
    uint32_t fill, total = 0, filled = 0;
    TRY(on(__func__, handle, RAS, count, &found));
    for (enum key key = RESET; key <= L3_FABRIC; key++)
        total += found.given[key];
    TRY(room(total + (uint32_t)found.number[UNFILLED], count, out, &fill));
    for (enum key key = RESET; key <= L3_FABRIC && filled < fill; key++)
        if (found.given[key])
            out[filled++] = (zes_ras_state_exp_t){(int32_t)(key - RESET), found.number[key]};
    return SUCCESS;
}

#ifdef LAYOUTS
/* A line "STRUCT MEMBER OFFSET SIZE" for each member, and one "STRUCT - 0 SIZE" for each struct. */
#define SHOW(type, member) printf("%s %s %zu %zu\n", name, #member, offsetof(Shown, member), sizeof(type));
#define SHOW_STRUCT(struct_name)                                                                                       \
    {                                                                                                                  \
        typedef struct_name Shown;                                                                                     \
        const char *name = #struct_name;                                                                               \
        printf("%s - 0 %zu\n", name, sizeof(Shown));                                                                   \
        FIELDS_##struct_name(SHOW)                                                                                     \
    }
int main(void) {
    EACH_STRUCT(SHOW_STRUCT)
    return 0;
}
#endif
