// AVX-512 (F, DQ, BW, VL).
#define SPARSAM_LANES 16
#define SPARSAM_TOKENS 12
#define SPARSAM_NAME sparsam_avx512_backend
#include "vector.inc"
