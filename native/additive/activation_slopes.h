// From the gradients of a tile's scores to those of what an additive score is made of: f and f' of every pair, summed three ways.
#pragma once
#include "attention/few_rows.h"
#include "additive/activation.h"

namespace regard {

// A tile's Σ_j ds r (1 - r) to u, Σ_ij ds r and `constant` to e, Σ_i ds r (1 - r) times `scale` to dc. ds [count up to whole vectors][kQueries];
// c [width][kKeys]: C. A division for each r: one for two of them takes more other operations than it saves.
template <int V>
REGARD_ALONE void tile_gradients(const float* exponentials, const float* c, int64_t width, int64_t count, const float* ds, const float* constant,
                                                const float* scale, float* u, float* e, float* dc, int64_t line) {
  const vf one = splat(1.0f);
  for (int64_t k = 0; k < width; ++k) {
    vf da[V], a[V], dw = vf{};
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) da[v] = vf{}, a[v] = load(exponentials + k * kQueries + v * W);
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
      float* to = dc + k * line + n;
      store(to, load(to) + splat(scale[k]) * sums(by_key));
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(u + k * kQueries + v * W, da[v]);
    store(e + k * W, dw);
  }
}

// The same from f and f' themselves. a, c: finite; c [count][width].
template <int V, class F>
REGARD_ALONE void pull_direct(const float* a, const float* c, int64_t width, int64_t count, const float* ds,
                                                  float slope, const float* scale, float* u, float* e, float* dc, int64_t line) {
  for (int64_t n = 0; n < count; n += W)
    for (int64_t k = 0; k < width; ++k) {
      vf by_key[W], dw = vf{};
      for (int m = 0; m < W; ++m) {
        const vf x = splat(c[(n + m < count ? n + m : count - 1) * width + k]);
        by_key[m] = vf{};
        for (int v = 0; v < V; ++v) {
          const vf z = load(a + k * kQueries + v * W) + x, y = F::value(z, slope), d = load(ds + (n + m) * kQueries + v * W);
          const vf p = d * F::slope(z, y, slope);
          dw += d * y;
          by_key[m] += p;
          float* to = u + k * kQueries + v * W;
          store(to, load(to) + p);
        }
      }
      store(e + k * W, load(e + k * W) + dw);
      float* to = dc + k * line + n;
      store(to, load(to) + splat(scale[k]) * sums(by_key));
    }
}

}  // namespace regard
