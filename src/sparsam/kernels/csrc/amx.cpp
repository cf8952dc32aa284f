// Block-sparse products on AMX tiles: bf16 in, fp32 accumulation, blocks of multiples of 16. This file lays out scratch and
// threads; amx_pack.inc, amx_product.inc and amx_gradient.inc do the work. fp32 and other blocks go to the vector paths.
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#include "backend.h"

namespace {

#define SPARSAM_LANES 16
#include "activation.inc"
#include "amx_tiles.inc"
#include "amx_pack.inc"
#include "amx_product.inc"
#include "amx_gradient.inc"
#include "amx_scores.inc"

bool fits(const sparsam_layer* p, int32_t dtype) { return dtype == SPARSAM_BF16 && p->rows % 16 == 0 && p->cols % 16 == 0; }

// Body(id, count) on every thread; without a pool when there is one thread, which is what a forked child has.
template <class Body>
void parallel(int32_t threads, const Body& body) {
  if (threads <= 1) return body(0, 1);
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}
INLINE void wait_for_all(int count) {
  if (count > 1) {
#pragma omp barrier
  }
}

// A buffer of the calling thread, shared by the threads of this call. Builds the layout twice: to count and to hand out.
template <class Layout>
bool lay_out(const Layout& layout) {
  Cursor cursor = {nullptr, 0};
  layout(cursor);
  char* base = static_cast<char*>(sparsam_scratch(0, size_t(cursor.used)));
  if (!base) return false;
  cursor = {base, 0};
  layout(cursor);
  return true;
}

Weights take_weights(const Direction& d, Cursor& cursor) {
  const char* tiles = cursor.take<char>(d.all_steps() * d.step_bytes());
  return {tiles, cursor.take<int32_t>(d.all_steps())};
}
void pack_share(const Direction& d, const Weights& w, int id, int count) {
  const int64_t first = d.live() * id / count, last = d.live() * (id + 1) / count;
  pack_weights(d, first, last, const_cast<char*>(w.tiles), const_cast<int32_t*>(w.panel));
}

void widen_bias(const void* bias, int32_t dtype, int64_t features, float* out) {
  const int64_t width = round_up(features, 32);
  for (int64_t i = 0; i < width; i += 16) {
    const __mmask16 mask = first_of_16(features - i);
    const __m512 v = dtype == SPARSAM_F32 ? _mm512_maskz_loadu_ps(mask, static_cast<const float*>(bias) + i)
                                          : widen(_mm256_maskz_loadu_epi16(mask, static_cast<const Bf16*>(bias) + i));
    _mm512_store_ps(out + i, v);
  }
}

int32_t forward(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* x, int64_t ldx, const void* bias,
                int32_t bias_dtype, int32_t activation, void* y, void* pre, const void* packed, int32_t threads) {
  if (!fits(layer, dtype)) return SPARSAM_UNSUPPORTED;
  const Direction d = direction(layer, true);
  const Bf16* in = static_cast<const Bf16*>(x);
  const int64_t features = d.inputs;
  const bool few = tokens <= 16, direct = few && features % d.reach == 0 && features == d.panels * d.reach;
  const Cut cut = cut_tokens(tokens, features, threads);
  Weights weights = {nullptr, nullptr};
  Panels panels = panels_of(d.reach, d.panels, few ? 16 : cut.tokens);
  float* wide_bias = nullptr;
  if (packed) {
    Cursor cursor = {static_cast<char*>(const_cast<void*>(packed)), 0};
    weights = take_weights(d, cursor);
  }
  if (!lay_out([&](Cursor& cursor) {
        if (!packed) weights = take_weights(d, cursor);
        panels.data = direct ? nullptr : cursor.take<char>(panels.chunk_bytes * (cut.by_columns ? 1 : threads));
        wide_bias = bias ? cursor.take<float>(round_up(features > d.outputs ? features : d.outputs, 32)) : nullptr;
      }))
    return SPARSAM_OUT_OF_MEMORY;
  if (bias) widen_bias(bias, bias_dtype, d.outputs, wide_bias);
  const Output out = {static_cast<Bf16*>(y), static_cast<Bf16*>(pre), d.outputs, wide_bias, activation};

  parallel(threads, [&](int id, int count) {
    if (!packed) pack_share(d, weights, id, count);
    if (cut.by_columns) {
      const int64_t first = pair_share(d, id, count), last = pair_share(d, id + 1, count);
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        const int64_t t0 = chunk * cut.tokens, rows = smaller(cut.tokens, tokens - t0);
        Tokens part = {reinterpret_cast<const char*>(in + t0 * ldx), d.reach * 2, ldx * 2};
        if (!direct) {
          if (chunk) wait_for_all(count);
          const int64_t padded = few ? round_up(rows, 2) : round_up(rows, 64), step = round_up(divide_up(padded, count), 2);
          const int64_t r0 = smaller(step * id, padded), r1 = smaller(r0 + step, padded);
          pack_rows(panels, in + (t0 + r0) * ldx, ldx, features, smaller(rows, r1) - r0, r1 - r0,
                    panels.data + r0 * d.reach * 2);
          part = {panels.data, panels.panel_bytes, d.reach * 2};
        }
        if (chunk == 0 || !direct) wait_for_all(count);
        product(d, weights, part, out, t0, rows, first, last, few);
      }
      return;
    }
    wait_for_all(count);
    char* mine = panels.data + id * panels.chunk_bytes;
    for (int64_t chunk = cut.chunks * id / count; chunk < cut.chunks * (id + 1) / count; ++chunk) {
      const int64_t t0 = chunk * cut.tokens, rows = smaller(cut.tokens, tokens - t0);
      pack_rows(panels, in + t0 * ldx, ldx, features, rows, round_up(rows, 64), mine);
      product(d, weights, {mine, panels.panel_bytes, d.reach * 2}, out, t0, rows, 0, d.pairs, false);
    }
  });
  return SPARSAM_OK;
}

