/* A pretend libcuda.so.1 for tests: a text file says which cards there are, and the environment which of them are seen.
 *
 * The file is named by FAKE_CUDA_STATE and looked at on every call. Without it cuInit answers NO_DEVICE. Its lines:
 *
 *   driver 12080                     what cuDriverGetVersion says; 12080 without it
 *   branch 570                       the driver's, which says how instances are seen; 570 without it
 *   order 2 0 1                      every card's index in the driver's own order; without it, by index
 *   gpu INDEX key=value ...          uuid pci name mig=0|1 accessible=0|1; if that is 0 it does not count
 *   mig INDEX MIGINDEX key=value     uuid name gi ci: an instance on card INDEX in MIG mode; gi, ci must be
 *   fault CALL [WHERE] CODE          the call answers CODE; CALL is a symbol or *, WHERE a card's index or *
 *   hang CALL [WHERE]                the call does not return while this line is there
 *   slow CALL [WHERE] MILLISECONDS   the call takes that long, then answers from the state as it is by then
 *   crash CALL [WHERE]               the call ends the process by SIGSEGV
 *
 * A key that is left out makes the calls that need it answer NOT_SUPPORTED, and a device without a uuid has no name in
 * a mask. Left out freely: mig is then 0, accessible 1. Text with blanks stands in double quotes. An instance has its
 * card's index, also for WHERE. A call without a device, or on one that is gone, matches only WHERE *. The first rule
 * of a kind that matches holds. A line that makes no sense aborts the process. A line with its symbol is appended to
 * FAKE_CUDA_RECORD for every call.
 *
 * The first cuInit that comes to it, past its rules and with a file, reads CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER
 * and settles which devices the process has, for good; if there are none it and every later one answer NO_DEVICE.
 * cuGetErrorName answers without cuInit, as it must to put a failed one into words.
 *
 * The mask is read as CUDA's documents and the public programs that imitate the driver say. Where these say nothing,
 * or not the same, this is what holds here:
 *
 *   - A repeat behind an invalid entry does not count, whatever the entry was: 0,9,0 is card 0.
 *   - Blanks are what isspace() says, and may stand around a number only: " GPU-1c" is invalid, and so is "+1".
 *   - The letters of a UUID must be the driver's own, lower case; what is unique is so among the accessible cards.
 *     "GPU-" and "MIG-" alone name nothing. "MIG-GPU-<uuid>/<gi>/<ci>" must be whole, and is of the kind of "MIG-".
 *   - A card in MIG mode without instances takes its place among the indices, ends no list, and adds no device.
 *   - Instances stand in their card's place, ascending by MIGINDEX; the "first available" is the first of them.
 *   - Before branch 570 a list ends where GPU- and MIG- entries meet; from then on they may be mixed, in list order.
 *   - From 570 on a card in MIG mode that is named as a card gives all its instances. Of two compute instances of one
 *     GPU instance the one that comes first is seen, so a mask can pick either; and past 64 no further ones are.
 *
 * -DWITHOUT_<symbol> leaves that symbol out, to play an older driver.
 */
#include "state.h"

/* ---- what CUDA defines ---- */

typedef int32_t CUresult;
typedef int32_t CUdevice;
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999
};
enum { UUID_BYTES = 16 };

typedef struct {
    uint8_t bytes[UUID_BYTES];
} CUuuid;

/* ---- what the state file says ---- */

static const Fake fake = {.name = "cuda", .variable = "FAKE_CUDA_STATE", .where_optional = true};

enum { TEXT = 128, MAX_DEVICES = 256, WHOLE = -1 };
/* From branch MANY_INSTANCES on a process may have several, though not more than the most. */
enum { VERSION_BY_DEFAULT = 12080, MANY_INSTANCES = 570, MOST_INSTANCES = 64 };

