/* What tests may ask and do beyond what a driver offers. Needs no cuInit, and makes no process known to the others. */
#include <string.h>

#include "faults.h"
#include "process.h"

/* The exported name of a function by number, NULL after the last. */
EXPORT const char *fake_cuda_function(int index) {
    return index >= 0 && index < FUNCTIONS ? functions[index].symbol : NULL;
}

/* Device memory in use on the physical device, with or without contexts. */
EXPORT uint64_t fake_cuda_used_bytes(uint32_t device, int with_contexts) {
    if (!state_map() || device >= DEVICES)
        return 0;
    state_lock();
    const uint64_t used = state_used_bytes(device, with_contexts != 0);
    state_unlock();
    return used;
}

/* Imports that living processes have open; returns how many there are, and fills in up to `room`. */
EXPORT int fake_cuda_open_imports(struct open_import *imports, int room) {
    int count = 0;
    if (!state_map())
        return 0;
    state_lock();
    state_sweep();
    for (uint32_t index = 0; index < state->references_end; index++) {
        const struct reference *reference = &state->references[index];
        const struct allocation *allocation = reference->allocation ? state_find(reference->allocation) : NULL;
        if (!allocation || reference->pid == allocation->owner_pid)
            continue;
        if (count < room)
            imports[count] = (struct open_import){reference->pid, allocation->owner_pid, allocation->device,
                                                  allocation->kind, allocation->bytes};
        count++;
    }
    state_unlock();
    return count;
}

/* How often the function was called by a process, alive or not (0: by all). */
EXPORT uint64_t fake_cuda_calls(const char *name, int32_t pid) {
    uint64_t calls = 0;
    if (!state_map())
        return 0;
    for (int index = 0; index < PROCESSES; index++) {
        struct process *process = &state->processes[index];
        if (!process->pid || (pid && process->pid != pid))
            continue;
        for (int function = 0; function < FUNCTIONS; function++)
            if (function_is((enum function)function, name))
                calls += process->calls[function];
    }
    return calls;
}

/* The pids of living processes that use the driver; returns how many, and fills in up to `room`. */
EXPORT int fake_cuda_processes(int32_t *pids, int room) {
    int count = 0;
    if (!state_map())
        return 0;
    for (int index = 0; index < PROCESSES; index++) {
        const struct process *process = &state->processes[index];
        if (!process->pid || !process_lives(process->pid, process->started))
            continue;
        if (count < room)
            pids[count] = process->pid;
        count++;
    }
    return count;
}

/* The `nth` call from now on (0: every one) in the process ends with `code`, or hangs for `pause_ms` (0: until lifted)
 * when the code is -1. Returns 0, or -1 when there is no such function or process, or it has too many faults. */
EXPORT int fake_cuda_arm(const char *name, uint64_t nth, int32_t code, uint32_t pause_ms, int32_t pid) {
    bool armed = false;
    if (!state_map())
        return -1;
    for (int index = 0; index < PROCESSES; index++) {
        struct process *process = &state->processes[index];
        if (process->pid != pid || !process_lives(pid, process->started))
            continue;
        for (int function = 0; function < FUNCTIONS; function++)
            if (function_is((enum function)function, name))
                armed |= fault_arm(process, (enum function)function,
                                   nth ? process->calls[function] + nth : 0, code, pause_ms);
    }
    return armed ? 0 : -1;
}

/* Lifts all faults of a process; what hangs goes on. */
EXPORT void fake_cuda_lift(int32_t pid) {
    for (int index = 0; state_map() && index < PROCESSES; index++)
        for (int fault = 0; state->processes[index].pid == pid && fault < FAULTS; fault++)
            atomic_store(&state->processes[index].faults[fault].armed, 0);
}

/* Lets the stream rest for so long, as if a forward pass ran. */
EXPORT CUresult fake_cuda_delay(CUstream stream, uint64_t microseconds) {
    struct operation *operation = operation_new(DELAY);
    operation->value = microseconds;
    return stream_submit(F_cuLaunchHostFunc, stream, operation);
}

/* Ends all that this process has: contexts, streams, memory, imports. Nothing of it may be touched afterwards. */
EXPORT void fake_cuda_shut_down(void) {
    if (!state_map())
        return;
    for (uint32_t device = 0; device < DEVICES; device++) {
        streams_end(device);
        pthread_mutex_lock(&process_lock);
        contexts[device].retained = 0;
        ranges_forget(device);
        registrations_forget(device);
        pthread_mutex_unlock(&process_lock);
    }
    pthread_mutex_lock(&process_lock);
    chunks_forget();
    pthread_mutex_unlock(&process_lock);
    state_leave();
}
