// The C interface of the int8 product: checks arguments and picks the path. No arithmetic lives here.
#include "int8.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

constexpr uint32_t kMagic = 0x53504938;
constexpr int64_t kMostFeatures = INT32_MAX / (127 * 127);  // sums of codes from -127 to 127 then fit 32 bits

const Int8Backend* backend_of(int32_t path) {
  switch (path) {
#ifdef SPARSAM_HAVE_AVX2
    case SPARSAM_INT8_AVX2:
      return &sparsam_int8_avx2;
#endif
#ifdef SPARSAM_HAVE_AVX512_VNNI
    case SPARSAM_INT8_VNNI:
      return &sparsam_int8_vnni;
#endif
#ifdef SPARSAM_HAVE_AMX_INT8
    case SPARSAM_INT8_AMX:
      return &sparsam_int8_amx;
#endif
    case SPARSAM_INT8_PORTABLE:
      return &sparsam_int8_portable;
    default:
      return nullptr;
  }
}

// What the processor has beyond the instruction set that api.cpp found, which says what the operating system saves.
bool has_feature(int32_t path) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (path <= SPARSAM_INT8_AVX2) return true;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool vnni = c >> 11 & 1, tiles = d >> 25 & 1;
  return vnni && (path < SPARSAM_INT8_AMX || tiles);
#else
  return path == SPARSAM_INT8_PORTABLE;
#endif
}

// The best path of the chosen instruction set, for blocks of rows x cols.
int32_t path_for(int32_t rows, int32_t cols) {
  const int32_t isa = sparsam_get_isa();
  const bool fills_tiles = rows % 16 == 0 && cols % 16 == 0;
  int32_t path = isa >= SPARSAM_AMX && fills_tiles ? SPARSAM_INT8_AMX
                 : isa >= SPARSAM_AVX512           ? SPARSAM_INT8_VNNI
                 : isa >= SPARSAM_AVX2             ? SPARSAM_INT8_AVX2
                                                   : SPARSAM_INT8_PORTABLE;
  while (path > SPARSAM_INT8_PORTABLE && !(backend_of(path) && has_feature(path))) --path;
  return path;
}

bool is_layer(const sparsam_int8_layer* p) {
  if (!p || p->in_features < 1 || p->in_features > kMostFeatures || p->out_features < 1 || p->rows < 1 || p->cols < 1 ||
      p->slots < 0 || p->slots > INT32_MAX || !p->scale || !p->row_start)
    return false;
  const int64_t lines = (p->out_features + p->rows - 1) / p->rows, across = (p->in_features + p->cols - 1) / p->cols;
  if (p->row_start[0] != 0 || p->row_start[lines] > p->slots) return false;
  if (p->row_start[lines] > 0 && !(p->values && p->block_row && p->block_col && p->row_slots)) return false;
  for (int64_t line = 0; line < lines; ++line) {
    if (p->row_start[line + 1] < p->row_start[line]) return false;
    for (int32_t i = p->row_start[line]; i < p->row_start[line + 1]; ++i) {
      const int64_t slot = p->row_slots[i];
      if (slot < 0 || slot >= p->slots || p->block_row[slot] != line || p->block_col[slot] < 0 ||
          p->block_col[slot] >= across)
        return false;
    }
  }
  return true;
}

Int8Header header_of(const sparsam_int8_layer* p) {
  const int64_t lines = (p->out_features + p->rows - 1) / p->rows;
  Int8Header h = {kMagic,  path_for(p->rows, p->cols), 0,      p->in_features, p->out_features, p->row_start[lines],
                  p->rows, p->cols,                    {0, 0}};
  h.bytes = backend_of(h.path)->bytes(&h);
  return h;
}

}  // namespace

extern "C" {

int32_t sparsam_int8_path(int32_t rows, int32_t cols) { return rows < 1 || cols < 1 ? -1 : path_for(rows, cols); }

int64_t sparsam_int8_pack_bytes(const sparsam_int8_layer* layer) {
  return is_layer(layer) ? header_of(layer).bytes : 0;
}

int32_t sparsam_int8_pack(const sparsam_int8_layer* layer, void* packed) {
  if (!is_layer(layer) || !packed || reinterpret_cast<uintptr_t>(packed) % 8) return SPARSAM_BAD_ARGUMENT;
  Int8Header* h = static_cast<Int8Header*>(packed);
  *h = header_of(layer);
  backend_of(h->path)->pack(layer, h);
  return SPARSAM_OK;
}

int32_t sparsam_int8_forward(const void* packed, int64_t packed_bytes, int64_t in_features, int64_t out_features,
                             int64_t tokens, int32_t x_dtype, const void* x, int64_t ldx, const float* x_scale,
                             const float* bias, int32_t activation, int32_t y_dtype, void* y, int32_t threads) {
  const Int8Header* h = static_cast<const Int8Header*>(packed);
  if (!h || reinterpret_cast<uintptr_t>(packed) % 8 || packed_bytes < int64_t(sizeof(Int8Header)) ||
      h->magic != kMagic || h->bytes != packed_bytes || h->in_features != in_features ||
      h->out_features != out_features || h->path != path_for(h->rows, h->cols))
    return SPARSAM_BAD_ARGUMENT;
  const bool codes = x_dtype == SPARSAM_I8, floats = x_dtype == SPARSAM_F32 || x_dtype == SPARSAM_BF16;
  if (tokens < 0 || threads < 1 || activation < SPARSAM_NONE || activation > SPARSAM_SILU ||
      (y_dtype != SPARSAM_F32 && y_dtype != SPARSAM_BF16) || !(codes || floats))
    return SPARSAM_BAD_ARGUMENT;
  if (tokens == 0) return SPARSAM_OK;
  if (!x || !y || (codes && !x_scale) || (tokens > 1 && ldx < in_features)) return SPARSAM_BAD_ARGUMENT;
  const Int8Call call = {tokens, x_dtype,    x,       ldx, x_scale,
                         bias,   activation, y_dtype, y,   sparsam_usable_threads(threads)};
  return backend_of(h->path)->forward(h, &call);
}

}  // extern "C"
