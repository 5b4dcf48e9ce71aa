/* Streams: each is a thread with a queue, so that what is submitted really happens later, in order, while the caller goes
 * on. An event recorded before a copy is complete before it; a host that reads too early sees the old bytes. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "process.h"

struct stream {
    struct stream *next;
    uint32_t device;
    bool is_null;
    bool closing; /* destroyed; ends when its queue is empty */
    _Atomic bool abandoned;
    struct operation *first;
    struct operation *last;
    struct operation *running;
    uint64_t submitted;
    uint64_t finished;
};

struct event {
    struct event *next;
    uint32_t references; /* the handle and operations in queues */
    bool destroyed;
    bool captured; /* last recorded in a stream that was being captured */
    uint64_t recorded; /* number of the latest record */
    uint64_t reached;  /* number of the latest record that a stream has passed */
};

static struct stream *streams;
static struct event *events;

struct operation *operation_new(enum operation_kind kind) {
    struct operation *operation = calloc(1, sizeof *operation);
    if (!operation)
        abort();
    operation->kind = kind;
    return operation;
}

static void event_drop(struct event *event) {
    if (--event->references)
        return;
    struct event **at = &events;
    while (*at != event)
        at = &(*at)->next;
    *at = event->next;
    free(event);
}

/* Under the lock. */
static void operation_free(struct operation *operation) {
    if (operation->event)
        event_drop(operation->event);
    free(operation->copies);
    free(operation->snapshots);
    free(operation);
}

/* --- what a stream's thread does ---------------------------------------------------------------------------------- */

static bool stopped(const struct stream *stream) {
    return stream->abandoned || contexts[stream->device].lost != CUDA_SUCCESS;
}

/* Under the lock, which it lets go of meanwhile. */
static void wait_us(const struct stream *stream, uint64_t microseconds) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(microseconds / 1000000);
    until.tv_nsec += (long)(microseconds % 1000000) * 1000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    while (!stopped(stream) && !pthread_cond_timedwait(&progress, &process_lock, &until)) {
        /* something else has got on */
    }
}

static bool value_reached(const struct operation *operation) {
    const uint64_t now = atomic_load((_Atomic uint64_t *)(uintptr_t)operation->address);
    switch (operation->flags & 3) {
    case 0:
        return (int64_t)(now - operation->value) >= 0;
    case 1:
        return now == operation->value;
    case 2:
        return (now & operation->value) != 0;
    default:
        return ~(now | operation->value) != 0;
    }
}

/* Without the lock. */
static void perform(struct stream *stream, struct operation *operation) {
    switch (operation->kind) {
    case COPY:
        copies_run(operation->copies, operation->count, operation->direction, stream->device, &stream->abandoned);
        break;
    case FILL:
        memset((void *)(uintptr_t)operation->address, (int)operation->value, operation->bytes);
        break;
    case WRITE_VALUE:
        if (!settings()->memops_silent)
            atomic_store((_Atomic uint64_t *)(uintptr_t)operation->address, operation->value);
        break;
    case WAIT_VALUE:
        while (!stopped(stream) && !value_reached(operation))
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        break;
    case HOST_FUNCTION:
        operation->function(operation->argument);
        break;
    case RECORD: /* in one step with `finished` */
        break;
    case WAIT_EVENT:
        pthread_mutex_lock(&process_lock);
        while (!stopped(stream) && operation->event->reached < operation->sequence)
            pthread_cond_wait(&progress, &process_lock);
        pthread_mutex_unlock(&process_lock);
        break;
    case DELAY:
        pthread_mutex_lock(&process_lock);
        wait_us(stream, operation->value);
        pthread_mutex_unlock(&process_lock);
        break;
    }
}

static void drop_queue(struct stream *stream) {
    while (stream->first) {
        struct operation *operation = stream->first;
        stream->first = operation->next;
        operation_free(operation);
    }
}

static void stream_free(struct stream *stream) {
    drop_queue(stream);
    struct stream **at = &streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    free(stream);
    pthread_cond_broadcast(&progress);
}

