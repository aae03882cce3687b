// Tiles of keys that no step changes, on a matrix unit: while the vector units turn the scores of one block of 32 keys
// × 32 queries into weights, the matrix unit multiplies the next block of scores, and the values of the tile before.
// Maxima are raised lazily: a row's weights may be up to 2^kSlack, so that o is rarely multiplied.
#pragma once
#include "attention/matrix_plan.h"

namespace regard {

constexpr float kSlack = 8;  // by how much, in base 2, a score may exceed its row's maximum before this is raised

// 32 queries of a block: two vectors.
// with_lse: whether weights that are rounded are summed before that, too.
template <int V, int parts, bool with_lse>
struct StreamedRows {
  static constexpr int64_t kPart = kWaiting * kPairs;  // floats from part to part of weights
  Block<V>& b;
  int vector;
  float factor;  // what scores are multiplied by: 1 where a modifier has changed them
  vf shift[2], limit[2], sum[2], unrounded[2];

  StreamedRows(Block<V>& b, int vector)
      : b(b), vector(vector), factor(Modifiers::used(b.c) ? 1.0f : b.factor), sum{vf{}, vf{}}, unrounded{vf{}, vf{}} {
    set_shift();
  }

  void set_shift() {
    for (int v = 0; v < 2; ++v) {
      const vf m = b.state[vector + v].m;
      shift[v] = finite_shift(m);
      limit[v] = select(m == splat(-kInf), splat(-kInf), splat(kSlack));
    }
  }

  // Whether some row has seen nothing.
  bool some_empty() const {
    return Isa::lanes_set((b.state[vector].m == splat(-kInf)) | (b.state[vector + 1].m == splat(-kInf)));
  }

  // Whether a maximum must be raised for scores whose largest are `top`, in base 2; most: how far they are above it.
  bool exceeded(const vf (&top)[2], vf (&most)[2]) const {
    for (int v = 0; v < 2; ++v) most[v] = top[v] - shift[v];
    return Isa::lanes_set((most[0] > limit[0]) | (most[1] > limit[1]));
  }

  // The largest of a block's scores, in base 2.
  vf largest(const float* s, int v) const {
    vf top = splat(-kInf);
    for (int64_t n = 0; n < kBlock; ++n) top = greater_of(load(s + n * kBlock + v * W), top);
    return Isa::product(top, splat(factor));
  }

  // Rows that have seen nothing take the maxima of these scores.
  __attribute__((noinline)) void begin(const float* s) {
    for (int v = 0; v < 2; ++v) {
      vf& m = b.state[vector + v].m;
      m = select(m == splat(-kInf), greater_of(largest(s, v), m), m);
    }
    set_shift();
  }

  // What weigh keeps in registers: the work beside the unit's.
  struct Weights {
    const float* s;
    float* p;
    vf unit, shift[2], sum[2], unrounded[2], most[2];

    // How far the score at `at` is above the maximum: where it has three parts, queries were multiplied by the factor.
    __attribute__((always_inline)) vf above(const float* at, int v) const {
      return (parts == 3 ? load(at) : Isa::product(load(at), unit)) - shift[v];
    }

    // Scores of two keys, of vector v, become pairs; after the last vector the next two keys are meant.
    template <int v>
    __attribute__((always_inline)) void half() {
      const vf a = above(s + v * W, v), z = above(s + kBlock + v * W, v);
      most[v] = greater_of(a, most[v]);
      most[v] = greater_of(z, most[v]);
      if constexpr (parts == 1) {
        const vf ones = (vf)splat_int(0x3f803f80), pairs = cut_pair(Isa::exp2_to_cut(a), Isa::exp2_to_cut(z));
        sum[v] = Isa::multiply_add_pairs(sum[v], pairs, ones);
        if (with_lse) unrounded[v] += Isa::exp2_quick(a) + Isa::exp2_quick(z);
        store(p + v * W, pairs);
      } else {
        const vf first = weight_in_parts<parts>(a), second = weight_in_parts<parts>(z);
        sum[v] += first + second;
        store_parts<parts>(p + v * W, kPart, first, second);
      }
      if (v) {
        s += 2 * kBlock;
        p += kBlock;
      }
    }
  };