/* The keys that hold text come first. */
enum key { UUID, NAME, PCI, TEXTS, MIG = TEXTS, ACCESSIBLE, GI, CI, KEYS };
static const char *const key_names[] = {"uuid", "name", "pci", "mig", "accessible", "gi", "ci", NULL};
#define KEY(key) (1u << (key))
enum {
    OF_CARDS = KEY(UUID) | KEY(NAME) | KEY(PCI) | KEY(MIG) | KEY(ACCESSIBLE),
    OF_PARTS = KEY(UUID) | KEY(NAME) | KEY(GI) | KEY(CI)
};

typedef struct {
    unsigned domain, bus, device, function;
} Address;

/* A card or an instance on one. */
struct Found {
    long card; /* the card's index; of an instance, its card's */
    long slot; /* the index among the card's instances, or WHOLE */
    bool given[KEYS];
    char text[TEXTS][TEXT];
    uint64_t number[KEYS];
};
typedef Found Device;

typedef struct {
    unsigned count;
    const Device *device[MAX_DEVICES];
} List;

static struct {
    uint64_t version, branch;
    unsigned devices, cards, ordered;
    long order[MAX_DEVICES];
    Device device[MAX_DEVICES];
} state;

/* What the process has, by ordinal, from cuInit on; it is kept by name, as the state may change. */
static struct {
    long card, slot;
} visible[MAX_DEVICES];
static unsigned visible_count;
static bool settled, initialized;

#define EACH(it) for (Device *it = state.device; it < state.device + state.devices; it++)

static Device *at(long card, long slot) {
    EACH(device)
        if (device->card == card && device->slot == slot)
            return device;
    return NULL;
}

/* ---- reading the state file ---- */

static bool parse_address(const char *text, Address *to) {
    int end = 0;
    int parts = sscanf(text, "%x:%x:%x.%x%n", &to->domain, &to->bus, &to->device, &to->function, &end);
    return parts == 4 && text[end] == '\0';
}

/* 32 hexadecimal digits behind GPU- or MIG-, with dashes wherever. */
static bool parse_uuid(const char *text, const char *prefix, CUuuid *to) {
    unsigned digits = 0;
    *to = (CUuuid){{0}};
    if (strncmp(text, prefix, strlen(prefix)) != 0)
        return false;
    for (text += strlen(prefix); *text != '\0'; text++) {
        const char digit[] = {*text, '\0'};
        if (*text == '-')
            continue;
        if (!isxdigit((unsigned char)*text) || digits == 2 * UUID_BYTES)
            return false;
        to->bytes[digits / 2] |= (uint8_t)(strtoul(digit, NULL, 16) << (digits % 2 == 0 ? 4 : 0));
        digits++;
    }
    return digits == 2 * UUID_BYTES;
}

static const char *prefix_of(const Device *device) { return device->slot == WHOLE ? "GPU-" : "MIG-"; }

static void parse_text(Device *device, enum key key, const char *value) {
    Address address;
    CUuuid uuid;
    demand(key != PCI || parse_address(value, &address), "not a PCI address", value);
    demand(key != UUID || parse_uuid(value, prefix_of(device), &uuid), "not a UUID", value);
    keep(device->text[key], value, TEXT);
}

static void parse_pair(Device *device, char *pair) {
    const char *value = value_of(pair);
    enum key key = (enum key)position(pair, key_names);
    demand(((device->slot == WHOLE ? OF_CARDS : OF_PARTS) & KEY(key)) != 0, "unknown word", pair);
    device->given[key] = true;
    if (key < TEXTS)
        parse_text(device, key, value);
    else
        device->number[key] = number(value);
    demand((key != MIG && key != ACCESSIBLE) || device->number[key] <= 1, "neither 0 nor 1", value);
}

static void parse_device(char **rest, bool part) {
    demand(state.devices < MAX_DEVICES, "too many devices", "at the end");
    Device *device = &state.device[state.devices++];
    const char *index = need_word(rest);
    *device = (Device){.card = (long)number(index), .number = {[ACCESSIBLE] = 1}};
    device->slot = part ? (long)number(need_word(rest)) : WHOLE;
    demand(at(device->card, device->slot) == device, "two lines about the same card or instance", index);
    for (char *pair = next_word(rest); pair != NULL; pair = next_word(rest))
        parse_pair(device, pair);
    demand(!part || (device->given[GI] && device->given[CI]), "no gi or no ci for an instance on card", index);
    state.cards += !part;
}

