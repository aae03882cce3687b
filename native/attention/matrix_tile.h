// One block of queries and one tile of keys on a matrix unit: the steps of tile.h, with numbers as sums of bfloat16.
#pragma once
#include "attention/kv_tile.h"
#include "attention/tile.h"

namespace regard {

// Queries as the right operand of S^T = K Q^T: as they are, and scores are multiplied; where products are of float32,
// multiplied like those of pack.
template <int V, class Op>
static void pack_parts(Block<V>& b, const void* q) {
  const regard_call& c = b.c;
  const int64_t depth = whole_depth(c.dk), part = kQueries * depth;
  const bool floats = product_dtype(c) == REGARD_F32;
  const uint16_t* rows = (const uint16_t*)q;
  int64_t row = c.q.row;
  if (Op::parts > 1 || c.q.col != 1 || depth != c.dk) {
    const float factor = floats ? b.factor : 1.0f;
    const Sizes sizes = Sizes::of_scores(product_dtype(c));
    b.unfit = !split_rows<Op::parts>({b.w.q_parts, depth, 32, part}, depth, q, c.dtype, c.q.row, c.q.col, b.p.rows,
                                     c.dk, factor, sizes);
    rows = b.w.q_parts;
    row = depth;
  }
  if (floats) b.factor = 1;
  b.rounded = Op::parts == 1;
  b.o_row = 2 * W;
  b.o_pair = c.dv * 2 * W;
  for (int n = 0; n < Op::parts; ++n) pack_columns<V>(b.w.q + n * part / 2, rows + n * part, row, b.p.rows, depth);
}

// Takes blocks of S^T, and the largest of its scores of `keys` keys.
template <int V>
struct ScoreBlocks {
  static constexpr int64_t stride = kQueries;
  float* s;
  int64_t keys;
  vf most[V];

  float* place(int64_t row, int vector) const { return s + row * kQueries + vector * W; }
  const float* from(int64_t, int) const { return nullptr; }

  template <int C>
  void take(int64_t row, int vector, int64_t rows) {
    rows = rows < keys - row ? rows : keys - row;
    const float* from = place(row, vector);
    vf one[C], other[C];
    for (int v = 0; v < C; ++v) one[v] = other[v] = most[vector + v];
    int64_t n = 0;
    for (; n + 2 <= rows; n += 2, from += 2 * kQueries)
#pragma GCC unroll 2
      for (int v = 0; v < C; ++v) {
        one[v] = greater_of(load(from + v * W), one[v]);
        other[v] = greater_of(load(from + kQueries + v * W), other[v]);
      }
    for (int v = 0; v < C; ++v) {
      if (n < rows) one[v] = greater_of(load(from + v * W), one[v]);
      most[vector + v] = greater_of(one[v], other[v]);
    }
  }
};

// Takes blocks of V^T P^T: o = o · alpha + block. A tile's sum starts at 0: long sums have two levels.
template <int V>
struct OutputBlocks {
  static constexpr int64_t stride = 2 * W;
  const Block<V>& b;
  const vf* alpha;
  float (*blocks)[32 * stride];  // two: this one, and that which the unit multiplies

  float* place(int64_t row, int) { return blocks[row / 32 % 2]; }
  const float* from(int64_t, int) const { return nullptr; }

