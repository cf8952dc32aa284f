// int8 on AVX-512 with VNNI: vpdpbusd, which adds four byte products to 32 bits without saturation.
#define SPARSAM_QUADS
#define SPARSAM_LANES 16
#define SPARSAM_TOKENS 12
#define SPARSAM_NAME sparsam_int8_vnni
#include "int8.inc"
