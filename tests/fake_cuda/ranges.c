/* Device addresses of this process: a sorted array. All of it needs the process's lock. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "process.h"

struct range *ranges;
size_t range_count;
static size_t range_room;
static uint64_t last_buffer_id;

static const uint64_t BIG = 2ULL << 20; /* the driver aligns memory of this size and more to as much */

uint64_t next_buffer_id(void) {
    return ++last_buffer_id;
}

/* Index of the first range that begins above the address. */
static size_t above(uint64_t address) {
    size_t low = 0, high = range_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (ranges[middle].base > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct range *range_of(uint64_t address) {
    const size_t index = above(address);
    if (!index)
        return NULL;
    struct range *range = &ranges[index - 1];
    return address - range->base < range->bytes ? range : NULL;
}

bool range_insert(const struct range *range) {
    if (range_count == range_room) {
        const size_t room = range_room ? range_room * 2 : 64;
        struct range *larger = realloc(ranges, room * sizeof *ranges);
        if (!larger)
            return false;
        ranges = larger;
        range_room = room;
    }
    const size_t index = above(range->base);
    memmove(ranges + index + 1, ranges + index, (range_count - index) * sizeof *ranges);
    ranges[index] = *range;
    range_count++;
    return true;
}

void range_remove(struct range *range) {
    const size_t index = (size_t)(range - ranges);
    memmove(ranges + index, ranges + index + 1, (range_count - index - 1) * sizeof *ranges);
    range_count--;
}

bool device_covers(uint64_t address, uint64_t bytes, bool write) {
    if (address + bytes < address)
        return false;
    uint64_t at = address;
    do {
        const struct range *range = range_of(at);
        if (!range || !(range->access & (write ? 2 : 1)))
            return false;
        /* Allocations that happen to be neighbours are still two; chunks mapped side by side are one. */
        if (at != address && range->kind != MAPPED)
            return false;
        at = range->base + range->bytes;
        if (at < address + bytes && range->kind != MAPPED)
            return false;
    } while (at < address + bytes);
    return true;
}

uint64_t map_device_memory(int fd, uint64_t bytes, uint64_t wanted) {
    bytes = (bytes + 4095) & ~(uint64_t)4095;
    const int access = PROT_READ | PROT_WRITE;
    if (wanted) {
        void *there = mmap((void *)(uintptr_t)wanted, bytes, access, MAP_SHARED | MAP_FIXED, fd, 0);
        if (there != MAP_FAILED)
            return (uint64_t)(uintptr_t)there;
    }
    const uint64_t alignment = bytes >= BIG ? BIG : 4096;
    uint8_t *space = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED)
        return 0;
    uint8_t *base = (uint8_t *)(((uintptr_t)space + alignment - 1) & ~(uintptr_t)(alignment - 1));
    if (base > space)
        munmap(space, (size_t)(base - space));
    if (base + bytes < space + bytes + alignment)
        munmap(base + bytes, (size_t)(space + alignment - base));
    if (mmap(base, bytes, access, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        munmap(base, bytes);
        return 0;
    }
    return (uint64_t)(uintptr_t)base;
}
