/* What one instruction set offers to api.cpp. Each backend is one translation unit compiled with its own flags;
 * everything in it but its table is in an anonymous namespace, and it uses no inline function or template of the
 * standard library (a copy compiled for a newer machine could be the one the linker keeps). */
#ifndef SPARSAM_BACKEND_H
#define SPARSAM_BACKEND_H
#include <stddef.h>

#include "sparsam.h"

struct Backend {
  decltype(&sparsam_forward) forward;
  decltype(&sparsam_backward) backward;
  decltype(&sparsam_scores) scores;
  decltype(&sparsam_pack_bytes) pack_bytes; /* negative: SPARSAM_UNSUPPORTED */
  decltype(&sparsam_pack) pack;
};

/* Arguments are checked by api.cpp. A function may answer SPARSAM_UNSUPPORTED: the next slower backend is then tried
 * (AMX leaves fp32 and blocks that do not fill its tiles to AVX-512). */
extern const Backend sparsam_portable_backend;
#if defined(__x86_64__)
extern const Backend sparsam_avx2_backend;
extern const Backend sparsam_avx512_backend;
extern const Backend sparsam_avx512_bf16_backend;
extern const Backend sparsam_amx_backend;
#endif

/* Grow-only buffer number `which` of the calling thread: page-aligned, contents undefined, valid until the same thread
 * asks for the same number again. NULL when memory is out. Several Python threads never share one. */
enum { SPARSAM_SCRATCH_COUNT = 8 };
void* sparsam_scratch(int which, size_t bytes);

/* How many of `threads` an OpenMP region may ask for: one in a forked child whose parent had a pool, for it is gone.
 * Every region with a pool asks here first, once per call. */
int32_t sparsam_usable_threads(int32_t threads);

#endif
