/* Words that a stream writes or waits for, functions of the host in a stream, and fills. */
#include "process.h"

static CUresult word(enum function self, enum operation_kind kind, CUstream stream, CUdeviceptr address,
                     uint64_t value, unsigned flags) {
    if (settings()->memops_refused)
        REFUSE(CUDA_ERROR_NOT_SUPPORTED, "stream memory operations are switched off");
    pthread_mutex_lock(&process_lock);
    const bool reachable = device_covers(address, 8, true) || registered(address, 8);
    pthread_mutex_unlock(&process_lock);
    if (!reachable || address % 8)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%#llx is no word that the device can reach", (unsigned long long)address);
    struct operation *operation = operation_new(kind);
    operation->address = address;
    operation->bytes = 8;
    operation->value = value;
    operation->flags = flags;
    return stream_submit(self, stream, operation);
}

EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    ENTER(cuStreamWriteValue64_v2);
    if (flags)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "flags %u: without its barrier the write could overtake the work", flags);
    return word(self, WRITE_VALUE, stream, address, value, flags);
}

EXPORT CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    ENTER(cuStreamWaitValue64_v2);
    if (flags > 3)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "flags %u", flags);
    return word(self, WAIT_VALUE, stream, address, value, flags);
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *argument) {
    ENTER(cuLaunchHostFunc);
    if (!function)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no function");
    struct operation *operation = operation_new(HOST_FUNCTION);
    operation->function = function;
    operation->argument = argument;
    return stream_submit(self, stream, operation);
}

static struct operation *fill(CUdeviceptr address, unsigned char value, size_t bytes) {
    pthread_mutex_lock(&process_lock);
    const bool good = bytes && device_covers(address, bytes, true);
    pthread_mutex_unlock(&process_lock);
    if (!good)
        return NULL;
    struct operation *operation = operation_new(FILL);
    operation->address = address;
    operation->bytes = bytes;
    operation->value = value;
    return operation;
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t bytes) {
    ENTER(cuMemsetD8_v2);
    struct operation *operation = fill(address, value, bytes);
    if (!operation)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%zu bytes that are no device memory", bytes);
    return stream_run(self, operation);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream) {
    ENTER(cuMemsetD8Async);
    struct operation *operation = fill(address, value, bytes);
    if (!operation)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%zu bytes that are no device memory", bytes);
    return stream_submit(self, stream, operation);
}
