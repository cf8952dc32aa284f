// int8 on any processor: pairs of 16-bit numbers, SSE2 where there is x86.
#define SPARSAM_LANES 4
#define SPARSAM_TOKENS 6
#define SPARSAM_NAME sparsam_int8_portable
#include "int8.inc"
