/* The C interface of Sparsam's CPU kernels. Plain C, no torch headers: one build serves every torch version.
 *
 * A block-sparse linear layer is y = act(x W^T + b), where W is (out_features, in_features) and only some of its
 * (rows, cols) blocks exist. Block i lives in slot i of `values`, at block position (block_row[i], block_col[i]);
 * a position of -1 is a dead slot. Two derived indices name the live slots: sorted by block row and by block column.
 *
 * Shape letters: T tokens (rows of x), K in_features, N out_features, R x C block, S slots,
 * RB = ceil(N / R) block rows, CB = ceil(K / C) block columns. Edge blocks reach past N or K: what lies there is
 * padding. It reads as zero, is never written to y or the input gradient, and its weight gradient is zero.
 */
#ifndef SPARSAM_H
#define SPARSAM_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPARSAM_API __attribute__((visibility("default")))

enum sparsam_dtype { SPARSAM_F32 = 0, SPARSAM_BF16 = 1, SPARSAM_I8 = 2 /* only where it says so */ };

enum sparsam_activation {
  SPARSAM_NONE = 0,
  SPARSAM_RELU = 1,
  SPARSAM_RELU2 = 2,     /* max(x, 0)^2 */
  SPARSAM_GELU = 3,      /* erf form */
  SPARSAM_GELU_TANH = 4,
  SPARSAM_SILU = 5
};

/* Instruction sets, slowest first. */
enum sparsam_isa {
  SPARSAM_PORTABLE = 0,
  SPARSAM_AVX2 = 1,
  SPARSAM_AVX512 = 2,
  SPARSAM_AVX512_BF16 = 3,
  SPARSAM_AMX = 4        /* AMX-bf16; fp32 products run on the AVX-512 path */
};

enum sparsam_status {
  SPARSAM_OK = 0,
  SPARSAM_BAD_ARGUMENT = 1,
  SPARSAM_OUT_OF_MEMORY = 2,
  SPARSAM_UNSUPPORTED = 3  /* the chosen instruction set cannot do this */
};

typedef struct sparsam_layer {
  int64_t in_features, out_features;
  int32_t rows, cols;            /* block size R, C; each >= 1 */
  int64_t slots;                 /* S */
  int32_t values_dtype;          /* of values, and of the weight gradient */
  const void* values;            /* (S, R, C), contiguous */
  const int32_t* block_row;      /* (S) */
  const int32_t* block_col;      /* (S) */
  const int32_t* row_start;      /* (RB + 1): live slots of block row r are row_slots[row_start[r] .. row_start[r+1]) */
  const int32_t* row_slots;      /* sorted by (block_row, block_col) */
  const int32_t* col_start;      /* (CB + 1) */
  const int32_t* col_slots;      /* sorted by (block_col, block_row) */
} sparsam_layer;

/* Best instruction set of this machine that this build has; asks the kernel for AMX once. */
SPARSAM_API int32_t sparsam_best_isa(void);
/* Fixes the instruction set for all later calls; SPARSAM_UNSUPPORTED when this machine or build lacks it. */
SPARSAM_API int32_t sparsam_set_isa(int32_t isa);
SPARSAM_API int32_t sparsam_get_isa(void);
/* SPARSAM_OK when sparsam_set_isa would accept it; changes nothing. */
SPARSAM_API int32_t sparsam_has_isa(int32_t isa);
/* Bytes of scratch memory that the kernels hold now, over all threads. A thread's scratch grows to what its largest call
 * needed and is freed when the thread ends. */
SPARSAM_API int64_t sparsam_scratch_bytes(void);
/* Version of this interface; the Python side refuses another one. */
SPARSAM_API int32_t sparsam_abi_version(void);

/* y = act(x W^T + bias).
 *   dtype: of x, y and pre (T rows each; x has K columns at stride ldx elements, y and pre are contiguous (T, N)).
 *   bias:  (N) of bias_dtype, or NULL.
 *   pre:   the value before the activation, or NULL when the caller does not need it.
 *   bf16 products accumulate in fp32. values of the other dtype are rounded (fp32 -> bf16, to nearest even) or widened.
 *   packed: NULL, or what sparsam_pack wrote for this layer, dtype and instruction set (frozen inference state). */
SPARSAM_API int32_t sparsam_forward(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* x, int64_t ldx,
                                    const void* bias, int32_t bias_dtype, int32_t activation, void* y, void* pre,
                                    const void* packed, int32_t threads);

/* Gradients of sparsam_forward.
 *   grad:  (T, N) at stride ldg elements, gradient of y.   pre: (T, N) contiguous, or NULL with SPARSAM_NONE.
 *   dx:    (T, K) contiguous, or NULL.   dvalues: (S, R, C) of values_dtype, or NULL; dead slots get zeros.
 *   dbias: (N) float32, or NULL.   x may be NULL when dvalues is. */
SPARSAM_API int32_t sparsam_backward(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* grad, int64_t ldg,
                                     const void* x, int64_t ldx, const void* pre, int32_t activation, void* dx,
                                     void* dvalues, float* dbias, int32_t threads);

/* scores[r, c] = mean over the entries of block (r, c) of |dense weight gradient| (padding counts as zero entries that
 * are not averaged over), for all RB x CB blocks, live or not; float32 (RB, CB). The gradient is summed over tokens
 * before the absolute value is taken. Arguments as in sparsam_backward. */
SPARSAM_API int32_t sparsam_scores(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* grad, int64_t ldg,
                                   const void* x, int64_t ldx, const void* pre, int32_t activation, float* scores,
                                   int32_t threads);

/* Packing of the weights for the forward of a frozen model. Size in bytes (0: this path needs none), then the packing
 * into a buffer of that size aligned to 64 bytes. */
