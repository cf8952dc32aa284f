/* Fused softmax attention on AMX-bf16: forward and backward of one (batch, head) at a time, one thread per head.
 * Not for other instruction sets: the Python side then composes attention from ordinary products.
 * Source: Dao 2023, arXiv:2307.08691 (recomputation from the log-sum-exp in the backward). */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "backend.h"

namespace {

#include "attention_tiles.inc"

#include "attention_forward.inc"

#include "attention_backward.inc"

/* Runs work(state, batch, head) for every head. The state lives in the thread's scratch. */
template <typename State, typename Work>
int32_t each_head(const sparsam_attention& shape, int32_t threads, const Work& work) {
  const int64_t heads = shape.batch * shape.heads, blocks = (shape.tokens + 31) / 32;
  int failed = 0;
  threads = sparsam_usable_threads(threads > heads ? static_cast<int32_t>(heads) : threads);
#pragma omp parallel num_threads(threads)
  {
    Cursor count{nullptr};
    State sizes(count, blocks);
    char* memory = static_cast<char*>(sparsam_scratch(0, count.used));
    if (memory == nullptr) {
#pragma omp atomic write
      failed = 1;
    }
    Cursor cursor{memory};
    State state(cursor, blocks);
    const TileConfig config;
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040); /* subnormals as zero: tiny probabilities would cost an assist each */
    _tile_loadconfig(&config);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < heads; ++i)
      if (memory != nullptr) work(state, i / shape.heads, i % shape.heads);
    _tile_release();
    _mm_setcsr(control);
  }
  return failed ? SPARSAM_OUT_OF_MEMORY : SPARSAM_OK;
}

/* SPARSAM_OK when there is work to do, -1 when there is none, an error otherwise. */
int32_t examine(const sparsam_attention* shape, int32_t threads) {
  if (shape == nullptr || threads < 1 || shape->batch < 0 || shape->heads < 0 || shape->tokens < 0) return SPARSAM_BAD_ARGUMENT;
  if (sparsam_get_isa() != SPARSAM_AMX) return SPARSAM_UNSUPPORTED;
  if (shape->head_size < 32 || shape->head_size > 128 || shape->head_size % 32 != 0) return SPARSAM_UNSUPPORTED;
  if (!(shape->scale >= 0.0f)) return SPARSAM_UNSUPPORTED; /* the maximum is taken before the scale is applied */
  return shape->batch == 0 || shape->heads == 0 || shape->tokens == 0 ? -1 : SPARSAM_OK;
}

}  // namespace

int32_t sparsam_attention_forward(const sparsam_attention* shape, const void* q, const int64_t* q_strides, const void* k,
                                  const int64_t* k_strides, const void* v, const int64_t* v_strides, void* out,
                                  const int64_t* out_strides, float* lse, int32_t threads) {
  const int32_t status = examine(shape, threads);
  if (status != SPARSAM_OK) return status < 0 ? SPARSAM_OK : status;
  const auto work = [&](auto& state, int64_t b, int64_t h) {
    state.head(*shape, head_of<const bf16>(q, q_strides, b, h), head_of<const bf16>(k, k_strides, b, h),
               head_of<const bf16>(v, v_strides, b, h), head_of<bf16>(out, out_strides, b, h),
               lse + (b * shape->heads + h) * shape->tokens);
  };
  switch (shape->head_size / 32) {
    case 1: return each_head<Forward<1>>(*shape, threads, work);
    case 2: return each_head<Forward<2>>(*shape, threads, work);
    case 3: return each_head<Forward<3>>(*shape, threads, work);
    default: return each_head<Forward<4>>(*shape, threads, work);
  }
}

int32_t sparsam_attention_backward(const sparsam_attention* shape, const void* q, const int64_t* q_strides, const void* k,
                                   const int64_t* k_strides, const void* v, const int64_t* v_strides, const void* out,
                                   const int64_t* out_strides, const float* lse, const void* dout,
                                   const int64_t* dout_strides, void* dq, const int64_t* dq_strides, void* dk,
                                   const int64_t* dk_strides, void* dv, const int64_t* dv_strides, int32_t threads) {
  const int32_t status = examine(shape, threads);
  if (status != SPARSAM_OK) return status < 0 ? SPARSAM_OK : status;
  const auto work = [&](auto& state, int64_t b, int64_t h) {
    state.head(*shape, head_of<const bf16>(q, q_strides, b, h), head_of<const bf16>(k, k_strides, b, h),
               head_of<const bf16>(v, v_strides, b, h), head_of<const bf16>(out, out_strides, b, h),
               head_of<const bf16>(dout, dout_strides, b, h), lse + (b * shape->heads + h) * shape->tokens,
               head_of<bf16>(dq, dq_strides, b, h), head_of<bf16>(dk, dk_strides, b, h),
               head_of<bf16>(dv, dv_strides, b, h));
  };
  switch (shape->head_size / 32) {
    case 1: return each_head<Backward<1>>(*shape, threads, work);
    case 2: return each_head<Backward<2>>(*shape, threads, work);
    case 3: return each_head<Backward<3>>(*shape, threads, work);
    default: return each_head<Backward<4>>(*shape, threads, work);
  }
}
