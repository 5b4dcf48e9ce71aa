/* Virtual memory: chunks (cuMemCreate), address reservations, mappings.
 *
 * A chunk is a file like any device memory, followed by one page that says which chunk it is: a descriptor is all that
 * an importer has, and its exporter may be dead by then. No descriptor is kept open; an anchor mapping without access
 * holds the pages, and cuMemMap makes further mappings of the anchor. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "process.h"

struct trailer {
    char magic[8];
    uint64_t allocation;
    uint64_t bytes;
    uint32_t device;
    int32_t owner_pid;
};
static const char MAGIC[8] = "fakevmm";
enum { TRAILER_BYTES = 4096, FABRIC = 8 };

struct chunk {
    void *anchor; /* NULL: unused entry */
    uint64_t allocation;
    uint64_t bytes;
    uint32_t device;
    uint32_t handles;  /* references by handle */
    uint32_t mappings; /* references by address */
    int handle_types;
};

struct reservation {
    uint64_t base;
    uint64_t bytes;
};

static struct chunk *chunks;
static size_t chunk_count;
static struct reservation *reservations;
static size_t reservation_count;

/* Handles are index + 1, shifted so that they are no small number. */
static CUmemGenericAllocationHandle handle_of(const struct chunk *chunk) {
    return ((uint64_t)(chunk - chunks) + 1) << 8;
}

static struct chunk *chunk_of_handle(CUmemGenericAllocationHandle handle) {
    const uint64_t index = (handle >> 8) - 1;
    if (handle & 255 || index >= chunk_count || !chunks[index].anchor || !chunks[index].handles)
        return NULL;
    return &chunks[index];
}

static struct chunk *new_chunk(void) {
    for (size_t index = 0; index < chunk_count; index++)
        if (!chunks[index].anchor)
            return &chunks[index];
    struct chunk *more = realloc(chunks, (chunk_count * 2 + 64) * sizeof *chunks);
    if (!more)
        return NULL;
    chunks = more;
    const size_t added = chunk_count + 64;
    memset(chunks + chunk_count, 0, added * sizeof *chunks);
    struct chunk *first = &chunks[chunk_count];
    chunk_count += added;
    return first;
}

static void drop_if_unused(struct chunk *chunk) {
    if (chunk->handles || chunk->mappings)
        return;
    munmap(chunk->anchor, chunk->bytes);
    chunk->anchor = NULL;
    for (size_t index = 0; index < chunk_count; index++)
        if (chunks[index].anchor && chunks[index].allocation == chunk->allocation)
            return; /* imported twice: the other one still holds it */
    state_lock();
    state_drop_reference(chunk->allocation);
    state_unlock();
}

int chunk_handle_types(uint32_t index) {
    return chunks[index].handle_types;
}

static bool good_properties(const CUmemAllocationProp *properties) {
    return properties && properties->type == 1 && properties->location.type == 1 && properties->location.id >= 0 &&
           (uint32_t)properties->location.id < visible_devices();
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties, int option) {
    ENTER(cuMemGetAllocationGranularity);
    if (!granularity || !good_properties(properties) || option < 0 || option > 1)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "properties or option");
    *granularity = settings()->granularity;
    return CUDA_SUCCESS;
}

