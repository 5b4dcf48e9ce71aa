/* What one process keeps for itself: contexts, address ranges, handles, streams, events. One lock guards it all; threads
 * that wait do so on one condition, which is signalled whenever a stream has got on. Order: this lock, then the state's. */
#pragma once

#include <pthread.h>
#include <stdbool.h>

#include "entry.h"
#include "settings.h"
#include "state.h"

extern pthread_mutex_t process_lock;
extern pthread_cond_t progress;

/* --- contexts.c --- */
struct context {
    uint32_t device;
    uint32_t retained; /* 0: there is none */
    _Atomic CUresult lost; /* the sticky code that every call now ends with */
};
extern struct context contexts[DEVICES];
CUcontext current_context(void);
/* The device of the current context; only after ENTER of a function that NEEDS_CONTEXT. */
uint32_t current_device(void);
/* Any context of this process that is lost: its code. */
CUresult lost_code(void);
void lose_context(uint32_t device, CUresult code);

/* --- devices.c --- */
bool driver_is_initialised(void);
uint32_t visible_devices(void);
/* The physical device behind an ordinal, which CUDA_VISIBLE_DEVICES may have moved. */
uint32_t physical_device(int ordinal);
int ordinal_of(uint32_t device);

/* --- ranges.c: device addresses of this process, sorted --- */
enum range_kind { ALLOCATED, IMPORTED, MAPPED };
struct range {
    uint64_t base;
    uint64_t bytes;
    enum range_kind kind;
    uint32_t device;
    uint64_t allocation; /* id */
    uint64_t buffer_id;
    uint32_t opens;       /* IMPORTED */
    CUipcMemHandle handle; /* IMPORTED: what it was opened with */
    uint32_t chunk;       /* MAPPED: index */
    int access;           /* 0, 1 or 3 */
};
extern struct range *ranges;
extern size_t range_count;
struct range *range_of(uint64_t address); /* that contains it, or NULL */
bool range_insert(const struct range *range);
void range_remove(struct range *range);
uint64_t next_buffer_id(void);
/* Whether all of it is device memory that may be read, or written, on one device after another range if need be. */
bool device_covers(uint64_t address, uint64_t bytes, bool write);
/* Addresses for a file: `wanted`, which the caller keeps free, or (0) new ones. 0 when that fails. */
uint64_t map_device_memory(int fd, uint64_t bytes, uint64_t wanted);

/* --- host.c --- */
struct registration {
    uint64_t base;
    uint64_t bytes;
    uint32_t device;
};
const struct registration *registration_of(uint64_t address);
/* Whether one registration covers all of it. */
bool registered(uint64_t address, uint64_t bytes);
void registrations_forget(uint32_t device);

/* --- memory.c, chunks.c --- */
void ranges_forget(uint32_t device);
void chunks_forget(void);
int chunk_handle_types(uint32_t index);
/* The reservation in which an address lies. Under the lock. */
bool reservation_of(uint64_t address, uint64_t *base, uint64_t *bytes);

/* --- capture.c; all but the last under the lock --- */
bool is_captured(CUstream stream);
/* Something was asked of a captured stream that makes its capture worthless. */
void break_capture(CUstream stream);
/* Whether some capture forbids this call of this thread, which breaks it. */
bool capture_forbids(enum function function);

/* --- streams.c --- */
/* Under the lock: whether this is a stream of the current context. */
bool is_stream(CUstream stream);
struct copy {
    uint64_t destination;
    uint64_t source;
    uint64_t width;
    uint64_t rows;
    uint64_t destination_pitch;
    uint64_t source_pitch;
    const void *snapshot; /* what the source held when the call was made, or NULL */
};
enum direction { TO_DEVICE, FROM_DEVICE, INSIDE };
enum operation_kind { COPY, FILL, WRITE_VALUE, WAIT_VALUE, RECORD, WAIT_EVENT, HOST_FUNCTION, DELAY };
struct operation {
    struct operation *next;
    enum operation_kind kind;
    enum direction direction;
    size_t count; /* COPY */
    struct copy *copies;
    void *snapshots;
    uint64_t address; /* FILL, WRITE_VALUE, WAIT_VALUE */
    uint64_t bytes;
    uint64_t value;
    unsigned flags;
    struct event *event;
    uint64_t sequence;
    void (*function)(void *);
    void *argument;
};
/* A zeroed operation; never NULL (the process ends instead). */
struct operation *operation_new(enum operation_kind kind);
/* Hands the operation to the stream (NULL: the device's own); it is the stream's from then on, whatever the code. */
CUresult stream_submit(enum function self, CUstream stream, struct operation *operation);
/* Under the lock. Whether queued or running work of this process touches any of it. */
bool work_touches(uint64_t address, uint64_t bytes);
/* Under the lock. Waits until none does, or the context is lost. */
void wait_for_work_on(uint64_t address, uint64_t bytes);
/* Whether a stream of this process has copies in this direction that have not begun. */
bool copies_wait(uint32_t device, enum direction direction);
/* Waits for all streams of the device; the code its context is lost with, or success. */
CUresult streams_drain(uint32_t device);
/* Ends all streams of the device; what they have not begun is dropped. */
void streams_end(uint32_t device);
/* Runs copies in the calling thread, at the speed of the link, until done, abandoned, or the context is lost. */
void copies_run(const struct copy *copies, size_t count, enum direction direction, uint32_t device,
                const _Atomic bool *abandoned);
/* Nothing is copied on the device's links for so long, by whatever process. */
void stop_links(uint32_t device, uint64_t microseconds);
/* Submits to the NULL stream and waits. */
CUresult stream_run(enum function self, struct operation *operation);
