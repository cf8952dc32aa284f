// AVX-512 with bf16 products; fp32 is left to the AVX-512 path.
#define SPARSAM_BF16_ONLY
#define SPARSAM_LANES 16
#define SPARSAM_TOKENS 12
#define SPARSAM_NAME sparsam_avx512_bf16_backend
#include "vector.inc"
