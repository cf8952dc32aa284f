// Any processor: GCC vectors of four floats, which compile to SSE2, NEON or plain code.
#define SPARSAM_LANES 4
#define SPARSAM_TOKENS 6
#define SPARSAM_NAME sparsam_portable_backend
#include "vector.inc"
