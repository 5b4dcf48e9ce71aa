#define _GNU_SOURCE
#include "entry.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "faults.h"
#include "process.h"

/* Their types are in the rooms that define them; here only the addresses matter. */
#define AS_INFO(symbol, name, since, needs) {#symbol, name, since, needs, fake_cuda_address_##symbol},
#define AS_ADDRESS(symbol, name, since, needs) extern void fake_cuda_address_##symbol(void) __asm__(#symbol);
FAKE_CUDA_FUNCTIONS(AS_ADDRESS)
const struct function_info functions[FUNCTIONS] = {FAKE_CUDA_FUNCTIONS(AS_INFO)};

int function_is(enum function function, const char *text) {
    return !strcmp(text, functions[function].symbol) || !strcmp(text, functions[function].name);
}

int is_sticky(CUresult code) {
    switch (code) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_INVALID_GRAPHICS_CONTEXT:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_UNKNOWN:
        return 1;
    default:
        return code >= CUDA_ERROR_HARDWARE_STACK_ERROR && code <= CUDA_ERROR_LAUNCH_FAILED;
    }
}

/* Works whatever has become of the context. */
static bool outlives_context(enum function function) {
    return function <= F_cuDeviceGetPCIBusId ||
           (function >= F_cuDevicePrimaryCtxRelease_v2 && function <= F_cuCtxPopCurrent_v2);
}

/* Faults of the environment are armed before the first call of the process is judged. */
static struct process *join(void) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static bool armed;
    struct process *process = state_join();
    if (!process)
        return NULL;
    pthread_mutex_lock(&once);
    if (!armed)
        faults_from_settings(process);
    armed = true;
    pthread_mutex_unlock(&once);
    return process;
}

static CUresult judge_context(enum function function) {
    const enum needs needs = functions[function].needs;
    if (needs == NEEDS_NOTHING)
        return CUDA_SUCCESS;
    if (!driver_is_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (outlives_context(function))
        return CUDA_SUCCESS;
    pthread_mutex_lock(&process_lock);
    const struct context *context = current_context();
    CUresult code = lost_code();
    if (needs == NEEDS_CONTEXT && !context)
        code = CUDA_ERROR_INVALID_CONTEXT;
    else if (needs == NEEDS_CONTEXT && !context->retained)
        code = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    pthread_mutex_unlock(&process_lock);
    return code;
}

CUresult enter(enum function function, CUresult *injected) {
    if (injected)
        *injected = CUDA_SUCCESS;
    if (function == F_cuGetErrorName || function == F_cuGetErrorString)
        return CUDA_SUCCESS;
    struct process *process = join();
    if (!process) /* no folder, or a forked child, for which the driver does nothing */
        return settings() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_NO_DEVICE;
    const uint64_t call = atomic_fetch_add(&process->calls[function], 1) + 1;
    const CUresult struck = fault_strike(process, function, call);
    const CUresult judged = judge_context(function);
    if (judged != CUDA_SUCCESS)
        return judged == CUDA_ERROR_INVALID_CONTEXT ? refuse(function, judged, "no context is current in this thread")
                                                    : judged;
    if (capture_forbids(function))
        return refuse(function, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a stream is being captured");
    if (struck == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    if (is_sticky(struck)) {
        pthread_mutex_lock(&process_lock);
        if (current_context())
            lose_context(current_context()->device, struck);
        pthread_mutex_unlock(&process_lock);
        return struck;
    }
    if (!injected)
        return struck;
    *injected = struck;
    return CUDA_SUCCESS;
}

CUresult refuse(enum function function, CUresult code, const char *why, ...) {
    char line[600];
    int length = snprintf(line, sizeof line, "%d %s %d ", (int)getpid(), functions[function].symbol, code);
    va_list values;
    va_start(values, why);
    length += vsnprintf(line + length, sizeof line - (size_t)length - 1, why, values);
    va_end(values);
    if (length > (int)sizeof line - 2)
        length = (int)sizeof line - 2;
    line[length++] = '\n';
    char path[300];
    snprintf(path, sizeof path, "%s/refusals", settings()->folder);
    const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) {
        if (write(fd, line, (size_t)length) < 0) {
            /* A note that is lost changes no result. */
        }
        close(fd);
    }
    return code;
}
