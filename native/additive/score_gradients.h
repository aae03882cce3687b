// One block of queries and one tile of keys in the backward of the additive similarity: weights, gradients of scores,
// values.
#pragma once
#include "additive/gradients.h"

namespace regard {

// One block of queries, and what it needs for the tiles of a slice.
template <int V>
struct GradientBlock {
  const Gradients& g;
  const GradientScratch& s;
  Block<V>& b;
  int64_t from;  // the slice's first key
  RowStats<vf> stats[V];
  vf delta[V];
  vi there[V];  // lanes with a query
  bool finite_dout;

  // The weight of a pair whose score is -inf: 0; where dout is not finite -1, which no weight is, and the pair is
  // skipped.
  float hidden_weight() const { return finite_dout ? 0 : -1; }
};

// The row statistics of a block, one row a lane; 0 where there is no row.
template <int V>
static void gather(RowStats<vf> (&to)[V], const regard_tensor& t, const Place& p) {
  const float* from = at<float>(t, p, p.h) + p.row * t.row;
  for (int64_t n = 0; n < V * W; ++n) {
    const bool there = n < p.rows;
    to[n / W].shift[n % W] = there ? from[n * t.row] : 0;
    to[n / W].inverse[n % W] = there ? from[n * t.row + t.col] : 0;
  }
}

template <int V>
static void begin_gradients(GradientBlock<V>& z) {
  const Gradients& g = z.g;
  const GradientScratch& s = z.s;
  const Place& p = z.b.p;
  zero(s.dout, kQueries * g.ldv);
  zero(s.da, g.width * kQueries);
  zero(s.dw, g.learned() * W);
  for (int v = 0; v < V; ++v) z.delta[v] = vf{};
  for (int64_t i = 0; i < p.rows; ++i)
    z.delta[i / W][i % W] = row_delta(g.g, p, p.h, p.row + i, s.dout + i * g.ldv, g.ldv);
  z.finite_dout = all_finite(s.dout, 1, g.ldv, g.ldv, p.rows);
  pack<V>(s.doutt, kQueries, s.dout, REGARD_F32, g.ldv, 1, p.rows, g.c.dv, 1.0f);
  gather(z.stats, g.c.row_stats, p);
  const int64_t rows = p.rows;
  for (int v = 0; v < V; ++v) z.there[v] = lanes() + splat_int(v * W) < splat_int((int32_t)rows);
  for (int64_t k = 0; k < g.width; ++k)
    for (int v = 0; v < V; ++v) {
      const vf a = k < g.c.dk ? load(s.q.a + k * kQueries + v * W) : vf{};
      store(s.bounded_a + k * kQueries + v * W, select(z.there[v], finite_end(a), vf{}));
    }
}

// Scores of M keys become weights, hidden_weight() where they are -inf; writes the gradients of the scores to ds.
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
      const vf s = load(z.b.w.s + at), p = z.stats[v].weight(s);
      vf dropped = p, dp = acc[i][v];
      if (k_at) {
        dropped = Dropout::apply(c, z.b.word[v], key, p);
        dp = Dropout::apply(c, z.b.word[v], key, dp);
      }
      const vi hidden = s == splat(-kInf);
      vf ds = select(hidden, vf{}, p * (dp - z.delta[v]));
      ds = select(z.there[v], ds, vf{});
      store(z.b.w.s + at, select(hidden, splat(z.hidden_weight()), dropped));
      store(z.s.ds + at, ds);
    }
  }
}

template <int V>
REGARD_NOINLINE void tile_score_gradients(GradientBlock<V>& z, const Tile& t, const float* x, int64_t row) {
  const Gradients& g = z.g;
  const int64_t place = (z.from / g.span() * elements(g.c) + z.b.p.b) * g.c.heads + z.b.p.h;
  int64_t n = 0;
  for (; n + kMR <= t.count; n += kMR) score_gradients<V, kMR>(z, t, x, row, n);
  for (; n < t.count; ++n) score_gradients<V, 1>(z, t, x, row, n);
  Modifiers::backward(z.b, t, ScoreGradients{g.g, z.s.ds, z.s.kept, 0, t.count}, g.sums, place);
}

// Adds to dv of M keys, V vectors of features.
template <int M, int V>
REGARD_INLINE void add_dv(float* dv, int64_t ldv, const float* p, const float* dout, int64_t rows) {
  vf acc[M][V];
  clear(acc);
  Isa::multiply_tiles<Floats, M, V>(acc, p, kQueries, 1, dout, ldv, rows);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(dv + i * ldv + v * W, load(dv + i * ldv + v * W) + acc[i][v]);
}

template <int V>
REGARD_NOINLINE void add_dv_columns(float* dv, int64_t ldv, const float* p, const float* dout, int64_t rows,
                                    int64_t count) {
  int64_t n = 0;
  for (; n + kMR <= count; n += kMR) add_dv<kMR, V>(dv + n * ldv, ldv, p + n * kQueries, dout, rows);
  for (; n < count; ++n) add_dv<1, V>(dv + n * ldv, ldv, p + n * kQueries, dout, rows);
}

// Adds the weights of a tile times dout to dv. 0 · NaN is NaN: where dout is not finite, hidden pairs are skipped.
template <int V>
static void tile_value_gradients(const GradientBlock<V>& z, const Tile& t) {
  const int64_t ldv = z.g.ldv, rows = z.b.p.rows;
  float *s = z.b.w.s, *dv = z.s.dv + (t.j - z.from) * ldv;
  if (!z.finite_dout) {
    for (int64_t n = 0; n < t.count; ++n)
      for (int64_t f = 0; f < ldv; f += W)
        for (int64_t i = 0; i < rows; ++i) {
          const float p = s[n * kQueries + i];
          if (p != z.hidden_weight())
            store(dv + n * ldv + f, load(dv + n * ldv + f) + splat(p) * load(z.s.dout + i * ldv + f));
        }
    return;
  }
  int64_t f = 0;
  for (; f + 2 * W <= ldv; f += 2 * W) add_dv_columns<2>(dv + f, ldv, s, z.s.dout + f, rows, t.count);
  for (; f < ldv; f += W) add_dv_columns<1>(dv + f, ldv, s, z.s.dout + f, rows, t.count);
}

// Copies the keys of a tile to bounded_c.
template <int V>
static void bound_keys(const GradientBlock<V>& z, const Tile& t, const float* c) {
  const regard_call& call = z.g.c;
  const int64_t width = z.g.width;
  float* const to = z.s.bounded_c;
  for (int64_t n = 0; n < t.count; ++n)
    for (int64_t k = 0; k < width; ++k) to[n * width + k] = k < call.dk ? c[n * call.k.row + k * call.k.col] : 0;
  for (int64_t n = 0; n < t.count * width; n += W) store(to + n, finite_end(load(to + n)));
}

}  // namespace regard
