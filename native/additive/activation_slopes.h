// The gradients of a, c and w from those of a tile's scores: f and f' of every pair, summed over keys, over queries and
// over both.
#pragma once
#include "attention/few_rows.h"
#include "additive/activation.h"

namespace regard {

// Adds x times a scale where x is not 0: keys that no query sees get no NaN of a scale that is not finite.
REGARD_INLINE void add_scaled(float* to, vf x, float scale) {
  const vf before = load(to);
  store(to, select(x == vf{}, before, before + splat(scale) * x));
}

// By r = 1 / (1 + A C). Writes Σ_j ds r (1 - r) to tile_da and Σ_ij ds r + Σ_j constant to tile_dw, and adds Σ_i ds r
// (1 - r) times `scale` to dc. ds: [count, rounded up to whole vectors][kQueries]; c: C, [width][kKeys]. Each r has a
// division of its own: one for two of them costs more in other operations than it saves.
template <int V>
REGARD_NOINLINE void tile_gradients(const float* exponentials, const float* c, int64_t width, int64_t count,
                                    const float* ds, const float* constant, const float* scale, float* tile_da,
                                    float* tile_dw, float* dc, int64_t dc_stride) {
  const vf one = splat(1.0f);
  for (int64_t k = 0; k < width; ++k) {
    vf da[V], a[V], dw = vf{};
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      da[v] = vf{};
      a[v] = load(exponentials + k * kQueries + v * W);
    }
    for (int64_t n = 0; n < count; n += W) {
      vf by_key[W], part = load(constant + n);
#pragma GCC unroll 2
      for (int m = 0; m < W; ++m) {
        const vf x = splat(c[k * kKeys + n + m]);
        vf sum = vf{};
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const vf r = one / (one + a[v] * x), dr = load(ds + (n + m) * kQueries + v * W) * r, p = dr - dr * r;
          part += dr;
          da[v] += p;
          sum = v ? sum + p : p;
        }
        by_key[m] = sum;
      }
      dw += part;
      float* to = dc + k * dc_stride + n;
      add_scaled(to, sums(by_key), scale[k]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(tile_da + k * kQueries + v * W, da[v]);
    store(tile_dw + k * W, dw);
  }
}

// By f and f' themselves; adds to tile_da and tile_dw. a, c: finite_end(); c [count][width].
template <int V, class F>
REGARD_NOINLINE void tile_gradients_direct(const float* a, const float* c, int64_t width, int64_t count,
                                           const float* ds, float slope, const float* scale, float* tile_da,
                                           float* tile_dw, float* dc, int64_t dc_stride) {
  for (int64_t n = 0; n < count; n += W)
    for (int64_t k = 0; k < width; ++k) {
      vf by_key[W], dw = vf{};
      for (int m = 0; m < W; ++m) {
        const vf x = splat(c[(n + m < count ? n + m : count - 1) * width + k]);
        by_key[m] = vf{};
        for (int v = 0; v < V; ++v) {
          const vf z = load(a + k * kQueries + v * W) + x, y = F::value(z, slope),
                   d = load(ds + (n + m) * kQueries + v * W);
          const vf p = d * F::slope(z, y, slope);
          dw += d * y;
          by_key[m] += p;
          float* to = tile_da + k * kQueries + v * W;
          store(to, load(to) + p);
        }
      }
      store(tile_dw + k * W, load(tile_dw + k * W) + dw);
      float* to = dc + k * dc_stride + n;
      add_scaled(to, sums(by_key), scale[k]);
    }
}

}  // namespace regard