int64_t pack_bytes(const sparsam_layer* layer, int32_t dtype) {
  if (!fits(layer, dtype)) return -int64_t(SPARSAM_UNSUPPORTED);
  Cursor cursor = {nullptr, 0};
  take_weights(direction(layer, true), cursor);
  return cursor.used;
}

int32_t pack(const sparsam_layer* layer, int32_t dtype, void* packed, int32_t threads) {
  if (!fits(layer, dtype)) return SPARSAM_UNSUPPORTED;
  const Direction d = direction(layer, true);
  Cursor cursor = {static_cast<char*>(packed), 0};
  const Weights weights = take_weights(d, cursor);
  parallel(threads, [&](int id, int count) { pack_share(d, weights, id, count); });
  return SPARSAM_OK;
}

// Tokens of a chunk of the weight gradient: its transposed side fits the level-2 cache, a paired strip the level-1 cache.
int64_t gradient_chunk(const Outer& o, int64_t tokens) {
  constexpr int64_t kLeftBytes = 512 << 10, kMost = 256;
  const int64_t most = larger(32, smaller(kMost, kLeftBytes / (o.narrow_panels * 32) / 32 * 32));
  return round_up(divide_up(tokens, divide_up(tokens, most)), 32);
}

// The effective gradient as panels of `chunks` chunks.
Panels gradient_panels(const Direction& back, const Cut& cut, int64_t chunks, Cursor& cursor) {
  Panels panels = panels_of(back.reach, back.panels, cut.tokens);
  panels.data = cursor.take<char>(panels.chunk_bytes * chunks);
  return panels;
}

