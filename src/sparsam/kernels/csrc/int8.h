/* What one path of the int8 product offers to int8.cpp, and how packed weights begin. The rules of backend.h hold. */
#ifndef SPARSAM_INT8_H
#define SPARSAM_INT8_H
#include "backend.h"

/* Opens every pack; behind it come starts, columns, zeros, scales and weights, in a layout of the path's own. A pack
 * holds no pointers, so it may be copied. */
struct Int8Header {
  uint32_t magic;
  int32_t path;
  int64_t bytes, in_features, out_features, live; /* live: blocks that exist */
  int32_t rows, cols;
  int64_t reserved[2];
};
static_assert(sizeof(Int8Header) == 64, "what follows stays aligned as the pack is");

struct Int8Call {
  int64_t tokens;
  int32_t x_dtype;
  const void* x;
  int64_t ldx;
  const float *x_scale, *bias;
  int32_t activation, y_dtype;
  void* y;
  int32_t threads;
};

struct Int8Backend {
  int64_t (*bytes)(const Int8Header*);                         /* of the whole pack */
  void (*pack)(const sparsam_int8_layer*, Int8Header*);        /* writes what follows the header */
  int32_t (*forward)(const Int8Header*, const Int8Call*);
};

extern const Int8Backend sparsam_int8_portable;
#if defined(__x86_64__)
extern const Int8Backend sparsam_int8_avx2;
extern const Int8Backend sparsam_int8_vnni;
extern const Int8Backend sparsam_int8_amx;
#endif

#endif
