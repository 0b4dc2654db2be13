/* A pretend libvulkan.so.1 for tests: the loader, a layer and the drivers in one, as a text file says.
 *
 * The file is named by FAKE_VULKAN_STATE and looked at on every call. Without it there is no driver: vkCreateInstance
 * answers INCOMPATIBLE_DRIVER, and what needs one INITIALIZATION_FAILED. Its lines:
 *
 *   instance 1.3                       the version that the loader has, and every device; 1.3 without the line
 *   layer 0|1                          whether Mesa's device-select layer is installed; it is without the line
 *   gpu INDEX key=value ...            a device; INDEX counts these lines from 0, which come in the drivers' order:
 *                                      driver=radv|nvidia|... pci vendor_id device_id type=discrete|integrated|virtual|
 *                                      cpu|other uuid name fp16=0|1 accessible=0|1 boot_vga=0|1 pci_info=0|1
 *   fault CALL [WHERE] STATUS          the call answers STATUS; CALL is a symbol or *, WHERE a device's INDEX or *
 *   hang CALL [WHERE]                  the call does not return while this line is there
 *   slow CALL [WHERE] MILLISECONDS     the call takes that long, then answers from the state as it is by then
 *   crash CALL [WHERE]                 the call ends the process by SIGSEGV
 *
 * A device needs a driver. Without pci, or with an empty one, it is on no bus. Without uuid its UUID is its address, as
 * RADV's is. pci_info is whether it has VK_EXT_pci_bus_info: every device on a bus has, unless it says not. One that is
 * not accessible is not enumerated, but the boot VGA device may be one. type is discrete, fp16 and accessible are 1 and
 * boot_vga is 0 when left out. Text with blanks stands in double quotes; whole numbers may be hexadecimal.
 *
 * A call that answers nothing leaves its struct as it is where there is a fault, or where the device is gone. A call
 * without a device matches only WHERE *. The first rule of a kind that matches holds. A line that makes no sense aborts
 * the process, as does what is no handle. A line with its symbol is appended to FAKE_VULKAN_RECORD for every call.
 *
 * The environment is read once, when the first instance is made. fake_ggml_vk_devices answers what ggml-vulkan would do
 * then: an instance of its own, and the devices it numbers, as positions in the enumeration.
 *
 * Stricter than Khronos's: a struct whose `sType` is not its own is left as it is, or makes no instance. Left out are
 * the selection of drivers and layers by name (VK_DRIVER_FILES, VK_LOADER_DRIVERS_SELECT, VK_LOADER_LAYERS_DISABLE and
 * so on), and displays, which count only for an instance with a surface extension, and there is none to be enabled.
 *
 * The rules are those of the specification of masks (SPEC below), section 6, and where it is silent those of the
 * sources it names; they share nothing with the exporter's own reading of it.
 *
 * -DWITHOUT_<symbol> leaves that symbol out, to play an older loader.
 */
#include "state.h"

/* ---- what Vulkan defines ---- */

typedef int32_t VkResult;
enum {
    SUCCESS = 0,
    INCOMPLETE = 5,
    OUT_OF_DEVICE_MEMORY = -2,
    INITIALIZATION_FAILED = -3,
    DEVICE_LOST = -4,
    LAYER_NOT_PRESENT = -6,
    EXTENSION_NOT_PRESENT = -7,
    INCOMPATIBLE_DRIVER = -9
};

/* The `sType` of each struct that has one. */
enum {
    INSTANCE_CREATE_INFO = 1,
    VULKAN_1_1_FEATURES = 49,
    FEATURES_2 = 1000059000,
    PROPERTIES_2 = 1000059001,
    ID_PROPERTIES = 1000071004,
    STORAGE_16BIT_FEATURES = 1000083000,
    DRIVER_PROPERTIES = 1000196000,
    PCI_BUS_INFO_PROPERTIES = 1000212000
};
enum { UUID_BYTES = 16, VERSION_1_1 = 1 << 22 | 1 << 12, VERSION_1_2 = 1 << 22 | 2 << 12 };

typedef struct {
    int32_t sType;
    void *pNext;
} Base;

typedef struct {
    Base base;
    const char *application;
    uint32_t applicationVersion;
    const char *engine;
    uint32_t engineVersion, apiVersion;
} ApplicationInfo;

typedef struct {
    Base base;
    uint32_t flags;
    const ApplicationInfo *application;
    uint32_t layerCount;
    const char *const *layers;
    uint32_t extensionCount;
    const char *const *extensions;
} InstanceCreateInfo;

typedef struct {
    char name[256];
    uint32_t version;
} ExtensionProperties;

typedef struct {
    uint32_t apiVersion, driverVersion, vendorID, deviceID;
    int32_t deviceType;
    char deviceName[256];
    uint8_t pipelineCacheUUID[UUID_BYTES];
    uint64_t limits[63];
    uint32_t sparse[5];
} Properties;

typedef struct {
    Base base;
    Properties properties;
} Properties2;

