/* Failures and hangs that tests arm, for this process through the environment or for another through the state. */
#pragma once

#include <stdbool.h>

#include "state.h"

/* Arms what FAKE_CUDA_FAIL and FAKE_CUDA_HANG say. */
void faults_from_settings(struct process *process);
/* `call`: the number of the failing call, 0 for every one. False when the process has too many armed already. */
bool fault_arm(struct process *process, enum function function, uint64_t call, int32_t code, uint32_t pause_ms);
/* To be called with the number of each call. Hangs where told to; returns the code to fail with, or success. */
CUresult fault_strike(struct process *process, enum function function, uint64_t call);
