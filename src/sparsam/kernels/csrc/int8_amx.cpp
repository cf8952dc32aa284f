// int8 on AMX tiles: tdpbssd, for blocks of multiples of 16.
#define SPARSAM_QUADS
#define SPARSAM_TILES
#define SPARSAM_LANES 16
#define SPARSAM_TOKENS 32
#define SPARSAM_NAME sparsam_int8_amx
#include "int8.inc"
