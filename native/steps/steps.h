// What happens to a score after the similarity and before the sum: soft cap, slopes, offsets, bias, mask, dropout.
#pragma once
#include "core/block.h"

namespace regard {

REGARD_INLINE vu mix(vu x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

REGARD_INLINE uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

REGARD_INLINE uint32_t fold(int64_t n) { return (uint32_t)(n ^ (n >> 32) * 0x165667B1); }

REGARD_INLINE uint32_t head_word(const regard_call& c, const Place& p) {
  uint32_t x = mix((uint32_t)(fold(p.b) * 0x9E3779B1u + (uint32_t)c.seed));
  return mix((uint32_t)(x + fold(p.h) * 0x85EBCA77u + (uint32_t)(c.seed >> 32)));
}

// Dropout's words of a query, and of a key.
REGARD_INLINE uint32_t query_word(uint32_t head, int64_t at) { return mix((uint32_t)(head + fold(at) * 0xC2B2AE3Du)); }
REGARD_INLINE uint32_t key_word(int64_t at) { return fold(at) * 0x27D4EB2Fu; }

REGARD_INLINE vi stays(const regard_call& c, vu query, vu key) { return (mix(query + key) >> 8) >= c.threshold; }

REGARD_INLINE vf sloped(vf s, const Slope& slope, vf away) {
  s -= splat(slope.most) * away;
  return s - splat(slope.rest) * away;
}

REGARD_INLINE Slope slope_of(const regard_call& c, int64_t head) {
  const double slope = c.slopes ? c.slopes[c.slopes_stride * head] * 1.4426950408889634 : 0;
  return {(float)slope, (float)(slope - (float)slope)};
}

// Of the distance between points, one more coordinate.
REGARD_INLINE vf farther(vf square, vf x, vf y) {
  const vf apart = x - y;
  return square + apart * apart;
}

// The sink's logit in base 2; -inf where there is none.
REGARD_INLINE float sink_of(const regard_call& c, const Place& p, int64_t head) {
  return c.sink.data ? plus_natural(vf{}, splat(*at<float>(c.sink, p, head)))[0] : -kInf;
}

REGARD_INLINE float cap_of(const regard_call& c, int64_t head) { return c.caps ? c.caps[c.caps_stride * head] : c.cap; }

// What a dot product is multiplied by on its way to the cap, or to base 2.
REGARD_INLINE float factor_of(const regard_call& c, int64_t head) {
  return c.cap != 0 && !c.cap_last ? c.scale / cap_of(c, head) : c.scale * kLog2e;
}

// A score in units of the cap becomes one in base 2; bend: the derivative.
REGARD_INLINE vf capped(vf s, float cap, vf& cap_slope) {
  const vf y = tanhv(s);
  cap_slope = splat(1.0f) - y * y;
  return splat(cap * kLog2e) * y;
}

// The cells of a block's queries. Those of lanes without a query are never past the end by more than a block.
template <int V>
static void begin_cells(Block<V>& b) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  const int32_t* cell = c.q_cell ? c.q_cell + offset(c.q_cell_batch, p) + p.row : nullptr;
  for (int64_t v = 0; v < V; ++v) {
    b.first_cell[v] = cell ? cell[v * W] : (int32_t)(p.row + v * W + c.nk - 1);
    for (int64_t n = v * W; cell && n < (v + 1) * W; ++n) {
      b.cell[v][n % W] = cell[n < p.rows ? n : 0];
      if (n < p.rows && cell[n] - (int64_t)cell[v * W] != n % W) b.first_cell[v] = -1;
    }
  }
}

// What the steps need to know of a block's queries.
template <int V>
static void begin_steps(Block<V>& b) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  if (c.q_at) {
    const int64_t* q_at = c.q_at + offset(c.q_at_batch, p) + p.row;
    b.base = q_at[0];
    const uint32_t seed = head_word(c, p);
    for (int64_t n = 0; n < V * W; ++n) {
      const int64_t i = q_at[n < p.rows ? n : 0];
      b.relative[n / W][n % W] = apart(i, b.base);
      b.word[n / W][n % W] = query_word(seed, i);
    }
  }
  for (int64_t d = 0; c.points_of_q && d < c.dims; ++d)
    for (int64_t n = 0; n < V * W; ++n) b.point[d][n / W][n % W] = c.points_of_q[d * c.nq + p.row + (n < p.rows ? n : 0)];
  b.slope = slope_of(c, p.h);
  b.cap = cap_of(c, p.h);
  b.offsets = c.offsets ? c.offsets + c.offsets_stride * p.h : nullptr;
  if (b.offsets) begin_cells(b);
}

