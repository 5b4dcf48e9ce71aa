/* Primary contexts, and which one is current in a thread. */
#define _GNU_SOURCE
#include <time.h>

#include "process.h"

struct context contexts[DEVICES];
pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t progress = PTHREAD_COND_INITIALIZER;

enum { DEPTH = 64 };
static _Thread_local CUcontext stack[DEPTH];
static _Thread_local int depth;

CUcontext current_context(void) {
    return depth ? stack[depth - 1] : NULL;
}

uint32_t current_device(void) {
    return current_context()->device;
}

CUresult lost_code(void) {
    for (int device = 0; device < DEVICES; device++)
        if (contexts[device].lost != CUDA_SUCCESS)
            return contexts[device].lost;
    return CUDA_SUCCESS;
}

void lose_context(uint32_t device, CUresult code) {
    if (contexts[device].lost == CUDA_SUCCESS)
        contexts[device].lost = code;
    pthread_cond_broadcast(&progress);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(cuDevicePrimaryCtxRetain);
    if (!context || device < 0 || (uint32_t)device >= visible_devices())
        REFUSE(CUDA_ERROR_INVALID_DEVICE, "device %d", device);
    const uint32_t physical = physical_device(device);
    struct context *own = &contexts[physical];
    CUresult code = CUDA_SUCCESS;
    pthread_mutex_lock(&process_lock);
    if (!own->retained) {
        struct process *process = state_join();
        state_lock();
        if (settings()->context_code)
            code = settings()->context_code;
        else if (!state_has_room(physical, settings()->context_bytes))
            code = CUDA_ERROR_OUT_OF_MEMORY;
        else
            atomic_fetch_or(&process->contexts, 1u << physical);
        state_unlock();
        own->device = physical;
        if (code == CUDA_SUCCESS && settings()->context_us) {
            const uint64_t us = settings()->context_us;
            stop_links(physical, us);
            nanosleep(&(struct timespec){.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000},
                      NULL);
        }
    }
    if (code == CUDA_SUCCESS) {
        own->retained++;
        *context = own;
    }
    pthread_mutex_unlock(&process_lock);
    return code;
}

/* All that lived in the context goes with it. */
static void destroy(struct context *own) {
    streams_end(own->device);
    pthread_mutex_lock(&process_lock);
    ranges_forget(own->device);
    registrations_forget(own->device);
    own->lost = CUDA_SUCCESS;
    atomic_fetch_and(&state_join()->contexts, ~(1u << own->device));
    pthread_mutex_unlock(&process_lock);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(cuDevicePrimaryCtxRelease_v2);
    if (device < 0 || (uint32_t)device >= visible_devices())
        REFUSE(CUDA_ERROR_INVALID_DEVICE, "device %d", device);
    struct context *own = &contexts[physical_device(device)];
    pthread_mutex_lock(&process_lock);
    const bool held = own->retained > 0;
    const bool last = held && --own->retained == 0;
    pthread_mutex_unlock(&process_lock);
    if (!held)
        REFUSE(CUDA_ERROR_INVALID_CONTEXT, "released more often than retained");
    if (last)
        destroy(own);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER(cuDevicePrimaryCtxGetState);
    if (!flags || !active || device < 0 || (uint32_t)device >= visible_devices())
        REFUSE(CUDA_ERROR_INVALID_DEVICE, "device %d", device);
    pthread_mutex_lock(&process_lock);
    *flags = 0;
    *active = contexts[physical_device(device)].retained > 0;
    pthread_mutex_unlock(&process_lock);
    return CUDA_SUCCESS;
}

static bool is_context(CUcontext context) {
    return context >= contexts && context < contexts + DEVICES && context->retained;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(cuCtxSetCurrent);
    if (context && !is_context(context))
        REFUSE(CUDA_ERROR_INVALID_CONTEXT, "not a context that is retained");
    if (depth)
        depth--; /* replaces the top; NULL only removes it */
    if (context)
        stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(cuCtxGetCurrent);
    if (!context)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    *context = current_context();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(cuCtxPushCurrent_v2);
    if (!is_context(context) || depth == DEPTH)
        REFUSE(CUDA_ERROR_INVALID_CONTEXT, "not a context that is retained, or %d deep", depth);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(cuCtxPopCurrent_v2);
    if (!depth)
        REFUSE(CUDA_ERROR_INVALID_CONTEXT, "no context is current");
    depth--;
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(cuCtxGetDevice);
    if (!device)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    *device = ordinal_of(current_device());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void) {
    ENTER(cuCtxSynchronize);
    return streams_drain(current_device());
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(cuCtxGetStreamPriorityRange);
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}