/* Under both locks. */
static CUresult create(struct chunk *chunk) {
    int fd;
    const CUresult code = state_allocate(chunk->device, chunk->bytes, CHUNK, &chunk->allocation, &fd);
    if (code != CUDA_SUCCESS)
        return code;
    struct trailer trailer = {.allocation = chunk->allocation, .bytes = chunk->bytes, .device = chunk->device};
    trailer.owner_pid = state_join()->pid;
    memcpy(trailer.magic, MAGIC, sizeof MAGIC);
    void *anchor = MAP_FAILED;
    if (!ftruncate(fd, (off_t)chunk->bytes + TRAILER_BYTES) &&
        pwrite(fd, &trailer, sizeof trailer, (off_t)chunk->bytes) == sizeof trailer)
        anchor = mmap(NULL, chunk->bytes, PROT_NONE, MAP_SHARED, fd, 0);
    close(fd);
    if (anchor != MAP_FAILED) {
        chunk->anchor = anchor;
        return CUDA_SUCCESS;
    }
    state_drop_reference(chunk->allocation);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    ENTER(cuMemCreate);
    if (!handle || !good_properties(properties) || flags || !bytes || bytes % settings()->granularity)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%zu bytes, or properties", bytes);
    if (properties->requested_handle_types & FABRIC && !settings()->imex)
        REFUSE(CUDA_ERROR_NOT_PERMITTED, "fabric handles need IMEX");
    CUresult code = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&process_lock);
    struct chunk *chunk = new_chunk();
    if (chunk) {
        *chunk = (struct chunk){.bytes = bytes, .device = physical_device(properties->location.id)};
        chunk->handle_types = properties->requested_handle_types;
        state_lock();
        code = create(chunk);
        state_unlock();
        chunk->handles = code == CUDA_SUCCESS;
        *handle = handle_of(chunk);
    }
    pthread_mutex_unlock(&process_lock);
    return code;
}

#define WITH_CHUNK(handle) \
    pthread_mutex_lock(&process_lock); \
    struct chunk *chunk = chunk_of_handle(handle); \
    if (!chunk) { \
        pthread_mutex_unlock(&process_lock); \
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no chunk has the handle %#llx", (unsigned long long)(handle)); \
    }

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(cuMemRelease);
    WITH_CHUNK(handle)
    chunk->handles--;
    drop_if_unused(chunk);
    pthread_mutex_unlock(&process_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                       CUmemGenericAllocationHandle handle) {
    ENTER(cuMemGetAllocationPropertiesFromHandle);
    if (!properties)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    WITH_CHUNK(handle)
    *properties = (CUmemAllocationProp){.type = 1, .requested_handle_types = chunk->handle_types};
    properties->location = (CUmemLocation){.type = 1, .id = ordinal_of(chunk->device)};
    pthread_mutex_unlock(&process_lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER(cuMemRetainAllocationHandle);
    pthread_mutex_lock(&process_lock);
    const struct range *range = range_of((uint64_t)(uintptr_t)address);
    const bool found = handle && range && range->kind == MAPPED;
    if (found) {
        chunks[range->chunk].handles++;
        *handle = handle_of(&chunks[range->chunk]);
    }
    pthread_mutex_unlock(&process_lock);
    if (!found)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%p is not in a mapped chunk", address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemExportToShareableHandle(void *descriptor, CUmemGenericAllocationHandle handle, int type,
                                             unsigned long long flags) {
    ENTER(cuMemExportToShareableHandle);
    if (settings()->mig)
        REFUSE(CUDA_ERROR_NOT_SUPPORTED, "a MIG slice has no IPC");
    if (!descriptor || type != 1 || flags)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "handle type %d: only descriptors", type);
    WITH_CHUNK(handle)
    const bool allowed = chunk->handle_types & 1;
    const int fd = allowed ? state_open(chunk->allocation) : -1;
    pthread_mutex_unlock(&process_lock);
    if (!allowed)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "made without a handle type that can be exported");
    if (fd < 0)
        REFUSE(CUDA_ERROR_OPERATING_SYSTEM, "no descriptor to be had");
    *(int *)descriptor = fd;
    return CUDA_SUCCESS;
}

static bool read_trailer(int fd, struct trailer *trailer) {
    struct stat status;
    return !fstat(fd, &status) && S_ISREG(status.st_mode) && status.st_size > TRAILER_BYTES &&
           pread(fd, trailer, sizeof *trailer, status.st_size - TRAILER_BYTES) == sizeof *trailer &&
           !memcmp(trailer->magic, MAGIC, sizeof MAGIC) &&
           trailer->bytes == (uint64_t)status.st_size - TRAILER_BYTES;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor, int type) {
    ENTER(cuMemImportFromShareableHandle);
    struct trailer trailer;
    const int fd = (int)(intptr_t)descriptor;
    if (!handle || type != 1 || !read_trailer(fd, &trailer))
        REFUSE(CUDA_ERROR_INVALID_VALUE, "descriptor %d is no chunk", fd);
    CUresult code = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&process_lock);
    void *anchor = mmap(NULL, trailer.bytes, PROT_NONE, MAP_SHARED, fd, 0);
    struct chunk *chunk = anchor == MAP_FAILED ? NULL : new_chunk();
    state_lock();
    if (chunk && state_revive(trailer.allocation, trailer.device, trailer.bytes, CHUNK, trailer.owner_pid))
        code = CUDA_SUCCESS;
    state_unlock();
    if (code == CUDA_SUCCESS) {
        *chunk = (struct chunk){.anchor = anchor, .allocation = trailer.allocation, .bytes = trailer.bytes};
        chunk->device = trailer.device;
        chunk->handles = 1;
        chunk->handle_types = 1;
        *handle = handle_of(chunk);
    } else if (anchor != MAP_FAILED) {
        munmap(anchor, trailer.bytes);
    }
    pthread_mutex_unlock(&process_lock);
    return code;
}

