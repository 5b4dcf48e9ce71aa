#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "settings.h"

static const uint64_t MAGIC = 0x3241444355454b46; /* changes with the layout */

struct state *state;
static struct process *mine;
static int32_t my_pid;
static uint64_t my_start;

/* --- processes ---------------------------------------------------------------------------------------------------- */

uint64_t process_start(int32_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    char text[1024];
    const ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = 0;
    const char *rest = strrchr(text, ')'); /* the name may hold anything */
    if (!rest || rest[2] == 'Z' || rest[2] == 'X')
        return 0; /* its memory is gone already */
    rest += 2;
    for (int field = 3; field < 22; field++)
        rest = strchr(rest, ' ') + 1;
    return strtoull(rest, NULL, 10);
}

bool process_lives(int32_t pid, uint64_t started) {
    return process_start(pid) == started;
}

static bool map_once(const struct settings *given) {
    char path[300];
    snprintf(path, sizeof path, "%s/state", given->folder);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    flock(fd, LOCK_EX); /* two processes may begin at once; a killed one lets go */
    struct state *mapped = MAP_FAILED;
    if (!ftruncate(fd, sizeof *mapped))
        mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED && atomic_load(&mapped->magic) != MAGIC) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&mapped->lock, &attributes);
        atomic_store(&mapped->magic, MAGIC);
    }
    flock(fd, LOCK_UN); /* closing does not end it: the mapping holds the open file */
    close(fd);
    state = mapped == MAP_FAILED ? NULL : mapped;
    return state != NULL;
}

bool state_map(void) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    const struct settings *given = settings();
    if (!given)
        return false;
    pthread_mutex_lock(&once);
    const bool mapped = state || map_once(given);
    pthread_mutex_unlock(&once);
    return mapped;
}

static struct process *claim_entry(void) {
    struct process *free_entry = NULL;
    for (int index = 0; index < PROCESSES && !free_entry; index++)
        if (!state->processes[index].pid)
            free_entry = &state->processes[index];
    /* Entries of dead processes keep their counts until they are needed. */
    for (int index = 0; index < PROCESSES && !free_entry; index++)
        if (!process_lives(state->processes[index].pid, state->processes[index].started))
            free_entry = &state->processes[index];
    if (!free_entry)
        return NULL;
    atomic_store(&free_entry->pid, 0);
    memset((void *)free_entry, 0, sizeof *free_entry);
    free_entry->started = my_start;
    atomic_store(&free_entry->pid, my_pid);
    return free_entry;
}

struct process *state_join(void) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    if (!state_map())
        return NULL;
    pthread_mutex_lock(&once);
    if (!my_pid) {
        my_pid = getpid();
        my_start = process_start(my_pid);
    }
    if (!mine && my_pid == getpid()) {
        state_lock();
        mine = claim_entry();
        state_unlock();
    }
    struct process *found = my_pid == getpid() ? mine : NULL;
    pthread_mutex_unlock(&once);
    return found;
}

void state_leave(void) {
    if (!mine || my_pid != getpid())
        return;
    state_lock();
    atomic_store(&mine->contexts, 0);
    for (uint32_t index = 0; index < state->references_end; index++) {
        struct reference *reference = &state->references[index];
        if (reference->allocation && reference->pid == my_pid && reference->started == my_start)
            state_drop_reference(reference->allocation);
    }
    state_unlock();
}

/* --- the lock ----------------------------------------------------------------------------------------------------- */

