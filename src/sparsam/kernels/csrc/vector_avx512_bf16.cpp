// AVX-512 with vdpbf16ps; fp32, and blocks that are odd along a sum, are left to the AVX-512 path.
#define SPARSAM_PAIRS
#define SPARSAM_LANES 16
#define SPARSAM_TOKENS 12
#define SPARSAM_NAME sparsam_avx512_bf16_backend
#include "vector.inc"