/* --- addresses ---------------------------------------------------------------------------------------------------- */

static struct reservation *reservation_around(uint64_t address, uint64_t bytes) {
    for (size_t index = 0; index < reservation_count; index++) {
        struct reservation *reservation = &reservations[index];
        if (reservation->bytes && address >= reservation->base && bytes <= reservation->bytes &&
            address - reservation->base <= reservation->bytes - bytes)
            return reservation;
    }
    return NULL;
}

static bool anything_mapped(uint64_t address, uint64_t bytes) {
    for (size_t index = 0; index < range_count; index++)
        if (ranges[index].base < address + bytes && address < ranges[index].base + ranges[index].bytes)
            return true;
    return false;
}

bool reservation_of(uint64_t address, uint64_t *base, uint64_t *bytes) {
    const struct reservation *reservation = reservation_around(address, 1);
    if (reservation) {
        *base = reservation->base;
        *bytes = reservation->bytes;
    }
    return reservation != NULL;
}

static void *reserve(uint64_t bytes, uint64_t alignment) {
    uint8_t *space = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED)
        return NULL;
    uint8_t *base = (uint8_t *)(((uintptr_t)space + alignment - 1) & ~(uintptr_t)(alignment - 1));
    if (base > space)
        munmap(space, (size_t)(base - space));
    munmap(base + bytes, (size_t)(space + alignment - base));
    return base;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
    ENTER(cuMemAddressReserve);
    const uint64_t grain = settings()->granularity;
    const uint64_t aligned = alignment > grain ? alignment : grain;
    (void)wanted; /* a hint */
    if (!address || !bytes || bytes % grain || alignment & (alignment - 1) || flags)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%zu bytes, alignment %zu", bytes, alignment);
    pthread_mutex_lock(&process_lock);
    size_t index = 0;
    while (index < reservation_count && reservations[index].bytes)
        index++;
    if (index == reservation_count) {
        struct reservation *more = realloc(reservations, (index + 1) * sizeof *more);
        if (more) {
            reservations = more;
            reservations[reservation_count++] = (struct reservation){0, 0};
        }
    }
    void *base = index < reservation_count ? reserve(bytes, aligned) : NULL;
    if (base)
        reservations[index] = (struct reservation){(uint64_t)(uintptr_t)base, bytes};
    pthread_mutex_unlock(&process_lock);
    if (!base)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (uint64_t)(uintptr_t)base;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER(cuMemAddressFree);
    pthread_mutex_lock(&process_lock);
    struct reservation *reservation = reservation_around(address, bytes);
    const bool whole = reservation && reservation->base == address && reservation->bytes == bytes;
    const bool mapped = whole && anything_mapped(address, bytes);
    if (whole && !mapped) {
        munmap((void *)(uintptr_t)address, bytes);
        *reservation = (struct reservation){0, 0};
    }
    pthread_mutex_unlock(&process_lock);
    if (!whole)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "not a whole reservation");
    if (mapped)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "chunks are still mapped there");
    return CUDA_SUCCESS;
}

