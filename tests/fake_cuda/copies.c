/* Copies: what may be copied, and how fast it goes. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "process.h"

/* Batches of tens of thousands have crashed real drivers; a caller that sends so many is wrong here. */
enum { BATCH_MAX = 4096 };
/* A copy goes in pieces, so that one of half its bytes can be seen, and stopped. */
static const uint64_t PIECE_BYTES = 256 << 10;
static const int64_t SHORTEST_SLEEP_NS = 500000;
/* Who has not asked for a turn for so long wants none. */
static const int64_t ASKED_NS = 5000000;
static const long TURN_POLL_NS = 50000;

/* --- running ------------------------------------------------------------------------------------------------------ */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Under the state's lock: whether this process may copy its next piece now. Copies of two processes take turns of a
 * slice, and who has nothing to copy loses its turn, so a process that always has work makes the others wait. */
static bool has_turn(struct turn *turn, int64_t now) {
    const int32_t me = state_join()->pid;
    const bool over = now >= turn->ends_ns;
    const bool wanted = turn->waiter && turn->waiter != me && now - turn->asked_ns < ASKED_NS;
    const bool mine = turn->owner == me;
    const bool given_up = over || !turn->busy;
    if (mine ? given_up && wanted : turn->owner && !given_up) {
        if (mine) {
            turn->owner = 0;
        } else {
            turn->waiter = me;
            turn->asked_ns = now;
        }
        return false;
    }
    if (!mine && wanted) /* it was asked for before */
        return false;
    if (!mine || over) {
        turn->owner = me;
        turn->ends_ns = now + (int64_t)settings()->slice_us * 1000;
    }
    if (turn->waiter == me)
        turn->waiter = 0;
    turn->busy = true;
    return true;
}

static void await_turn(struct turn *turn) {
    for (bool got = false; !got;) {
        state_lock();
        got = has_turn(turn, now_ns());
        state_unlock();
        if (!got)
            nanosleep(&(struct timespec){.tv_nsec = TURN_POLL_NS}, NULL);
    }
}

/* A copy is done: the turn is over, unless another one waits in a queue. */
static void rest(uint32_t device, enum direction direction) {
    if (!settings()->bandwidth || !settings()->slice_us || direction == INSIDE)
        return;
    struct turn *turn = &state->turns[device][direction];
    if (copies_wait(device, direction))
        return;
    state_lock();
    if (turn->owner == state_join()->pid)
        turn->busy = false;
    state_unlock();
}

void stop_links(uint32_t device, uint64_t microseconds) {
    for (int direction = 0; microseconds && direction < 2; direction++) {
        const int64_t until_ns = now_ns() + (int64_t)microseconds * 1000;
        _Atomic int64_t *link = &state->link_free_ns[device][direction];
        int64_t free_ns = atomic_load(link);
        while (free_ns < until_ns && !atomic_compare_exchange_weak(link, &free_ns, until_ns)) {
            /* somebody copies */
        }
    }
}

/* All processes share the link; a short wait is left to those who come next. */
static void occupy_link(uint32_t device, enum direction direction, uint64_t bytes) {
    const uint64_t bandwidth = settings()->bandwidth;
    if (!bandwidth || direction == INSIDE)
        return;
    struct turn *turn = settings()->slice_us ? &state->turns[device][direction] : NULL;
    if (turn)
        await_turn(turn);
    _Atomic int64_t *link = &state->link_free_ns[device][direction];
    const int64_t lasts_ns = (int64_t)((double)bytes * 1e9 / (double)bandwidth);
    const int64_t now = now_ns();
    int64_t free_ns = atomic_load(link), end_ns;
    do
        end_ns = (free_ns > now ? free_ns : now) + lasts_ns;
    while (!atomic_compare_exchange_weak(link, &free_ns, end_ns));
    if (end_ns - now < SHORTEST_SLEEP_NS)
        return;
    const struct timespec until = {.tv_sec = end_ns / 1000000000, .tv_nsec = end_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) {
        /* a signal */
    }
}

void copies_run(const struct copy *copies, size_t count, enum direction direction, uint32_t device,
                const _Atomic bool *abandoned) {
    for (size_t index = 0; index < count; index++) {
        const struct copy *copy = &copies[index];
        for (uint64_t row = 0; row < copy->rows; row++) {
            uint8_t *to = (uint8_t *)(uintptr_t)copy->destination + row * copy->destination_pitch;
            const uint8_t *from =
                copy->snapshot ? copy->snapshot : (const uint8_t *)(uintptr_t)copy->source + row * copy->source_pitch;
            for (uint64_t at = 0; at < copy->width; at += PIECE_BYTES) {
                const uint64_t bytes = copy->width - at < PIECE_BYTES ? copy->width - at : PIECE_BYTES;
                if (*abandoned || contexts[device].lost != CUDA_SUCCESS)
                    return;
                occupy_link(device, direction, bytes);
                memmove(to + at, from + at, bytes);
            }
        }
    }
    rest(device, direction);
}