SPARSAM_API int64_t sparsam_pack_bytes(const sparsam_layer* layer, int32_t dtype);
SPARSAM_API int32_t sparsam_pack(const sparsam_layer* layer, int32_t dtype, void* packed, int32_t threads);

/* The same layer in int8, for inference: y = act(acc x_scale[t] scale[n] + bias[n]), where acc is the exact sum of int8
 * codes in 32 bits, rounded once to fp32; after that each operation rounds in fp32 (no fused multiply-add), so every path
 * gives the same bits. Codes go from -127 to 127; at most INT32_MAX / 127^2 input features. The path follows the instruction
 * set: AMX-int8 (blocks of multiples of 16), AVX-512-VNNI, AVX2, portable. Any block size runs on any path: what a tile has
 * more than a block is filled with zeros at packing. */
enum sparsam_int8_path { SPARSAM_INT8_PORTABLE = 0, SPARSAM_INT8_AVX2 = 1, SPARSAM_INT8_VNNI = 2, SPARSAM_INT8_AMX = 3 };
typedef struct sparsam_int8_layer {
  int64_t in_features, out_features;
  int32_t rows, cols;
  int64_t slots;
  const int8_t* values;          /* (S, R, C), contiguous */
  const float* scale;            /* (N) */
  const int32_t *block_row, *block_col, *row_start, *row_slots; /* as in sparsam_layer */
} sparsam_int8_layer;
/* Which path blocks of this size take now. */
SPARSAM_API int32_t sparsam_int8_path(int32_t rows, int32_t cols);
/* Weights laid out for that path: size in bytes (0: the layer is not one), then the packing into such a buffer, aligned to
 * 8 bytes. It holds all that the product needs and no pointer: it may be copied, and the layer may go. */
SPARSAM_API int64_t sparsam_int8_pack_bytes(const sparsam_int8_layer* layer);
SPARSAM_API int32_t sparsam_int8_pack(const sparsam_int8_layer* layer, void* packed);
/*   x:       (T, K) at stride ldx elements. SPARSAM_I8: codes. fp32 or bf16: quantised on the way in, codes = x / scale to
 *            nearest even, at most 127; a row with NaN or infinity comes out as NaN.
 *   x_scale: (T), or NULL unless x is codes: each row then has the scale max(|row|, 1e-12) / 127.
 *   bias:    (N) or NULL.   y: (T, N) contiguous, fp32 or bf16. */
SPARSAM_API int32_t sparsam_int8_forward(const void* packed, int64_t packed_bytes, int64_t in_features,
                                         int64_t out_features, int64_t tokens, int32_t x_dtype, const void* x, int64_t ldx,
                                         const float* x_scale, const float* bias, int32_t activation, int32_t y_dtype,
                                         void* y, int32_t threads);

/* Causal or full softmax attention, bf16 with fp32 softmax, for (batch, heads, tokens, head) views with element
 * strides (batch, head, token) and unit stride in the last dimension. out is written the same way.
 *   lse: (batch, heads, tokens) float32: log-sum-exp of the scaled scores, for the backward.
 * SPARSAM_UNSUPPORTED unless the instruction set is AMX, head_size a multiple of 32 up to 128. */
typedef struct sparsam_attention {
  int64_t batch, heads, tokens, head_size;
  float scale;
  int32_t causal;
} sparsam_attention;
SPARSAM_API int32_t sparsam_attention_forward(const sparsam_attention* shape, const void* q, const int64_t* q_strides,
                                              const void* k, const int64_t* k_strides, const void* v,
                                              const int64_t* v_strides, void* out, const int64_t* out_strides, float* lse,
                                              int32_t threads);
SPARSAM_API int32_t sparsam_attention_backward(const sparsam_attention* shape, const void* q, const int64_t* q_strides,
                                               const void* k, const int64_t* k_strides, const void* v,
                                               const int64_t* v_strides, const void* out, const int64_t* out_strides,
                                               const float* lse, const void* dout, const int64_t* dout_strides, void* dq,
                                               const int64_t* dq_strides, void* dk, const int64_t* dk_strides, void* dv,
                                               const int64_t* dv_strides, int32_t threads);

/* Residual addition and LayerNorm over the last dimension, rows x width, all contiguous:
 * sum = x + branch,  out = (sum - mean) rstd weight + bias,  rstd = 1 / sqrt(variance + eps); computed in fp32.
 *   branch: of branch_dtype, or NULL: nothing is added, and sum may be NULL too.   weight, bias: (width), or NULL.
 *   out:    of out_dtype.   mean, rstd: (rows), for the backward.
 * SPARSAM_UNSUPPORTED below AVX-512. */
SPARSAM_API int32_t sparsam_norm_forward(int64_t rows, int64_t width, const float* x, const void* branch,
                                         int32_t branch_dtype, const float* weight, const float* bias, float eps, float* sum, void* out,
                                         int32_t out_dtype, float* mean, float* rstd, int32_t threads);

/* Gradients of sparsam_norm_forward. sum is x where nothing was added. Sums over rows are added up in an order that
 * depends on rows alone.
 *   dout: of out_dtype, gradient of out.   dsum: gradient of sum, or NULL for zero.
 *   dx:   gradient of x, and of a float32 branch.   dx_bf16: the same rounded, for a bfloat16 branch, or NULL.
 *   dweight, dbias: (width), or NULL. */
SPARSAM_API int32_t sparsam_norm_backward(int64_t rows, int64_t width, const void* dout, int32_t out_dtype,
                                          const float* dsum, const float* sum, const float* mean, const float* rstd,
                                          const float* weight, float* dx, void* dx_bf16, float* dweight, float* dbias,
                                          int32_t threads);

#ifdef __cplusplus
}
#endif
#endif
