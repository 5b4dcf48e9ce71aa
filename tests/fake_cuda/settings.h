/* What a test chose, from FAKE_CUDA_* in the environment or from the file that the fixture wrote beside the library. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct settings {
    char folder[256];         /* FAKE_CUDA_DIR: shared state and device memory */
    int version;              /* FAKE_CUDA_VERSION: 13000, 12080, 12040 … */
    unsigned devices;         /* FAKE_CUDA_DEVICES */
    uint64_t hbm_bytes;       /* FAKE_CUDA_HBM, per device */
    uint64_t context_bytes;   /* FAKE_CUDA_CONTEXT_BYTES, per context */
    uint64_t bandwidth;       /* FAKE_CUDA_BANDWIDTH, bytes per second, each direction of each device; 0: unthrottled */
    uint64_t slice_us;        /* FAKE_CUDA_SLICE_US: how long one process's turn on a throttled link lasts; 0: piece by piece */
    uint64_t latency_us;      /* FAKE_CUDA_LATENCY_US, before each operation of a stream */
    uint64_t granularity;     /* FAKE_CUDA_GRANULARITY of virtual memory */
    bool mig;                 /* FAKE_CUDA_MIG: a MIG slice, which has no IPC */
    int ipc_code;             /* FAKE_CUDA_NO_IPC: 1, or the code with which exporting is refused */
    int ipc_namespaces_code;  /* FAKE_CUDA_IPC_NAMESPACES: with which code handles of other PID namespaces are refused; or 0 */
    int ipc_users_code;       /* FAKE_CUDA_IPC_USERS: 1, or the code with which another user's handle is refused */
    int compute_mode;         /* FAKE_CUDA_COMPUTE_MODE, which is told, and changes nothing: 3 is EXCLUSIVE_PROCESS */
    uint64_t context_us;      /* FAKE_CUDA_CONTEXT_US: how long making a context takes, and stops the copies of all */
    uint64_t register_us;     /* FAKE_CUDA_REGISTER_US, for each MiB of a registration, with the process's lock held */
    bool imex;                /* FAKE_CUDA_IMEX: chunks may have fabric handles */
    int context_code;         /* FAKE_CUDA_CONTEXT_FAIL: 1, or the code with which a primary context is refused */
    bool eager;               /* FAKE_CUDA_EAGER: sources of batches with order ANY are read inside the call */
    bool memops_refused;      /* FAKE_CUDA_MEMOPS=none */
    bool memops_silent;       /* FAKE_CUDA_MEMOPS=silent: accepted, and nothing is ever written */
    char visible[256];        /* CUDA_VISIBLE_DEVICES: ordinals or UUIDs */
    char fail[1024];          /* FAKE_CUDA_FAIL "function:n:code,…"; n may be * */
    char hang[1024];          /* FAKE_CUDA_HANG "function:n[:milliseconds],…" */
};

/* NULL when no folder is known: then this machine has no GPU. Read once per process. */
const struct settings *settings(void);