/* --- checking ----------------------------------------------------------------------------------------------------- */

/* Under the lock. What is wrong with one end of a copy, or NULL. */
static const char *wrong_end(uint64_t address, uint64_t bytes, bool write, bool pageable, bool *is_device) {
    *is_device = range_of(address) != NULL;
    if (*is_device)
        return device_covers(address, bytes, write) ? NULL : "reaches out of its device memory, or may not be accessed";
    if (address + bytes < address || !address)
        return "is no address";
    if (pageable && !registration_of(address))
        return NULL;
    if (registered(address, bytes))
        return NULL;
    return registration_of(address) ? "spans two host registrations" : "is neither device memory nor registered";
}

/* Under the lock. */
static const char *wrong_copy(const struct copy *copy, bool pageable, enum direction *direction) {
    if (!copy->width || !copy->rows)
        return "is empty";
    if (copy->rows > 1 && (copy->destination_pitch < copy->width || copy->source_pitch < copy->width))
        return "has rows wider than their pitch";
    bool to_device, from_device;
    const uint64_t written = (copy->rows - 1) * copy->destination_pitch + copy->width;
    const uint64_t read = (copy->rows - 1) * copy->source_pitch + copy->width;
    const char *wrong = wrong_end(copy->destination, written, true, pageable, &to_device);
    if (!wrong)
        wrong = wrong_end(copy->source, read, false, pageable, &from_device);
    if (wrong)
        return wrong;
    *direction = to_device ? (from_device ? INSIDE : TO_DEVICE) : FROM_DEVICE;
    return !to_device && !from_device ? "touches no device" : NULL;
}

/* An operation for these copies, which it takes over; NULL and the code if one of them is wrong. */
static struct operation *checked(enum function self, struct copy *copies, size_t count, bool pageable,
                                 size_t *wrong_index) {
    struct operation *operation = operation_new(COPY);
    operation->copies = copies;
    operation->count = count;
    const char *wrong = NULL;
    pthread_mutex_lock(&process_lock);
    for (size_t index = 0; index < count && !wrong; index++) {
        wrong = wrong_copy(&copies[index], pageable, &operation->direction);
        if (wrong && wrong_index)
            *wrong_index = index;
        if (wrong)
            refuse(self, CUDA_ERROR_INVALID_VALUE, "copy %zu of %zu, %#llx to %#llx, %llu bytes: %s", index, count,
                   (unsigned long long)copies[index].source, (unsigned long long)copies[index].destination,
                   (unsigned long long)copies[index].width, wrong);
    }
    pthread_mutex_unlock(&process_lock);
    if (!wrong)
        return operation;
    free(operation->copies);
    free(operation);
    return NULL;
}

static struct copy *copies_new(size_t count) {
    struct copy *copies = calloc(count, sizeof *copies);
    if (!copies)
        abort();
    return copies;
}

static struct operation *one_copy(enum function self, uint64_t destination, uint64_t source, size_t bytes,
                                  bool pageable) {
    struct copy *copy = copies_new(1);
    *copy = (struct copy){.destination = destination, .source = source, .width = bytes, .rows = 1};
    return checked(self, copy, 1, pageable, NULL);
}

static CUresult copy_now(enum function self, uint64_t destination, uint64_t source, size_t bytes) {
    if (!bytes)
        return CUDA_SUCCESS;
    struct operation *operation = one_copy(self, destination, source, bytes, true);
    return operation ? stream_run(self, operation) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult copy_later(enum function self, uint64_t destination, uint64_t source, size_t bytes, CUstream stream) {
    if (!bytes)
        return CUDA_SUCCESS;
    struct operation *operation = one_copy(self, destination, source, bytes, false);
    return operation ? stream_submit(self, stream, operation) : CUDA_ERROR_INVALID_VALUE;
}

/* --- the driver's functions --------------------------------------------------------------------------------------- */

EXPORT CUresult cuMemcpy(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    ENTER(cuMemcpy);
    return copy_now(self, destination, source, bytes);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr destination, const void *source, size_t bytes) {
    ENTER(cuMemcpyHtoD_v2);
    return copy_now(self, destination, (uint64_t)(uintptr_t)source, bytes);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *destination, CUdeviceptr source, size_t bytes) {
    ENTER(cuMemcpyDtoH_v2);
    return copy_now(self, (uint64_t)(uintptr_t)destination, source, bytes);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyAsync);
    return copy_later(self, destination, source, bytes, stream);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void *source, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyHtoDAsync_v2);
    return copy_later(self, destination, (uint64_t)(uintptr_t)source, bytes, stream);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyDtoHAsync_v2);
    return copy_later(self, (uint64_t)(uintptr_t)destination, source, bytes, stream);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyDtoDAsync_v2);
    return copy_later(self, destination, source, bytes, stream);
}