static void parse_order(char **rest) {
    state.ordered = 0;
    for (const char *word = need_word(rest); word != NULL; word = next_word(rest)) {
        demand(state.ordered < MAX_DEVICES, "too many devices", word);
        state.order[state.ordered++] = (long)number(word);
    }
}

static void parse_rule(const char *word, char **rest) {
    Rule *rule = new_rule(word);
    keep(rule->call, need_word(rest), WORD);
    parse_where(rule, rest);
}

static void parse_words(const char *first, char **rest) {
    if (strcmp(first, "driver") == 0)
        state.version = number(need_word(rest));
    else if (strcmp(first, "branch") == 0)
        state.branch = number(need_word(rest));
    else if (strcmp(first, "order") == 0)
        parse_order(rest);
    else if (strcmp(first, "gpu") == 0 || strcmp(first, "mig") == 0)
        parse_device(rest, *first == 'm');
    else
        parse_rule(first, rest);
}

static void start_over(void) {
    memset(&state, 0, sizeof state);
    state.version = VERSION_BY_DEFAULT;
    state.branch = MANY_INSTANCES;
}

/* Cards by index, and each one's instances by theirs. */
static int compare_devices(const void *a, const void *b) {
    const Device *one = a, *other = b;
    if (one->card != other->card)
        return one->card < other->card ? -1 : 1;
    return (one->slot > other->slot) - (one->slot < other->slot);
}

static void complete_order(void) {
    bool own = state.ordered == 0;
    EACH(device)
        if (own && device->slot == WHOLE)
            state.order[state.ordered++] = device->card;
    demand(state.ordered == state.cards, "the order is not one of all cards", "at the end");
    for (unsigned i = 0; i < state.ordered; i++) {
        demand(at(state.order[i], WHOLE) != NULL, "the order is not one of all cards", "at the end");
        for (unsigned before = 0; before < i; before++)
            demand(state.order[before] != state.order[i], "the order is not one of all cards", "at the end");
    }
}

static void complete(void) {
    qsort(state.device, state.devices, sizeof *state.device, compare_devices);
    EACH(device) {
        const Device *card = at(device->card, WHOLE);
        bool on_mig = card != NULL && (card == device || card->number[MIG]);
        demand(on_mig, "an instance on no card in MIG mode", "at the end");
    }
    complete_order();
}

/* ---- which devices the process has; with the lock held ---- */

static bool add(List *list, const Device *device) {
    for (unsigned i = 0; i < list->count; i++)
        if (list->device[i] == device)
            return false;
    list->device[list->count++] = device;
    return true;
}

/* Cards without an address come last. */
static int compare_addresses(const void *a, const void *b) {
    const Device *one = *(const Device *const *)a, *other = *(const Device *const *)b;
    Address first = {.domain = UINT32_MAX}, second = first;
    parse_address(one->text[PCI], &first);
    parse_address(other->text[PCI], &second);
    const unsigned parts[][2] = {{first.domain, second.domain},
                                 {first.bus, second.bus},
                                 {first.device, second.device},
                                 {first.function, second.function}};
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i][0] != parts[i][1])
            return parts[i][0] < parts[i][1] ? -1 : 1;
    return compare_devices(one, other);
}

/* The cards that count, in the order in which the mask's indices count them. */
static void list_cards(List *cards) {
    const char *order = getenv("CUDA_DEVICE_ORDER");
    for (unsigned i = 0; i < state.ordered; i++) {
        const Device *card = at(state.order[i], WHOLE);
        if (card->number[ACCESSIBLE])
            add(cards, card);
    }
    if (order != NULL && strcmp(order, "PCI_BUS_ID") == 0)
        qsort(cards->device, cards->count, sizeof *cards->device, compare_addresses);
}