typedef struct {
    Base base;
    uint8_t deviceUUID[UUID_BYTES], driverUUID[UUID_BYTES], deviceLUID[8];
    uint32_t deviceNodeMask, deviceLUIDValid;
} IdProperties;

typedef struct {
    Base base;
    int32_t driverID;
    char driverName[256], driverInfo[256];
    uint8_t conformance[4];
} DriverProperties;

typedef struct {
    Base base;
    uint32_t domain, bus, device, function;
} PciProperties;

typedef struct {
    Base base;
    uint32_t features[55];
} Features2;

/* The 16-bit features and those of Vulkan 1.1 both begin with this one. */
typedef struct {
    Base base;
    uint32_t storageBuffer16BitAccess;
} StorageFeatures;

/* As vulkan_core.h has them on a machine of 64 bits. */
_Static_assert(sizeof(InstanceCreateInfo) == 64 && offsetof(ApplicationInfo, apiVersion) == 44, "instance");
_Static_assert(sizeof(Properties) == 824 && offsetof(Properties, limits) == 296, "properties");
_Static_assert(sizeof(Properties2) == 840 && sizeof(Features2) == 240, "properties and features");
_Static_assert(sizeof(IdProperties) == 64 && sizeof(DriverProperties) == 536, "IDs and driver");
_Static_assert(sizeof(ExtensionProperties) == 260 && sizeof(PciProperties) == 32, "extensions and PCI");

/* ---- what the state file says ---- */

static const Fake fake = {
    .name = "vulkan", .variable = "FAKE_VULKAN_STATE", .hexadecimal = true, .where_optional = true};

enum { TEXT = 256, MAX_DEVICES = 64, MAX_INSTANCES = 256 };

/* By their VkPhysicalDeviceType. */
enum type { OTHER, INTEGRATED, DISCRETE, VIRTUAL, CPU };
static const char *const types[] = {"other", "integrated", "discrete", "virtual", "cpu", NULL};

/* By their VkDriverId; the empty ones can be none's word. */
enum driver {
    AMDGPU_PRO = 1,
    AMDVLK = 2,
    RADV = 3,
    NVIDIA = 4,
    INTEL_WINDOWS = 5,
    ANV = 6,
    QUALCOMM = 8,
    MOLTENVK = 14,
    TURNIP = 18,
    DOZEN = 23,
    NVK = 24
};
static const char *const drivers[] = {"",            "amdgpu_pro",
                                      "amdvlk",      "radv",
                                      "nvidia",      "intel_windows",
                                      "anv",         "imagination",
                                      "qualcomm",    "arm",
                                      "swiftshader", "ggp",
                                      "broadcom",    "llvmpipe",
                                      "moltenvk",    "coreavi",
                                      "juice",       "verisilicon",
                                      "turnip",      "v3dv",
                                      "panvk",       "samsung",
                                      "venus",       "dozen",
                                      "nvk",         "imagination_mesa",
                                      "honeykrisp",  NULL};

typedef struct {
    uint32_t domain, bus, device, function;
} Address;

/* The keys whose values are kept as text come first, then words, then whole numbers, and from FP16 on yes or no. */
enum key {
    PCI,
    UUID,
    NAME,
    TEXTS,
    TYPE = TEXTS,
    DRIVER,
    VENDOR_ID,
    DEVICE_ID,
    FP16,
    ACCESSIBLE,
    BOOT_VGA,
    PCI_INFO,
    KEYS
};
static const char *const key_names[] = {"pci",       "uuid", "name",       "type",     "driver",   "vendor_id",
                                        "device_id", "fp16", "accessible", "boot_vga", "pci_info", NULL};

struct Found {
    long place;
    bool given[KEYS];
    char text[TEXTS][TEXT];
    uint32_t number[KEYS];
    Address address;  /* zeros where there is none */
    uint32_t version; /* for calls without a device too */
    uint8_t uuid[UUID_BYTES];
};
typedef Found Device;

static struct {
    unsigned devices;
    uint32_t version;
    bool layer;
    Device device[MAX_DEVICES];
} state;

/* What the caller's VkInstance points to. It is never used again, so that one that was destroyed is known as such. */
typedef struct {
    bool alive;
    bool vulkan_1_1;   /* the application asked for 1.1 at least */
    bool properties_2; /* and so, or by the extension, has vkGetPhysicalDeviceProperties2 */
} Instance;
static Instance instances[MAX_INSTANCES];
static unsigned instance_count;

static char handles[MAX_DEVICES]; /* what the caller's VkPhysicalDevice points to: the device of that place */

/* ---- reading the state file ---- */

/* 32 hexadecimal digits, with dashes wherever. */
static bool parse_uuid(const char *text, uint8_t *to) {
    int digits = 0;
    for (; *text != '\0'; text++) {
        unsigned digit;
        if (*text == '-')
            continue;
        if (!isxdigit((unsigned char)*text) || digits == 2 * UUID_BYTES || sscanf(text, "%1x", &digit) != 1)
            return false;
        to[digits / 2] = (uint8_t)(to[digits / 2] << 4 | digit);
        digits++;
    }
    return digits == 2 * UUID_BYTES;
}