static void *stream_main(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&process_lock);
    while (true) {
        if (stopped(stream))
            drop_queue(stream);
        if (!stream->first) {
            if (stream->closing)
                break;
            pthread_cond_wait(&progress, &process_lock);
            continue;
        }
        struct operation *operation = stream->first;
        stream->first = operation->next;
        stream->running = operation;
        if (settings()->latency_us)
            wait_us(stream, settings()->latency_us);
        pthread_mutex_unlock(&process_lock);
        const bool performed = !stopped(stream);
        if (performed)
            perform(stream, operation);
        pthread_mutex_lock(&process_lock);
        /* Who sees the event complete finds the stream done as well, if nothing comes after it. */
        if (performed && operation->kind == RECORD && operation->sequence > operation->event->reached)
            operation->event->reached = operation->sequence;
        stream->running = NULL;
        stream->finished++;
        operation_free(operation);
        pthread_cond_broadcast(&progress);
    }
    stream_free(stream);
    pthread_mutex_unlock(&process_lock);
    return NULL;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

/* Under the lock. NULL when there is no thread to be had. */
static struct stream *stream_new(uint32_t device, bool is_null) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return NULL;
    stream->device = device;
    stream->is_null = is_null;
    stream->next = streams;
    streams = stream;
    pthread_t thread;
    if (pthread_create(&thread, NULL, stream_main, stream)) {
        streams = stream->next;
        free(stream);
        return NULL;
    }
    pthread_detach(thread);
    return stream;
}

static bool stream_lives(const struct stream *stream) {
    for (const struct stream *one = streams; one; one = one->next)
        if (one == stream)
            return !one->closing;
    return false;
}

/* Under the lock: the stream that a handle means, or NULL. */
static struct stream *stream_named(CUstream handle) {
    if (handle)
        return stream_lives(handle) && handle->device == current_device() && !handle->is_null ? handle : NULL;
    for (struct stream *one = streams; one; one = one->next)
        if (one->is_null && one->device == current_device() && !one->closing)
            return one;
    return stream_new(current_device(), true);
}

/* Under the lock: until all that was submitted by now is done. */
static CUresult wait_for(struct stream *stream) {
    const uint32_t device = stream->device;
    const uint64_t target = stream->submitted;
    while (contexts[device].lost == CUDA_SUCCESS && stream_lives(stream) && stream->finished < target)
        pthread_cond_wait(&progress, &process_lock);
    return contexts[device].lost;
}

bool is_stream(CUstream handle) {
    return stream_named(handle) != NULL;
}