static void list_instances(const Device *card, List *parts) {
    EACH(device)
        if (device->card == card->card && device->slot != WHOLE)
            add(parts, device);
}

/* An entry of the mask goes from `text` over `length` to the comma or the end. */
typedef struct {
    const char *text;
    size_t length;
} Entry;

enum kind { INVALID, INDEX, CARD, INSTANCE };

static bool begins(Entry entry, const char *with) { return strncmp(entry.text, with, strlen(with)) == 0; }

static enum kind kind_of(Entry entry) {
    const char *text = entry.text;
    while (isspace((unsigned char)*text))
        text++;
    if (isdigit((unsigned char)*text))
        return INDEX;
    if (begins(entry, "GPU-"))
        return CARD;
    return begins(entry, "MIG-") ? INSTANCE : INVALID;
}

/* Its leading digits count, and strtoull passes over blanks before them; one that is too large stays too large. */
static const Device *by_index(Entry entry, const List *cards) {
    unsigned long long index = strtoull(entry.text, NULL, 10);
    return index < cards->count ? cards->device[index] : NULL;
}

/* The only one whose UUID begins like this. */
static const Device *by_uuid(Entry entry, const List *among) {
    const Device *match = NULL;
    if (entry.length <= strlen("GPU-"))
        return NULL;
    for (unsigned i = 0; i < among->count; i++) {
        if (strncmp(among->device[i]->text[UUID], entry.text, entry.length) != 0)
            continue;
        if (match != NULL)
            return NULL;
        match = among->device[i];
    }
    return match;
}

static const Device *by_legacy_name(Entry entry, const List *parts) {
    for (unsigned i = 0; i < parts->count; i++) {
        const Device *part = parts->device[i];
        char name[2 * TEXT];
        int length = snprintf(name, sizeof name, "MIG-%s/%" PRIu64 "/%" PRIu64, at(part->card, WHOLE)->text[UUID],
                              part->number[GI], part->number[CI]);
        if ((size_t)length == entry.length && begins(entry, name))
            return part;
    }
    return NULL;
}

/* What an entry names, or NULL if that is nothing. */
static const Device *named(Entry entry, enum kind kind, const List *cards) {
    List parts = {0};
    for (unsigned i = 0; i < cards->count; i++)
        list_instances(cards->device[i], &parts);
    if (kind == INDEX)
        return by_index(entry, cards);
    if (kind == CARD)
        return by_uuid(entry, cards);
    return begins(entry, "MIG-GPU-") ? by_legacy_name(entry, &parts) : by_uuid(entry, &parts);
}

/* The first entry says what the others must be. */
static bool fits(enum kind kind, enum kind first) {
    bool mixed = kind >= CARD && first >= CARD && state.branch >= MANY_INSTANCES;
    return kind != INVALID && (kind == first || mixed);
}

/* The cards and instances that the mask names, up to the first entry that is invalid; none at all if one is twice. */
static void read_mask(const char *mask, const List *cards, List *chosen) {
    Entry entry = {mask, strcspn(mask, ",")};
    const enum kind first = kind_of(entry);
    for (;;) {
        const enum kind kind = kind_of(entry);
        const Device *device = fits(kind, first) ? named(entry, kind, cards) : NULL;
        if (device == NULL)
            return;
        if (!add(chosen, device)) {
            chosen->count = 0;
            return;
        }
        if (entry.text[entry.length] == '\0')
            return;
        entry.text += entry.length + 1;
        entry.length = strcspn(entry.text, ",");
    }
}

/* One compute instance of each GPU instance, and not too many in all. */
static void add_instance(List *devices, const Device *part) {
    unsigned instances = 0;
    for (unsigned i = 0; i < devices->count; i++) {
        const Device *other = devices->device[i];
        if (other->slot != WHOLE && other->card == part->card && other->number[GI] == part->number[GI])
            return;
        instances += other->slot != WHOLE;
    }
    if (instances < MOST_INSTANCES)
        add(devices, part);
}

