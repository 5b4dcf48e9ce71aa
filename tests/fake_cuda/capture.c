/* Capturing of streams into graphs, as far as it decides what else may be called meanwhile. Nothing is replayed: what is
 * submitted to a stream that is being captured is thrown away. */
#include <stdlib.h>

#include "process.h"

struct capture {
    struct capture *next;
    CUstream stream;
    const void *thread;
    int mode;
    bool broken;
};

enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

static struct capture *captures; /* under the process's lock */
static _Thread_local int mode_of_thread;
static _Thread_local char this_thread;

static struct capture *capture_of(CUstream stream) {
    for (struct capture *one = captures; one; one = one->next)
        if (one->stream == stream)
            return one;
    return NULL;
}

bool is_captured(CUstream stream) {
    return capture_of(stream) != NULL;
}

void break_capture(CUstream stream) {
    struct capture *capture = capture_of(stream);
    if (capture)
        capture->broken = true;
}

/* What the driver calls potentially unsafe: it allocates, registers, opens, or waits. */
static bool is_unsafe(enum function function) {
    switch (function) {
    case F_cuCtxSynchronize:
    case F_cuMemAlloc_v2:
    case F_cuMemFree_v2:
    case F_cuIpcGetMemHandle:
    case F_cuIpcOpenMemHandle_v2:
    case F_cuIpcCloseMemHandle:
    case F_cuMemHostRegister_v2:
    case F_cuMemHostUnregister:
    case F_cuStreamSynchronize:
    case F_cuStreamQuery:
    case F_cuStreamDestroy_v2:
    case F_cuEventQuery:
    case F_cuEventSynchronize:
    case F_cuMemcpy:
    case F_cuMemcpyHtoD_v2:
    case F_cuMemcpyDtoH_v2:
    case F_cuMemsetD8_v2:
        return true;
    default:
        return function >= F_cuMemCreate && function <= F_cuMemSetAccess;
    }
}

bool capture_forbids(enum function function) {
    if (mode_of_thread == RELAXED || !is_unsafe(function))
        return false;
    bool forbidden = false;
    pthread_mutex_lock(&process_lock);
    for (struct capture *one = captures; one; one = one->next) {
        const bool own = one->thread == &this_thread;
        if (own ? one->mode != RELAXED : one->mode == GLOBAL && mode_of_thread == GLOBAL) {
            one->broken = true;
            forbidden = true;
        }
    }
    pthread_mutex_unlock(&process_lock);
    return forbidden;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode);
    if (!mode || *mode < GLOBAL || *mode > RELAXED)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "mode");
    const int before = mode_of_thread;
    mode_of_thread = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    ENTER(cuStreamBeginCapture_v2);
    if (!stream || mode < GLOBAL || mode > RELAXED)
        REFUSE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "mode %d, or the NULL stream", mode);
    struct capture *capture = calloc(1, sizeof *capture);
    if (!capture)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *capture = (struct capture){.stream = stream, .thread = &this_thread, .mode = mode};
    pthread_mutex_lock(&process_lock);
    const bool good = is_stream(stream) && !capture_of(stream);
    if (good) {
        capture->next = captures;
        captures = capture;
    }
    pthread_mutex_unlock(&process_lock);
    if (good)
        return CUDA_SUCCESS;
    free(capture);
    REFUSE(CUDA_ERROR_INVALID_VALUE, "no stream, or one that is captured already");
}

/* The graph that comes of it is of no use here; NULL after a capture that was broken. */
EXPORT CUresult cuStreamEndCapture(CUstream stream, void **graph) {
    ENTER(cuStreamEndCapture);
    pthread_mutex_lock(&process_lock);
    struct capture *capture = capture_of(stream);
    const bool broken = capture && capture->broken;
    for (struct capture **at = &captures; capture && *at; at = &(*at)->next)
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    pthread_mutex_unlock(&process_lock);
    if (graph)
        *graph = capture && !broken ? stream : NULL;
    if (!capture)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "not captured");
    free(capture);
    if (broken)
        REFUSE(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "something unsafe was called meanwhile");
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    ENTER(cuStreamIsCapturing);
    if (!status)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    pthread_mutex_lock(&process_lock);
    const struct capture *capture = capture_of(stream);
    *status = !capture ? 0 : capture->broken ? 2 : 1;
    pthread_mutex_unlock(&process_lock);
    return CUDA_SUCCESS;
}