int32_t backward(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* grad, int64_t ldg, const void* x,
                 int64_t ldx, const void* pre, int32_t activation, void* dx, void* dvalues, float* dbias, int32_t threads) {
  if (!fits(layer, dtype)) return SPARSAM_UNSUPPORTED;
  const Direction back = direction(layer, false);
  const Outer o = outer(layer);
  const Bf16 *g = static_cast<const Bf16*>(grad), *z = static_cast<const Bf16*>(pre);
  const int64_t features = back.inputs, wide_features = round_up(back.panels * back.reach, 32);
  const Cut cut = cut_tokens(tokens, features, threads);
  const bool packs = dx || dbias || activation != SPARSAM_NONE;
  // Without an activation the weight gradient reads the gradient as it came, and a thread's panels stay in its cache.
  const bool in_panels = activation != SPARSAM_NONE && dvalues, all_chunks = in_panels || cut.by_columns;
  // Either every thread has its own tokens and the sums are added at the end, or every thread has its own lines and the
  // narrow side is transposed once for each.
  const int64_t sum_bytes = o.tiles() * kTileBytes, narrow_bytes = tokens * o.narrow_panels * 32;
  const bool by_tokens = threads > 1 && tokens >= 64 * threads && sum_bytes < narrow_bytes;
  const int64_t share = by_tokens ? round_up(divide_up(tokens, threads), 32) : tokens, chunk = gradient_chunk(o, share);
  const bool direct = !by_tokens, keep_sums = dvalues && (by_tokens || chunk < tokens);

  Weights weights = {nullptr, nullptr};
  Panels panels = {};
  float *column_sums = nullptr, *sums = nullptr;
  char *left = nullptr, *right = nullptr;
  const int64_t left_panel = chunk * 32 + 64, left_bytes = left_panel * o.narrow_panels;
  const int64_t right_bytes = chunk * kPairedFeatures * 2;
  if (!lay_out([&](Cursor& cursor) {
        if (dx) weights = take_weights(back, cursor);
        if (packs) panels = gradient_panels(back, cut, all_chunks ? cut.chunks : threads, cursor);
        if (dbias) column_sums = cursor.take<float>(wide_features * threads);
        if (keep_sums) sums = cursor.take<float>(o.tiles() * kTileFloats * (by_tokens ? threads : 1));
        if (dvalues) {
          left = cursor.take<char>(left_bytes * threads);
          right = cursor.take<char>(right_bytes * threads);
        }
      }))
    return SPARSAM_OUT_OF_MEMORY;
  const Output out = {static_cast<Bf16*>(dx), nullptr, back.outputs, nullptr, SPARSAM_NONE};
  const Source from_grad = in_panels ? Source{nullptr, 0, panels.count * panels.reach, tokens, panels}
                                     : Source{g, ldg, features, tokens, panels};
  const Source from_x = {static_cast<const Bf16*>(x), ldx, layer->in_features, tokens, panels};

  parallel(threads, [&](int id, int count) {
    float* my_sums = dbias ? column_sums + id * wide_features : nullptr;
    if (dbias) memset(my_sums, 0, sizeof(float) * size_t(wide_features));
    if (dx) {
      pack_share(back, weights, id, count);
      wait_for_all(count);
    }
    if (packs) {
      for (int64_t c = cut.chunks * id / count; c < cut.chunks * (id + 1) / count; ++c) {
        const int64_t t0 = c * cut.tokens, rows = smaller(cut.tokens, tokens - t0);
        char* chunk_data = panels.data + (all_chunks ? c : id) * panels.chunk_bytes;
        pack_gradient(activation, panels, g + t0 * ldg, ldg, z ? z + t0 * features : nullptr, features, rows,
                      round_up(rows, 64), chunk_data, my_sums);
        if (dx && !cut.by_columns)
          product(back, weights, {chunk_data, panels.panel_bytes, back.reach * 2}, out, t0, rows, 0, back.pairs, false);
      }
      wait_for_all(count);
    }
    if (dx && cut.by_columns)
      for (int64_t c = 0; c < cut.chunks; ++c) {
        const int64_t t0 = c * cut.tokens;
        product(back, weights, {panels.data + c * panels.chunk_bytes, panels.panel_bytes, back.reach * 2}, out, t0,
                smaller(cut.tokens, tokens - t0), pair_share(back, id, count), pair_share(back, id + 1, count), false);
      }
    if (dbias)  // a barrier lies between here and the packing
      for (int64_t i = wide_features / 16 * id / count * 16; i < wide_features / 16 * (id + 1) / count * 16; i += 16) {
        __m512 sum = _mm512_load_ps(column_sums + i);
        for (int other = 1; other < count; ++other) sum = sum + _mm512_load_ps(column_sums + other * wide_features + i);
        _mm512_mask_storeu_ps(dbias + i, first_of_16(features - i), sum);
      }
    if (!dvalues) return;
    if (id == count - 1) clear_dead(layer, dvalues);
    GradientShare my;
    my.token = by_tokens ? smaller(tokens, share * id) : 0;
    my.end = by_tokens ? (id == count - 1 ? tokens : smaller(tokens, share * (id + 1))) : tokens;
    my.first = by_tokens ? 0 : line_share(o.d, id, count);
    my.last = by_tokens ? o.d.lines : line_share(o.d, id + 1, count);
    my.sums = sums + (by_tokens ? id * o.tiles() * kTileFloats : 0);
    my.direct = direct;
    my.left = {left + id * left_bytes, left_panel};
    my.right = {right + id * right_bytes, o.strip, chunk * o.strip * 2};
    load_config(16, 32, false);
    weight_gradient(o, o.d.forward ? from_x : from_grad, o.d.forward ? from_grad : from_x, chunk, my, dvalues);
    _tile_release();
    if (by_tokens) {
      wait_for_all(count);
      const int64_t copies = smaller(count, divide_up(tokens, share));  // a thread without tokens has no sums
      reduce_gradient(o, sums, copies, o.d.live() * id / count, o.d.live() * (id + 1) / count, dvalues);
    }
  });
  return SPARSAM_OK;
}