static bool parse_address(const char *text, Address *to) {
    int end = 0;
    int parts = sscanf(text, "%x:%x:%x.%x%n", &to->domain, &to->bus, &to->device, &to->function, &end);
    return *text == '\0' || (parts == 4 && text[end] == '\0');
}

static void parse_pair(Device *device, char *pair) {
    const char *value = value_of(pair);
    enum key key = (enum key)position(pair, key_names);
    if (key < TEXTS)
        keep(device->text[key], value, TEXT);
    else if (key == TYPE || key == DRIVER)
        device->number[key] = position(value, key == TYPE ? types : drivers);
    else
        device->number[key] = (uint32_t)number(value);
    demand(key < FP16 || device->number[key] <= 1, "neither 0 nor 1", value);
    demand(key != PCI || parse_address(value, &device->address), "not a PCI address", value);
    demand(key != UUID || parse_uuid(value, device->uuid), "not a UUID", value);
    device->given[key] = true;
}

static void parse_device(char **rest) {
    const char *index = need_word(rest);
    demand(state.devices < MAX_DEVICES, "too many devices", index);
    demand(number(index) == state.devices, "a device out of turn", index);
    Device *device = &state.device[state.devices];
    device->place = state.devices++;
    device->number[TYPE] = DISCRETE;
    device->number[FP16] = device->number[ACCESSIBLE] = true;
    for (char *pair = next_word(rest); pair != NULL; pair = next_word(rest))
        parse_pair(device, pair);
    bool on_bus = device->text[PCI][0] != '\0';
    demand(device->number[DRIVER] != 0, "a device without a driver", index);
    demand(on_bus || device->number[PCI_INFO] == 0, "pci_info without a PCI address", index);
    if (!device->given[PCI_INFO])
        device->number[PCI_INFO] = on_bus;
    if (!device->given[UUID])
        memcpy(device->uuid, &device->address, UUID_BYTES);
}

static void parse_version(const char *text) {
    unsigned major, minor;
    int end = 0;
    demand(sscanf(text, "%u.%u%n", &major, &minor, &end) == 2 && text[end] == '\0', "not a version", text);
    state.version = major << 22 | minor << 12;
}

static void parse_words(const char *first, char **rest) {
    if (strcmp(first, "gpu") == 0) {
        parse_device(rest);
    } else if (strcmp(first, "instance") == 0) {
        parse_version(need_word(rest));
    } else if (strcmp(first, "layer") == 0) {
        state.layer = position(need_word(rest), (const char *const[]){"0", "1", NULL});
    } else {
        Rule *rule = new_rule(first);
        keep(rule->call, need_word(rest), WORD);
        parse_where(rule, rest);
    }
}

static void start_over(void) {
    memset(&state, 0, sizeof state);
    parse_version("1.3");
    state.layer = true;
}

static void complete(void) {}

/* ---- the environment ---- */

enum variable {
    LOADER_SELECT,
    LOADER_DISABLE_SELECT,
    DEVICE_FILTER,
    VENDOR_FILTER,
    DRIVER_FILTER,
    NO_LAYER,
    MESA_SELECT,
    MESA_ONLY_DEFAULT,
    DRI_PRIME,
    GGML_VISIBLE,
    VARIABLES
};
static const char *const variables[VARIABLES] = {"VK_LOADER_DEVICE_SELECT",
                                                 "VK_LOADER_DISABLE_SELECT",
                                                 "VK_LOADER_DEVICE_ID_FILTER",
                                                 "VK_LOADER_VENDOR_ID_FILTER",
                                                 "VK_LOADER_DRIVER_ID_FILTER",
                                                 "NODEVICE_SELECT",
                                                 "MESA_VK_DEVICE_SELECT",
                                                 "MESA_VK_DEVICE_SELECT_FORCE_DEFAULT_DEVICE",
                                                 "DRI_PRIME",
                                                 "GGML_VK_VISIBLE_DEVICES"};
static const char *set[VARIABLES]; /* NULL where it is not set */

static void read_environment(void) {
    static bool done;
    for (unsigned i = 0; i < VARIABLES && !done; i++) {
        const char *value = getenv(variables[i]);
        set[i] = value == NULL ? NULL : strdup(value);
    }
    done = true;
}

/* ---- the order: the drivers', then the loader's, then the layer's, then the loader's filters ---- */

typedef struct {
    unsigned count;
    const Device *at[MAX_DEVICES];
} List;

static void to_front(List *list, unsigned index) {
    const Device *chosen = list->at[index];
    memmove(list->at + 1, list->at, index * sizeof *list->at);
    list->at[0] = chosen;
}