void state_lock(void) {
    if (pthread_mutex_lock(&state->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&state->lock); /* nothing to repair: see state.h */
}

void state_unlock(void) {
    pthread_mutex_unlock(&state->lock);
}

/* --- device memory ------------------------------------------------------------------------------------------------ */

static void name_of(uint64_t id, char *path, size_t size) {
    snprintf(path, size, "%s/mem-%llu", settings()->folder, (unsigned long long)id);
}

static struct allocation *find(uint64_t id) {
    for (uint32_t index = 0; index < state->allocations_end; index++)
        if (id && state->allocations[index].id == id)
            return &state->allocations[index];
    return NULL;
}

const struct allocation *state_find(uint64_t id) {
    return find(id);
}

const struct allocation *state_find_exported(int32_t pid, uint64_t started, uint64_t address) {
    if (!process_lives(pid, started))
        return NULL;
    for (uint32_t index = 0; index < state->allocations_end; index++) {
        const struct allocation *allocation = &state->allocations[index];
        if (allocation->id && allocation->kind == LEGACY && allocation->owner_pid == pid &&
            allocation->owner_started == started && allocation->owner_address == address)
            return allocation;
    }
    return NULL;
}

int state_open(uint64_t id) {
    char path[300];
    name_of(id, path, sizeof path);
    return open(path, O_RDWR | O_CLOEXEC);
}

static bool held(uint64_t id) {
    for (uint32_t index = 0; index < state->references_end; index++)
        if (state->references[index].allocation == id)
            return true;
    return false;
}

static void forget(struct allocation *allocation) {
    char path[300];
    name_of(allocation->id, path, sizeof path);
    unlink(path);
    atomic_store(&allocation->id, 0);
}

static struct reference *my_reference(uint64_t id) {
    for (uint32_t index = 0; index < state->references_end; index++) {
        struct reference *reference = &state->references[index];
        if (reference->allocation == id && reference->pid == my_pid && reference->started == my_start)
            return reference;
    }
    return NULL;
}

bool state_add_reference(uint64_t id) {
    const struct allocation *allocation = find(id);
    if (!allocation)
        return false;
    if (my_reference(id))
        return true;
    for (uint32_t index = 0; index < REFERENCES; index++) {
        struct reference *reference = &state->references[index];
        if (reference->allocation)
            continue;
        if (index >= state->references_end)
            atomic_store(&state->references_end, index + 1);
        reference->index = (uint32_t)(allocation - state->allocations);
        reference->pid = my_pid;
        reference->started = my_start;
        atomic_store(&reference->allocation, id);
        return true;
    }
    return false;
}

void state_drop_reference(uint64_t id) {
    struct reference *reference = my_reference(id);
    if (reference)
        atomic_store(&reference->allocation, 0);
    struct allocation *allocation = find(id);
    if (!allocation)
        return;
    if (allocation->owner_pid == my_pid && allocation->owner_started == my_start)
        allocation->owner_address = 0; /* freed by its owner: nobody can open it any more */
    if (!held(id))
        forget(allocation);
}

void state_set_address(uint64_t id, uint64_t address) {
    struct allocation *allocation = find(id);
    if (allocation)
        allocation->owner_address = address;
}

void state_sweep(void) {
    static bool has_holder[ALLOCATIONS]; /* the lock makes it ours */
    memset(has_holder, 0, sizeof has_holder);
    int32_t pid = 0;
    uint64_t started = 0;
    bool lives = false;
    for (uint32_t index = 0; index < state->references_end; index++) {
        struct reference *reference = &state->references[index];
        if (!reference->allocation)
            continue;
        if (reference->pid != pid || reference->started != started) {
            pid = reference->pid;
            started = reference->started;
            lives = process_lives(pid, started);
        }
        if (!lives)
            atomic_store(&reference->allocation, 0);
        else if (state->allocations[reference->index].id == reference->allocation)
            has_holder[reference->index] = true;
    }
    for (uint32_t index = 0; index < state->allocations_end; index++)
        if (state->allocations[index].id && !has_holder[index])
            forget(&state->allocations[index]);
    for (int index = 0; index < PROCESSES; index++) {
        struct process *process = &state->processes[index];
        if (process->pid && process->contexts && !process_lives(process->pid, process->started))
            atomic_store(&process->contexts, 0);
    }
}

static uint64_t count_used(uint32_t device, bool with_contexts) {
    uint64_t used = 0;
    for (uint32_t index = 0; index < state->allocations_end; index++)
        if (state->allocations[index].id && state->allocations[index].device == device)
            used += state->allocations[index].bytes;
    for (int index = 0; with_contexts && index < PROCESSES; index++)
        if (state->processes[index].pid && state->processes[index].contexts >> device & 1)
            used += settings()->context_bytes;
    return used;
}

uint64_t state_used_bytes(uint32_t device, bool with_contexts) {
    state_sweep();
    return count_used(device, with_contexts);
}

bool state_has_room(uint32_t device, uint64_t bytes) {
    const uint64_t all = settings()->hbm_bytes;
    if (bytes > all)
        return false;
    return count_used(device, true) <= all - bytes || state_used_bytes(device, true) <= all - bytes;
}

static bool enter_allocation(uint64_t id, uint32_t device, uint64_t bytes, enum memory_kind kind, int32_t pid,
                             uint64_t started) {
    for (uint32_t index = 0; index < ALLOCATIONS; index++) {
        struct allocation *allocation = &state->allocations[index];
        if (allocation->id)
            continue;
        if (index >= state->allocations_end)
            atomic_store(&state->allocations_end, index + 1);
        allocation->device = device;
        allocation->bytes = bytes;
        allocation->kind = kind;
        allocation->owner_pid = pid;
        allocation->owner_started = started;
        allocation->owner_address = 0;
        atomic_store(&allocation->id, id);
        return state_add_reference(id);
    }
    return false;
}

CUresult state_allocate(uint32_t device, uint64_t bytes, enum memory_kind kind, uint64_t *id, int *fd) {
    if (!state_has_room(device, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *id = atomic_fetch_add(&state->last_id, 1) + 1;
    char path[300];
    name_of(*id, path, sizeof path);
    *fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (*fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (enter_allocation(*id, device, bytes, kind, my_pid, my_start))
        return CUDA_SUCCESS;
    close(*fd);
    unlink(path);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

bool state_revive(uint64_t id, uint32_t device, uint64_t bytes, enum memory_kind kind, int32_t owner_pid) {
    return find(id) ? state_add_reference(id) : enter_allocation(id, device, bytes, kind, owner_pid, 0);
}