/* Under the lock. */
static CUresult append(struct stream *stream, struct operation *operation) {
    if (!stream) {
        operation_free(operation);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (is_captured(stream)) { /* it goes into the graph, and does not run */
        operation_free(operation);
        return CUDA_SUCCESS;
    }
    if (stream->first)
        stream->last->next = operation;
    else
        stream->first = operation;
    stream->last = operation;
    stream->submitted++;
    pthread_cond_broadcast(&progress);
    return CUDA_SUCCESS;
}

CUresult stream_submit(enum function self, CUstream handle, struct operation *operation) {
    pthread_mutex_lock(&process_lock);
    const CUresult code = append(stream_named(handle), operation);
    pthread_mutex_unlock(&process_lock);
    if (code != CUDA_SUCCESS)
        REFUSE(code, "%p is no stream of the current context", (void *)handle);
    return code;
}

CUresult stream_run(enum function self, struct operation *operation) {
    pthread_mutex_lock(&process_lock);
    struct stream *stream = stream_named(NULL);
    CUresult code = append(stream, operation);
    if (code == CUDA_SUCCESS)
        code = wait_for(stream);
    pthread_mutex_unlock(&process_lock);
    if (code != CUDA_SUCCESS)
        REFUSE(code, "on the NULL stream");
    return code;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned flags, int priority) {
    ENTER(cuStreamCreateWithPriority);
    (void)priority; /* the driver clamps it, and this double has no order among streams */
    if (!handle || flags > 1)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "flags %u", flags);
    pthread_mutex_lock(&process_lock);
    *handle = stream_new(current_device(), false);
    pthread_mutex_unlock(&process_lock);
    return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuStreamCreate(CUstream *handle, unsigned flags) {
    ENTER(cuStreamCreate);
    return cuStreamCreateWithPriority(handle, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    ENTER(cuStreamDestroy_v2);
    pthread_mutex_lock(&process_lock);
    const bool known = handle && stream_named(handle);
    if (known)
        handle->closing = true; /* finishes what it has, as the driver does */
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&process_lock);
    if (!known)
        REFUSE(CUDA_ERROR_INVALID_HANDLE, "%p is no stream of the current context", (void *)handle);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(cuStreamSynchronize);
    pthread_mutex_lock(&process_lock);
    struct stream *stream = stream_named(handle);
    const bool captured = stream && is_captured(stream);
    if (captured)
        break_capture(stream);
    const CUresult code = !stream    ? CUDA_ERROR_INVALID_HANDLE
                          : captured ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                                     : wait_for(stream);
    pthread_mutex_unlock(&process_lock);
    if (captured)
        REFUSE(code, "the stream is being captured");
    return code;
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    ENTER(cuStreamQuery);
    pthread_mutex_lock(&process_lock);
    struct stream *stream = stream_named(handle);
    if (stream)
        break_capture(stream);
    const CUresult code = !stream                                 ? CUDA_ERROR_INVALID_HANDLE
                          : is_captured(stream)                   ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                          : stream->finished == stream->submitted ? CUDA_SUCCESS
                                                                  : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&process_lock);
    return code;
}

CUresult streams_drain(uint32_t device) {
    pthread_mutex_lock(&process_lock);
    bool busy = true;
    while (busy && contexts[device].lost == CUDA_SUCCESS) {
        busy = false;
        for (const struct stream *one = streams; one; one = one->next)
            busy |= one->device == device && one->finished < one->submitted;
        if (busy)
            pthread_cond_wait(&progress, &process_lock);
    }
    const CUresult code = contexts[device].lost;
    pthread_mutex_unlock(&process_lock);
    return code;
}

void streams_end(uint32_t device) {
    pthread_mutex_lock(&process_lock);
    for (bool left = true; left;) {
        left = false;
        for (struct stream *one = streams; one; one = one->next) {
            if (one->device != device)
                continue;
            one->closing = true;
            one->abandoned = true;
            left = true;
        }
        pthread_cond_broadcast(&progress);
        if (left)
            pthread_cond_wait(&progress, &process_lock);
    }
    pthread_mutex_unlock(&process_lock);
}

/* --- who touches what --------------------------------------------------------------------------------------------- */

static bool meets(uint64_t base, uint64_t bytes, uint64_t other, uint64_t other_bytes) {
    return base < other + other_bytes && other < base + bytes;
}

static bool operation_touches(const struct operation *operation, uint64_t address, uint64_t bytes) {
    for (size_t index = 0; index < operation->count; index++) {
        const struct copy *copy = &operation->copies[index];
        const uint64_t written = (copy->rows - 1) * copy->destination_pitch + copy->width;
        const uint64_t read = (copy->rows - 1) * copy->source_pitch + copy->width;
        if (meets(copy->destination, written, address, bytes) || meets(copy->source, read, address, bytes))
            return true;
    }
    return operation->bytes && meets(operation->address, operation->bytes, address, bytes);
}

bool work_touches(uint64_t address, uint64_t bytes) {
    for (const struct stream *one = streams; one; one = one->next) {
        if (one->running && operation_touches(one->running, address, bytes))
            return true;
        for (const struct operation *waiting = one->first; waiting && !stopped(one); waiting = waiting->next)
            if (operation_touches(waiting, address, bytes))
                return true;
    }
    return false;
}

void wait_for_work_on(uint64_t address, uint64_t bytes) {
    while (work_touches(address, bytes))
        pthread_cond_wait(&progress, &process_lock);
}