/* The discrete first, then by address, those without one last; a tie goes by the IDs. */
static int compare(const Device *left, const Device *right) {
    static const int ranks[] = {[DISCRETE] = 0, [INTEGRATED] = 1, [VIRTUAL] = 2, [OTHER] = 3, [CPU] = 4};
    const Device *both[] = {left, right};
    int64_t by[2][7];
    for (int i = 0; i < 2; i++) {
        const Device *it = both[i];
        const Address address = it->number[PCI_INFO] ? it->address : (Address){0};
        const uint32_t ids = it->number[VENDOR_ID] ^ it->number[DEVICE_ID];
        const int64_t order[] = {ranks[it->number[TYPE]],
                                 !it->number[PCI_INFO],
                                 address.domain,
                                 address.bus,
                                 address.device,
                                 address.function,
                                 ids};
        memcpy(by[i], order, sizeof order);
    }
    for (int i = 0; i < 7; i++)
        if (by[0][i] != by[1][i])
            return by[0][i] < by[1][i] ? -1 : 1;
    return 0;
}

/* VID:DID in hexadecimal, with or without 0x. What follows is ignored, as is a text that is not of that form. */
static int by_ids(const List *list, const char *text, bool last) {
    unsigned vendor, device;
    int found = -1;
    if (text == NULL || sscanf(text, "%x:%x", &vendor, &device) != 2)
        return -1;
    for (int i = 0; i < (int)list->count && (last || found < 0); i++)
        if (list->at[i]->number[VENDOR_ID] == vendor && list->at[i]->number[DEVICE_ID] == device)
            found = i;
    return found;
}

/* SPEC does not say what happens to devices that tie in all, such as one card's under two drivers: the loader's qsort
 * leaves them in the drivers' order with the C library's usual merge sort, and so does this. Nor does it say that the
 * loader sorts only for instances that may ask for PCI addresses, nor which of several equal cards is selected: both
 * are as in the loader's source, which takes the first. */
static void sort_as_loader(List *list, const Instance *instance) {
    if (!instance->properties_2 || (set[LOADER_DISABLE_SELECT] != NULL && atoi(set[LOADER_DISABLE_SELECT]) != 0))
        return;
    int selected = by_ids(list, set[LOADER_SELECT], false);
    const Device *front = selected < 0 ? NULL : list->at[selected];
    for (unsigned i = 1; i < list->count; i++)
        for (unsigned j = i; j > 0 && compare(list->at[j - 1], list->at[j]) > 0; j--) {
            const Device *later = list->at[j - 1];
            list->at[j - 1] = list->at[j];
            list->at[j] = later;
        }
    for (unsigned i = 0; i < list->count; i++)
        if (list->at[i] == front)
            to_front(list, i);
}

/* The layer believes that all devices have the extension for PCI addresses if one has; such a one's is then 0. */
static bool any_has_address(const List *list) {
    for (unsigned i = 0; i < list->count; i++)
        if (list->at[i]->number[PCI_INFO])
            return true;
    return false;
}

/* DRI_PRIME=pci-0000_03_00_0, as long as that, or one longer with a ! */
static int by_tag(const List *list, const Instance *instance, const char *text) {
    size_t length = strlen(text), usual = strlen("pci-xxxx_yy_zz_w");
    int found = -1;
    if (length < usual || (!instance->vulkan_1_1 && !any_has_address(list)))
        return -1;
    if (length == usual + 1 && text[usual] == '!')
        length--;
    for (int i = 0; i < (int)list->count; i++) {
        char tag[TEXT];
        bool known = instance->vulkan_1_1 && list->at[i]->number[PCI_INFO];
        const Address at = known ? list->at[i]->address : (Address){0};
        snprintf(tag, sizeof tag, "pci-%04x_%02x_%02x_%1u", at.domain, at.bus, at.device, at.function);
        if (strncmp(text, tag, length) == 0)
            found = i;
    }
    return found;
}

/* By its address, or where that cannot be asked for by its IDs: then the first device that has these. */
static int boot_vga(const List *list, const Instance *instance) {
    const Device *boot = NULL;
    bool by_address = instance->vulkan_1_1 && any_has_address(list);
    for (unsigned i = state.devices; i-- > 0;)
        if (state.device[i].number[BOOT_VGA])
            boot = &state.device[i];
    for (int i = 0; i < (int)list->count && boot != NULL; i++) {
        const uint32_t *it = list->at[i]->number;
        if (by_address ? it[PCI_INFO] && it[BOOT_VGA]
                       : it[VENDOR_ID] == boot->number[VENDOR_ID] && it[DEVICE_ID] == boot->number[DEVICE_ID])
            return i;
    }
    return -1;
}

/* The n-th device that is not a CPU, `but` left out, or -1. */
static int nth_gpu(const List *list, int n, int but) {
    for (int i = 0; i < (int)list->count; i++)
        if (i != but && list->at[i]->number[TYPE] != CPU && --n <= 0)
            return i;
    return -1;
}

static bool exclaims(const char *text) {
    size_t length = strlen(text);
    return length > 1 && text[length - 1] == '!';
}

/* SPEC names the variables in their order; the rest is as in the layer's source. MESA_VK_DEVICE_SELECT takes the last
 * of several equal cards. DRI_PRIME=n takes the n-th other GPU than the one that is first so far, which is what
 * MESA_VK_DEVICE_SELECT found if it found any, but only where that is at 0 or 1 and there is a second GPU. */
