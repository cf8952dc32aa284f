// AVX2 and FMA.
#define SPARSAM_LANES 8
#define SPARSAM_TOKENS 6
#define SPARSAM_NAME sparsam_avx2_backend
#include "vector.inc"
