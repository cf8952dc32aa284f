// The C interface: checks arguments, picks the instruction set, and hands the call to the first backend that can do it.
// No arithmetic lives here.
#include "sparsam.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "backend.h"

namespace {

const Backend* const kBackends[] = {
    &sparsam_portable_backend,
#ifdef SPARSAM_HAVE_AVX2
    &sparsam_avx2_backend,
#else
    nullptr,
#endif
#ifdef SPARSAM_HAVE_AVX512
    &sparsam_avx512_backend,
#else
    nullptr,
#endif
#ifdef SPARSAM_HAVE_AVX512_BF16
    &sparsam_avx512_bf16_backend,
#else
    nullptr,
#endif
#ifdef SPARSAM_HAVE_AMX
    &sparsam_amx_backend,
#else
    nullptr,
#endif
};
constexpr int32_t kUnknown = -1;
constexpr int32_t kIsaCount = sizeof(kBackends) / sizeof(kBackends[0]);

// What the processor has and the operating system saves across a context switch; says nothing about this build.
int32_t detect_processor() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return SPARSAM_PORTABLE;
  const bool osxsave = c >> 27 & 1, avx = c >> 28 & 1, fma = c >> 12 & 1;
  if (!osxsave || !avx || !fma) return SPARSAM_PORTABLE;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const bool saves_ymm = (low & 0x6) == 0x6, saves_zmm = (low & 0xe6) == 0xe6, saves_tiles = (low & 0x60000) == 0x60000;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return SPARSAM_PORTABLE;
  const bool avx2 = b >> 5 & 1;
  if (!saves_ymm || !avx2) return SPARSAM_PORTABLE;
  const unsigned avx512_bits = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if (!saves_zmm || (b & avx512_bits) != avx512_bits) return SPARSAM_AVX2;
  const bool tiles = saves_tiles && (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
  if (a < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return SPARSAM_AVX512;
#ifdef __linux__
  // Linux gives a process the 8 KiB of tile state only on request; the permission is inherited by its threads and
  // forks.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return SPARSAM_AMX;
#else
  (void)tiles;
#endif
  return SPARSAM_AVX512_BF16;
#else
  return SPARSAM_PORTABLE;
#endif
}

int32_t processor_isa = kUnknown;
int32_t chosen_isa = kUnknown;

int32_t processor() {
  int32_t isa = __atomic_load_n(&processor_isa, __ATOMIC_RELAXED);
  if (isa == kUnknown) __atomic_store_n(&processor_isa, isa = detect_processor(), __ATOMIC_RELAXED);
  return isa;
}

// A child of fork inherits libgomp's record of a thread pool whose threads are gone, and would wait for them for ever.
bool used_threads = false, lost_threads = false;
pthread_once_t fork_handler = PTHREAD_ONCE_INIT;
void in_child() { lost_threads = lost_threads || used_threads; }
void watch_forks() { pthread_atfork(nullptr, nullptr, in_child); }

bool is_dtype(int32_t dtype) { return dtype == SPARSAM_F32 || dtype == SPARSAM_BF16; }
bool is_activation(int32_t activation) { return activation >= SPARSAM_NONE && activation <= SPARSAM_SILU; }

// One sorted index: `starts` covers `lines` lines, and every slot it names lies in its line and inside the other side.
bool is_index(const int32_t* starts, const int32_t* slots, int64_t lines, const int32_t* line_of,
              const int32_t* other_of, int64_t others, int64_t slot_count) {
  if (!starts || starts[0] != 0 || starts[lines] > slot_count || (starts[lines] > 0 && !slots)) return false;
  for (int64_t line = 0; line < lines; ++line) {
    if (starts[line + 1] < starts[line]) return false;
    for (int32_t i = starts[line]; i < starts[line + 1]; ++i) {
      const int64_t slot = slots[i];
      if (slot < 0 || slot >= slot_count || line_of[slot] != line || other_of[slot] < 0 || other_of[slot] >= others)
        return false;
    }
  }
  return true;
}

bool is_shape(const sparsam_layer* p) {
  return p && p->in_features >= 1 && p->out_features >= 1 && p->rows >= 1 && p->cols >= 1 && p->slots >= 0 &&
         p->slots <= INT32_MAX && is_dtype(p->values_dtype) &&
         (p->slots == 0 || (p->values && p->block_row && p->block_col));
}

bool is_layer(const sparsam_layer* p) {
  if (!is_shape(p)) return false;
  const int64_t block_rows = (p->out_features + p->rows - 1) / p->rows,
                block_cols = (p->in_features + p->cols - 1) / p->cols;
  return is_index(p->row_start, p->row_slots, block_rows, p->block_row, p->block_col, block_cols, p->slots) &&
         is_index(p->col_start, p->col_slots, block_cols, p->block_col, p->block_row, block_rows, p->slots);
}

bool is_matrix(const void* data, int64_t rows, int64_t cols, int64_t stride) {
  return data && (rows <= 1 || stride >= cols);
}

// Calls `call` with the chosen backend, then with slower ones, until one does not answer SPARSAM_UNSUPPORTED.
template <class Call>
int32_t dispatch(int32_t isa, const Call& call) {
  for (; isa >= 0; --isa) {
    if (!kBackends[isa]) continue;
    const int32_t status = call(*kBackends[isa]);
    if (status != SPARSAM_UNSUPPORTED) return status;
  }
  return SPARSAM_UNSUPPORTED;
}

// Opens every packed buffer: each backend has a layout of its own, and reading one as another would give silent
// nonsense.
struct alignas(64) PackHeader {
  uint32_t magic;
  int32_t chosen, backend, dtype;
  int64_t in_features, out_features, slots;
  int32_t rows, cols;
};
constexpr uint32_t kMagic = 0x53505231;
static_assert(sizeof(PackHeader) == 64, "packed weights stay aligned to 64 bytes");

// Which backend packs for this layer; its bytes go to *bytes. kUnknown when none wants packed weights.
int32_t packing_backend(const sparsam_layer* layer, int32_t dtype, int64_t* bytes) {
  for (int32_t isa = sparsam_get_isa(); isa >= 0; --isa) {
    if (!kBackends[isa]) continue;
    *bytes = kBackends[isa]->pack_bytes(layer, dtype);
    if (*bytes >= 0) return *bytes > 0 ? isa : kUnknown;
  }
  return kUnknown;
}

// Grow-only buffers of one thread, freed when it ends.
struct Scratch {
  void* data[SPARSAM_SCRATCH_COUNT];
  size_t bytes[SPARSAM_SCRATCH_COUNT];
};
pthread_key_t scratch_key;
pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
bool scratch_ready = false;
int64_t scratch_held = 0;  // bytes, over all threads
void drop_scratch(Scratch* scratch, int which) {
  __atomic_sub_fetch(&scratch_held, int64_t(scratch->bytes[which]), __ATOMIC_RELAXED);
  free(scratch->data[which]);
  scratch->data[which] = nullptr;
  scratch->bytes[which] = 0;
}
void free_scratch(void* p) {
  for (int which = 0; which < SPARSAM_SCRATCH_COUNT; ++which) drop_scratch(static_cast<Scratch*>(p), which);
  free(p);
}
void make_scratch_key() { scratch_ready = pthread_key_create(&scratch_key, free_scratch) == 0; }

}  // namespace

int32_t sparsam_usable_threads(int32_t threads) {
  if (threads <= 1 || __atomic_load_n(&lost_threads, __ATOMIC_RELAXED)) return 1;
  pthread_once(&fork_handler, watch_forks);
  __atomic_store_n(&used_threads, true, __ATOMIC_RELAXED);
  return threads;
}

void* sparsam_scratch(int which, size_t bytes) {
  pthread_once(&scratch_once, make_scratch_key);
  if (!scratch_ready) return nullptr;
  Scratch* scratch = static_cast<Scratch*>(pthread_getspecific(scratch_key));
  if (!scratch) {
    scratch = static_cast<Scratch*>(calloc(1, sizeof(Scratch)));
    if (!scratch || pthread_setspecific(scratch_key, scratch)) return free(scratch), nullptr;
  }
  if (scratch->bytes[which] >= bytes && scratch->data[which]) return scratch->data[which];
  drop_scratch(scratch, which);
  const size_t page = size_t(2) << 20, unit = bytes >= page ? page : 4096,
               rounded = (bytes + unit - 1) / unit * unit + unit * !bytes;
  void* data = nullptr;
  if (posix_memalign(&data, unit, rounded)) return nullptr;
#ifdef MADV_HUGEPAGE
  if (unit == page) madvise(data, rounded, MADV_HUGEPAGE);  // token panels stride far: small pages would miss the TLB
#endif
  scratch->data[which] = data;
  scratch->bytes[which] = rounded;
  __atomic_add_fetch(&scratch_held, int64_t(rounded), __ATOMIC_RELAXED);
  return data;
}

extern "C" {

int32_t sparsam_abi_version(void) { return 1; }

int32_t sparsam_best_isa(void) {
  int32_t isa = processor();
  while (isa > SPARSAM_PORTABLE && !kBackends[isa]) --isa;
  return isa;
}

int32_t sparsam_has_isa(int32_t isa) {
  if (isa < 0 || isa >= kIsaCount) return SPARSAM_BAD_ARGUMENT;
  return kBackends[isa] && isa <= processor() ? SPARSAM_OK : SPARSAM_UNSUPPORTED;
}

int64_t sparsam_scratch_bytes(void) { return __atomic_load_n(&scratch_held, __ATOMIC_RELAXED); }

int32_t sparsam_set_isa(int32_t isa) {
  const int32_t status = sparsam_has_isa(isa);
  if (status != SPARSAM_OK) return status;
  __atomic_store_n(&chosen_isa, isa, __ATOMIC_RELAXED);
  return SPARSAM_OK;
}

int32_t sparsam_get_isa(void) {
  const int32_t isa = __atomic_load_n(&chosen_isa, __ATOMIC_RELAXED);
  return isa == kUnknown ? sparsam_best_isa() : isa;
}

int32_t sparsam_forward(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* x, int64_t ldx,
                        const void* bias, int32_t bias_dtype, int32_t activation, void* y, void* pre,
                        const void* packed, int32_t threads) {
  // With packed weights (one row at a time, say) a walk over the whole index would cost more than it could ever find.
  if (!(packed ? is_shape(layer) && layer->row_start && layer->col_start : is_layer(layer)))
    return SPARSAM_BAD_ARGUMENT;
  if (!is_dtype(dtype) || !is_activation(activation) || (bias && !is_dtype(bias_dtype)) || tokens < 0 || threads < 1)
    return SPARSAM_BAD_ARGUMENT;
  if (tokens == 0) return SPARSAM_OK;
  if (!is_matrix(x, tokens, layer->in_features, ldx) || !y) return SPARSAM_BAD_ARGUMENT;
  threads = sparsam_usable_threads(threads);
  const int32_t isa = sparsam_get_isa();
  if (packed) {
    const PackHeader* h = static_cast<const PackHeader*>(packed);
    if (h->magic != kMagic || h->chosen != isa || h->backend < 0 || h->backend > isa || !kBackends[h->backend] ||
        h->dtype != dtype || h->in_features != layer->in_features || h->out_features != layer->out_features ||
        h->slots != layer->slots || h->rows != layer->rows || h->cols != layer->cols)
      return SPARSAM_BAD_ARGUMENT;
    const int32_t status = kBackends[h->backend]->forward(layer, dtype, tokens, x, ldx, bias, bias_dtype, activation, y,
                                                          pre, h + 1, threads);
    if (status != SPARSAM_UNSUPPORTED) return status;
  }
  return dispatch(isa, [&](const Backend& backend) {
    return backend.forward(layer, dtype, tokens, x, ldx, bias, bias_dtype, activation, y, pre, nullptr, threads);
  });
}

int32_t sparsam_backward(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* grad, int64_t ldg,
                         const void* x, int64_t ldx, const void* pre, int32_t activation, void* dx, void* dvalues,
                         float* dbias, int32_t threads) {
  if (!is_layer(layer) || !is_dtype(dtype) || !is_activation(activation) || tokens < 0 || threads < 1)
    return SPARSAM_BAD_ARGUMENT;
  if (tokens == 0) {
    const size_t width = layer->values_dtype == SPARSAM_F32 ? 4 : 2;
    if (dvalues) memset(dvalues, 0, width * size_t(layer->slots) * size_t(layer->rows) * size_t(layer->cols));
    if (dbias) memset(dbias, 0, sizeof(float) * size_t(layer->out_features));
    return SPARSAM_OK;
  }
  if (!is_matrix(grad, tokens, layer->out_features, ldg) || (activation != SPARSAM_NONE && !pre) ||
      (dvalues && !is_matrix(x, tokens, layer->in_features, ldx)))
    return SPARSAM_BAD_ARGUMENT;
  threads = sparsam_usable_threads(threads);
  return dispatch(sparsam_get_isa(), [&](const Backend& backend) {
    return backend.backward(layer, dtype, tokens, grad, ldg, x, ldx, pre, activation, dx, dvalues, dbias, threads);
  });
}

int32_t sparsam_scores(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* grad, int64_t ldg,
                       const void* x, int64_t ldx, const void* pre, int32_t activation, float* scores,
                       int32_t threads) {
  if (!is_layer(layer) || !is_dtype(dtype) || !is_activation(activation) || tokens < 0 || threads < 1 || !scores)
    return SPARSAM_BAD_ARGUMENT;
  if (tokens == 0) {
    const int64_t block_rows = (layer->out_features + layer->rows - 1) / layer->rows;
    const int64_t block_cols = (layer->in_features + layer->cols - 1) / layer->cols;
    memset(scores, 0, sizeof(float) * size_t(block_rows * block_cols));
    return SPARSAM_OK;
  }
  if (!is_matrix(grad, tokens, layer->out_features, ldg) || !is_matrix(x, tokens, layer->in_features, ldx) ||
      (activation != SPARSAM_NONE && !pre))
    return SPARSAM_BAD_ARGUMENT;
  threads = sparsam_usable_threads(threads);
  return dispatch(sparsam_get_isa(), [&](const Backend& backend) {
    return backend.scores(layer, dtype, tokens, grad, ldg, x, ldx, pre, activation, scores, threads);
  });
}

int64_t sparsam_pack_bytes(const sparsam_layer* layer, int32_t dtype) {
  int64_t bytes = 0;
  if (!is_layer(layer) || !is_dtype(dtype) || packing_backend(layer, dtype, &bytes) == kUnknown) return 0;
  return int64_t(sizeof(PackHeader)) + bytes;
}

int32_t sparsam_pack(const sparsam_layer* layer, int32_t dtype, void* packed, int32_t threads) {
  if (!is_layer(layer) || !is_dtype(dtype) || !packed || reinterpret_cast<uintptr_t>(packed) % 64 || threads < 1)
    return SPARSAM_BAD_ARGUMENT;
  int64_t bytes = 0;
  const int32_t backend = packing_backend(layer, dtype, &bytes);
  if (backend == kUnknown) return SPARSAM_UNSUPPORTED;
  PackHeader* h = static_cast<PackHeader*>(packed);
  *h = PackHeader{kMagic,       sparsam_get_isa(), backend,    dtype, layer->in_features, layer->out_features,
                  layer->slots, layer->rows,       layer->cols};
  return kBackends[backend]->pack(layer, dtype, h + 1, sparsam_usable_threads(threads));
}

#ifndef SPARSAM_HAVE_AMX
int32_t sparsam_attention_forward(const sparsam_attention*, const void*, const int64_t*, const void*, const int64_t*,
                                  const void*, const int64_t*, void*, const int64_t*, float*, int32_t) {
  return SPARSAM_UNSUPPORTED;
}
int32_t sparsam_attention_backward(const sparsam_attention*, const void*, const int64_t*, const void*, const int64_t*,
                                   const void*, const int64_t*, const void*, const int64_t*, const float*, const void*,
                                   const int64_t*, void*, const int64_t*, void*, const int64_t*, void*, const int64_t*,
                                   int32_t) {
  return SPARSAM_UNSUPPORTED;
}
#endif

#ifndef SPARSAM_HAVE_AVX512
int32_t sparsam_norm_forward(int64_t, int64_t, const float*, const void*, int32_t, const float*, const float*, float,
                             float*, void*, int32_t, float*, float*, int32_t) {
  return SPARSAM_UNSUPPORTED;
}
int32_t sparsam_norm_backward(int64_t, int64_t, const void*, int32_t, const float*, const float*, const float*,
                              const float*, const float*, float*, void*, float*, float*, int32_t) {
  return SPARSAM_UNSUPPORTED;
}
#endif

}  // extern "C"