static unsigned selected_by_layer(const List *list, const Instance *instance, bool *only) {
    const char *select = set[MESA_SELECT], *prime = set[DRI_PRIME];
    int n = prime == NULL || strchr(prime, ':') != NULL ? 0 : atoi(prime);
    int found = by_ids(list, select, true);
    unsigned cpus = 0;
    for (unsigned i = 0; i < list->count; i++)
        cpus += list->at[i]->number[TYPE] == CPU;
    *only = found >= 0 && exclaims(select);
    if (found < 0 && prime != NULL && n <= 0) {
        found = by_ids(list, prime, true);
        found = found < 0 ? by_tag(list, instance, prime) : found;
        *only = found >= 0 && exclaims(prime);
    }
    found = found < 0 ? boot_vga(list, instance) : found;
    found = found < 0 ? nth_gpu(list, 1, -1) : found;
    found = found < 0 ? 0 : found;
    if (n > 0 && list->count > cpus + 1 && found <= 1) {
        found = nth_gpu(list, n, found);
        *only = found < 0 ? *only : exclaims(prime);
    }
    return found < 0 ? 0 : (unsigned)found;
}

static bool true_to_mesa(const char *text) {
    static const char *const words[] = {"1", "y", "yes", "t", "true"};
    for (unsigned i = 0; text != NULL && i < sizeof words / sizeof *words; i++)
        if (strcasecmp(text, words[i]) == 0)
            return true;
    return false;
}

/* The layer is off where NODEVICE_SELECT is set, to whatever. With "list" it ends the process, as the real one does. */
static void select_as_layer(List *list, const Instance *instance) {
    bool only;
    if (!state.layer || set[NO_LAYER] != NULL || list->count == 0)
        return;
    if (set[MESA_SELECT] != NULL && strcmp(set[MESA_SELECT], "list") == 0) {
        fprintf(stderr, "selectable devices: %u\n", list->count);
        exit(0);
    }
    to_front(list, selected_by_layer(list, instance, &only));
    if (only || true_to_mesa(set[MESA_ONLY_DEFAULT]))
        list->count = 1;
}

/* Numbers and ranges FIRST:LAST with commas between, decimal or hexadecimal; an empty text is none. */
static bool passes(const char *filter, uint32_t id) {
    const char *from = filter == NULL || *filter == '\0' ? NULL : filter;
    for (const char *comma; from != NULL; from = comma == NULL ? NULL : comma + 1) {
        char *end;
        unsigned long first = strtoul(from, &end, 0), last = *end == ':' ? strtoul(end + 1, NULL, 0) : first;
        if (first <= id && id <= last)
            return true;
        comma = strchr(from, ',');
    }
    return filter == NULL || *filter == '\0';
}

/* SPEC only says that there are filters. They come last: the loader applies them to what the layers gave. */
static void filter_as_loader(List *list) {
    unsigned kept = 0;
    for (unsigned i = 0; i < list->count; i++) {
        const uint32_t *it = list->at[i]->number;
        bool passed = passes(set[DEVICE_FILTER], it[DEVICE_ID]) && passes(set[VENDOR_FILTER], it[VENDOR_ID]) &&
                      passes(set[DRIVER_FILTER], it[DRIVER]);
        if (passed)
            list->at[kept++] = list->at[i];
    }
    list->count = kept;
}

/* With the lock held, as all above. */
static List enumerated(const Instance *instance) {
    List list = {0};
    for (unsigned i = 0; i < state.devices; i++)
        if (state.device[i].number[ACCESSIBLE])
            list.at[list.count++] = &state.device[i];
    sort_as_loader(&list, instance);
    select_as_layer(&list, instance);
    filter_as_loader(&list);
    return list;
}

/* ---- ggml ---- */

/* What `stream >> unsigned` reads: blanks, a sign, digits. A number that does not fit in 64 bits is none; one with a
 * minus wraps. SPEC calls `+` and `-` accepted; what stands behind the digits is left for the next read, as in C++. */
static bool next_number(const char **from, uint64_t *to) {
    const char *text = *from + strspn(*from, " \t\n\v\f\r");
    bool negative = *text == '-';
    text += negative || *text == '+';
    const char *begin = text;
    for (*to = 0; isdigit((unsigned char)*text); text++)
        if (__builtin_mul_overflow(*to, 10, to) || __builtin_add_overflow(*to, (uint64_t)(*text - '0'), to))
            return false;
    *to = negative ? -*to : *to;
    *from = text;
    return text > begin;
}

static int masked(const List *list, const char *mask, uint32_t *out, int most) {
    char *text = strdup(mask);
    const char *rest = text;
    uint64_t index;
    int count = 0;
    for (char *comma = strchr(text, ','); comma != NULL; comma = strchr(comma, ','))
        *comma = ' ';
    while (count >= 0 && next_number(&rest, &index)) {
        if (index < list->count && count < most)
            out[count] = (uint32_t)index;
        count = index < list->count ? count + 1 : -1;
    }
    free(text);
    return count;
}