  // Scores of a block become weights, in pairs, while the unit works. Returns whether some score is so large that a
  // maximum must be raised; most: how far scores are above the maxima.
  __attribute__((always_inline)) bool weigh(const float* s, float* p, UnitPlan<parts>& plan, vf (&most)[2]) {
    const vf low = splat(-kInf);
    Weights w{s, p, splat(factor), {shift[0], shift[1]}, {vf{}, vf{}}, {vf{}, vf{}}, {low, low}};
    plan.run(w, kBlock / 2);
    most[0] = w.most[0];
    most[1] = w.most[1];
    if (Isa::lanes_set((most[0] > limit[0]) | (most[1] > limit[1]))) return true;
    for (int v = 0; v < 2; ++v) {
      sum[v] += w.sum[v];
      unrounded[v] += w.unrounded[v];
    }
    return false;
  }

  // Raises the maxima of rows whose scores s exceed them by more than kSlack, by `most`: by whole numbers, so that
  // rounded weights are multiplied by a power of two, as near as the maximum is rounded; to the largest score itself
  // where numbers are so large that whole ones are lost in rounding. weights: pairs that were computed and do not wait
  // yet. No values may wait.
  __attribute__((noinline)) void raise(const float* s, const vf (&most)[2], float* weights, int64_t pairs) {
    const vf whole = splat(0x1p20f);
    vf alpha[2];
    for (int v = 0; v < 2; ++v) {
      SoftmaxState<vf>& state = b.state[vector + v];
      const vi near = (absolute(shift[v]) < whole) & (most[v] < whole);
      const vf raised = select(near, shift[v] + ceiling(most[v]), largest(s, v)),
               top = select(most[v] > limit[v], raised, state.m);
      alpha[v] = state.raise(top);
      b.unrounded[vector + v] *= alpha[v];
      sum[v] *= alpha[v];
      unrounded[v] *= alpha[v];
    }
    set_shift();
    for (int64_t f = 0; f < b.c.dv; ++f)
      for (int v = 0; v < 2; ++v) {
        float* o = b.sums(f, vector + v);
        store(o, load(o) * alpha[v]);
      }
    for (int64_t n = 0; n < pairs / W; ++n) {
      vf first{}, second{};
      for (int part = parts - 1; part >= 0; --part) {
        const vu pair = (vu)load(weights + part * kPart + n * W);
        first += (vf)(pair << 16);
        second += (vf)(pair & 0xffff0000u);
      }
      store_parts<parts>(weights + n * W, kPart, first * alpha[n % 2], second * alpha[n % 2]);
    }
  }
};

// A tile that is streamed: its first key, which of the tile's that is, how many keys and blocks of keys (the last one
// may have fewer), its keys and values from the first on, and their bits, or null.
struct StreamedTile {
  int64_t j, from, count, blocks;
  LeftParts keys, values;
  const uint64_t* bits;

  // Its blocks that hold keys of [lo, hi).
  StreamedTile within(int64_t lo, int64_t hi) const {
    const int64_t first = lo > j ? (lo - j) / kBlock : 0, end = hi > j ? (hi - j + kBlock - 1) / kBlock : 0;
    StreamedTile some = *this;
    some.blocks = (end < blocks ? end : blocks) - first;
    some.j += first * kBlock;
    some.from += first * kBlock;
    some.count -= first * kBlock;
    some.keys.at += first * kBlock * keys.row;
    some.values.at += first * values.step;
    if (bits) some.bits += first * kBlock;
    return some;
  }

