// One block of queries and one tile of keys in the backward of the additive similarity: weights, gradients of scores, values.
#pragma once
#include "additive/gradients.h"

namespace regard {

// One block of queries while it meets the tiles of a slice.
template <int V>
struct GradientBlock {
  const Gradients& g;
  const GradientScratch& s;
  Block<V>& b;
  int64_t from;       // the slice's first key
  vf shift[V], inverse[V], delta[V];  // weights are exp2(s - shift) · inverse
  vi fine[V];         // lanes with a query, all of it finite
  bool finite_dout;
};

// dst[lane] of one number a row, 0 where there is no row.
template <int V>
static void gather(vf (&dst)[V], const regard_tensor& t, const Place& p, int64_t col) {
  const float* from = at<float>(t, p, p.h) + p.row * t.row + col * t.col;
  for (int64_t n = 0; n < V * W; ++n) dst[n / W][n % W] = n < p.rows ? from[n * t.row] : 0;
}

template <int V>
static void begin_gradients(GradientBlock<V>& z) {
  const Gradients& g = z.g;
  const GradientScratch& s = z.s;
  const Place& p = z.b.p;
  zero(s.dout, kQueries * g.wide), zero(s.da, g.width * kQueries), zero(s.dw, g.width * W);
  for (int v = 0; v < V; ++v) z.delta[v] = vf{};
  for (int64_t i = 0; i < p.rows; ++i) z.delta[i / W][i % W] = row_delta(g.g, p, p.h, p.row + i, s.dout + i * g.wide, g.wide);
  z.finite_dout = all_finite(s.dout, 1, g.wide, g.wide, p.rows);
  pack<V>(s.doutt, kQueries, s.dout, REGARD_F32, g.wide, 1, p.rows, g.c.dv, 1.0f);
  gather(z.shift, g.c.row_stats, p, 0), gather(z.inverse, g.c.row_stats, p, 1);
  const int64_t rows = p.rows;
  for (int v = 0; v < V; ++v) z.fine[v] = lanes() + splat_int(v * W) < splat_int((int32_t)rows);
  for (int64_t k = 0; k < g.c.dk; ++k)
    for (int v = 0; v < V; ++v) {
      const vf a = load(s.q.a + k * kQueries + v * W);
      z.fine[v] = z.fine[v] & (a - a == vf{});
    }
  for (int64_t k = 0; k < g.width; ++k)
    for (int v = 0; v < V; ++v)
      store(s.clean + k * kQueries + v * W, k < g.c.dk ? select(z.fine[v], load(s.q.a + k * kQueries + v * W), vf{}) : vf{});
}

// Scores of M keys become weights, -1 where hidden, and gradients of scores as the similarity gave them.
template <int V, int M>
REGARD_INLINE void score_gradients(GradientBlock<V>& z, const Tile& t, const float* x, int64_t row, int64_t n) {
  const regard_call& c = z.g.c;
  vf acc[M][V];
  clear(acc);
  Isa::multiply_tiles<Floats, M, V>(acc, x + n * row, row, 1, z.s.doutt, kQueries, c.dv);
  const int64_t* k_at = c.threshold ? c.k_at + offset(c.k_at_batch, z.b.p) + t.j + n : nullptr;
  for (int i = 0; i < M; ++i) {
    const vu key = (k_at ? Dropout::key_word(k_at[i]) : 0u) + vu{};
    for (int v = 0; v < V; ++v) {
      const int64_t at = (n + i) * kQueries + v * W;
      const vf s = load(z.b.w.s + at), p = exp2v(s - z.shift[v]) * z.inverse[v];
      vf kept = p, dp = acc[i][v];
      if (k_at) {
        kept = Dropout::apply(c, z.b.word[v], key, p);
        dp = Dropout::apply(c, z.b.word[v], key, dp);
      }
      const vi hidden = s == splat(-kInf);
      vf ds = select(hidden, vf{}, p * (dp - z.delta[v]));
      if (Modifiers::have_derivative(c)) ds = select(hidden, vf{}, ds * load(z.s.derivative + at));
      ds = select(z.fine[v], ds, vf{});
      store(z.b.w.s + at, select(hidden, splat(-1.0f), kept));
      store(z.s.ds + at, ds);
    }
  }
}

template <int V>
REGARD_ALONE void pull_tile_scores(GradientBlock<V>& z, const Tile& t, const float* x, int64_t row) {
  int64_t n = 0;
  for (; n + kRows <= t.count; n += kRows) score_gradients<V, kRows>(z, t, x, row, n);
  for (; n < t.count; ++n) score_gradients<V, 1>(z, t, x, row, n);
}

// dv of M keys and V vectors of features.
template <int M, int V>
REGARD_INLINE void pull_values(float* dv, int64_t wide, const float* p, const float* dout, int64_t rows) {
  vf acc[M][V];
  clear(acc);
  Isa::multiply_tiles<Floats, M, V>(acc, p, kQueries, 1, dout, wide, rows);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(dv + i * wide + v * W, load(dv + i * wide + v * W) + acc[i][v]);
}

template <int V>
REGARD_ALONE void pull_value_columns(float* dv, int64_t wide, const float* p, const float* dout, int64_t rows,
                                                         int64_t count) {
  int64_t n = 0;
  for (; n + kRows <= count; n += kRows) pull_values<kRows, V>(dv + n * wide, wide, p + n * kQueries, dout, rows);
  for (; n < count; ++n) pull_values<1, V>(dv + n * wide, wide, p + n * kQueries, dout, rows);
}

// Weights of a tile, hidden ones -1, to dv. 0 · NaN is NaN: what is hidden meets no cotangent that is not finite.
template <int V>
static void pull_tile_values(const GradientBlock<V>& z, const Tile& t) {
  const int64_t wide = z.g.wide, rows = z.b.p.rows;
  float *s = z.b.w.s, *dv = z.s.dv + (t.j - z.from) * wide;
  if (!z.finite_dout) {
    for (int64_t n = 0; n < t.count; ++n)
      for (int64_t f = 0; f < wide; f += W)
        for (int64_t i = 0; i < rows; ++i) {
          const float p = s[n * kQueries + i];
          if (p != -1.0f) store(dv + n * wide + f, load(dv + n * wide + f) + splat(p) * load(z.s.dout + i * wide + f));
        }
    return;
  }
  const bool hides = t.edge || t.bits || Modifiers::hide(z.g.c);
  if (hides)
    for (int64_t n = 0; n < t.count; ++n)
      for (int v = 0; v < V; ++v) {
        const vf p = load(s + n * kQueries + v * W);
        store(s + n * kQueries + v * W, p == splat(-1.0f) ? vf{} : p);
      }
  int64_t f = 0;
  for (; f + 2 * W <= wide; f += 2 * W) pull_value_columns<2>(dv + f, wide, s, z.s.dout + f, rows, t.count);
  for (; f < wide; f += W) pull_value_columns<1>(dv + f, wide, s, z.s.dout + f, rows, t.count);
}

// Keys of a tile as they are, rows that are not finite 0, and so is what their scores' gradients would give.
template <int V>
static void clean_keys(const GradientBlock<V>& z, const Tile& t, const float* c) {
  const regard_call& call = z.g.c;
  for (int64_t n = 0; n < t.count; ++n) {
    float* row = z.s.cleaned + n * z.g.width;
    bool fine = true;
    for (int64_t k = 0; k < z.g.width; ++k) {
      row[k] = k < call.dk ? c[n * call.k.row + k * call.k.col] : 0;
      fine &= row[k] - row[k] == 0;
    }
    if (fine) continue;
    zero(row, z.g.width), zero(z.s.ds + n * kQueries, kQueries);
  }
}

}  // namespace regard
