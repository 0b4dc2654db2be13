/* A pretend Level Zero for tests, the core half (ze*) of libze_loader.so.1 with the drivers behind it: a text file says
 * which cards there are, and the environment's masks are applied to them here as Intel's compute-runtime applies them.
 *
 * The file is named by FAKE_ZE_DRIVER_STATE. Without it there is no driver: zeInit answers UNINITIALIZED. Its lines:
 *
 *   gpu INDEX key=value ...           a card; INDEX counts the lines from 0, which is the order the cards are found in:
 *                                     bdf name device_id uuid tiles=1..4 hpc=0|1 integrated=0|1 rank (of the product
 *                                     family, the newest has the highest) accessible=0|1 library=0..7; bdf is needed
 *   api 1.13                          what zeDriverGetApiVersion says; below 1.10 zeInitDrivers is UNINITIALIZED
 *   unsorted 1 0 2                    an old driver: the cards in this order whatever the PCI switch says, and one
 *                                     driver handle for all of a library's families
 *   narrowed zero                     the subdeviceId of a card that the mask left one tile of is 0, see below
 *   fault CALL [WHERE] STATUS         the call answers STATUS; CALL is a symbol or *, WHERE a card's INDEX or *
 *   hang CALL [WHERE]                 the call does not return while this line is there
 *   slow CALL [WHERE] MILLISECONDS    the call takes that long
 *   crash CALL [WHERE]                the call ends the process by SIGSEGV
 *
 * What is left out: library, rank, hpc, integrated and device_id are 0, tiles and accessible 1, a uuid is made of the
 * ids and the address as the driver makes it. Rules are looked at on every call; the cards and the environment once, in
 * the first zeInit or zeInitDrivers that finds the file. A call without a device matches only WHERE *. A line that
 * makes no sense aborts the process. A line with its symbol is appended to FAKE_ZE_DRIVER_RECORD for every call.
 *
 * Calls that would make a context, a queue or memory are there to be recorded: they answer UNSUPPORTED_FEATURE.
 *
 * Where it is open what a real driver does, this one follows compute-runtime's and the loader's source:
 *
 * - A driver without devices fails its init and the loader drops it; with none left init answers UNINITIALIZED. So it
 *   is for a mask that selects nothing (some releases crash instead) and for cards that may not be opened (if that is
 *   for lack of permission, some releases answer INSUFFICIENT_PERMISSIONS).
 * - A number in a mask is strtoul's with base 0, cut to 32 bits: -1 is out of range, but 4294967296 is 0. What does not
 *   fit into 64 bits throws. 0b1 is 0: it became 1 only in drivers built against glibc 2.38 or later.
 * - The second part of X.Y is read only if X is in range and the hierarchy is COMPOSITE: elsewhere it may be anything.
 *   Four parts abort only if X and Y are in range.
 * - An empty entry is undefined there; here it throws as every text does that is no number.
 * - ZE_AFFINITY_MASK and ZE_ENABLE_PCI_ID_DEVICE_ORDER are looked for with NEO_L0_ before them, then NEO_, then plain;
 *   one that is set hides the rest even if it is empty, but a mask of 4096 characters is as if not set.
 *   ZE_FLAT_DEVICE_HIERARCHY has no such spellings.
 * - Each library decides its default hierarchy for itself, by the first of its cards that can be opened.
 * - The loader sorts libraries by what the mask left of them, ties by number, and the other way round if the plain
 *   ZE_ENABLE_PCI_ID_DEVICE_ORDER is exactly "1". (In some releases a library counts as what its last driver handle is;
 *   not here.)
 * - A card that the mask left one tile of has no sub-devices and is none; but under COMBINED it is still a card, with
 *   one sub-device. Only a device with a root device has the SUBDEVICE flag: so no device under FLAT.
 * - The driver says subdeviceId 0 for a card with one tile left, except under COMBINED: which tile that is cannot be
 *   read. So does this one with `narrowed zero`; without, it gives the tile's number as for any other tile. Either way
 *   the UUID is the card's, where other tiles have one of their own.
 *
 * Not played: ZEL_DRIVERS_ORDER, ZET_ENABLE_PROGRAM_INSTRUMENTATION, ZEX_NUMBER_OF_CCS, the integer ids of newer APIs.
 * Stricter than Intel's: an `stype` that is not the struct's is an INVALID_ARGUMENT, and so is no array with a count.
 *
 * -DWITHOUT_<symbol> leaves that symbol out, to play an older loader.
 */
