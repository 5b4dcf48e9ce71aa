/* cuMemAlloc memory and its sharing through IPC handles.
 *
 * A handle names the exporter and the address, so the handle of an allocation that was freed and made anew at the same
 * address has the same bytes, as has been seen of real drivers. Addresses are given out again as soon as possible. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "process.h"

struct handle_content {
    char magic[8];
    int32_t pid;
    int32_t shown_pid; /* in its own PID namespace */
    uint64_t started;
    uint64_t address;
    uint64_t pid_namespace;
    uint32_t uid;
    uint32_t unused;
};
static const char MAGIC[8] = "fakeipc";

/* As the environment pretends at this moment, for tests without namespaces of their own, or as it is. */
static uint64_t pretended(const char *name, uint64_t real) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : real;
}

static uint64_t pid_namespace(void) {
    struct stat file;
    return pretended("FAKE_CUDA_PID_NAMESPACE", stat("/proc/self/ns/pid", &file) ? 0 : (uint64_t)file.st_ino);
}

static int32_t shown_pid(void) {
    return (int32_t)pretended("FAKE_CUDA_SHOWN_PID", (uint64_t)getpid());
}

/* The last allocation that was freed: the next of its size gets its address, which is kept free until then. */
static uint64_t freed_address;
static uint64_t freed_bytes;

static void keep_address(uint64_t address, uint64_t bytes) {
    if (freed_address)
        munmap((void *)(uintptr_t)freed_address, freed_bytes);
    void *kept = mmap((void *)(uintptr_t)address, bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    freed_address = kept == MAP_FAILED ? 0 : address;
    freed_bytes = bytes;
}

/* That address if it is of this size, else 0. */
static uint64_t kept_address(uint64_t bytes) {
    const uint64_t address = bytes == freed_bytes ? freed_address : 0;
    if (address)
        freed_address = 0;
    return address;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER(cuMemGetInfo_v2);
    if (!free_bytes || !total_bytes)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    state_lock();
    const uint64_t used = state_used_bytes(current_device(), true);
    state_unlock();
    *total_bytes = settings()->hbm_bytes;
    *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
    return CUDA_SUCCESS;
}

/* Under both locks. */
static CUresult allocate(uint64_t bytes, struct range *range) {
    int fd;
    const CUresult code = state_allocate(range->device, bytes, LEGACY, &range->allocation, &fd);
    if (code != CUDA_SUCCESS)
        return code;
    if (!ftruncate(fd, (off_t)((bytes + 4095) & ~(uint64_t)4095)))
        range->base = map_device_memory(fd, bytes, kept_address(bytes));
    close(fd);
    if (range->base && range_insert(range)) {
        state_set_address(range->allocation, range->base);
        return CUDA_SUCCESS;
    }
    state_drop_reference(range->allocation);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    ENTER(cuMemAlloc_v2);
    if (!address || !bytes)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%zu bytes", bytes);
    pthread_mutex_lock(&process_lock);
    struct range range = {.bytes = bytes, .kind = ALLOCATED, .device = current_device(), .access = 3};
    range.buffer_id = next_buffer_id();
    state_lock();
    const CUresult code = allocate(bytes, &range);
    state_unlock();
    pthread_mutex_unlock(&process_lock);
    *address = range.base;
    return code;
}

/* Under the lock. */
static void let_go(struct range *range) {
    const struct range gone = *range;
    range_remove(range);
    munmap((void *)(uintptr_t)gone.base, gone.bytes);
    state_lock();
    state_drop_reference(gone.allocation);
    state_unlock();
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(cuMemFree_v2);
    if (!address)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&process_lock);
    struct range *range = range_of(address);
    if (!range || range->kind != ALLOCATED || range->base != address) {
        pthread_mutex_unlock(&process_lock);
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%#llx is not the start of an allocation", (unsigned long long)address);
    }
    wait_for_work_on(range->base, range->bytes);
    range = range_of(address);
    if (range) { /* no other thread was faster */
        const struct range gone = *range;
        let_go(range);
        keep_address(gone.base, gone.bytes);
    }
    pthread_mutex_unlock(&process_lock);
    return CUDA_SUCCESS;
}

void ranges_forget(uint32_t device) {
    for (size_t index = range_count; index-- > 0;)
        if (ranges[index].device == device && ranges[index].kind != MAPPED)
            let_go(&ranges[index]);
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    ENTER(cuMemGetAddressRange_v2);
    pthread_mutex_lock(&process_lock);
    const struct range *range = range_of(address);
    const bool found = range != NULL;
    uint64_t first = found ? range->base : 0, size = found ? range->bytes : 0;
    if (found && range->kind == MAPPED) /* as is said of real drivers */
        reservation_of(address, &first, &size);
    if (found && base)
        *base = first;
    if (found && bytes)
        *bytes = size;
    pthread_mutex_unlock(&process_lock);
    if (!found)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%#llx is no device memory", (unsigned long long)address);
    return CUDA_SUCCESS;
}

