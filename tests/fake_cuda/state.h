/* What the processes on one fake machine share: who runs, how often which function was called, which failures wait for
 * whom, and who holds which device memory. One file in the folder, mapped by all.
 *
 * A process may be killed at any instruction. The lock is a robust mutex, so that it dies with its holder; every entry
 * is published by one last store, and sums are counted anew each time, so there is no half-made state to repair.
 * Device memory exists as long as a living process holds a reference to it. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "entry.h"

enum { PROCESSES = 1024, ALLOCATIONS = 16384, REFERENCES = 32768, DEVICES = 16, FAULTS = 16 };
enum { HANG = -1 };
enum memory_kind { LEGACY = 1, CHUNK = 2 };

struct fault {
    _Atomic uint32_t armed;
    uint32_t function;
    _Atomic uint64_t call; /* the number of the call that fails; 0: every one */
    int32_t code;          /* or HANG */
    uint32_t pause_ms;     /* how long a hang lasts; 0: until the fault is lifted */
};

struct process {
    _Atomic int32_t pid; /* 0: free */
    uint64_t started;    /* clock ticks since boot: tells two processes with one pid apart */
    _Atomic uint64_t calls[FUNCTIONS];
    _Atomic uint32_t contexts; /* one bit per device */
    struct fault faults[FAULTS];
};

struct allocation {
    _Atomic uint64_t id; /* 0: free. Never used again */
    uint64_t bytes;
    uint32_t device;
    uint32_t kind;
    int32_t owner_pid;
    uint64_t owner_started;
    uint64_t owner_address; /* of legacy memory */
};

struct reference {
    _Atomic uint64_t allocation; /* id; 0: free */
    uint32_t index;              /* of the allocation */
    int32_t pid;
    uint64_t started;
};

/* Whose turn it is on one direction of a device's link. */
struct turn {
    int32_t owner; /* pid; 0: nobody's */
    int32_t waiter; /* who has asked last for the next turn */
    int64_t asked_ns;
    int64_t ends_ns;
    bool busy; /* whether the owner copies, or is about to */
};

/* An import, as tests see it. */
struct open_import {
    int32_t importer_pid;
    int32_t exporter_pid;
    uint32_t device;
    uint32_t kind;
    uint64_t bytes;
};

struct state {
    _Atomic uint64_t magic;
    pthread_mutex_t lock;
    _Atomic uint64_t last_id;
    /* Entries from here on were never used: most tests need few of them. */
    _Atomic uint32_t allocations_end;
    _Atomic uint32_t references_end;
    /* When the link of a device is free again, monotonic nanoseconds; to the device, from the device. */
    _Atomic int64_t link_free_ns[DEVICES][2];
    struct turn turns[DEVICES][2];
    struct process processes[PROCESSES];
    struct allocation allocations[ALLOCATIONS];
    struct reference references[REFERENCES];
};
extern struct state *state;

/* Maps the state; false when this machine has no folder for it. */
bool state_map(void);

/* This process's own entry, made on first use; NULL when there is none to be had. Not in a forked child. */
struct process *state_join(void);
/* Gives up the entry and every reference of this process. */
void state_leave(void);

void state_lock(void);
void state_unlock(void);

/* The rest needs the lock.
 * state_allocate makes `bytes` of device memory with a reference held by this process; its descriptor goes to *fd.
 * Returns CUDA_ERROR_OUT_OF_MEMORY when the device has no room. */
CUresult state_allocate(uint32_t device, uint64_t bytes, enum memory_kind kind, uint64_t *id, int *fd);
void state_set_address(uint64_t id, uint64_t address);
const struct allocation *state_find(uint64_t id);
/* The living legacy allocation that its living owner has at this address, or NULL. */
const struct allocation *state_find_exported(int32_t pid, uint64_t started, uint64_t address);
int state_open(uint64_t id); /* descriptor, or -1 */
bool state_add_reference(uint64_t id);
/* A descriptor outlives its exporter, so its memory can be gone from the table: then it is entered again. */
bool state_revive(uint64_t id, uint32_t device, uint64_t bytes, enum memory_kind kind, int32_t owner_pid);
void state_drop_reference(uint64_t id);
/* Frees what only dead processes held. */
void state_sweep(void);
/* Contexts included. Sweeps first. */
uint64_t state_used_bytes(uint32_t device, bool with_contexts);
bool state_has_room(uint32_t device, uint64_t bytes);

bool process_lives(int32_t pid, uint64_t started);
uint64_t process_start(int32_t pid); /* 0: no such process, or it is dead */
