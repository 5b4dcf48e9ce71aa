/* What every driver function does first: count the call, fail or hang where a test asked for it, and refuse what a
 * process without driver, context or luck may not call. */
#pragma once

#include "abi.h"
#include "functions.h"

#define EXPORT __attribute__((visibility("default")))

enum needs { NEEDS_NOTHING, NEEDS_DRIVER, NEEDS_CONTEXT };

#define AS_ENUM(symbol, name, since, needs) F_##symbol,
enum function { FAKE_CUDA_FUNCTIONS(AS_ENUM) FUNCTIONS };
#undef AS_ENUM

struct function_info {
    const char *symbol;
    const char *name;
    int since;
    enum needs needs;
    void (*address)(void);
};

extern const struct function_info functions[FUNCTIONS];

/* By exported symbol or by plain name ("cuMemAlloc" is cuMemAlloc_v2); true if `text` names this function. */
int function_is(enum function function, const char *text);

/* The code with which this call has to end at once, or CUDA_SUCCESS. `injected` may be NULL; else it receives a code
 * that a test asked for and that the function has to return itself, after doing half of its work. */
CUresult enter(enum function function, CUresult *injected);

/* Notes for tests why a call was refused, and gives back `code`. */
__attribute__((format(printf, 3, 4))) CUresult refuse(enum function function, CUresult code, const char *why, ...);

/* Whether a context that saw this code is lost for good. */
int is_sticky(CUresult code);

#define ENTER(symbol) \
    const enum function self = F_##symbol; \
    const CUresult verdict_ = enter(self, NULL); \
    if (verdict_ != CUDA_SUCCESS) \
    return verdict_
#define REFUSE(code, ...) return refuse(self, (code), __VA_ARGS__)