/* The smaller, the better. The vendor is that of the device that is there already. */
static unsigned preference(uint32_t vendor, uint32_t driver) {
    static const struct {
        uint32_t vendor;
        enum driver drivers[3];
    } known[] = {{0x1002, {RADV, AMDVLK, AMDGPU_PRO}},
                 {0x8086, {ANV, INTEL_WINDOWS}},
                 {0x10de, {NVIDIA, NVK}},
                 {0x5143, {QUALCOMM, TURNIP}}};
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        for (unsigned j = 0; known[i].vendor == vendor && j < 3; j++)
            if (known[i].drivers[j] == driver)
                return j;
    return driver == DOZEN ? 100 : UINT32_MAX;
}

static bool same_gpu(const Device *one, const Device *other) {
    bool both_molten = one->number[DRIVER] == MOLTENVK && other->number[DRIVER] == MOLTENVK;
    return memcmp(one->uuid, other->uuid, UUID_BYTES) == 0 && !both_molten; /* no driver for Linux has a LUID */
}

/* Takes a device up, or in place of another one of the same GPU, but then at the end. */
static unsigned take_up(const List *list, uint32_t *chosen, unsigned count, uint32_t new) {
    unsigned old = 0;
    while (old < count && !same_gpu(list->at[chosen[old]], list->at[new]))
        old++;
    if (old < count) {
        const uint32_t *before = list->at[chosen[old]]->number, *after = list->at[new]->number;
        if (preference(before[VENDOR_ID], after[DRIVER]) >= preference(before[VENDOR_ID], before[DRIVER]))
            return count;
        memmove(chosen + old, chosen + old + 1, (count-- - old - 1) * sizeof *chosen);
    }
    chosen[count] = new;
    return count + 1;
}

static int unmasked(const List *list, uint32_t *out, int most) {
    uint32_t chosen[MAX_DEVICES];
    unsigned count = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const uint32_t *it = list->at[i]->number;
        if ((it[TYPE] == DISCRETE || it[TYPE] == INTEGRATED) && it[FP16])
            count = take_up(list, chosen, count, i);
    }
    int other = count == 0 ? nth_gpu(list, 1, -1) : -1;
    if (other >= 0)
        chosen[count++] = (uint32_t)other;
    for (int i = 0; i < (int)count && i < most; i++)
        out[i] = chosen[i];
    return (int)count;
}

/* ---- what every call goes through ---- */

static void refuse(const char *what) {
    fprintf(stderr, "fake vulkan: this is no %s\n", what);
    abort();
}

static Code by_nothing(const void *wanted, Device *found) { return (void)wanted, (void)found, SUCCESS; }

static Code by_instance(const void *wanted, Device *found) {
    (void)found;
    for (unsigned i = 0; i < instance_count; i++)
        if (&instances[i] == wanted && instances[i].alive)
            return SUCCESS;
    refuse("VkInstance");
    return SUCCESS;
}

static Code by_device(const void *wanted, Device *found) {
    long place = (long)((intptr_t)wanted - (intptr_t)handles);
    if (place < 0 || place >= MAX_DEVICES)
        refuse("VkPhysicalDevice");
    if (place >= (long)state.devices)
        return DEVICE_LOST;
    *found = state.device[place];
    return SUCCESS;
}

static bool needs_no_driver(const char *call) {
    static const char *const calls[] = {"vkGetInstanceProcAddr", "vkEnumerateInstanceVersion",
                                        "vkEnumerateInstanceExtensionProperties", "vkDestroyInstance"};
    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++)
        if (strcmp(calls[i], call) == 0)
            return true;
    return false;
}

static Code answer(const char *call, long place, Code found) {
    const Rule *fault = rule_for(FAULT, call, place);
    if (!present && !needs_no_driver(call))
        return strcmp(call, "vkCreateInstance") == 0 ? INCOMPATIBLE_DRIVER : INITIALIZATION_FAILED;
    return fault == NULL ? found : (VkResult)fault->value;
}

static Verdict look(const char *call, Finder *find, const void *wanted, Device *found, bool first) {
    *found = (Device){.place = NOWHERE};
    if (first)
        record_call(getenv("FAKE_VULKAN_RECORD"), call, ""); /* before it may abort */
    Code code = find(wanted, found);
    found->version = state.version;
    return verdict_on(call, found->place, answer(call, found->place, code));
}

/* Vulkan's two calls: without an array the count becomes the total, otherwise as many are filled as fit. */
static VkResult room(uint32_t total, uint32_t *count, const void *out) {
    uint32_t asked = *count;
    *count = out == NULL || asked > total ? total : asked;
    return out != NULL && asked < total ? INCOMPLETE : SUCCESS;
}