int32_t scores(const sparsam_layer* layer, int32_t dtype, int64_t tokens, const void* grad, int64_t ldg, const void* x,
               int64_t ldx, const void* pre, int32_t activation, float* scores, int32_t threads) {
  if (!fits(layer, dtype)) return SPARSAM_UNSUPPORTED;
  const Direction back = direction(layer, false);
  const Outer o = outer(layer);
  const Bf16 *g = static_cast<const Bf16*>(grad), *z = static_cast<const Bf16*>(pre);
  const int64_t features = back.inputs;
  const Cut cut = cut_tokens(tokens, features, threads);
  const bool in_panels = activation != SPARSAM_NONE;
  const DenseTile size = dense_tile(o, tokens);
  Panels panels = {};
  char* scratch = nullptr;
  if (!lay_out([&](Cursor& cursor) {
        if (in_panels) panels = gradient_panels(back, cut, cut.chunks, cursor);
        scratch = cursor.take<char>(size.bytes() * threads);
      }))
    return SPARSAM_OUT_OF_MEMORY;
  const Source from_grad = in_panels ? Source{nullptr, 0, panels.count * panels.reach, tokens, panels}
                                     : Source{g, ldg, features, tokens, panels};
  const Source from_x = {static_cast<const Bf16*>(x), ldx, layer->in_features, tokens, panels};
  parallel(threads, [&](int id, int count) {
    if (in_panels) {
      for (int64_t c = cut.chunks * id / count; c < cut.chunks * (id + 1) / count; ++c) {
        const int64_t t0 = c * cut.tokens, rows = smaller(cut.tokens, tokens - t0);
        pack_gradient(activation, panels, g + t0 * ldg, ldg, z + t0 * features, features, rows, round_up(rows, 64),
                      panels.data + c * panels.chunk_bytes, nullptr);
      }
      wait_for_all(count);
    }
    load_config(16, 32, false);
    dense_scores(o, o.d.forward ? from_x : from_grad, o.d.forward ? from_grad : from_x, size, o.d.lines * id / count,
                 o.d.lines * (id + 1) / count, scratch + id * size.bytes(), scores);
    _tile_release();
  });
  return SPARSAM_OK;
}

}  // namespace

const Backend sparsam_amx_backend = {forward, backward, scores, pack_bytes, pack};
