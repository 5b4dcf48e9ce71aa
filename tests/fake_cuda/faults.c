#define _GNU_SOURCE
#include "faults.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "settings.h"

enum { UNUSED = 0, ARMED = 1, BEING_ARMED = 2, STRIKING = 3 };
static const long HANG_STEP_NS = 2000000;

bool fault_arm(struct process *process, enum function function, uint64_t call, int32_t code, uint32_t pause_ms) {
    for (int index = 0; index < FAULTS; index++) {
        struct fault *fault = &process->faults[index];
        uint32_t expected = UNUSED;
        if (!atomic_compare_exchange_strong(&fault->armed, &expected, BEING_ARMED))
            continue;
        fault->function = (uint32_t)function;
        fault->code = code;
        fault->pause_ms = pause_ms;
        atomic_store(&fault->call, call);
        atomic_store(&fault->armed, ARMED);
        return true;
    }
    return false;
}

/* One "function:n[:number]"; anything else is a mistake in a test, and ends the process aloud. */
static void arm_one(struct process *process, const char *text, bool hang) {
    char name[96], call_text[32];
    long number = 0;
    const int fields = sscanf(text, "%95[^:]:%31[^:]:%ld", name, call_text, &number);
    bool known = false;
    if (fields >= (hang ? 2 : 3)) {
        const uint64_t call = *call_text == '*' ? 0 : strtoull(call_text, NULL, 10);
        for (int function = 0; function < FUNCTIONS; function++)
            if (function_is((enum function)function, name))
                known |= fault_arm(process, (enum function)function, call, hang ? HANG : (int32_t)number,
                                   hang ? (uint32_t)number : 0);
    }
    if (!known) {
        fprintf(stderr, "fake_cuda: cannot read the fault \"%s\", or there are too many\n", text);
        abort();
    }
}

static void arm_list(struct process *process, const char *list, bool hang) {
    char text[1024];
    snprintf(text, sizeof text, "%s", list);
    char *rest = NULL;
    for (char *one = strtok_r(text, ", ", &rest); one; one = strtok_r(NULL, ", ", &rest))
        arm_one(process, one, hang);
}

void faults_from_settings(struct process *process) {
    arm_list(process, settings()->fail, false);
    arm_list(process, settings()->hang, true);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Until its time is over, or somebody lifts the fault. */
static void hang(struct fault *fault) {
    const int64_t until_ns = fault->pause_ms ? now_ns() + (int64_t)fault->pause_ms * 1000000 : INT64_MAX;
    while (now_ns() < until_ns && atomic_load(&fault->armed) != UNUSED)
        nanosleep(&(struct timespec){.tv_nsec = HANG_STEP_NS}, NULL);
}

CUresult fault_strike(struct process *process, enum function function, uint64_t call) {
    for (int index = 0; index < FAULTS; index++) {
        struct fault *fault = &process->faults[index];
        if (atomic_load(&fault->armed) != ARMED || fault->function != (uint32_t)function)
            continue;
        const uint64_t wanted = atomic_load(&fault->call);
        if (wanted && wanted != call)
            continue;
        const int32_t code = fault->code;
        if (code != HANG) {
            uint32_t expected = ARMED;
            if (!wanted || atomic_compare_exchange_strong(&fault->armed, &expected, UNUSED))
                return code;
            continue;
        }
        uint32_t expected = ARMED;
        if (!wanted) {
            hang(fault);
        } else if (atomic_compare_exchange_strong(&fault->armed, &expected, STRIKING)) {
            hang(fault);
            atomic_store(&fault->armed, UNUSED);
        }
    }
    return CUDA_SUCCESS;
}