#include "state.h"

/* ---- what Level Zero defines ---- */

typedef int32_t ze_result_t;
enum {
    SUCCESS = 0,
    UNINITIALIZED = 0x78000001,
    UNSUPPORTED_FEATURE = 0x78000003,
    INVALID_ARGUMENT = 0x78000004,
    INVALID_NULL_HANDLE = 0x78000005,
    INVALID_NULL_POINTER = 0x78000007,
    INVALID_ENUMERATION = 0x7800000c
};
enum { DEVICE_TYPE_GPU = 1, FLAG_INTEGRATED = 1, FLAG_SUBDEVICE = 2, VENDOR_INTEL = 0x8086, UUID_BYTES = 16 };
enum { INIT_GPU = 1, INIT_ANY = 3, MAKE_VERSION_SHIFT = 16, FIRST_WITH_INIT_DRIVERS = 1 << 16 | 10 };

/* The `stype` of each struct that has one. */
enum {
    DRIVER_PROPERTIES = 0x1,
    DEVICE_PROPERTIES = 0x3,
    PCI_EXT_PROPERTIES = 0x10008,
    INIT_DRIVER_TYPE_DESC = 0x20021
};

typedef struct {
    uint8_t id[UUID_BYTES];
} ze_uuid_t;

typedef struct {
    int32_t stype;
    const void *pNext;
    uint32_t flags;
} ze_init_driver_type_desc_t;

typedef struct {
    int32_t stype;
    void *pNext;
    ze_uuid_t uuid;
    uint32_t driverVersion;
} ze_driver_properties_t;

typedef struct {
    char name[256];
    uint32_t version;
} ze_driver_extension_properties_t;

typedef struct {
    int32_t stype;
    void *pNext;
    int32_t type;
    uint32_t vendorId, deviceId, flags, subdeviceId, coreClockRate;
    uint64_t maxMemAllocSize;
    uint32_t maxHardwareContexts, maxCommandQueuePriority, numThreadsPerEU, physicalEUSimdWidth;
    uint32_t numEUsPerSubslice, numSubslicesPerSlice, numSlices;
    uint64_t timerResolution;
    uint32_t timestampValidBits, kernelTimestampValidBits;
    ze_uuid_t uuid;
    char name[256];
} ze_device_properties_t;

typedef struct {
    uint32_t domain, bus, device, function;
} ze_pci_address_ext_t;

typedef struct {
    int32_t genVersion, width;
    int64_t maxBandwidth;
} ze_pci_speed_ext_t;

typedef struct {
    int32_t stype;
    void *pNext;
    ze_pci_address_ext_t address;
    ze_pci_speed_ext_t maxSpeed;
} ze_pci_ext_properties_t;

_Static_assert(sizeof(ze_init_driver_type_desc_t) == 24 && sizeof(ze_driver_properties_t) == 40, "as in ze_api.h");
_Static_assert(sizeof(ze_driver_extension_properties_t) == 260 && sizeof(ze_pci_ext_properties_t) == 48, "likewise");
_Static_assert(sizeof(ze_device_properties_t) == 368 && offsetof(ze_device_properties_t, uuid) == 96, "likewise");

/* ---- what the state file says ---- */

static const Fake fake = {
    .name = "ze_driver", .variable = "FAKE_ZE_DRIVER_STATE", .hexadecimal = true, .where_optional = true};

enum { TEXT = 256, MAX_CARDS = 64, MAX_TILES = 4, MAX_LIBRARIES = 8, MAX_NODES = MAX_CARDS * (MAX_TILES + 2) };

/* The keys that hold text come first; each of the others has a least and a greatest value. */
enum key { BDF, NAME, UUID, DEVICE_ID, TILES, HPC, INTEGRATED, RANK, ACCESSIBLE, LIBRARY, KEYS };
static const char *const key_names[] = {"bdf", "name",       "uuid", "device_id",  "tiles",   "hpc",
                                        "integrated", "rank", "accessible", "library", NULL};
