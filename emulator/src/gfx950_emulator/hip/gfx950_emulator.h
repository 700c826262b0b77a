// SPDX-License-Identifier: MIT
// What the stand-in for libamdhip64 offers beyond HIP.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Declares memory that did not come from HIP (malloc, mmap), so that kernels are checked against
// its bounds. `label` names it in messages and is copied; null for none. Unregister before it is
// freed.
void gfx950_emulator_register(void* begin, size_t bytes, const char* label);
void gfx950_emulator_unregister(void* begin);

// Host memory between inaccessible pages, registered until it is freed: an allocator for a whole
// program.
void* gfx950_emulator_allocate(size_t bytes, const char* label);
void gfx950_emulator_free(void* begin);

// Kernel launches so far, failed ones included.
unsigned long long gfx950_emulator_launches(void);

#ifdef __cplusplus
}
#endif