static VkResult give_extensions(const char *const *names, uint32_t total, uint32_t *count, ExtensionProperties *out) {
    VkResult result = room(total, count, out);
    for (uint32_t i = 0; out != NULL && i < *count; i++) {
        out[i] = (ExtensionProperties){.version = 1};
        strcpy(out[i].name, names[i]);
    }
    return result;
}

static void give_properties(const Device *device, Properties *out) {
    *out = (Properties){.apiVersion = device->version,
                        .driverVersion = 1,
                        .vendorID = device->number[VENDOR_ID],
                        .deviceID = device->number[DEVICE_ID],
                        .deviceType = (int32_t)device->number[TYPE]};
    strcpy(out->deviceName, device->text[NAME]);
}

/* Fills one struct behind Properties2. Without its extension a device knows nothing of PCI addresses. */
static void fill_properties(const Device *device, Base *out) {
    if (out->sType == ID_PROPERTIES) {
        *(IdProperties *)out = (IdProperties){.base = *out};
        memcpy(((IdProperties *)out)->deviceUUID, device->uuid, UUID_BYTES);
    } else if (out->sType == DRIVER_PROPERTIES) {
        *(DriverProperties *)out = (DriverProperties){.base = *out, .driverID = (int32_t)device->number[DRIVER]};
        strcpy(((DriverProperties *)out)->driverName, drivers[device->number[DRIVER]]);
    } else if (out->sType == PCI_BUS_INFO_PROPERTIES && device->number[PCI_INFO]) {
        const Address *at = &device->address;
        *(PciProperties *)out = (PciProperties){*out, at->domain, at->bus, at->device, at->function};
    }
}

static void fill_features(const Device *device, Base *out) {
    if (out->sType == STORAGE_16BIT_FEATURES || out->sType == VULKAN_1_1_FEATURES)
        ((StorageFeatures *)out)->storageBuffer16BitAccess = device->number[FP16];
}

/* ---- the exported calls ---- */

#define CALL(name, ...) EXPORTED(name) VkResult name(__VA_ARGS__)
#define VOID_CALL(name, ...) EXPORTED(name) void name(__VA_ARGS__)

/* How a call begins. Past it `found` is what it is about; a void one returns at once where it may not go on. */
#define FIND(find, wanted)                                                                                             \
    Device found;                                                                                                      \
    TRY(enter(__func__, find, wanted, &found))
#define FIND_OR_LEAVE(find, wanted)                                                                                    \
    Device found;                                                                                                      \
    if (enter(__func__, find, wanted, &found) != SUCCESS)                                                              \
    return

static const char *const instance_extensions[] = {"VK_KHR_get_physical_device_properties2",
                                                  "VK_KHR_portability_enumeration"};
enum { INSTANCE_EXTENSIONS = sizeof instance_extensions / sizeof *instance_extensions };

CALL(vkEnumerateInstanceVersion, uint32_t *version) {
    FIND(by_nothing, NULL);
    *version = found.version;
    return SUCCESS;
}

CALL(vkEnumerateInstanceExtensionProperties, const char *layer, uint32_t *count, ExtensionProperties *out) {
    FIND(by_nothing, NULL);
    return layer != NULL ? LAYER_NOT_PRESENT : give_extensions(instance_extensions, INSTANCE_EXTENSIONS, count, out);
}

static VkResult understood(const InstanceCreateInfo *info, Instance *instance) {
    if (info == NULL || info->base.sType != INSTANCE_CREATE_INFO || info->layerCount > 0)
        return info != NULL && info->layerCount > 0 ? LAYER_NOT_PRESENT : INITIALIZATION_FAILED;
    instance->alive = true;
    instance->vulkan_1_1 = info->application != NULL && info->application->apiVersion >= VERSION_1_1;
    instance->properties_2 = instance->vulkan_1_1;
    for (uint32_t i = 0; i < info->extensionCount; i++) {
        unsigned known = 0;
        while (known < INSTANCE_EXTENSIONS && strcmp(instance_extensions[known], info->extensions[i]) != 0)
            known++;
        if (known == INSTANCE_EXTENSIONS)
            return EXTENSION_NOT_PRESENT;
        instance->properties_2 |= known == 0;
    }
    return SUCCESS;
}