static const uint64_t greatest[KEYS] = {[DEVICE_ID] = UINT16_MAX, [TILES] = MAX_TILES,         [HPC] = 1,
                                        [INTEGRATED] = 1,         [RANK] = UINT32_MAX,         [ACCESSIBLE] = 1,
                                        [LIBRARY] = MAX_LIBRARIES - 1};

typedef struct {
    long place; /* in the state file */
    bool given[KEYS];
    char name[TEXT];
    ze_pci_address_ext_t address;
    ze_uuid_t uuid;
    uint64_t number[KEYS];
} Card;

typedef struct {
    unsigned cards, ordered; /* how many places `order` has: none, or those of all cards */
    uint64_t order[MAX_CARDS];
    uint32_t api;
    bool narrowed_zero;
    Card card[MAX_CARDS];
} State;
static State state;

static bool parse_address(const char *text, ze_pci_address_ext_t *to) {
    int end = 0;
    int parts = sscanf(text, "%x:%x:%x.%x%n", &to->domain, &to->bus, &to->device, &to->function, &end);
    return parts == 4 && text[end] == '\0';
}

static bool parse_uuid(const char *text, ze_uuid_t *to) {
    for (size_t i = 0; i < UUID_BYTES; i++)
        if (!isxdigit((unsigned char)text[2 * i]) || sscanf(text + 2 * i, "%2hhx", &to->id[i]) != 1)
            return false;
    return strlen(text) == 2 * UUID_BYTES && strspn(text, "0123456789abcdefABCDEF") == 2 * UUID_BYTES;
}

static void parse_pair(Card *card, char *pair) {
    const char *value = value_of(pair);
    enum key key = (enum key)position(pair, key_names);
    if (key == BDF)
        demand(parse_address(value, &card->address), "not a PCI address", value);
    else if (key == NAME)
        keep(card->name, value, TEXT);
    else if (key == UUID)
        demand(parse_uuid(value, &card->uuid), "not a UUID", value);
    else
        card->number[key] = number(value);
    demand(card->number[key] <= greatest[key] && (key != TILES || card->number[key] > 0), "out of range", value);
    card->given[key] = true;
}

static bool same_address(const Card *one, const Card *other) {
    return memcmp(&one->address, &other->address, sizeof one->address) == 0;
}

static void parse_card(char **rest) {
    const char *index = need_word(rest);
    demand(number(index) == state.cards && state.cards < MAX_CARDS, "not the next card's index", index);
    Card *card = &state.card[state.cards];
    *card = (Card){.place = state.cards, .number = {[TILES] = 1, [ACCESSIBLE] = 1}};
    for (char *pair = next_word(rest); pair != NULL; pair = next_word(rest))
        parse_pair(card, pair);
    demand(card->given[BDF], "no bdf for the card", index);
    for (unsigned i = 0; i < state.cards; i++)
        demand(!same_address(card, &state.card[i]), "an address that another card has", index);
    state.cards++;
}

static void parse_api(const char *text) {
    unsigned major, minor;
    int end = 0;
    bool fits = sscanf(text, "%u.%u%n", &major, &minor, &end) == 2 && text[end] == '\0';
    demand(fits && major <= UINT16_MAX && minor <= UINT16_MAX, "not a version", text);
    state.api = major << MAKE_VERSION_SHIFT | minor;
}

static void parse_order(char **rest) {
    for (const char *word = next_word(rest); word != NULL; word = next_word(rest)) {
        uint64_t place = number(word);
        for (unsigned i = 0; i < state.ordered; i++)
            demand(state.order[i] != place, "a card twice", word);
        demand(state.ordered < MAX_CARDS, "too many cards", word);
        state.order[state.ordered++] = place;
    }
}

static void parse_words(const char *first, char **rest) {
    if (strcmp(first, "gpu") == 0)
        parse_card(rest);
    else if (strcmp(first, "api") == 0)
        parse_api(need_word(rest));
    else if (strcmp(first, "unsorted") == 0)
        parse_order(rest);
    else if (strcmp(first, "narrowed") == 0)
        state.narrowed_zero = position(need_word(rest), (const char *const[]){"tile", "zero", NULL}) == 1;
    else {
        Rule *rule = new_rule(first);
        keep(rule->call, need_word(rest), WORD);
        parse_where(rule, rest);
    }
}