/* The address of one side's first byte; 0 when its memory type is none that this double knows. */
static uint64_t side(int type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t pitch) {
    const uint64_t base = type == 1 ? (uint64_t)(uintptr_t)host : type == 2 || type == 4 ? device : 0;
    return base ? base + y * pitch + x : 0;
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *given, CUstream stream) {
    ENTER(cuMemcpy2DAsync_v2);
    if (!given)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no description");
    struct copy *copy = copies_new(1);
    copy->destination = side(given->destination_type, given->destination_host, given->destination_device,
                             given->destination_x, given->destination_y, given->destination_pitch);
    copy->source = side(given->source_type, given->source_host, given->source_device, given->source_x,
                        given->source_y, given->source_pitch);
    copy->width = given->width;
    copy->rows = given->height;
    copy->destination_pitch = given->destination_pitch;
    copy->source_pitch = given->source_pitch;
    struct operation *operation = checked(self, copy, 1, false, NULL);
    return operation ? stream_submit(self, stream, operation) : CUDA_ERROR_INVALID_VALUE;
}

/* --- batches ------------------------------------------------------------------------------------------------------ */

static const char *wrong_attributes(const CUmemcpyAttributes *attributes, const size_t *first, size_t attribute_count,
                                    size_t count) {
    if (!attributes || !first || !attribute_count || attribute_count > count || first[0])
        return "attributes are missing, too many, or do not begin at copy 0";
    for (size_t index = 0; index < attribute_count; index++) {
        if (attributes[index].source_access_order < 1 || attributes[index].source_access_order > 3)
            return "an access order that does not exist";
        if (attributes[index].flags > 1)
            return "flags that do not exist";
        if (index && (first[index] <= first[index - 1] || first[index] >= count))
            return "attributes that do not follow one another";
    }
    return NULL;
}

/* Sources that need not be read in the stream's order are read now, as the driver is free to do. */
static void take_snapshots(struct operation *operation, const CUmemcpyAttributes *attributes, const size_t *first,
                           size_t attribute_count) {
    uint8_t *at = NULL;
    for (size_t index = 0, attribute = 0; index < operation->count; index++) {
        while (attribute + 1 < attribute_count && first[attribute + 1] <= index)
            attribute++;
        struct copy *copy = &operation->copies[index];
        const int order = attributes[attribute].source_access_order;
        if (order == 1 || (order == 3 && !settings()->eager))
            continue;
        if (!at) {
            uint64_t total = 0;
            for (size_t each = index; each < operation->count; each++)
                total += operation->copies[each].width;
            at = operation->snapshots = malloc(total);
            if (!at)
                abort();
        }
        memcpy(at, (const void *)(uintptr_t)copy->source, copy->width);
        copy->snapshot = at;
        at += copy->width;
    }
}

static CUresult batch(enum function self, CUresult injected, const CUdeviceptr *destinations,
                      const CUdeviceptr *sources, const size_t *sizes, size_t count,
                      const CUmemcpyAttributes *attributes, const size_t *first, size_t attribute_count,
                      size_t *fail_index, CUstream stream) {
    if (fail_index)
        *fail_index = SIZE_MAX;
    if (functions[self].since > settings()->version)
        REFUSE(CUDA_ERROR_NOT_SUPPORTED, "a driver %d has no such function", settings()->version);
    if (!destinations || !sources || !sizes || !count)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "nothing to copy");
    if (count > BATCH_MAX)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%zu copies; more than %d have crashed real drivers", count, BATCH_MAX);
    if (!stream)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "batches are refused on the NULL stream");
    const char *wrong = wrong_attributes(attributes, first, attribute_count, count);
    if (wrong)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "%s", wrong);
    struct copy *copies = copies_new(count);
    for (size_t index = 0; index < count; index++) {
        copies[index] = (struct copy){.destination = destinations[index], .source = sources[index], .rows = 1};
        copies[index].width = sizes[index];
    }
    struct operation *operation = checked(self, copies, count, false, fail_index);
    if (!operation)
        return CUDA_ERROR_INVALID_VALUE;
    if (injected != CUDA_SUCCESS)
        operation->count = (count + 1) / 2; /* a batch that fails may leave earlier copies in flight */
    take_snapshots(operation, attributes, first, attribute_count);
    const CUresult code = stream_submit(self, stream, operation);
    return injected != CUDA_SUCCESS ? injected : code;
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *first, size_t attribute_count,
                                   size_t *fail_index, CUstream stream) {
    CUresult injected;
    const CUresult verdict = enter(F_cuMemcpyBatchAsync, &injected);
    if (verdict != CUDA_SUCCESS)
        return verdict;
    return batch(F_cuMemcpyBatchAsync, injected, destinations, sources, sizes, count, attributes, first,
                 attribute_count, fail_index, stream);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
                                      CUmemcpyAttributes *attributes, size_t *first, size_t attribute_count,
                                      CUstream stream) {
    CUresult injected;
    const CUresult verdict = enter(F_cuMemcpyBatchAsync_v2, &injected);
    if (verdict != CUDA_SUCCESS)
        return verdict;
    return batch(F_cuMemcpyBatchAsync_v2, injected, destinations, sources, sizes, count, attributes, first,
                 attribute_count, NULL, stream);
}