  // Whether the bits of a block of keys hide some of the queries [W vector, W vector + 32).
  bool hidden_bits(int64_t block, int vector) const {
    if (!bits) return false;
    uint64_t all = ~(uint64_t)0;
    for (int64_t n = block * kBlock; n < (block + 1) * kBlock && n < count; ++n) all &= bits[n];
    return (uint32_t)(all >> (vector * W)) != ~(uint32_t)0;
  }
};

// The keys that some of the queries [W vector, W vector + 32) of a block sees, and those that all of them see.
template <int V>
static Limits limits_of_rows(const Block<V>& b, int vector) {
  Place p = b.p;
  p.row += vector * W;
  p.rows -= vector * W;
  p.rows = p.rows < kBlock ? p.rows : kBlock;
  return Interval::limits(b.c, p);
}

// The steps of a block of scores: times factor, a modifier, intervals, bits. Scores of keys past the tile become -inf.
// top: takes the largest.
template <int V, class One, bool edge, bool bits>
REGARD_NOINLINE void step_block(const Block<V>& b, const StreamedTile& t, int64_t block, int vector, float factor,
                                float* s, vf (&top)[2]) {
  const int64_t first = block * kBlock, keys = t.count - first < kBlock ? t.count - first : kBlock;
  for (int v = 0; v < 2; ++v) {
    const auto modify = One::simply(b, t.j - t.from, vector + v);
    const vi start = b.first[vector + v], stop = b.last[vector + v];
    vf most = splat(-kInf);
    for (int64_t n = keys; n < kBlock; ++n) store(s + n * kBlock + v * W, splat(-kInf));
    for (int64_t n = 0; n < keys; ++n) {
      float* at = s + n * kBlock + v * W;
      vf x = modify(Isa::product(load(at), splat(factor)), t.from + first + n);
      if (edge) x = Interval::apply(x, t.j + first + n, start, stop);
      if (bits) x = Bits::apply(x, t.bits[first + n] >> ((vector + v) * W));
      most = greater_of(x, most);
      store(at, x);
    }
    top[v] = most;
  }
}

// The same where there is something to do. seen: the keys that some, and all, of the queries see.
template <int V>
static void step_block(const Block<V>& b, const StreamedTile& t, int64_t block, int vector, const Limits& seen,
                       float* s, vf (&top)[2]) {
  const int64_t key = t.j + block * kBlock;
  const bool edge = b.c.start.data && (key < seen.inner_lo || key + kBlock > seen.inner_hi);
  const bool bits = t.hidden_bits(block, vector);
  if (!edge && !bits && !Modifiers::used(b.c) && t.count >= (block + 1) * kBlock) return;
  Modifiers::simply(b.c, [&](auto one) {
    using One = decltype(one);
    const auto step = edge ? (bits ? step_block<V, One, true, true> : step_block<V, One, true, false>)
                           : (bits ? step_block<V, One, false, true> : step_block<V, One, false, false>);
    step(b, t, block, vector, Modifiers::used(b.c) ? b.factor : 1.0f, s, top);
  });
}

// Streams the queries [W vector, W vector + 32) of a block over what they see of some tiles.
template <int V, int parts, bool with_lse>
static void stream_rows(Block<V>& b, int vector, const StreamedTile* all, int64_t of_all) {
  const Limits seen = limits_of_rows(b, vector);
  StreamedTile tiles[tiles_at_once(parts)];
  int64_t count = 0;
  for (int64_t n = 0; n < of_all; ++n) {
    tiles[count] = all[n].within(seen.lo, seen.hi);
    count += tiles[count].blocks > 0;
  }
  if (!count) return;
  using Rows = StreamedRows<V, parts, with_lse>;
  const regard_call& c = b.c;
  MatrixStream& stream = *b.w.stream;
  const int64_t depth = whole_depth(c.dk);
  const RightParts queries{(const uint16_t*)(b.w.q + vector * W * depth / 2), 2 * kBlock, 0, depth * kQueries};
  float* scores[2] = {b.w.s, b.w.s + kBlock * kBlock};
  float* sums = parts == 3 ? b.w.s + 2 * kBlock * kBlock : nullptr;
  int turn = 0;  // which of the scores is next
  const auto score_block = [&](const StreamedTile& tile, int64_t i) {
    LeftParts keys = tile.keys;
    keys.at += i * kBlock * keys.row;
    return UnitJob{keys, queries, depth / kBlock, scores[turn], nullptr, nullptr};
  };
  UnitPlan<parts> first{stream};
  first.add(score_block(tiles[0], 0));
  first.run();
  stream.store_sums();
  Rows rows(b, vector);
  const bool modified = Modifiers::used(c);
  for (int64_t n = 0; n < count; ++n)
    for (int64_t i = 0; i < tiles[n].blocks; ++i) {
      float* s = scores[turn];
      turn ^= 1;
      vf top[2], most[2];
      step_block(b, tiles[n], i, vector, seen, s, top);
      if (rows.some_empty()) rows.begin(s);
      const int64_t at = i % kWaiting;
      float *weights = b.w.p_parts + stream.turn * parts * Rows::kPart, *p = weights + at * kPairs;
      if (modified && rows.exceeded(top, most)) {
        stream.finish<parts>();
        rows.raise(s, most, weights, at * kPairs);
      }
      UnitPlan<parts> plan{stream};
      if (i + 1 < tiles[n].blocks) plan.add(score_block(tiles[n], i + 1));
      else if (n + 1 < count) plan.add(score_block(tiles[n + 1], 0));
      const int64_t waiting = stream.waiting.count - stream.waiting.next;
      const int64_t left = i - at + kWaiting < tiles[n].blocks ? kWaiting - at : tiles[n].blocks - i;
      for (int64_t share = (waiting + left - 1) / left; share; --share) plan.add(stream.waiting.take());
      const bool large = rows.weigh(s, p, plan, most);
      if (large || plan.count < 2) stream.store_sums();
      if (large) {
        stream.finish<parts>();
        rows.raise(s, most, weights, at * kPairs);
        UnitPlan<parts> none{stream};
        rows.weigh(s, p, none, most);
      }
      if (left > 1) continue;
      LeftParts values = tiles[n].values;
      values.at += (i - at) * values.step;
      const RightParts columns{(const uint16_t*)weights, 2 * kBlock, 0, 2 * Rows::kPart};
      stream.waiting = {values, columns, b.sums(0, vector), sums, at + 1, 0, c.dv / kBlock};
      stream.turn ^= 1;
    }
  for (int v = 0; v < 2; ++v) {
    b.state[vector + v].l += rows.sum[v];
    b.unrounded[vector + v] += rows.unrounded[v];
  }
}

// Whether the tiles of a block are streamed: scores change by intervals, bits and one simple modifier alone. Not where
// rows must not depend on others: which scores share a maximum would then depend on whether a mask has bits for another
// row.
template <int V, class Op>
static bool streams(const Block<V>& b) {
  const regard_call& c = b.c;
  const bool whole = V % 2 == 0 && c.dv % kBlock == 0 && c.dv <= 16 * kBlock;
  return Op::parts && whole && !c.threshold && !c.invariant && b.factor > 0 && Modifiers::simply(c, [](auto) {});
}

// The keys [lo, hi) of a tile that may be streamed: whole blocks that nothing hides. Where values are finite, so that 0
// times what is hidden is 0: all of them. finite: the tile's values.
template <int V>
static Limits streamed_keys(const Block<V>& b, const Tile& t, bool finite) {
  int64_t lo = t.j, hi = t.j + t.count;
  if (finite) return {lo, hi, 0, 0};
  if (t.bits) return {};
  if (t.edge) {
    lo = b.inner_lo > lo ? b.inner_lo : lo;
    hi = b.inner_hi < hi ? b.inner_hi : hi;
  }
  lo = t.j + (lo - t.j + kBlock - 1) / kBlock * kBlock;
  return {lo, hi > lo ? lo + (hi - lo) / kBlock * kBlock : lo, 0, 0};
}

template <int V, class Op>
static void stream_tiles(Block<V>& b, const StreamedTile* tiles, int64_t count) {
  const bool with_lse = Op::parts == 1 && (b.c.lse.data || b.c.row_stats.data);
  const auto stream = with_lse ? stream_rows<V, Op::parts, Op::parts == 1> : stream_rows<V, Op::parts, false>;
  for (int vector = 0; count && vector < V && vector * W < b.p.rows; vector += 2) stream(b, vector, tiles, count);
}

}  // namespace regard