static void start_over(void) {
    memset(&state, 0, sizeof state);
    state.api = 1 << MAKE_VERSION_SHIFT | 13;
}

static void complete(void) {
    demand(state.ordered == 0 || state.ordered == state.cards, "not all cards are in the order", "unsorted");
    for (unsigned i = 0; i < state.ordered; i++)
        demand(state.order[i] < state.cards, "no such card", "unsorted");
}

/* ---- the environment, read once ---- */

enum { LONGEST = 4096 };
enum hierarchy { COMPOSITE, FLAT, COMBINED, DEFAULT };
static const char *const hierarchies[] = {"COMPOSITE", "FLAT", "COMBINED", NULL};

static struct {
    char mask[LONGEST]; /* "" is none */
    bool pci_order, loader_pci_order;
    enum hierarchy hierarchy;
} environment;

/* The first spelling of a driver's variable that is set, and shorter than `limit`. */
static const char *spelled(const char *name, size_t limit) {
    const char *const prefixes[] = {"NEO_L0_", "NEO_", ""};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        char full[WORD];
        snprintf(full, sizeof full, "%s%s", prefixes[i], name);
        const char *value = getenv(full);
        if (value != NULL && strlen(value) < limit)
            return value;
    }
    return "";
}

static void read_environment(void) {
    const char *order = "ZE_ENABLE_PCI_ID_DEVICE_ORDER", *plain = getenv(order);
    const char *hierarchy = getenv("ZE_FLAT_DEVICE_HIERARCHY");
    const char *mask = spelled("ZE_AFFINITY_MASK", LONGEST);
    strcpy(environment.mask, strcmp(mask, "default") == 0 ? "" : mask);
    environment.pci_order = strtoll(spelled(order, SIZE_MAX), NULL, 10) != 0; /* atoll: "true" and "0x1" are off */
    environment.loader_pci_order = plain != NULL && strcmp(plain, "1") == 0;
    environment.hierarchy = DEFAULT;
    for (enum hierarchy i = COMPOSITE; i < DEFAULT; i++)
        if (hierarchy != NULL && strcmp(hierarchy, hierarchies[i]) == 0)
            environment.hierarchy = i;
}

/* ---- the mask: what it leaves of a library's cards ---- */

/* A driver library's cards in the order that affinity numbers count them, and which tiles of each are left. */
typedef struct {
    enum hierarchy hierarchy;
    unsigned cards;
    const Card *card[MAX_CARDS];
    unsigned left[MAX_CARDS]; /* a bit for each tile */
} Library;

/* As an uncaught exception does. */
static void throw(const char *what, const char *text) {
    fprintf(stderr, "terminate called after throwing an instance of 'std::%s'\n  what():  stoul: %s\n", what, text);
    abort();
}

/* What std::stoul(text, nullptr, 0) reads, cut to 32 bits. The base is found here: strtoul's differ about 0b. */
static uint32_t mask_number(const char *text) {
    const char *digits = text + strspn(text, " \t\n\v\f\r");
    digits += *digits == '+' || *digits == '-';
    bool hexadecimal = digits[0] == '0' && (digits[1] | 0x20) == 'x' && isxdigit((unsigned char)digits[2]);
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, hexadecimal ? 16 : *digits == '0' ? 8 : 10);
    if (end == text)
        throw("invalid_argument", text);
    if (errno == ERANGE)
        throw("out_of_range", text);
    return (uint32_t)value;
}

/* Cuts the next part off, in place. As there, nothing follows a separator at the end. */
static char *next_part(char **rest, char separator) {
    char *part = *rest, *end = strchrnul(part, separator);
    if (*part == '\0')
        return NULL;
    *rest = end + (*end != '\0');
    *end = '\0';
    return part;
}

static unsigned all_tiles(const Card *card) { return (1u << card->number[TILES]) - 1; }

/* Entry X of FLAT and COMBINED: the tiles of all cards are counted. */
static void select_position(Library *library, uint32_t index) {
    for (unsigned i = 0; i < library->cards; i++) {
        uint32_t tiles = (uint32_t)library->card[i]->number[TILES];
        if (index < tiles) {
            library->left[i] |= 1u << index;
            return;
        }
        index -= tiles;
    }
}