  template <int C>
  void take(int64_t row, int vector, int64_t rows) {
    rows = rows < b.c.dv - row ? rows : b.c.dv - row;
    const float* from = blocks[row / 32 % 2];
    for (int64_t n = 0; n < rows; ++n)
#pragma GCC unroll 2
      for (int v = 0; v < C; ++v)
        merge_values(b.sums(row + n, vector + v), alpha[vector + v], load(from + n * stride + v * W));
  }
};

// 2^x, as exactly as so many parts hold it.
template <int parts>
REGARD_INLINE vf weight_in_parts(vf x) {
  return parts == 3 ? Isa::exp2_whole(x) : Isa::exp2_quick(x);
}

// Two rows of weights, of neighbouring keys, as rows of pairs of their parts. The first is rounded, so that what is
// left has 16 bits; the others are cut off, which loses nothing, and takes the fewest instructions.
template <int parts>
REGARD_INLINE void store_parts(float* to, int64_t part, vf p, vf next) {
#pragma GCC unroll 3
  for (int n = 0; n < parts; ++n, to += part) {
    const vf pairs = n ? cut_pair(p, next) : Isa::pair_of(p, next);
    store(to, pairs);
    if (n + 1 == parts) return;
    p -= n ? (vf)((vu)p & 0xffff0000u) : (vf)((vu)pairs << 16);
    next -= (vf)((n ? (vu)next : (vu)pairs) & 0xffff0000u);
  }
}

// Fills rows of pairs [from, to) with zeros: keys that a tile lacks.
template <int V>
static void clear_pairs(float* p, int64_t parts, int64_t part, int64_t from, int64_t to) {
  for (; parts; --parts, p += part)
    for (int64_t n = from; n < to; ++n)
      for (int v = 0; v < V; ++v) store(p + n * kQueries + v * W, vf{});
}

// Scores, times factor in base 2, become parts of weights (the product is rounded before the maximum is subtracted, as
// the maximum was: else 2^ its last digit would be the weight of a score of 2^40), and their sums are added to l;
// without dropout. One vector of queries after the other, so that everything stays in registers.
template <int V, class Op>
REGARD_NOINLINE void weigh_parts(float* p, int64_t part, const float* s, float factor, SoftmaxState<vf>* state,
                                 int64_t count) {
  const vf unit = splat(factor);
  for (int v = 0; v < V; ++v) {
    const vf shift = state[v].shift();
    vf sum = vf{}, other = vf{};
    const float* from = s + v * W;
    float* to = p + v * W;
    int64_t n = 0;
    for (; n + 2 <= count; n += 2, from += 2 * kQueries, to += kQueries) {
      const vf w = weight_in_parts<Op::parts>(Isa::product(load(from), unit) - shift);
      const vf next = weight_in_parts<Op::parts>(Isa::product(load(from + kQueries), unit) - shift);
      sum += w;
      other += next;
      store_parts<Op::parts>(to, part, w, next);
    }
    if (n < count) {
      const vf w = weight_in_parts<Op::parts>(Isa::product(load(from), unit) - shift);
      sum += w;
      store_parts<Op::parts>(to, part, w, vf{});
    }
    state[v].l += sum + other;
  }
}

// Weights as parts.
template <int V, class Op>
static void split_weights(float* p, int64_t part, const float* s, int64_t count) {
  for (int64_t n = 0; n < count; n += 2)
    for (int v = 0; v < V; ++v) {
      const float* from = s + n * kQueries + v * W;
      const vf next = n + 1 < count ? load(from + kQueries) : vf{};
      store_parts<Op::parts>(p + n / 2 * kQueries + v * W, part, load(from), next);
    }
}

template <int V>
static void scale_rows(float* s, int64_t count, float factor) {
  for (int64_t n = 0; n < count; ++n)
    for (int v = 0; v < V; ++v) {
      float* at = s + n * kQueries + v * W;
      store(at, Isa::product(load(at), splat(factor)));
    }
}

// Whether the scores of a tile are dot products times the block's factor, masks of intervals aside. Not where rows must
// not depend on others: which scores share a maximum would then depend on whether a mask has bits for another row.
template <int V>
static bool unchanged(const Block<V>& b, const Tile& t) {
  return !Modifiers::used(b.c) && !t.bits && !t.allowed && !t.masks && !b.c.threshold && b.factor > 0 && !b.c.invariant;
}

template <int V, class Op>
static void run_keys(Block<V>& b, const Tile& t, KvTile& x) {
  const regard_call& c = b.c;
  const int64_t skip = t.j - x.j, depth = whole_depth(t.count), width = whole_depth(c.dk);
  LeftParts keys = x.key_parts, values = x.value_parts;
  keys.at += skip * keys.row;
  values.at += skip / 32 * values.step;
  const RightParts queries{(const uint16_t*)b.w.q, 64, width * 32, width * kQueries};
  const bool raw = unchanged(b, t);
  const vf low = splat(-kInf);
  float* s = b.w.s;
  ScoreBlocks<V> scores{s, t.count, {}};
  for (int v = 0; v < V; ++v) scores.most[v] = low;
  Isa::multiply_blocks<Op::parts, V>(scores, keys, queries, whole_rows(t.count), width);

  vf top[V];
  for (int v = 0; v < V; ++v) top[v] = raw ? low : b.state[v].m;
  if (!raw && b.factor != 1) scale_rows<V>(s, t.count, b.factor);
  if (!raw || t.edge) step_rows<V>(b, t, 0, t.count, top);
  for (int v = 0; raw && v < V; ++v)
    top[v] = greater_of(Isa::product(t.edge ? top[v] : scores.most[v], splat(b.factor)), b.state[v].m);
  vf alpha[V];
  raise_state<V>(b, top, alpha);

  const int64_t part = kKeys / 2 * kQueries;
  float* p = Op::parts == 1 ? s : b.w.p_parts;
  vf before[V];
  for (int v = 0; v < V; ++v) {
    before[v] = b.state[v].l;
    b.state[v].l = vf{};
  }
  if (c.threshold) weigh<V, false>(b, t, false);
  else weigh_parts<V, Op>(p, part, s, raw ? b.factor : 1.0f, b.state, t.count);
  for (int v = 0; v < V; ++v) {
    b.unrounded[v] += b.state[v].l;
    b.state[v].l += before[v];
  }
  if (c.threshold) split_weights<V, Op>(p, part, s, t.count);
  clear_pairs<V>(p, Op::parts, part, (t.count + 1) / 2, depth / 2);
  alignas(64) float blocks[2][32 * OutputBlocks<V>::stride];
  OutputBlocks<V> output{b, alpha, blocks};
  Isa::multiply_blocks<Op::parts, V>(output, values, {(const uint16_t*)p, 2 * kQueries, 64, 2 * part}, whole_rows(c.dv),
                                     depth);
}

// The keys [from, to) of a tile.
template <int V>
static Tile piece(const Block<V>& b, const Tile& t, int64_t from, int64_t to) {
  Tile some = t;
  some.j = from;
  some.count = to - from;
  some.edge = t.edge && (from < b.inner_lo || to > b.inner_hi);
  return some;
}

// A tile whose steps change no score: 64 keys at a time, so that scores stay in the first-level cache; on a grid, as
// tiles are.
template <int V, class Op>
static void run_matrix_tile(Block<V>& b, const Tile& t, KvTile& x) {
  constexpr int64_t kAtOnce = 64;
  if (!unchanged(b, t)) return run_keys<V, Op>(b, t, x);
  for (int64_t j = t.j, next; j < t.j + t.count; j = next) {
    next = (j / kAtOnce + 1) * kAtOnce;
    if (next > t.j + t.count) next = t.j + t.count;
    run_keys<V, Op>(b, piece(b, t, j, next), x);
  }
}

}  // namespace regard