/* What was chosen, but the instances of a card in MIG mode in its place. */
static void expand(const List *chosen, List *devices) {
    for (unsigned i = 0; i < chosen->count; i++) {
        const Device *device = chosen->device[i];
        List parts = {0};
        if (device->slot != WHOLE)
            add(&parts, device);
        else if (device->number[MIG])
            list_instances(device, &parts);
        else
            add(devices, device);
        for (unsigned part = 0; part < parts.count; part++)
            add_instance(devices, parts.device[part]);
    }
}

/* Older drivers let a process have one instance, and then nothing else. */
static void keep_one_instance(List *devices) {
    for (unsigned i = 0; i < devices->count; i++)
        if (devices->device[i]->slot != WHOLE) {
            *devices = (List){.count = 1, .device = {devices->device[i]}};
            return;
        }
}

static void settle(void) {
    List cards = {0}, chosen = {0}, devices = {0};
    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    list_cards(&cards);
    if (mask == NULL)
        chosen = cards;
    else
        read_mask(mask, &cards, &chosen);
    expand(&chosen, &devices);
    if (state.branch < MANY_INSTANCES)
        keep_one_instance(&devices);
    for (visible_count = 0; visible_count < devices.count; visible_count++) {
        visible[visible_count].card = devices.device[visible_count]->card;
        visible[visible_count].slot = devices.device[visible_count]->slot;
    }
    settled = true;
    initialized = visible_count > 0;
}

/* ---- finding what a call is about; with the lock held ---- */

static Code nothing(const void *wanted, Device *found) {
    (void)wanted, (void)found;
    return SUCCESS;
}

static Code find(CUdevice ordinal, bool whole, Device *found) {
    if (ordinal < 0 || (unsigned)ordinal >= visible_count)
        return INVALID_DEVICE;
    const Device *device = at(visible[ordinal].card, whole ? WHOLE : visible[ordinal].slot);
    if (device == NULL)
        return UNKNOWN; /* it has gone since cuInit */
    *found = *device;
    return SUCCESS;
}

static Code by_ordinal(const void *wanted, Device *found) { return find(*(const CUdevice *)wanted, false, found); }

/* The card, also where the ordinal is an instance's. */
static Code card_by_ordinal(const void *wanted, Device *found) { return find(*(const CUdevice *)wanted, true, found); }

/* ---- what every call goes through ---- */

static Code answer(const char *call, long card, Code found) {
    const Rule *fault = rule_for(FAULT, call, card);
    bool init = strcmp(call, "cuInit") == 0;
    if (!initialized && !init && strcmp(call, "cuGetErrorName") != 0)
        return NOT_INITIALIZED;
    if (!present && init)
        return NO_DEVICE;
    return fault != NULL ? (CUresult)fault->value : found;
}

static Verdict look(const char *call, Finder *find_it, const void *wanted, Device *found, bool first) {
    *found = (Device){.card = NOWHERE};
    Code code = find_it(wanted, found);
    if (first)
        record_call(getenv("FAKE_CUDA_RECORD"), call, "");
    return verdict_on(call, found->card, answer(call, found->card, code));
}

/* Enters a call on a device that writes to `out`, which must be there and may need a key. */
static CUresult on(const char *call, Finder *find_it, CUdevice device, enum key key, const void *out, Device *found) {
    TRY(enter(call, find_it, &device, found));
    if (out == NULL)
        return INVALID_VALUE;
    return key == KEYS || found->given[key] ? SUCCESS : NOT_SUPPORTED;
}

/* ---- the exported calls ---- */

#define CALL(name, ...) EXPORTED(name) CUresult name(__VA_ARGS__)

/* How a call begins: ON where it is about a `device` and has an `out`. Past it `found` is what it is about. */
#define BEGIN                                                                                                          \
    Device found;                                                                                                      \
    TRY(enter(__func__, nothing, NULL, &found))