static unsigned positions(const Library *library) {
    unsigned total = 0;
    for (unsigned i = 0; i < library->cards; i++)
        total += library->hierarchy == COMPOSITE ? 1 : (unsigned)library->card[i]->number[TILES];
    return total;
}

/* X, X.Y or more parts of COMPOSITE; `rest` is what stands behind X. */
static void select_card(Library *library, uint32_t index, char *rest) {
    const Card *card = library->card[index];
    char *second = next_part(&rest, '.');
    if (second == NULL) {
        library->left[index] |= all_tiles(card);
        return;
    }
    uint32_t tile = mask_number(second);
    if (tile >= card->number[TILES])
        return;
    unsigned parts = 2;
    while (next_part(&rest, '.') != NULL)
        parts++;
    if (parts > 3)
        abort(); /* UNRECOVERABLE_IF */
    if (parts == 2)
        library->left[index] |= 1u << tile;
}

static void select_entry(Library *library, char *entry) {
    const char *first = next_part(&entry, '.');
    uint32_t index = mask_number(first == NULL ? "" : first);
    if (index >= positions(library))
        return;
    if (library->hierarchy == COMPOSITE)
        select_card(library, index, entry);
    else if (*entry == '\0')
        select_position(library, index);
}

static void apply_mask(Library *library) {
    char mask[LONGEST], *rest = strcpy(mask, environment.mask);
    for (unsigned i = 0; i < library->cards; i++)
        library->left[i] = *rest == '\0' ? all_tiles(library->card[i]) : 0;
    for (char *entry = next_part(&rest, ','); entry != NULL; entry = next_part(&rest, ','))
        select_entry(library, entry);
}

/* ---- the order: what counts as which number ---- */

static State frozen; /* as it was at init, for the handles to point to */

static int compare(uint64_t one, uint64_t other) { return one < other ? -1 : one > other; }

static int by_address(const Card *one, const Card *other) {
    const ze_pci_address_ext_t *a = &one->address, *b = &other->address;
    int order = compare(a->domain, b->domain);
    order = order != 0 ? order : compare(a->bus, b->bus);
    order = order != 0 ? order : compare(a->device, b->device);
    return order != 0 ? order : compare(a->function, b->function);
}

static int by_base_order(const void *one, const void *other) {
    const Card *a = *(const Card *const *)one, *b = *(const Card *const *)other;
    int order = environment.pci_order ? 0 : compare(a->number[INTEGRATED], b->number[INTEGRATED]);
    return order != 0 ? order : by_address(a, b);
}

/* For the first cards of product families. */
static int by_family(const void *one, const void *other) {
    const Card *a = *(const Card *const *)one, *b = *(const Card *const *)other;
    int order = compare(a->number[INTEGRATED], b->number[INTEGRATED]);
    return order != 0 ? order : compare(b->number[RANK], a->number[RANK]);
}

static void discover(Library *library, uint64_t which) {
    library->cards = 0;
    for (unsigned i = 0; i < frozen.cards; i++) {
        const Card *card = &frozen.card[frozen.ordered > 0 ? frozen.order[i] : i];
        if (card->number[LIBRARY] == which && card->number[ACCESSIBLE])
            library->card[library->cards++] = card;
    }
    library->hierarchy = environment.hierarchy;
    if (library->hierarchy == DEFAULT)
        library->hierarchy = library->cards > 0 && library->card[0]->number[HPC] ? FLAT : COMPOSITE;
    if (frozen.ordered == 0)
        qsort(library->card, library->cards, sizeof *library->card, by_base_order);
    if (library->cards > 0) /* without a card a driver gives up before it looks at the mask */
        apply_mask(library);
}

/* ---- the handles that come of it ---- */

enum kind { DRIVER, DEVICE, NOTHING };

/* What the caller's handles point to. They are made at init, in the order they are listed, and never change. */
typedef struct Node {
    enum kind kind;
    const Card *card;         /* NULL of a driver */
    bool on_tile, narrowed;   /* it is a tile; it is what the mask left of a card */
    unsigned tile;            /* of a driver its number */
    const struct Node *root;  /* the card that it is a sub-device of, or NULL */
    const struct Node *owner; /* the driver that lists it, or NULL */
} Node;

