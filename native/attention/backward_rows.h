// The first phase of the backward: row statistics and delta of each query.
#pragma once
#include "attention/backward_block.h"
#include "core/work.h"

namespace regard {

static float dot_row(const void* a, int a_dtype, int64_t a_col, const void* b, int b_dtype, int64_t b_col,
                     int64_t count) {
  vf sum = vf{};
  float total = 0;
  int64_t n = 0;
  if (a_col == 1 && b_col == 1)
    for (; n + W <= count; n += W) sum += load_some(a, n, a_dtype) * load_some(b, n, b_dtype);
  for (; n < count; ++n) total += load_one(a, n * a_col, a_dtype) * load_one(b, n * b_col, b_dtype);
  return total + sum_of_lanes(sum);
}

// Calls body(tile) for each tile of keys that a block of queries sees, with its scores in s.p.
template <int V, class Body>
REGARD_INLINE void each_tile(const BackwardCall& w, const BackwardScratch& s, const Block<V>& b, BlockShare& x,
                             bool values, const Body& body) {
  const regard_call& c = w.c;
  const int64_t key_head = b.p.h / (c.heads / c.key_heads);
  const char* keys = (const char*)c.k.data + size_of(c.dtype) * offset(c.k, b.p, key_head);
  const char* all = (const char*)c.v.data + size_of(c.dtype) * offset(c.v, b.p, key_head);
  for (int64_t j = 0; j < c.nk; j += kTile) {
    const int64_t count = c.nk - j < kTile ? c.nk - j : kTile;
    uint64_t bits[kTile];
    Tile t;
    if (!visit(w, b.p, j, count, bits, t, x)) continue;
    widen_rows(s.k, w.ldk, keys + size_of(c.dtype) * j * c.k.row, c.dtype, c.k.row, c.k.col, count, c.dk);
    if (values) widen_rows(s.v, w.ldv, all + size_of(c.dtype) * j * c.v.row, c.dtype, c.v.row, c.v.col, count, c.dv);
    Modifiers::load_tile(b, t);
    score_keys<V>(b, t, s, w.ldk, x, nullptr);
    body(t);
  }
}

// Computes shift and inverse of a block of queries again, where the forward rounded its scores differently.
template <int V>
static void sum_rows(const BackwardCall& w, const BackwardScratch& s, Block<V>& b, BlockShare& x, float* shift,
                     float* inverse) {
  const float sink = sink_of(w.c, b.p, b.p.h);
  for (int v = 0; v < V; ++v) b.state[v] = {splat(sink), splat(sink == -kInf ? 0.0f : 1.0f)};
  each_tile<V>(w, s, b, x, false, [&](const Tile&) {
    for (int v = 0; v < V; ++v) {
      const float* at = s.p + v * W;
      vf top = b.state[v].m, sum = vf{};
      for (int64_t n = x.from; n < x.to; ++n) top = greater_of(load(at + n * kQueries), top);
      const vf shift = finite_shift(top);
      for (int64_t n = x.from; n < x.to; ++n) sum += exp2v(load(at + n * kQueries) - shift);
      b.state[v].merge(top, sum);
    }
  });
  for (int v = 0; v < V; ++v) {
    const SoftmaxState<vf>& state = b.state[v];
    store(shift + v * W, state.shift());
    store(inverse + v * W, select(state.m == splat(-kInf), vf{}, splat(1.0f) / state.l));
  }
}

// Computes delta of a block of queries as rowsum(P ∘ dP). It equals rowsum(dO ∘ O) but for rounding; where slopes are
// learned, the distances in their gradient would multiply that.
template <int V>
static void sum_block(const BackwardCall& w, const BackwardScratch& s, const Place& p, float* shift, float* inverse,
                      float* delta) {
  const regard_call& c = w.c;
  const Scratch scratch{s.qt, s.p, nullptr, s.modifiers, nullptr, nullptr};
  Block<V> b{c, scratch, p};
  open_block<V>(b);
  pack_queries<V>(b, s);
  BlockShare x{0, 0, s.p, s.ds, shift, inverse, delta, false, false};
  if (w.recompute_stats) sum_rows<V>(w, s, b, x, shift, inverse);
  const regard_tensor& g = w.g.dout;
  const char* dout = (const char*)g.data + size_of(dtype_of(w.g.dout)) * (offset(g, p, p.h) + p.row * g.row);
  pack<V>(s.doutt, kQueries, dout, dtype_of(w.g.dout), g.row, g.col, p.rows, c.dv, 1.0f);
  vf row_delta[V];
  for (int v = 0; v < V; ++v) {
    row_delta[v] = vf{};
    store(delta + v * W, vf{});
  }
  each_tile<V>(w, s, b, x, true, [&](const Tile& t) {
    weigh_keys<V>(b, t, s, w.ldv, x);
    for (int v = 0; v < V; ++v) {
      vf sum = vf{};
      for (int64_t n = x.from; n < x.to; ++n) sum += load(s.ds + n * kQueries + v * W);
      row_delta[v] += sum;
    }
  });
  for (int64_t n = 0; n < p.rows; ++n)
    if (inverse[n] != 0)
      delta[n] =
          row_delta[n / W][n % W] - (w.g.dlse.data ? at<float>(w.g.dlse, p, p.h)[(p.row + n) * w.g.dlse.row] : 0);
}

// First phase, for one block of queries.
static void prepare(const BackwardCall& w, const BackwardScratch& s, int64_t item) {
  const regard_call& c = w.c;
  const int64_t pair = item / w.blocks;
  const Place p = place_at(c, pair / c.heads, pair % c.heads, item % w.blocks * kQueries);
  float *shift = w.shift + item * kQueries, *inverse = w.inverse + item * kQueries, *delta = w.delta + item * kQueries;
  w.limits[item] = Interval::limits(c, p);
  const float* row_stats = at<float>(c.row_stats, p, p.h) + p.row * c.row_stats.row;
  const float* dlse = w.g.dlse.data ? at<float>(w.g.dlse, p, p.h) + p.row * w.g.dlse.row : nullptr;
  const char* out = (const char*)c.out.data + size_of(c.out_dtype) * (offset(c.out, p, p.h) + p.row * c.out.row);
  const char* dout =
      (const char*)w.g.dout.data + size_of(dtype_of(w.g.dout)) * (offset(w.g.dout, p, p.h) + p.row * w.g.dout.row);
  for (int64_t n = 0; n < kQueries; ++n) {
    shift[n] = inverse[n] = delta[n] = 0;
    if (n >= p.rows) continue;
    shift[n] = row_stats[n * c.row_stats.row];
    inverse[n] = row_stats[n * c.row_stats.row + c.row_stats.col];
    if (inverse[n] == 0) continue;
    delta[n] = dot_row(dout + n * w.g.dout.row * size_of(dtype_of(w.g.dout)), dtype_of(w.g.dout), w.g.dout.col,
                       out + n * c.out.row * size_of(c.out_dtype), c.out_dtype, c.out.col, c.dv);
    if (dlse) delta[n] -= dlse[n * w.g.dlse.row];
  }
  if (!w.recompute_stats && !Modifiers::multiply_delta(w.g)) return;
  with_vectors(p.rows, [&](auto vectors) { sum_block<vectors>(w, s, p, shift, inverse, delta); });
}

}  // namespace regard