/* Under the lock. */
static CUresult map(uint64_t address, uint64_t bytes, struct chunk *chunk, const char **why) {
    *why = "not inside a reservation, or not the whole chunk";
    if (!reservation_around(address, bytes) || bytes != chunk->bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *why = "something is mapped there";
    if (anything_mapped(address, bytes))
        return CUDA_ERROR_ALREADY_MAPPED;
    struct range range = {.base = address, .bytes = bytes, .kind = MAPPED, .device = chunk->device};
    range.allocation = chunk->allocation;
    range.buffer_id = next_buffer_id();
    range.chunk = (uint32_t)(chunk - chunks);
    /* An old size of 0 makes a second mapping of the same pages. */
    *why = "the system has no mapping left";
    if (mremap(chunk->anchor, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)address) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!range_insert(&range))
        return CUDA_ERROR_OUT_OF_MEMORY;
    chunk->mappings++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    ENTER(cuMemMap);
    if (flags || offset || !bytes || bytes % settings()->granularity || address % settings()->granularity)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%zu bytes at offset %zu", bytes, offset);
    WITH_CHUNK(handle)
    const char *why;
    const CUresult code = map(address, bytes, chunk, &why);
    pthread_mutex_unlock(&process_lock);
    if (code != CUDA_SUCCESS)
        REFUSE(code, "%s", why);
    return CUDA_SUCCESS;
}

/* Whether mappings, each whole, cover exactly this. */
static bool whole_mappings(uint64_t address, uint64_t bytes) {
    uint64_t at = address;
    while (at < address + bytes) {
        const struct range *range = range_of(at);
        if (!range || range->kind != MAPPED || range->base != at || range->bytes > address + bytes - at)
            return false;
        at += range->bytes;
    }
    return at == address + bytes && bytes;
}

static void unmap_one(struct range *range) {
    struct chunk *chunk = &chunks[range->chunk];
    mmap((void *)(uintptr_t)range->base, range->bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0); /* reserved again */
    range_remove(range);
    chunk->mappings--;
    drop_if_unused(chunk);
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER(cuMemUnmap);
    CUresult code = CUDA_SUCCESS;
    pthread_mutex_lock(&process_lock);
    if (!whole_mappings(address, bytes)) {
        code = CUDA_ERROR_INVALID_VALUE;
    } else if (work_touches(address, bytes)) {
        code = CUDA_ERROR_ILLEGAL_ADDRESS;
        lose_context(range_of(address)->device, code);
    } else {
        for (struct range *range; (range = range_of(address)) && bytes;) {
            address += range->bytes;
            bytes -= range->bytes;
            unmap_one(range);
        }
    }
    pthread_mutex_unlock(&process_lock);
    if (code == CUDA_ERROR_ILLEGAL_ADDRESS)
        REFUSE(code, "unmapped while copies are under way");
    if (code != CUDA_SUCCESS)
        REFUSE(code, "not whole mappings");
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    ENTER(cuMemSetAccess);
    if (!access || count != 1 || access->location.type != 1 || access->location.id < 0 ||
        (uint32_t)access->location.id >= visible_devices() ||
        (access->flags != 0 && access->flags != 1 && access->flags != 3))
        REFUSE(CUDA_ERROR_INVALID_VALUE, "access descriptions");
    pthread_mutex_lock(&process_lock);
    const bool good = whole_mappings(address, bytes);
    const int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : access->flags ? PROT_READ : PROT_NONE;
    for (uint64_t at = address; good && at < address + bytes;) {
        struct range *range = range_of(at);
        if (range->device == physical_device(access->location.id)) {
            mprotect((void *)(uintptr_t)range->base, range->bytes, protection);
            range->access = access->flags;
        }
        at += range->bytes;
    }
    pthread_mutex_unlock(&process_lock);
    if (!good)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "not whole mappings");
    return CUDA_SUCCESS;
}

/* Under the lock: everything this process mapped, reserved and holds. */
void chunks_forget(void) {
    for (size_t index = range_count; index-- > 0;)
        if (ranges[index].kind == MAPPED)
            unmap_one(&ranges[index]);
    for (size_t index = 0; index < reservation_count; index++)
        if (reservations[index].bytes)
            munmap((void *)(uintptr_t)reservations[index].base, reservations[index].bytes);
    reservation_count = 0;
    for (size_t index = 0; index < chunk_count; index++)
        if (chunks[index].anchor) {
            chunks[index].handles = 0;
            drop_if_unused(&chunks[index]);
        }
}