static Node nodes[MAX_NODES];
static unsigned node_count, driver_count;
static bool decided;

static const Node *add(Node node) {
    nodes[node_count] = node;
    return &nodes[node_count++];
}

static void add_card(const Card *card, unsigned left, enum hierarchy hierarchy, const Node *driver) {
    bool tiled = card->number[TILES] > 1, one = (left & (left - 1)) == 0;
    const Node *root = NULL;
    if (!tiled || (one && hierarchy != COMBINED)) {
        unsigned tile = (unsigned)__builtin_ctz(left);
        add((Node){DEVICE, card, .on_tile = tiled, .narrowed = tiled, .tile = tile, .owner = driver});
        return;
    }
    if (hierarchy != FLAT)
        root = add((Node){DEVICE, card, .owner = hierarchy == COMPOSITE ? driver : NULL});
    for (unsigned tile = 0; tile < MAX_TILES; tile++)
        if ((left & 1u << tile) != 0)
            add((Node){DEVICE, card, .on_tile = true, .tile = tile, .root = root,
                       .owner = hierarchy == COMPOSITE ? NULL : driver});
}

static bool same_family(const Card *one, const Card *other) {
    return frozen.ordered > 0 || one->number[RANK] == other->number[RANK];
}

/* A driver handle for each product family of which there is something left. */
static void add_library(const Library *library) {
    const Card *first[MAX_CARDS];
    unsigned families = 0;
    for (unsigned i = 0; i < library->cards; i++) {
        bool new = library->left[i] != 0;
        for (unsigned family = 0; family < families; family++)
            new = new && !same_family(first[family], library->card[i]);
        if (new)
            first[families++] = library->card[i];
    }
    qsort(first, families, sizeof *first, by_family);
    for (unsigned family = 0; family < families; family++) {
        const Node *driver = add((Node){DRIVER, .tile = driver_count++});
        for (unsigned i = 0; i < library->cards; i++)
            if (library->left[i] != 0 && same_family(first[family], library->card[i]))
                add_card(library->card[i], library->left[i], library->hierarchy, driver);
    }
}

enum type { DISCRETE_ONLY, MIXED, INTEGRATED_ONLY, TYPES };

static enum type type_of(const Library *library) {
    bool discrete = false, integrated = false;
    for (unsigned i = 0; i < library->cards; i++) {
        discrete = discrete || (library->left[i] != 0 && !library->card[i]->number[INTEGRATED]);
        integrated = integrated || (library->left[i] != 0 && library->card[i]->number[INTEGRATED]);
    }
    return !integrated ? DISCRETE_ONLY : discrete ? MIXED : INTEGRATED_ONLY;
}

/* What there is to be seen from now on. */
static void decide(void) {
    static Library libraries[MAX_LIBRARIES];
    decided = true;
    frozen = state;
    read_environment();
    for (unsigned i = 0; i < MAX_LIBRARIES; i++)
        discover(&libraries[i], i);
    for (int i = 0; i < TYPES; i++) {
        enum type type = (enum type)(environment.loader_pci_order ? TYPES - 1 - i : i);
        for (unsigned j = 0; j < MAX_LIBRARIES; j++)
            if (type_of(&libraries[j]) == type)
                add_library(&libraries[j]);
    }
}

/* ---- what every call goes through ---- */

struct Found {
    long place; /* of the card */
    const Node *node;
    uint32_t api;
    bool narrowed_zero;
};

typedef struct {
    const void *handle;
    enum kind kind;
} Wanted;

static Code by_handle(const void *sought, Found *found) {
    const Wanted *wanted = sought;
    found->api = state.api;
    found->narrowed_zero = state.narrowed_zero;
    if (wanted->kind == NOTHING)
        return SUCCESS;
    if (wanted->handle == NULL)
        return INVALID_NULL_HANDLE;
    for (const Node *node = nodes; node < nodes + node_count; node++)
        if (node == wanted->handle && node->kind == wanted->kind) {
            found->node = node;
            found->place = node->card == NULL ? NOWHERE : node->card->place;
            return SUCCESS;
        }
    return INVALID_ARGUMENT;
}