// How far the queries are from a key, for the slopes.
template <int V>
REGARD_INLINE void away_from(const Block<V>& b, int64_t key, vf (&away)[V]) {
  const regard_call& c = b.c;
  if (!c.points_of_k) {
    const vi ahead = splat_int(apart(c.k_at[offset(c.k_at_batch, b.p) + key], b.base));
    for (int v = 0; v < V; ++v) away[v] = absolute(__builtin_convertvector(apart(b.relative[v], ahead), vf));
    return;
  }
  for (int v = 0; v < V; ++v) {
    vf square = vf{};
    for (int64_t d = 0; d < c.dims; ++d) square = farther(square, b.point[d][v], splat(c.points_of_k[d * c.nk + key]));
    away[v] = sqrtv(square);
  }
}

// The cell of a key: what is taken from a query's to find their offset.
template <int V>
REGARD_INLINE int32_t cell_of(const Block<V>& b, int64_t key) {
  return b.c.k_cell ? b.c.k_cell[offset(b.c.k_cell_batch, b.p) + key] : (int32_t)key;
}

// The bias of a tile, transposed.
template <int V>
static void load_bias(const Block<V>& b, const Tile& t) {
  const regard_call& c = b.c;
  if (!c.bias.data) return;
  const int64_t from = offset(c.bias, b.p, b.p.h) + b.p.row * c.bias.row + t.j * c.bias.col;
  const void* bias = moved(c.bias.data, from, c.bias_dtype);
  const auto map = [](vf x) __attribute__((always_inline)) { return bounded(x); };
  pack_by<V>(b.w.bias, kQueries, bias, c.bias_dtype, c.bias.row, c.bias.col, b.p.rows, t.count, map);
}

// A score, or -inf for the lanes that do not see the key.
REGARD_INLINE vf within(vf s, int64_t key, vi first, vi last) {
  vi k = splat_int((int32_t)key);
  return ((k >= first) & (k < last)) ? s : splat(-kInf);
}

REGARD_INLINE vf where_set(vf s, uint64_t word) {
  vi bit;
  for (int k = 0; k < W; ++k) bit[k] = 1 << k;
  return (splat_int((int32_t)word) & bit) != 0 ? s : splat(-kInf);
}

// Scores of one key for V vectors of queries: everything after the similarity, in base 2. bend: the soft cap's derivative,
// 0 for what is hidden, [..][W]; or 0 where nobody asks.
template <int V, class Op>
REGARD_INLINE void steps(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], float* cap_slope = nullptr) {
  const regard_call& c = b.c;
  vf bent[V] = {};
  if (Op::pairs)
    for (int v = 0; v < V; ++v) s[v] *= splat(b.factor);
  if (c.cap != 0 && !c.cap_last)
    for (int v = 0; v < V; ++v) s[v] = capped(s[v], b.cap, bent[v]);
  if (c.slopes) {
    vf away[V];
    away_from(b, t.j + n, away);
    for (int v = 0; v < V; ++v) s[v] = sloped(s[v], b.slope, away[v]);
  }
  if (b.offsets) {
    const float* of = b.offsets - cell_of(b, t.j + n);
    for (int v = 0; v < V; ++v) s[v] = plus_natural(s[v], b.first_cell[v] < 0 ? take(of, b.cell[v]) : load(of + b.first_cell[v]));
  }
  if (c.bias.data)
    for (int v = 0; v < V; ++v) s[v] = plus_natural(s[v], load(b.w.bias + n * kQueries + v * W));
  if (c.cap != 0 && c.cap_last)
    for (int v = 0; v < V; ++v) s[v] = capped(s[v] * splat(1 / (b.cap * kLog2e)), b.cap, bent[v]);
  if (t.edge)
    for (int v = 0; v < V; ++v) s[v] = within(s[v], t.j + n, b.first[v], b.last[v]);
  if (t.bits)
    for (int v = 0; v < V; ++v) s[v] = where_set(s[v], t.bits[n] >> (v * W));
  for (int v = 0; cap_slope && v < V; ++v) store(cap_slope + v * W, select(s[v] == splat(-kInf), vf{}, bent[v]));
}

// The weight of one score, exp2(s - shift); its sum goes to `sum`, before dropout.
template <int V>
REGARD_INLINE vf weight(const Block<V>& b, int v, vf s, vf shift, vu key, vf& sum) {
  vf p = exp2v(s - shift);
  sum += p;
  if (b.c.threshold) p = select(stays(b.c, b.word[v], key), p * splat(b.c.keep), vf{});
  return p;
}

}  // namespace regard
