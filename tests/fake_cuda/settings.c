#define _GNU_SOURCE
#include "settings.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct settings chosen;
static bool usable;
static char file_text[8192];

/* The environment first, then the file's line "NAME=value". */
static const char *look_up(const char *name, const char *fallback) {
    static _Thread_local char value[1024];
    const char *text = getenv(name);
    if (text)
        return text;
    const size_t length = strlen(name);
    for (const char *line = file_text; *line; line = strchr(line, '\n') + 1) {
        if (!strncmp(line, name, length) && line[length] == '=') {
            snprintf(value, sizeof value, "%.*s", (int)strcspn(line + length + 1, "\n"), line + length + 1);
            return value;
        }
        if (!strchr(line, '\n'))
            break;
    }
    return fallback;
}

static uint64_t number(const char *name, uint64_t fallback) {
    const char *text = look_up(name, NULL);
    return text && *text ? strtoull(text, NULL, 0) : fallback;
}

/* 0 when unset or 0, `usual` for 1, else the number itself. */
static int code(const char *name, int usual) {
    const uint64_t given = number(name, 0);
    return given == 1 ? usual : (int)given;
}

static void text(const char *name, char *into, size_t size) {
    snprintf(into, size, "%s", look_up(name, ""));
}

/* A copy of the library in a folder of its own brings its settings along. */
static void read_file_beside(char *folder, size_t size) {
    Dl_info info;
    if (!dladdr(&chosen, &info) || !info.dli_fname || !strchr(info.dli_fname, '/'))
        return;
    char path[512];
    const int length = (int)(strrchr(info.dli_fname, '/') - info.dli_fname);
    snprintf(path, sizeof path, "%.*s/settings", length, info.dli_fname);
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    file_text[fread(file_text, 1, sizeof file_text - 1, file)] = 0;
    fclose(file);
    snprintf(folder, size, "%.*s", length, info.dli_fname);
}

static void read_all(void) {
    read_file_beside(chosen.folder, sizeof chosen.folder);
    if (!*chosen.folder)
        text("FAKE_CUDA_DIR", chosen.folder, sizeof chosen.folder);
    usable = *chosen.folder != 0;
    chosen.version = (int)number("FAKE_CUDA_VERSION", 13000);
    chosen.devices = (unsigned)number("FAKE_CUDA_DEVICES", 1);
    chosen.hbm_bytes = number("FAKE_CUDA_HBM", 1ULL << 30);
    chosen.context_bytes = number("FAKE_CUDA_CONTEXT_BYTES", 16ULL << 20);
    chosen.bandwidth = number("FAKE_CUDA_BANDWIDTH", 0);
    chosen.slice_us = number("FAKE_CUDA_SLICE_US", 0);
    chosen.context_us = number("FAKE_CUDA_CONTEXT_US", 0);
    chosen.register_us = number("FAKE_CUDA_REGISTER_US", 0);
    chosen.imex = number("FAKE_CUDA_IMEX", 0) != 0;
    chosen.latency_us = number("FAKE_CUDA_LATENCY_US", 0);
    chosen.granularity = number("FAKE_CUDA_GRANULARITY", 2ULL << 20);
    chosen.mig = number("FAKE_CUDA_MIG", 0) != 0;
    chosen.ipc_code = code("FAKE_CUDA_NO_IPC", 801);
    chosen.ipc_namespaces_code = (int)number("FAKE_CUDA_IPC_NAMESPACES", 201);
    chosen.ipc_users_code = code("FAKE_CUDA_IPC_USERS", 205);
    chosen.compute_mode = (int)number("FAKE_CUDA_COMPUTE_MODE", 0);
    chosen.context_code = code("FAKE_CUDA_CONTEXT_FAIL", 2);
    chosen.eager = number("FAKE_CUDA_EAGER", 0) != 0;
    const char *memops = look_up("FAKE_CUDA_MEMOPS", "");
    chosen.memops_refused = !strcmp(memops, "none");
    chosen.memops_silent = !strcmp(memops, "silent");
    text("CUDA_VISIBLE_DEVICES", chosen.visible, sizeof chosen.visible);
    text("FAKE_CUDA_FAIL", chosen.fail, sizeof chosen.fail);
    text("FAKE_CUDA_HANG", chosen.hang, sizeof chosen.hang);
}

const struct settings *settings(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_all);
    return usable ? &chosen : NULL;
}
