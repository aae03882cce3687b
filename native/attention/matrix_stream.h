// Tiles of keys in a stream, on a matrix unit: while the vector units turn the scores of one block of 32 keys × 32
// queries into weights, the matrix unit multiplies the next block of scores, and the values of the tile before.
// Maxima are raised lazily: a row's weights may be up to 2^kSlack, so that o is rarely multiplied.
#pragma once
#include "attention/matrix_plan.h"
#include "attention/matrix_steps.h"

namespace regard {

constexpr float kSlack = 8;  // by how much, in base 2, a score may exceed its row's maximum before this is raised
// By how much more it is then raised where modifiers may let scores grow from key to key, as slopes do, and numbers
// have parts: the largest weight may be 2^-kRoom, whose products with the least values that have parts are still far
// from denormal numbers. Values of bfloat16 may be of any size.
constexpr float kRoom = 10;

// 32 queries of a block: two vectors.
// with_lse: whether weights that are rounded are summed before that, too.
template <int V, int parts, bool with_lse>
struct StreamedRows {
  static constexpr int64_t kPart = kWaiting * kPairs;  // floats from part to part of weights
  Block<V>& b;
  int vector;
  float factor;  // what scores are multiplied by: 1 where a modifier has changed them
  float room;    // by how much more than scores need maxima are raised
  vf shift[2], limit[2], sum[2], unrounded[2];

  StreamedRows(Block<V>& b, int vector)
      : b(b),
        vector(vector),
        factor(Modifiers::used(b.c) ? 1.0f : b.factor),
        room(parts > 1 && Modifiers::used(b.c) ? kRoom : 0.0f),
        sum{vf{}, vf{}},
        unrounded{vf{}, vf{}} {
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
  vf largest(const float* s, int v) const { return Isa::product(largest_score(s, v), splat(factor)); }

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
      const vf raised = select(near, shift[v] + ceiling(most[v]) + splat(room), largest(s, v)),
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

// Streams the queries [W vector, W vector + 32) of a block over what they see of some tiles.
template <int V, int parts, bool with_lse>
static void stream_rows(Block<V>& b, int vector, const StreamedTile* all, int64_t of_all) {
  const Limits seen = Interval::limits(b.c, place_of_rows(b, vector));
  StreamedTile tiles[tiles_at_once(parts)];
  int64_t count = 0;
  for (int64_t n = 0; n < of_all; ++n) {
    tiles[count] = all[n].within(seen.lo, seen.hi);
    count += tiles[count].blocks > 0;
  }
  if (!count) return;
  load_program(b, vector);
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

template <int V, class Op>
static void stream_tiles(Block<V>& b, const StreamedTile* tiles, int64_t count) {
  const bool with_lse = Op::parts == 1 && (b.c.lse.data || b.c.row_stats.data);
  const auto stream = with_lse ? stream_rows<V, Op::parts, Op::parts == 1> : stream_rows<V, Op::parts, false>;
  for (int vector = 0; count && vector < V && vector * W < b.p.rows; vector += 2) stream(b, vector, tiles, count);
}

}  // namespace regard