bool copies_wait(uint32_t device, enum direction direction) {
    bool found = false;
    pthread_mutex_lock(&process_lock);
    for (const struct stream *one = streams; one && !found; one = one->next)
        for (const struct operation *waiting = one->first; waiting && !found; waiting = waiting->next)
            found = one->device == device && waiting->kind == COPY && waiting->direction == direction;
    pthread_mutex_unlock(&process_lock);
    return found;
}

/* --- events ------------------------------------------------------------------------------------------------------- */

static struct event *event_named(CUevent handle) {
    for (struct event *one = events; one; one = one->next)
        if (one == handle)
            return one->destroyed ? NULL : one;
    return NULL;
}

#define WITH_EVENT(handle) \
    pthread_mutex_lock(&process_lock); \
    struct event *event = event_named(handle); \
    if (!event) { \
        pthread_mutex_unlock(&process_lock); \
        REFUSE(CUDA_ERROR_INVALID_HANDLE, "%p is no event", (void *)(handle)); \
    }

EXPORT CUresult cuEventCreate(CUevent *handle, unsigned flags) {
    ENTER(cuEventCreate);
    if (!handle || flags > 7 || (flags & 4 && !(flags & 2)))
        REFUSE(CUDA_ERROR_INVALID_VALUE, "flags %u", flags);
    struct event *event = calloc(1, sizeof *event);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->references = 1;
    pthread_mutex_lock(&process_lock);
    event->next = events;
    events = event;
    pthread_mutex_unlock(&process_lock);
    *handle = event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream) {
    ENTER(cuEventRecord);
    WITH_EVENT(handle)
    struct operation *operation = operation_new(RECORD);
    operation->event = event;
    event->references++;
    operation->sequence = ++event->recorded;
    struct stream *into = stream_named(stream);
    event->captured = into && is_captured(into);
    const CUresult code = append(into, operation);
    if (code != CUDA_SUCCESS || event->captured)
        event->recorded--;
    pthread_mutex_unlock(&process_lock);
    if (code != CUDA_SUCCESS)
        REFUSE(code, "%p is no stream of the current context", (void *)stream);
    return code;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned flags) {
    ENTER(cuStreamWaitEvent);
    if (flags > 1)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "flags %u", flags);
    WITH_EVENT(handle)
    struct operation *operation = operation_new(WAIT_EVENT);
    operation->event = event;
    event->references++;
    operation->sequence = event->recorded; /* an event never recorded counts as complete */
    const CUresult code = append(stream_named(stream), operation);
    pthread_mutex_unlock(&process_lock);
    if (code != CUDA_SUCCESS)
        REFUSE(code, "%p is no stream of the current context", (void *)stream);
    return code;
}

EXPORT CUresult cuEventQuery(CUevent handle) {
    ENTER(cuEventQuery);
    WITH_EVENT(handle)
    const bool complete = event->reached >= event->recorded;
    const bool captured = event->captured;
    pthread_mutex_unlock(&process_lock);
    if (captured)
        REFUSE(CUDA_ERROR_CAPTURED_EVENT, "recorded in a stream that is being captured");
    return complete ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
    ENTER(cuEventSynchronize);
    const uint32_t device = current_device();
    WITH_EVENT(handle)
    const uint64_t target = event->recorded;
    if (event->captured) {
        pthread_mutex_unlock(&process_lock);
        REFUSE(CUDA_ERROR_CAPTURED_EVENT, "recorded in a stream that is being captured");
    }
    event->references++; /* it may be destroyed meanwhile */
    while (event->reached < target && contexts[device].lost == CUDA_SUCCESS)
        pthread_cond_wait(&progress, &process_lock);
    event_drop(event);
    const CUresult code = contexts[device].lost;
    pthread_mutex_unlock(&process_lock);
    return code;
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
    ENTER(cuEventDestroy_v2);
    WITH_EVENT(handle)
    event->destroyed = true;
    event_drop(event);
    pthread_mutex_unlock(&process_lock);
    return CUDA_SUCCESS;
}