#define ON(find_it, key)                                                                                               \
    Device found;                                                                                                      \
    TRY(on(__func__, find_it, device, key, out, &found))

CALL(cuInit, unsigned flags) {
    BEGIN;
    if (flags != 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!settled)
        settle();
    bool any = initialized;
    pthread_mutex_unlock(&lock);
    return any ? SUCCESS : NO_DEVICE;
}

CALL(cuDriverGetVersion, int *out) {
    BEGIN;
    if (out == NULL)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *out = (int)state.version;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

CALL(cuDeviceGetCount, int *out) {
    BEGIN;
    if (out == NULL)
        return INVALID_VALUE;
    *out = (int)visible_count; /* which no longer changes */
    return SUCCESS;
}

/* The real driver's devices are their ordinals too. */
CALL(cuDeviceGet, CUdevice *out, int device) {
    ON(by_ordinal, KEYS);
    *out = device;
    return SUCCESS;
}

/* Cut off where it does not fit, as the real one does. */
CALL(cuDeviceGetName, char *out, int length, CUdevice device) {
    ON(by_ordinal, NAME);
    if (length <= 0)
        return INVALID_VALUE;
    snprintf(out, (size_t)length, "%s", found.text[NAME]);
    return SUCCESS;
}

#define UUID_CALL(name, find_it)                                                                                       \
    CALL(name, CUuuid *out, CUdevice device) {                                                                         \
        ON(find_it, UUID);                                                                                             \
        parse_uuid(found.text[UUID], prefix_of(&found), out);                                                          \
        return SUCCESS;                                                                                                \
    }
UUID_CALL(cuDeviceGetUuid, card_by_ordinal)
UUID_CALL(cuDeviceGetUuid_v2, by_ordinal)

CALL(cuDeviceGetPCIBusId, char *out, int length, CUdevice device) {
    Address pci;
    char text[TEXT];
    ON(card_by_ordinal, PCI);
    parse_address(found.text[PCI], &pci);
    const char *form = pci.domain > 0xffff ? "%08X:%02X:%02X.%X" : "%04X:%02X:%02X.%X";
    int needed = snprintf(text, sizeof text, form, pci.domain, pci.bus, pci.device, pci.function) + 1;
    if (length < needed)
        return INVALID_VALUE;
    strcpy(out, text);
    return SUCCESS;
}

static const struct {
    CUresult code;
    const char *name;
} error_names[] = {{SUCCESS, "CUDA_SUCCESS"},
                   {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
                   {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                   {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
                   {4, "CUDA_ERROR_DEINITIALIZED"},
                   {34, "CUDA_ERROR_STUB_LIBRARY"},
                   {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
                   {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
                   {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
                   {304, "CUDA_ERROR_OPERATING_SYSTEM"},
                   {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED"},
                   {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
                   {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
                   {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
                   {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"},
                   {UNKNOWN, "CUDA_ERROR_UNKNOWN"}};

/* A code that it does not know has the name NULL. */
CALL(cuGetErrorName, CUresult code, const char **out) {
    BEGIN;
    if (out == NULL)
        return INVALID_VALUE;
    *out = NULL;
    for (size_t i = 0; i < sizeof error_names / sizeof *error_names; i++)
        if (error_names[i].code == code)
            *out = error_names[i].name;
    return *out == NULL ? INVALID_VALUE : SUCCESS;
}

/* ---- what a program that only looks must never call: recorded, and refused even if a rule answers 0 ---- */

CALL(cuCtxCreate_v2, void **out, unsigned flags, CUdevice device) {
    (void)flags;
    ON(by_ordinal, KEYS);
    return NOT_PERMITTED;
}

CALL(cuDevicePrimaryCtxRetain, void **out, CUdevice device) {
    ON(by_ordinal, KEYS);
    return NOT_PERMITTED;
}

CALL(cuMemAlloc_v2, uint64_t *out, size_t size) {
    BEGIN;
    (void)out, (void)size;
    return NOT_PERMITTED;
}
