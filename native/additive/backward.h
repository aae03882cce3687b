// Backward of the additive similarity. An item is a set of (batch element, key head) pairs that share a gradient of a
// modifier, most often one, and a slice of their keys: it writes their dC and dV, and leaves its sums for dA, dw and
// the modifiers, which are added over the slices in order.
//
// With ds_ij the gradient of a score and r = 1 / (1 + A C), f' is 4 r (1 - r) for tanh, r (1 - r) for the sigmoid:
//   da_ik = w_k Σ_j ds_ij f'   dc_jk = Σ_i ds_ij w_k f'   dw_k = Σ_ij ds_ij f.
#pragma once
#include "additive/score_gradients.h"
#include "additive/activation_slopes.h"

namespace regard {

template <int V>
static void similarity_gradients(GradientBlock<V>& z, const Tile& t) {
  const Gradients& g = z.g;
  const GradientScratch& s = z.s;
  const regard_call& c = g.c;
  const int64_t pair = pair_of_block(c, z.b.p), width = g.width, dc_stride = g.dc_stride();
  const Method method = method_of(g.x, s.q, g.keys.max_abs[pair * key_tiles(c) + t.j / kKeys]);
  const float* exponentials = g.keys.c + (pair * c.nk + t.j) * width;
  float *dc = s.dc + (t.j - z.from), one = 1, value = 1;
  float constant[kKeys];  // f = value · (r + constant): Σ ds · constant of W keys, added next to Σ ds · r, so that
                          // digits cancel early
  for (int64_t n = t.count; n % W != 0; ++n) zero(s.ds + n * kQueries, kQueries);
  if (method == kDirect) {
    bound_keys(z, t, at<float>(c.k, z.b.p, pair % c.key_heads) + t.j * c.k.row);
  } else {
    const Separable form = separable(g.x.activation);
    one = g.x.activation == REGARD_TANH ? 4 : 1;
    value = form.factor;
    for (int64_t n = 0; n < t.count; n += W) {
      vf sum = vf{};
      for (int64_t m = n; m < n + W; ++m)
        for (int v = 0; v < V; ++v) sum += load(s.ds + m * kQueries + v * W);
      store(constant + n, sum * splat((form.middle - form.factor / 2) / form.factor));
    }
  }
  zero(s.tile_da, width * kQueries);
  zero(s.tile_dw, g.learned() * W);
  float* scale = s.scale;
  for (int64_t k = 0; k < width; ++k) scale[k] = s.q.plain[k] * one;
  if (method != kDirect)
    for (int64_t n = 0; n < t.count; n += W)
      pack<1>(s.bounded_c + n, kKeys, exponentials + n * width, REGARD_F32, width, 1, t.count - n < W ? t.count - n : W,
              width, 1.0f);
  const auto direct = [&](auto gradients, float slope) {
    gradients(s.bounded_a, s.bounded_c, width, t.count, s.ds, slope, scale, s.tile_da, s.tile_dw, dc, dc_stride);
  };
  if (FeatureProgram::used(g.x))
    FeatureProgram::gradients<V>(g.x, s.q.slots, z.b.p.h, s.bounded_a, s.bounded_c, t.count, s.ds,
                                 {s.tile_da, dc, s.tile_dw, dc_stride, width});
  else if (method != kDirect)
    tile_gradients<V>(s.q.exponentials, s.bounded_c, width, t.count, s.ds, constant, scale, s.tile_da, s.tile_dw, dc,
                      dc_stride);
  else if (g.x.activation == REGARD_TANH) direct(tile_gradients_direct<V, TanhOf>, 0);
  else if (g.x.activation == REGARD_SIGMOID) direct(tile_gradients_direct<V, SigmoidOf>, 0);
  else direct(tile_gradients_direct<V, LeakyReluOf>, g.x.slope);
  for (int64_t n = 0; n < width * kQueries; n += W) store(s.da + n, load(s.da + n) + load(s.tile_da + n) * splat(one));
  for (int64_t n = 0; n < g.learned() * W; n += W) store(s.dw + n, load(s.dw + n) + load(s.tile_dw + n) * splat(value));
}

template <int V>
static void block_gradients(const Gradients& g, const GradientScratch& s, const Place& p, int64_t slice) {
  const regard_call& c = g.c;
  Block<V> b{c, s.forward, p};
  begin_state(b);
  const int64_t from = slice * g.span(), to = from + g.span();
  b.lo = b.lo > from ? b.lo : from;
  b.hi = b.hi < to ? b.hi : to;
  PreparedQueries q = s.q;
  prepare_block<V>(g.x, q, p);
  GradientScratch mine = s;
  mine.q = q;
  GradientBlock<V> z{g, mine, b, from};
  begin_gradients(z);
  each_tile(b, [&](Tile& t, KvTile& x) {
    vf top[V];
    for (int v = 0; v < V; ++v) top[v] = vf{};
    additive_tile(b, t, g.x, q, g.keys, top, s.kept);
    load_values(c, b.w, x);
    tile_score_gradients(z, t, x.v + (t.j - x.j) * x.v_row, x.v_row);
    tile_value_gradients(z, t);
    similarity_gradients(z, t);
  });
  const int64_t head = p.b * c.heads + p.h, heads = elements(c) * c.heads, all = g.width * kQueries;
  __builtin_memcpy(g.da + ((slice * heads + head) * g.blocks + p.row / kQueries) * all, s.da,
                   (size_t)all * sizeof(float));
  float* dw = g.dw + (slice * heads + head) * g.learned();
  for (int64_t k = 0; k < g.learned(); ++k) {
    float sum = 0;
    for (int n = 0; n < W; ++n) sum += s.dw[k * W + n];
    dw[k] += sum;
  }
}

struct AdditiveBackward {
  const Gradients& g;