/* --- IPC ---------------------------------------------------------------------------------------------------------- */

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER(cuIpcGetMemHandle);
    if (!handle)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    if (settings()->mig)
        REFUSE(CUDA_ERROR_NOT_SUPPORTED, "a MIG slice has no IPC");
    if (settings()->ipc_code)
        REFUSE(settings()->ipc_code, "IPC is switched off");
    pthread_mutex_lock(&process_lock);
    const struct range *range = range_of(address);
    const bool exportable = range && range->kind == ALLOCATED && range->base == address;
    struct handle_content content = {.pid = state_join()->pid, .started = state_join()->started};
    if (exportable)
        content.address = range->base;
    pthread_mutex_unlock(&process_lock);
    if (!exportable)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no cuMemAlloc memory of this process begins at %#llx", (unsigned long long)address);
    memcpy(content.magic, MAGIC, sizeof MAGIC);
    content.pid_namespace = pid_namespace();
    content.shown_pid = shown_pid();
    content.uid = (uint32_t)geteuid();
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &content, sizeof content);
    return CUDA_SUCCESS;
}

static struct range *opened_with(const CUipcMemHandle *handle) {
    for (size_t index = 0; index < range_count; index++)
        if (ranges[index].kind == IMPORTED && !memcmp(&ranges[index].handle, handle, sizeof *handle))
            return &ranges[index];
    return NULL;
}

/* Under the process's lock. */
static CUresult import(const struct handle_content *content, struct range *range) {
    const uint32_t device = current_device();
    CUresult code = CUDA_ERROR_MAP_FAILED;
    state_lock();
    const struct allocation *allocation = state_find_exported(content->pid, content->started, content->address);
    if (allocation && allocation->device != device) {
        code = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    } else if (allocation) {
        range->allocation = allocation->id;
        range->bytes = allocation->bytes;
        const int fd = state_open(allocation->id);
        if (fd >= 0) {
            range->base = map_device_memory(fd, range->bytes, 0);
            close(fd);
        }
        if (range->base && state_add_reference(range->allocation) && range_insert(range))
            code = CUDA_SUCCESS;
    }
    state_unlock();
    return code;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    ENTER(cuIpcOpenMemHandle_v2);
    struct handle_content content;
    memcpy(&content, &handle, sizeof content);
    if (!address || flags != 1 || memcmp(content.magic, MAGIC, sizeof MAGIC))
        REFUSE(CUDA_ERROR_INVALID_VALUE, "flags %u, or no handle at all", flags);
    if (settings()->mig)
        REFUSE(CUDA_ERROR_NOT_SUPPORTED, "a MIG slice has no IPC");
    const struct process *own = state_join();
    if (content.pid == own->pid && content.started == own->started)
        REFUSE(CUDA_ERROR_INVALID_CONTEXT, "a handle of this very process");
    /* What real drivers do between containers is not agreed upon: these are the refusals that were reported. */
    if (content.shown_pid == shown_pid())
        REFUSE(CUDA_ERROR_INVALID_CONTEXT, "the exporter has our own PID, %d, in its namespace", content.shown_pid);
    if (settings()->ipc_namespaces_code && content.pid_namespace != pid_namespace())
        REFUSE(settings()->ipc_namespaces_code, "the exporter is in another PID namespace");
    if (settings()->ipc_users_code && content.uid != (uint32_t)geteuid())
        REFUSE(settings()->ipc_users_code, "the exporter is user %u", content.uid);
    CUresult code = CUDA_SUCCESS;
    pthread_mutex_lock(&process_lock);
    struct range *range = opened_with(&handle);
    if (range) {
        range->opens++;
        *address = range->base;
    } else {
        struct range made = {.kind = IMPORTED, .device = current_device(), .opens = 1, .handle = handle, .access = 3};
        made.buffer_id = next_buffer_id();
        code = import(&content, &made);
        *address = made.base;
    }
    pthread_mutex_unlock(&process_lock);
    if (code != CUDA_SUCCESS)
        REFUSE(code, "the exporter %d is dead, has freed it, or it is on another device", content.pid);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(cuIpcCloseMemHandle);
    CUresult code = CUDA_SUCCESS;
    pthread_mutex_lock(&process_lock);
    struct range *range = range_of(address);
    if (!range || range->kind != IMPORTED || range->base != address) {
        code = CUDA_ERROR_INVALID_VALUE;
    } else if (range->opens > 1) {
        range->opens--;
    } else if (work_touches(range->base, range->bytes)) {
        code = CUDA_ERROR_ILLEGAL_ADDRESS; /* the device would fault on the copies that are under way */
        lose_context(range->device, code);
    } else {
        let_go(range);
    }
    pthread_mutex_unlock(&process_lock);
    if (code == CUDA_ERROR_ILLEGAL_ADDRESS)
        REFUSE(code, "closed while copies are under way");
    if (code != CUDA_SUCCESS)
        REFUSE(code, "%#llx is not an open import", (unsigned long long)address);
    return CUDA_SUCCESS;
}
