// Residual addition and LayerNorm in one pass over memory each way, on AVX-512: what is added, normalised and rounded
// stays in the first cache for the length of a row. Not for other machines: the Python side then composes it.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "backend.h"

namespace {

typedef uint16_t Bf16;
enum { kVector = 16, kRowsBuffer = 0, kSumsBuffer = 1 };
constexpr int64_t kChunks = 64;               // of the sums over rows: their order may not depend on the threads
constexpr int64_t kEntriesAThread = 1 << 14;  // below it a second thread costs more than it brings

struct None {};  // a branch that is absent

inline __mmask16 lanes(int64_t left) { return left >= kVector ? __mmask16(0xffff) : __mmask16((1u << left) - 1); }
inline __m512 load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline __m512 load(const Bf16* p, __mmask16 m) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
inline void store(float* p, __m512 x, __mmask16 m) { _mm512_mask_storeu_ps(p, m, x); }
// To nearest even, as PyTorch does it: subnormals are kept, and a NaN keeps being one.
inline void store(Bf16* p, __m512 x, __mmask16 m) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_or_epi32(near, nan, high, _mm512_set1_epi32(0x40));
  _mm256_mask_storeu_epi16(p, m, _mm512_cvtepi32_epi16(rounded));
}

// Body(column, lanes) for every vector of a row; the whole ones get a constant mask, which the compiler drops.
template <class Body>
inline __attribute__((always_inline)) void each(int64_t width, const Body& body) {
  int64_t i = 0;
#pragma GCC unroll 2
  for (; i + kVector <= width; i += kVector) body(i, __mmask16(0xffff));
  if (i < width) body(i, lanes(width - i));
}

int64_t padded(int64_t width) { return (width + kVector - 1) / kVector * kVector; }
int32_t fewer(int32_t threads, int64_t rows, int64_t width) {
  const int64_t useful = rows * width / kEntriesAThread + 1;
  return sparsam_usable_threads(threads > useful ? int32_t(useful) : threads);
}

// Weight and bias of all lanes; ones and zeros where there are none.
bool take_affine(int64_t width, const float* weight, const float* bias, const float** w, const float** b) {
  *w = weight, *b = bias;
  if (weight && bias) return true;
  float* own = static_cast<float*>(sparsam_scratch(kRowsBuffer, sizeof(float) * 2 * size_t(width)));
  if (!own) return false;
  for (int64_t i = 0; i < width; ++i) own[i] = 1.0f, own[width + i] = 0.0f;
  if (!weight) *w = own;
  if (!bias) *b = own + width;
  return true;
}

inline __m512 sum_of(const float* x, const None*, int64_t i, __mmask16 m) { return load(x + i, m); }
template <class Branch>
inline __m512 sum_of(const float* x, const Branch* branch, int64_t i, __mmask16 m) {
  return _mm512_add_ps(load(x + i, m), load(branch + i, m));
}
inline const None* row_of(const None*, int64_t) { return nullptr; }
template <class T>
inline T* row_of(T* p, int64_t at) { return p + at; }

template <class Branch, class Out>
void forward_row(int64_t width, const float* x, const Branch* branch, const float* w, const float* b, float eps,
                 float* sum, Out* out, float* mean, float* rstd) {
  __m512 total[2] = {};
  each(width, [&](int64_t i, __mmask16 m) {
    const __m512 s = sum_of(x, branch, i, m);
    if (sum) store(sum + i, s, m);
    total[i / kVector & 1] = _mm512_add_ps(total[i / kVector & 1], s);
  });
  const float* s = sum ? sum : x;
  const float center = _mm512_reduce_add_ps(_mm512_add_ps(total[0], total[1])) / float(width);
  const __m512 c = _mm512_set1_ps(center);
  total[0] = total[1] = _mm512_setzero_ps();
  each(width, [&](int64_t i, __mmask16 m) {
    const __m512 d = _mm512_maskz_sub_ps(m, load(s + i, m), c);
    total[i / kVector & 1] = _mm512_fmadd_ps(d, d, total[i / kVector & 1]);
  });
  const float variance = _mm512_reduce_add_ps(_mm512_add_ps(total[0], total[1])) / float(width);
  const float scale = 1.0f / __builtin_sqrtf(variance + eps);
  const __m512 q = _mm512_set1_ps(scale);
  each(width, [&](int64_t i, __mmask16 m) {
    const __m512 h = _mm512_mul_ps(_mm512_sub_ps(load(s + i, m), c), q);
    store(out + i, _mm512_fmadd_ps(h, load(w + i, m), load(b + i, m)), m);
  });
  *mean = center, *rstd = scale;
}