CALL(vkCreateInstance, const InstanceCreateInfo *info, const void *allocator, void **out) {
    Instance instance = {0};
    FIND(by_nothing, allocator);
    TRY(understood(info, &instance));
    pthread_mutex_lock(&lock);
    read_environment();
    demand(instance_count < MAX_INSTANCES, "too many instances since the start", "vkCreateInstance");
    instances[instance_count] = instance;
    *out = &instances[instance_count++];
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

VOID_CALL(vkDestroyInstance, void *instance, const void *allocator) {
    (void)allocator;
    FIND_OR_LEAVE(instance == NULL ? by_nothing : by_instance, instance);
    pthread_mutex_lock(&lock);
    if (instance != NULL)
        ((Instance *)instance)->alive = false;
    pthread_mutex_unlock(&lock);
}

CALL(vkEnumeratePhysicalDevices, void *instance, uint32_t *count, void **out) {
    FIND(by_instance, instance);
    pthread_mutex_lock(&lock);
    const List list = enumerated(instance);
    VkResult result = room(list.count, count, out);
    for (uint32_t i = 0; out != NULL && i < *count; i++)
        out[i] = &handles[list.at[i]->place];
    pthread_mutex_unlock(&lock);
    return result;
}

VOID_CALL(vkGetPhysicalDeviceProperties, void *device, Properties *out) {
    FIND_OR_LEAVE(by_device, device);
    give_properties(&found, out);
}

VOID_CALL(vkGetPhysicalDeviceProperties2, void *device, Properties2 *out) {
    FIND_OR_LEAVE(by_device, device);
    if (out->base.sType != PROPERTIES_2)
        return;
    give_properties(&found, &out->properties);
    for (Base *next = out->base.pNext; next != NULL; next = next->pNext)
        fill_properties(&found, next);
}

VOID_CALL(vkGetPhysicalDeviceFeatures2, void *device, Features2 *out) {
    FIND_OR_LEAVE(by_device, device);
    if (out->base.sType != FEATURES_2)
        return;
    memset(out->features, 0, sizeof out->features);
    for (Base *next = out->base.pNext; next != NULL; next = next->pNext)
        fill_features(&found, next);
}

CALL(vkEnumerateDeviceExtensionProperties, void *device, const char *layer, uint32_t *count, ExtensionProperties *out) {
    const char *names[3] = {"VK_KHR_driver_properties"};
    uint32_t total = 1;
    FIND(by_device, device);
    if (found.number[FP16])
        names[total++] = "VK_KHR_16bit_storage";
    if (found.number[PCI_INFO])
        names[total++] = "VK_EXT_pci_bus_info";
    return layer != NULL ? LAYER_NOT_PRESENT : give_extensions(names, total, count, out);
}

/* What would make a context or take memory is there only to be seen in the record: it fails. */
CALL(vkCreateDevice, void *device, const void *info, const void *allocator, void **out) {
    (void)info, (void)allocator, (void)out;
    FIND(by_device, device);
    return INITIALIZATION_FAILED;
}

CALL(vkAllocateMemory, void *device, const void *info, const void *allocator, void **out) {
    (void)device, (void)info, (void)allocator, (void)out;
    FIND(by_nothing, NULL);
    return OUT_OF_DEVICE_MEMORY;
}

/* What ggml's start-up makes of GGML_VK_VISIBLE_DEVICES: how many devices it numbers, the first `most` of which are
 * given, or -1 where it throws, and with it loses the whole backend, as it does without a driver or Vulkan 1.2. */
EXPORTED(fake_ggml_vk_devices) int fake_ggml_vk_devices(uint32_t *raw_positions, int most) {
    static const Instance of_ggml = {.alive = true, .vulkan_1_1 = true, .properties_2 = true};
    Device found;
    if (enter(__func__, by_nothing, NULL, &found) != SUCCESS)
        return -1;
    pthread_mutex_lock(&lock);
    read_environment();
    const List list = enumerated(&of_ggml);
    int count = set[GGML_VISIBLE] != NULL ? masked(&list, set[GGML_VISIBLE], raw_positions, most)
                                          : unmasked(&list, raw_positions, most);
    pthread_mutex_unlock(&lock);
    return found.version < VERSION_1_2 ? -1 : count;
}

typedef void (*Any)(void);
EXPORTED(vkGetInstanceProcAddr) Any vkGetInstanceProcAddr(void *instance, const char *name);

/* A symbol that is left out of the library is left out here too. The first GLOBALS need no instance. */
#define LOADED(name) {#name, (Any)name, SECOND(EXPANDED(HIDE_, WITHOUT_##name) 0, "default", 0)}
enum { GLOBALS = 4 };
static const struct {
    const char *name;
    Any call;
    const char *visibility;
} loaded[] = {LOADED(vkGetInstanceProcAddr),
              LOADED(vkEnumerateInstanceVersion),
              LOADED(vkEnumerateInstanceExtensionProperties),
              LOADED(vkCreateInstance),
              LOADED(vkDestroyInstance),
              LOADED(vkEnumeratePhysicalDevices),
              LOADED(vkGetPhysicalDeviceProperties),
              LOADED(vkGetPhysicalDeviceProperties2),
              LOADED(vkGetPhysicalDeviceFeatures2),
              LOADED(vkEnumerateDeviceExtensionProperties),
              LOADED(vkCreateDevice),
              LOADED(vkAllocateMemory)};

Any vkGetInstanceProcAddr(void *instance, const char *name) {
    Device found;
    if (enter(__func__, instance == NULL ? by_nothing : by_instance, instance, &found) != SUCCESS)
        return NULL;
    for (unsigned i = 0; i < (instance == NULL ? GLOBALS : sizeof loaded / sizeof *loaded); i++)
        if (strcmp(loaded[i].name, name) == 0 && strcmp(loaded[i].visibility, "default") == 0)
            return loaded[i].call;
    return NULL;
}