static Code answer(const char *call, long place, Code found) {
    const Rule *fault = rule_for(FAULT, call, place);
    bool init = strcmp(call, "zeInit") == 0 || strcmp(call, "zeInitDrivers") == 0;
    if (!present || (node_count == 0 && !init))
        return UNINITIALIZED;
    return fault == NULL ? found : (ze_result_t)fault->value;
}

static Verdict look(const char *call, Finder *find, const void *wanted, Found *found, bool first) {
    *found = (Found){.place = NOWHERE};
    Code code = find(wanted, found);
    if (first)
        record_call(getenv("FAKE_ZE_DRIVER_RECORD"), call, "");
    return verdict_on(call, found->place, answer(call, found->place, code));
}

/* Enters a call on a handle of that kind that writes to `out`. */
static ze_result_t on(const char *call, const void *handle, enum kind kind, const void *out, Found *found) {
    TRY(enter(call, by_handle, &(Wanted){handle, kind}, found));
    return out == NULL ? INVALID_NULL_POINTER : SUCCESS;
}

static ze_result_t initialize(void) {
    pthread_mutex_lock(&lock);
    if (!decided)
        decide();
    pthread_mutex_unlock(&lock);
    return node_count > 0 ? SUCCESS : UNINITIALIZED;
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

static bool belongs(const Node *node, const Node *owner) {
    if (owner == NULL)
        return node->kind == DRIVER;
    return node->kind == DEVICE && (owner->kind == DRIVER ? node->owner : node->root) == owner;
}

/* The drivers, a driver's devices or a device's sub-devices. */
static ze_result_t list(const Node *owner, uint32_t *count, const void **out) {
    const Node *listed[MAX_NODES];
    uint32_t total = 0, fill;
    for (unsigned i = 0; i < node_count; i++)
        if (belongs(&nodes[i], owner))
            listed[total++] = &nodes[i];
    TRY(room(total, count, out, &fill));
    for (uint32_t i = 0; i < fill; i++)
        out[i] = listed[i];
    return SUCCESS;
}

/* As the driver makes one: vendor, device, revision, domain, bus, device, function, and last the tile from 1 on. */
static ze_uuid_t uuid_of(const Node *node) {
    const Card *card = node->card;
    const ze_pci_address_ext_t *at = &card->address;
    uint8_t id = (uint8_t)card->number[DEVICE_ID], id_high = (uint8_t)(card->number[DEVICE_ID] >> 8);
    ze_uuid_t uuid = {{0x86, 0x80, id, id_high, 0, 0, (uint8_t)at->domain, (uint8_t)(at->domain >> 8),
                       (uint8_t)at->bus, (uint8_t)at->device, (uint8_t)at->function}};
    if (card->given[UUID])
        uuid = card->uuid;
    if (node->on_tile && !node->narrowed)
        uuid.id[UUID_BYTES - 1] += (uint8_t)(node->tile + 1);
    return uuid;
}

/* ---- the exported calls ---- */

#define CALL(name, ...) EXPORTED(name) ze_result_t name(__VA_ARGS__)

/* How a call begins: ON where it has a `handle` and an `out`. Past it `found` is what it is about. */
#define ON(kind)                                                                                                       \
    Found found;                                                                                                       \
    TRY(on(__func__, handle, kind, out, &found))
#define TYPED(it, type)                                                                                                \
    if ((it)->stype != (type))                                                                                         \
    return INVALID_ARGUMENT

CALL(zeInit, uint32_t flags) {
    Found found;
    TRY(enter(__func__, by_handle, &(Wanted){NULL, NOTHING}, &found));
    if (flags > INIT_ANY)
        return INVALID_ENUMERATION;
    return flags == 0 || (flags & INIT_GPU) != 0 ? initialize() : UNINITIALIZED; /* else NPUs alone are wanted */
}

CALL(zeInitDrivers, uint32_t *count, const void **out, const ze_init_driver_type_desc_t *kinds) {
    Found found;
    TRY(on(__func__, NULL, NOTHING, count, &found));
    if (kinds == NULL)
        return INVALID_NULL_POINTER;
    TYPED(kinds, INIT_DRIVER_TYPE_DESC);
    if (kinds->flags == 0)
        return INVALID_ENUMERATION;
    if (found.api < FIRST_WITH_INIT_DRIVERS || (kinds->flags & INIT_GPU) == 0)
        return UNINITIALIZED;
    TRY(initialize());
    return list(NULL, count, out);
}

CALL(zeDriverGet, uint32_t *count, const void **out) {
    Found found;
    TRY(on(__func__, NULL, NOTHING, count, &found));
    return list(NULL, count, out);
}

CALL(zeDriverGetApiVersion, void *handle, uint32_t *out) {
    ON(DRIVER);
    *out = found.api;
    return SUCCESS;
}

CALL(zeDriverGetProperties, void *handle, ze_driver_properties_t *out) {
    ON(DRIVER);
    TYPED(out, DRIVER_PROPERTIES);
    out->driverVersion = 0x01030000; /* 1.3, as Intel's has long said */
    out->uuid = (ze_uuid_t){{[UUID_BYTES - 1] = (uint8_t)(found.node->tile + 1)}};
    return SUCCESS;
}

CALL(zeDriverGetExtensionProperties, void *handle, uint32_t *count, ze_driver_extension_properties_t *out) {
    Found found;
    uint32_t fill;
    TRY(on(__func__, handle, DRIVER, count, &found));
    TRY(room(1, count, out, &fill));
    if (fill > 0)
        *out = (ze_driver_extension_properties_t){"ZE_extension_pci_properties", 1 << MAKE_VERSION_SHIFT};
    return SUCCESS;
}

#define LIST_CALL(name, kind)                                                                                          \
    CALL(name, void *handle, uint32_t *count, const void **out) {                                                      \
        Found found;                                                                                                   \
        TRY(on(__func__, handle, kind, count, &found));                                                                \
        return list(found.node, count, out);                                                                           \
    }
LIST_CALL(zeDeviceGet, DRIVER)
LIST_CALL(zeDeviceGetSubDevices, DEVICE)

CALL(zeDeviceGetRootDevice, void *handle, const void **out) {
    ON(DEVICE);
    *out = found.node->root;
    return SUCCESS;
}

/* What no mask depends on is 0. */
CALL(zeDeviceGetProperties, void *handle, ze_device_properties_t *out) {
    ON(DEVICE);
    TYPED(out, DEVICE_PROPERTIES);
    const Node *node = found.node;
    bool hidden = node->narrowed && found.narrowed_zero;
    *out = (ze_device_properties_t){.stype = out->stype, .pNext = out->pNext, .type = DEVICE_TYPE_GPU};
    out->vendorId = VENDOR_INTEL;
    out->deviceId = (uint32_t)node->card->number[DEVICE_ID];
    out->flags = (node->card->number[INTEGRATED] ? FLAG_INTEGRATED : 0) | (node->root != NULL ? FLAG_SUBDEVICE : 0);
    out->subdeviceId = node->on_tile && !hidden ? node->tile : 0;
    out->uuid = uuid_of(node);
    strcpy(out->name, node->card->name);
    return SUCCESS;
}

CALL(zeDevicePciGetPropertiesExt, void *handle, ze_pci_ext_properties_t *out) {
    ON(DEVICE);
    TYPED(out, PCI_EXT_PROPERTIES);
    out->address = found.node->card->address;
    out->maxSpeed = (ze_pci_speed_ext_t){-1, -1, -1};
    return SUCCESS;
}

/* What only asks which devices there are calls none of these. */
#define REFUSED_CALL(name, ...)                                                                                        \
    CALL(name, __VA_ARGS__) {                                                                                          \
        Found found;                                                                                                   \
        TRY(enter(__func__, by_handle, &(Wanted){NULL, NOTHING}, &found));                                             \
        return UNSUPPORTED_FEATURE;                                                                                    \
    }
REFUSED_CALL(zeContextCreate, void *driver, const void *wish, void **out)
REFUSED_CALL(zeMemAllocDevice, void *context, const void *wish, size_t size, size_t align, void *device, void **out)
REFUSED_CALL(zeCommandQueueCreate, void *context, void *device, const void *wish, void **out)
