/* Threads and processes at once on the fake driver, for the sanitizers and for deaths at any instruction.
 *
 *   stress threads N      N threads share streams, events, memory and registrations; every byte copied is checked
 *   stress processes N    a child after another is killed at a random moment while it allocates; then all memory is free
 * Linked with the library. Ends with 0, or says what is wrong. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../fake_cuda/abi.h"

CUresult cuInit(unsigned flags);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr address);
CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags);
CUresult cuMemHostUnregister(void *address);
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventSynchronize(CUevent event);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream);
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream);
uint64_t fake_cuda_used_bytes(uint32_t device, int with_contexts);

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)
#define OK(call) CHECK((call) == CUDA_SUCCESS)

enum { BYTES = 1 << 16, ROUNDS = 60 };

static CUcontext begin(void) {
    CUcontext context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxPushCurrent_v2(context));
    return context;
}

/* Fills device memory on one stream, copies it back on another that waits for the first, and looks at every byte. */
static void *use(void *argument) {
    OK(cuCtxPushCurrent_v2(argument));
    uint8_t *host = mmap(NULL, BYTES + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(host != MAP_FAILED);
    _Atomic uint64_t *word = (_Atomic uint64_t *)(void *)(host + BYTES);
    OK(cuMemHostRegister_v2(host, BYTES + 4096, 3));
    for (int round = 1; round <= ROUNDS; round++) {
        CUstream first, second;
        CUevent filled, copied;
        CUdeviceptr memory;
        OK(cuMemAlloc_v2(&memory, BYTES));
        OK(cuStreamCreateWithPriority(&first, 1, 0));
        OK(cuStreamCreateWithPriority(&second, 1, -5));
        OK(cuEventCreate(&filled, 2));
        OK(cuEventCreate(&copied, 3));
        OK(cuMemsetD8Async(memory, (unsigned char)round, BYTES, first));
        OK(cuEventRecord(filled, first));
        OK(cuStreamWaitEvent(second, filled, 0));
        OK(cuMemcpyAsync((CUdeviceptr)(uintptr_t)host, memory, BYTES, second));
        OK(cuStreamWriteValue64_v2(second, (CUdeviceptr)(uintptr_t)word, (uint64_t)round, 0));
        OK(cuEventRecord(copied, second));
        OK(cuEventDestroy_v2(filled));
        OK(cuStreamDestroy_v2(first));
        OK(cuEventSynchronize(copied));
        CHECK(*word == (uint64_t)round);
        for (int index = 0; index < BYTES; index++)
            CHECK(host[index] == (uint8_t)round);
        OK(cuEventDestroy_v2(copied));
        OK(cuStreamSynchronize(second));
        OK(cuStreamDestroy_v2(second));
        OK(cuMemFree_v2(memory));
    }
    OK(cuMemHostUnregister(host));
    munmap(host, BYTES + 4096);
    return NULL;
}

static void threads(int count) {
    CUcontext context = begin();
    pthread_t running[64];
    for (int index = 0; index < count; index++)
        CHECK(!pthread_create(&running[index], NULL, use, context));
    for (int index = 0; index < count; index++)
        CHECK(!pthread_join(running[index], NULL));
    CHECK(fake_cuda_used_bytes(0, 0) == 0);
    OK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK(fake_cuda_used_bytes(0, 1) == 0);
}

static void allocate_until_killed(void) {
    begin();
    while (1) {
        CUdeviceptr memory[8];
        for (int index = 0; index < 8; index++)
            OK(cuMemAlloc_v2(&memory[index], 4096));
        for (int index = 0; index < 8; index++)
            OK(cuMemFree_v2(memory[index]));
    }
}

/* The first calls of all children meet each other, the killed and this process. */
static void processes(int count) {
    enum { AT_ONCE = 4 };
    srand(1);
    pid_t children[AT_ONCE] = {0};
    for (int index = 0; index < count + AT_ONCE; index++) {
        pid_t *child = &children[index % AT_ONCE];
        if (*child) {
            nanosleep(&(struct timespec){.tv_nsec = rand() % 4000000}, NULL);
            kill(*child, SIGKILL);
            int status;
            CHECK(waitpid(*child, &status, 0) == *child);
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        }
        if (index >= count)
            continue;
        *child = fork(); /* before this process has called the driver */
        CHECK(*child >= 0);
        if (!*child)
            allocate_until_killed();
    }
    CHECK(fake_cuda_used_bytes(0, 1) == 0);
    begin();
    CUdeviceptr memory;
    OK(cuMemAlloc_v2(&memory, 4096));
    OK(cuMemFree_v2(memory));
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    const int number = atoi(arguments[2]);
    CHECK(number > 0 && number <= 4096);
    alarm(100);
    if (!strcmp(arguments[1], "threads"))
        threads(number > 64 ? 64 : number);
    else
        processes(number);
    return 0;
}
