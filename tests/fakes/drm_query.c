/* Answers the memory region queries of i915 and xe for files that stand in for DRM devices: a library to be preloaded.
 *
 * The file named by FAKE_DRM_STATE is read at every query. A line is
 *
 *   region FILE CLASS TOTAL FREE    FILE is the last part of the device file's path; CLASS 0 is the system's memory, 1 the
 *                                   card's. Both drivers' queries are answered from it: xe's says TOTAL - FREE for used.
 *   error FILE ERRNO                the ioctl fails with that number
 *   blind FILE                      the process has no right for counts: i915 says that all is free, xe that 0 is used
 *
 * A file without a line has no such query (ENOTTY), as has every other ioctl on it. The structs are those of the kernel's
 * include/uapi/drm/{i915,xe}_drm.h, and the numbers of the calls are made from their sizes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

struct i915_query { uint32_t num_items, flags; uint64_t items_ptr; };
struct i915_item { uint64_t query_id; int32_t length; uint32_t flags; uint64_t data_ptr; };
struct i915_region {
    uint16_t memory_class, memory_instance; uint32_t rsvd0;
    uint64_t probed_size, unallocated_size;
    union { uint64_t rsvd1[8]; struct { uint64_t probed_cpu_visible_size, unallocated_cpu_visible_size; }; };
};
struct i915_regions { uint32_t num_regions, rsvd[3]; struct i915_region regions[16]; };
struct xe_query { uint64_t extensions; uint32_t query, size; uint64_t data, reserved[2]; };
struct xe_region {
    uint16_t mem_class, instance; uint32_t min_page_size;
    uint64_t total_size, used, cpu_visible_size, cpu_visible_used, reserved[6];
};
struct xe_regions { uint32_t num_mem_regions, pad; struct xe_region mem_regions[16]; };

#define I915_QUERY _IOWR('d', 0x40 + 0x39, struct i915_query)
#define XE_QUERY _IOWR('d', 0x40 + 0x00, struct xe_query)

typedef struct { int count, error, blind, known; struct { int kind; uint64_t total, free; } regions[16]; } Card;

static Card state_of(int fd) {
    Card card = {0};
    char link[64], path[4096], line[512], name[256];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    const char *file = getenv("FAKE_DRM_STATE");
    FILE *state = length > 0 && file ? fopen(file, "r") : NULL;
    if (!state) return card;
    path[length] = 0;
    const char *base = strrchr(path, '/') + 1;
    while (fgets(line, sizeof line, state)) {
        int kind, number;
        unsigned long long total, available;
        if (sscanf(line, "region %255s %d %llu %llu", name, &kind, &total, &available) == 4 && !strcmp(name, base)) {
            card.known = 1;
            card.regions[card.count].kind = kind;
            card.regions[card.count].total = total;
            card.regions[card.count++].free = available;
        } else if (sscanf(line, "error %255s %d", name, &number) == 2 && !strcmp(name, base)) {
            card.error = number;
        } else if (sscanf(line, "blind %255s", name) == 1 && !strcmp(name, base)) {
            card.blind = 1;
        }
    }
    fclose(state);
    return card;
}

static int fail(int number) { errno = number; return -1; }

static int answer_i915(const Card *card, struct i915_query *query) {
    struct i915_item *item = (void *)(uintptr_t)query->items_ptr;
    int length = (int)(16 + card->count * sizeof(struct i915_region));
    if (query->num_items != 1 || query->flags) return fail(EINVAL);
    if (item->query_id != 4) { item->length = -EINVAL; return 0; }
    if (item->length == 0) { item->length = length; return 0; }
    if (item->length < length) { item->length = -EINVAL; return 0; }
    struct i915_regions *out = (void *)(uintptr_t)item->data_ptr;
    memset(out, 0, length);
    out->num_regions = card->count;
    for (int i = 0; i < card->count; i++) {
        out->regions[i].memory_class = card->regions[i].kind;
        out->regions[i].probed_size = card->regions[i].total;
        out->regions[i].unallocated_size = card->blind ? card->regions[i].total : card->regions[i].free;
    }
    item->length = length;
    return 0;
}

static int answer_xe(const Card *card, struct xe_query *query) {
    uint32_t length = 8 + card->count * sizeof(struct xe_region);
    if (query->extensions || query->reserved[0] || query->reserved[1] || query->query != 1) return fail(EINVAL);
    if (query->size == 0) { query->size = length; return 0; }
    if (query->size != length) return fail(EINVAL);
    struct xe_regions *out = (void *)(uintptr_t)query->data;
    memset(out, 0, length);
    out->num_mem_regions = card->count;
    for (int i = 0; i < card->count; i++) {
        out->mem_regions[i].mem_class = card->regions[i].kind;
        out->mem_regions[i].min_page_size = 65536;
        out->mem_regions[i].total_size = card->regions[i].total;
        out->mem_regions[i].used = card->blind ? 0 : card->regions[i].total - card->regions[i].free;
    }
    return 0;
}

int ioctl(int fd, unsigned long request, ...) {
    static int (*real)(int, unsigned long, ...);
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    request &= 0xffffffffUL;
    if (request == I915_QUERY || request == XE_QUERY) {
        Card card = state_of(fd);
        if (card.error) return fail(card.error);
        if (!card.known) return fail(ENOTTY);
        return request == I915_QUERY ? answer_i915(&card, argument) : answer_xe(&card, argument);
    }
    if (!real) real = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
    return real(fd, request, argument);
}
