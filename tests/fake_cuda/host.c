/* Host memory that the device may reach. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "process.h"

static struct registration *registrations;
static size_t registration_count;
static size_t registration_room;

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

enum { PORTABLE = 1, DEVICE_MAP = 2, READ_ONLY = 8 };

const struct registration *registration_of(uint64_t address) {
    for (size_t index = 0; index < registration_count; index++)
        if (address >= registrations[index].base && address - registrations[index].base < registrations[index].bytes)
            return &registrations[index];
    return NULL;
}

bool registered(uint64_t address, uint64_t bytes) {
    const struct registration *found = registration_of(address);
    return found && bytes <= found->bytes && address - found->base <= found->bytes - bytes;
}

void registrations_forget(uint32_t device) {
    size_t kept = 0;
    for (size_t index = 0; index < registration_count; index++)
        if (registrations[index].device != device)
            registrations[kept++] = registrations[index];
    registration_count = kept;
}

static uint64_t page_of(uint64_t address) {
    return address & ~(uint64_t)4095;
}

static uint64_t page_end(uint64_t address) {
    return page_of(address + 4095);
}

/* Pages are pinned, so two registrations may not share one. */
static bool overlaps(uint64_t base, uint64_t bytes) {
    for (size_t index = 0; index < registration_count; index++) {
        const struct registration *one = &registrations[index];
        if (page_of(one->base) < page_end(base + bytes) && page_of(base) < page_end(one->base + one->bytes))
            return true;
    }
    return false;
}

/* Pinning faults every page in, as the real call does. */
static CUresult pin(uint64_t base, uint64_t bytes, bool read_only) {
    const uint64_t first = page_of(base);
    const uint64_t end = page_end(base + bytes);
    if (!madvise((void *)(uintptr_t)first, end - first, read_only ? MADV_POPULATE_READ : MADV_POPULATE_WRITE))
        return CUDA_SUCCESS;
    return errno == EFAULT || errno == EHWPOISON ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    ENTER(cuMemHostRegister_v2);
    const uint64_t base = (uint64_t)(uintptr_t)address;
    if (!address || !bytes || base + bytes < base || flags & ~(unsigned)(PORTABLE | DEVICE_MAP | READ_ONLY))
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%zu bytes, flags %u", bytes, flags);
    CUresult code = CUDA_SUCCESS;
    pthread_mutex_lock(&process_lock);
    if (overlaps(base, bytes))
        code = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (range_of(base))
        code = CUDA_ERROR_INVALID_VALUE;
    else
        code = pin(base, bytes, flags & READ_ONLY);
    if (code == CUDA_SUCCESS && settings()->register_us) {
        /* The process's lock is held, so its other threads' calls wait, as for the driver's own locks. */
        const uint64_t us = bytes * settings()->register_us / (1 << 20);
        nanosleep(&(struct timespec){.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000}, NULL);
    }
    if (code == CUDA_SUCCESS && registration_count == registration_room) {
        const size_t room = registration_room * 2 + 16;
        struct registration *more = realloc(registrations, room * sizeof *more);
        if (more) {
            registrations = more;
            registration_room = room;
        } else {
            code = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (code == CUDA_SUCCESS)
        registrations[registration_count++] = (struct registration){base, bytes, current_device()};
    pthread_mutex_unlock(&process_lock);
    if (code != CUDA_SUCCESS)
        REFUSE(code, "%zu bytes at %p: registered already, not mapped, or device memory", bytes, address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostUnregister(void *address) {
    ENTER(cuMemHostUnregister);
    CUresult code = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    pthread_mutex_lock(&process_lock);
    for (size_t index = 0; index < registration_count; index++) {
        const struct registration *registration = &registrations[index];
        if (registration->base != (uint64_t)(uintptr_t)address)
            continue;
        if (work_touches(registration->base, registration->bytes)) {
            code = CUDA_ERROR_ILLEGAL_ADDRESS;
            lose_context(registration->device, code);
        } else {
            registrations[index] = registrations[--registration_count];
            code = CUDA_SUCCESS;
        }
        break;
    }
    pthread_mutex_unlock(&process_lock);
    if (code != CUDA_SUCCESS)
        REFUSE(code, "%p: not the start of a registration, or copies are under way", address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *host, unsigned flags) {
    ENTER(cuMemHostGetDevicePointer_v2);
    pthread_mutex_lock(&process_lock);
    const bool good = address && !flags && registration_of((uint64_t)(uintptr_t)host);
    pthread_mutex_unlock(&process_lock);
    if (!good)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%p is not registered", host);
    *address = (uint64_t)(uintptr_t)host;
    return CUDA_SUCCESS;
}