  int64_t items() const { return g.sets * g.slices; }
  int64_t scratch() const {
    GradientScratch s;
    return carve_scratch(g, nullptr, s);
  }

  void run(int64_t item, float* memory) const {
    GradientScratch s;
    carve_scratch(g, memory, s);
    g.sharing.each_pair(g.c, item / g.slices,
                        [&](int64_t element, int64_t head) { run_pair(s, element, head, item % g.slices); });
  }

  void run_pair(const GradientScratch& s, int64_t element, int64_t head, int64_t slice) const {
    const regard_call& c = g.c;
    const int64_t from = slice * g.span();
    zero(s.dc, g.width * g.dc_stride());
    zero(s.dv, g.span() * g.ldv);
    const Place there = place_in_batch(c, element);
    const int64_t group = c.heads / c.key_heads;
    for (int64_t h = head * group; h < (head + 1) * group; ++h)
      for (int64_t row = 0; row < c.nq; row += kQueries) {
        const Place p = place_at(c, there.b, h, row);
        with_vectors(p.rows, [&](auto vectors) { block_gradients<vectors>(g, s, p, slice); });
      }
    float *dc = at<float>(g.g.dk, there, head), *dv = at<float>(g.g.dv, there, head);
    for (int64_t n = 0; n < g.span() && from + n < c.nk; ++n) {
      for (int64_t k = 0; k < c.dk; ++k) dc[(from + n) * g.g.dk.row + k * g.g.dk.col] = s.dc[k * g.dc_stride() + n];
      for (int64_t f = 0; f < c.dv; ++f) dv[(from + n) * g.g.dv.row + f * g.g.dv.col] = s.dv[n * g.ldv + f];
    }
  }
};

// Adds the slices' sums for da in order, times w.
struct AdditiveJoin {
  const Gradients& g;

  int64_t items() const { return elements(g.c) * g.c.heads * g.blocks; }
  int64_t scratch() const { return W; }

  void run(int64_t item, float*) const {
    const regard_call& c = g.c;
    const int64_t head = item / g.blocks, all = g.width * kQueries;
    const Place p = place_at(c, head / c.heads, head % c.heads, item % g.blocks * kQueries);
    float* to = at<float>(g.g.dq, p, p.h) + p.row * g.g.dq.row;
    for (int64_t k = 0; k < c.dk; ++k) {
      const float w = weight_of(g.x, p.h, k);
      for (int64_t i = 0; i < p.rows; ++i) {
        float sum = 0;
        for (int64_t slice = 0; slice < g.slices; ++slice)
          sum += g.da[(slice * items() + item) * all + k * kQueries + i];
        to[i * g.g.dq.row + k * g.g.dq.col] = w * sum;
      }
    }
  }
};

}  // namespace regard