template <class Branch, class Out>
int32_t forward(int64_t rows, int64_t width, const float* x, const Branch* branch, const float* weight,
                const float* bias, float eps, float* sum, Out* out, float* mean, float* rstd, int32_t threads) {
  const float *w, *b;
  if (!take_affine(width, weight, bias, &w, &b)) return SPARSAM_OUT_OF_MEMORY;
#pragma omp parallel for num_threads(fewer(threads, rows, width)) schedule(static)
  for (int64_t r = 0; r < rows; ++r)
    forward_row(width, x + r * width, row_of(branch, r * width), w, b, eps, sum ? sum + r * width : nullptr,
                out + r * width, mean + r, rstd + r);
  return SPARSAM_OK;
}

// With h = (sum - mean) rstd and g = dout w:  dx = dsum + rstd (g - mean(g) - h mean(g h)), and over all rows
// dw = sum of dout h,  db = sum of dout.
template <bool kSums, class Out>
void backward_row(int64_t width, const Out* dout, const float* dsum, const float* sum, float mean, float rstd,
                  const float* w, float* dx, Bf16* narrow, float* dw, float* db) {
  const __m512 c = _mm512_set1_ps(mean), q = _mm512_set1_ps(rstd);
  __m512 of_g = _mm512_setzero_ps(), of_gh = of_g;
  each(width, [&](int64_t i, __mmask16 m) {
    const __m512 d = load(dout + i, m), g = _mm512_mul_ps(d, load(w + i, m));
    const __m512 h = _mm512_maskz_mul_ps(m, _mm512_sub_ps(load(sum + i, m), c), q);
    of_g = _mm512_add_ps(of_g, g);
    of_gh = _mm512_fmadd_ps(g, h, of_gh);
    if (kSums) {  // these rows are padded
      _mm512_storeu_ps(dw + i, _mm512_fmadd_ps(d, h, _mm512_loadu_ps(dw + i)));
      _mm512_storeu_ps(db + i, _mm512_add_ps(d, _mm512_loadu_ps(db + i)));
    }
  });
  const __m512 c1 = _mm512_set1_ps(_mm512_reduce_add_ps(of_g) / float(width));
  const __m512 c2 = _mm512_set1_ps(_mm512_reduce_add_ps(of_gh) / float(width));
  each(width, [&](int64_t i, __mmask16 m) {
    const __m512 g = _mm512_mul_ps(load(dout + i, m), load(w + i, m));
    const __m512 h = _mm512_mul_ps(_mm512_sub_ps(load(sum + i, m), c), q);
    const __m512 stream = dsum ? load(dsum + i, m) : _mm512_setzero_ps();
    const __m512 d = _mm512_fmadd_ps(_mm512_sub_ps(_mm512_sub_ps(g, c1), _mm512_mul_ps(h, c2)), q, stream);
    store(dx + i, d, m);
    if (narrow) store(narrow + i, d, m);
  });
}

