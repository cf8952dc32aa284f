// int8 on AVX2: vpmaddwd on codes widened to 16 bits, for the byte product of this instruction set saturates.
#define SPARSAM_LANES 8
#define SPARSAM_TOKENS 6
#define SPARSAM_NAME sparsam_int8_avx2
#include "int8.inc"