template <bool kSums, class Out>
int32_t backward(int64_t rows, int64_t width, const Out* dout, const float* dsum, const float* sum, const float* mean,
                 const float* rstd, const float* weight, float* dx, Bf16* narrow, float* dweight, float* dbias,
                 int32_t threads) {
  const float *w, *zeros;
  if (!take_affine(width, weight, weight, &w, &zeros)) return SPARSAM_OUT_OF_MEMORY;
  const int64_t chunks = rows < kChunks ? rows : kChunks, line = padded(width);
  float* sums = nullptr;
  if (kSums && !(sums = static_cast<float*>(sparsam_scratch(kSumsBuffer, sizeof(float) * 2 * size_t(chunks * line)))))
    return SPARSAM_OUT_OF_MEMORY;
#pragma omp parallel num_threads(fewer(threads, rows, width))
  {
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      float *dw = kSums ? sums + 2 * chunk * line : nullptr, *db = kSums ? dw + line : nullptr;
      if (kSums) memset(dw, 0, sizeof(float) * 2 * size_t(line));
      for (int64_t r = rows * chunk / chunks; r < rows * (chunk + 1) / chunks; ++r) {
        const int64_t at = r * width;
        backward_row<kSums>(width, dout + at, dsum ? dsum + at : nullptr, sum + at, mean[r], rstd[r], w, dx + at,
                            narrow ? narrow + at : nullptr, dw, db);
      }
    }
    if (kSums) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < 2 * line; i += kVector) {
        __m512 total = _mm512_setzero_ps();
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
          total = _mm512_add_ps(total, _mm512_loadu_ps(sums + 2 * chunk * line + i));
        float* to = i < line ? dweight : dbias;
        const int64_t column = i < line ? i : i - line;
        if (to) store(to + column, total, lanes(width - column));
      }
    }
  }
  return SPARSAM_OK;
}

template <bool kSums, class Out>
auto backward_of(const Out*) {
  return &backward<kSums, Out>;
}

bool is_dtype(int32_t dtype) { return dtype == SPARSAM_F32 || dtype == SPARSAM_BF16; }

}  // namespace

int32_t sparsam_norm_forward(int64_t rows, int64_t width, const float* x, const void* branch, int32_t branch_dtype,
                             const float* weight, const float* bias, float eps, float* sum, void* out,
                             int32_t out_dtype, float* mean, float* rstd, int32_t threads) {
  if (rows < 0 || width < 1 || threads < 1 || !is_dtype(out_dtype) || (branch && !is_dtype(branch_dtype)))
    return SPARSAM_BAD_ARGUMENT;
  if (sparsam_get_isa() < SPARSAM_AVX512) return SPARSAM_UNSUPPORTED;
  if (rows == 0) return SPARSAM_OK;
  if (!x || !out || !mean || !rstd || (branch && !sum)) return SPARSAM_BAD_ARGUMENT;
  const auto with = [&](const auto* typed) {
    if (out_dtype == SPARSAM_F32)
      return forward(rows, width, x, typed, weight, bias, eps, sum, static_cast<float*>(out), mean, rstd, threads);
    return forward(rows, width, x, typed, weight, bias, eps, sum, static_cast<Bf16*>(out), mean, rstd, threads);
  };
  if (!branch) return with(static_cast<const None*>(nullptr));
  return branch_dtype == SPARSAM_F32 ? with(static_cast<const float*>(branch)) : with(static_cast<const Bf16*>(branch));
}

int32_t sparsam_norm_backward(int64_t rows, int64_t width, const void* dout, int32_t out_dtype, const float* dsum,
                              const float* sum, const float* mean, const float* rstd, const float* weight, float* dx,
                              void* dx_bf16, float* dweight, float* dbias, int32_t threads) {
  if (rows < 0 || width < 1 || threads < 1 || !is_dtype(out_dtype)) return SPARSAM_BAD_ARGUMENT;
  if (sparsam_get_isa() < SPARSAM_AVX512) return SPARSAM_UNSUPPORTED;
  if (rows == 0) {
    if (dweight) memset(dweight, 0, sizeof(float) * size_t(width));
    if (dbias) memset(dbias, 0, sizeof(float) * size_t(width));
    return SPARSAM_OK;
  }
  if (!dout || !sum || !mean || !rstd || !dx) return SPARSAM_BAD_ARGUMENT;
  Bf16* narrow = static_cast<Bf16*>(dx_bf16);
  const auto with = [&](const auto* typed) {
    const auto call = dweight || dbias ? backward_of<true>(typed) : backward_of<false>(typed);
    return call(rows, width, typed, dsum, sum, mean, rstd, weight, dx, narrow, dweight, dbias, threads);
  };
  return out_dtype == SPARSAM_F32 ? with(static_cast<const float*>(dout)) : with(static_cast<const Bf16*>(dout));
}
