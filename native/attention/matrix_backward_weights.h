// Weights and gradients of scores of a block of queries and a tile of keys, as operands of the backward's products on a
// matrix unit.
#pragma once
#include "attention/matrix_backward_operands.h"

namespace regard {

// Queries whose weights are held at once: their products are added to dK and dV in memory once. A matrix unit stores
// slowly what isn't in the first-level cache.
REGARD_INLINE constexpr int64_t held_queries(int64_t parts) { return (parts == 1 ? 4 : 2) * kQueries; }

// Weights and gradients of scores, as parts: as left operands, of 32 keys and the 32 before, [2][part][32 queries after
// the other][32 keys][32], and the latter as a right one, of pairs of keys: [part][32 queries after the other][kTile /
// 2][32].
template <int parts>
struct WeightParts {
  uint16_t *p, *ds;
  float* pairs;
  static constexpr int64_t kStep = kBlock * kBlock, kPart = kBlock * held_queries(parts), kKeys = parts * kPart;
  static constexpr int64_t kPairsColumn = kTile / 2 * kBlock, kPairsPart = kTile / 2 * held_queries(parts);

  // Where those of 32 keys begin, of which `key` is one.
  static int64_t begin(int64_t key) { return key / kBlock % 2 * kKeys; }
  static LeftParts rows(const uint16_t* at, int64_t key) { return {at + begin(key), kBlock, kStep, kPart}; }
  // Of all keys, and the n-th 32 queries.
  RightParts right(int64_t n) const {
    return {(const uint16_t*)(pairs + n * kPairsColumn), 2 * kBlock, 0, 2 * kPairsPart};
  }

  // Of a key, and of vectors v and v + 1 of queries.
  __attribute__((always_inline)) void put_key(int64_t n, int v, const vf (&of_p)[2], const vf (&of_ds)[2]) const {
    const int64_t at = begin(n) + v / 2 * kStep + n % kBlock * kBlock;
    split<parts>(p + at, kPart, of_p[0], of_p[1]);
    split<parts>(ds + at, kPart, of_ds[0], of_ds[1]);
  }

  // Of the keys n and n + 1: of_ds[key][vector].
  __attribute__((always_inline)) void put_pairs(int64_t n, int v, const vf (&of_ds)[2][2]) const {
    float* at = pairs + v / 2 * kPairsColumn + n / 2 * kBlock;
    for (int m = 0; m < 2; ++m) store_parts<parts>(at + m * W, kPairsPart, of_ds[0][m], of_ds[1][m]);
  }
};

// Queries of a head, one after the other, in a stream.
struct StreamedQueries {
  Place p;  // whole 32 rows
  float factor;
  const float *shift, *inverse, *delta;  // of each
};

// Scores and dP of 32 keys and 32 queries become weights and gradients of scores, beside what the unit multiplies
// meanwhile; where no step changes scores.
template <int parts>
struct WeighedBlock {
  const float *s, *dp;  // [32][32]
  WeightParts<parts> to;
  int64_t n;  // the first of two keys
  int v;      // the first of two vectors
  vf unit, shift[2], inverse[2], delta[2], p[2][2], ds[2][2];

  WeighedBlock(const StreamedQueries& of, const WeightParts<parts>& to, const float* s, const float* dp, int64_t n,
               int v)
      : s(s), dp(dp), to(to), n(n), v(v), unit(splat(of.factor)) {
    for (int m = 0; m < 2; ++m) {
      const int64_t at = (v + m) * W;
      shift[m] = load(of.shift + at);
      inverse[m] = load(of.inverse + at);
      delta[m] = load(of.delta + at);
    }
  }

  // Of one key; after the second, the next two keys are meant. Of float32, queries were multiplied by the factor.
  template <int i>
  __attribute__((always_inline)) void half() {
#pragma GCC unroll 2
    for (int m = 0; m < 2; ++m) {
      const vf score = load(s + m * W), scaled = parts == 3 ? score : Isa::product(score, unit);
      p[i][m] = weight_in_parts<parts>(scaled - shift[m]) * inverse[m];
      ds[i][m] = p[i][m] * (load(dp + m * W) - delta[m]);
    }
    to.put_key(n + i, v, p[i], ds[i]);
    s += kBlock;
    dp += kBlock;
    if (i) {
      to.put_pairs(n, v, ds);
      n += 2;
    }
  }
};

// Keys [from, to) of a tile.
struct KeyRange {
  int64_t from = 0, to = 0;
};

// Whether intervals are all that changes a score of a block of queries, and its rows are finite: what hidden pairs
// multiply by 0 is then finite, too. Hidden scores are -inf before they are multiplied by the queries' factor.
static bool hides_alone(const BackwardCall& w, const StreamedQueries& of, const Tile& t) {
  if (Modifiers::used(w.c) || t.bits || w.c.threshold || of.p.rows % kBlock || !(of.factor > 0)) return false;
  vf sum = vf{};  // of zeros
  for (int64_t n = 0; n < of.p.rows; n += W)
    sum += (load(of.shift + n) + load(of.inverse + n) + load(of.delta + n)) * vf{};
  return Isa::lanes_set(sum != sum) == 0;
}

// Makes scores of 32 queries and 32 keys from `key` on that intervals hide -inf, and dP there 0.
static void hide_pairs(const regard_call& c, const Place& queries, int64_t key, float* s, float* dp) {
  Interval::State<2> b;
  Interval::begin<2>(b, c, queries);
  for (int v = 0; v < 2; ++v)
    for (int64_t n = 0; n < kBlock; ++n) {
      const int64_t at = n * kBlock + v * W;
      const vf score = Interval::apply(load(s + at), key + n, b.first[v], b.last[v]);
      store(s + at, score);
      store(dp + at, score == splat(-kInf) ? vf{} : load(dp + at));
    }
}

// Weights and gradients of scores after any steps, when scores lie in x.p and dP in x.ds, as floats; x.p takes weights,
// x.ds gradients of scores.
template <int parts>
static void weigh_floats(const Block<kVectors>& b, const Tile& t, const BlockShare& x) {
  const int64_t* k_at = b.c.threshold ? b.c.k_at + offset(b.c.k_at_batch, b.p) + t.j : nullptr;
  for (int64_t n = x.from; n < x.to; ++n) {
    const vu word = (k_at ? Dropout::key_word(k_at[n]) : 0u) + vu{};
    for (int v = 0; v < kVectors; ++v) {
      float *at = x.p + n * kQueries + v * W, *ds = x.ds + n * kQueries + v * W;
      const vf s = load(at);
      const vi hidden = s == splat(-kInf);
      vf p = weight_in_parts<parts>(s - load(x.shift + v * W)) * load(x.inverse + v * W), dp = load(ds);
      p = hidden ? vf{} : p;
      const vf dropped = k_at ? Dropout::apply(b.c, b.word[v], word, p) : p;
      if (k_at) dp = Dropout::apply(b.c, b.word[v], word, dp);
      store(at, dropped);
      store(ds, hidden ? vf{} : p * (dp - load(x.delta + v * W)));
    }
  }
}

// Weights and gradients of scores of 32 keys from `key` on as parts; those of others than [x.from, x.to) are 0.
template <int parts>
static void split_floats(const BlockShare& x, const WeightParts<parts>& to, int64_t key) {
  for (int64_t n = key; n < key + kBlock; n += 2)
    for (int v = 0; v < kVectors; v += 2) {
      vf p[2][2], ds[2][2];
      for (int i = 0; i < 2; ++i)
        for (int m = 0; m < 2; ++m) {
          const bool there = n + i >= x.from && n + i < x.to;
          const int64_t at = (n + i) * kQueries + (v + m) * W;
          p[i][m] = there ? load(x.p + at) : vf{};
          ds[i][m] = there ? load(x.ds + at) : vf{};
        }
      to.put_key(n, v, p[0], ds[0]);
      to.put_key(n + 1, v, p[1], ds[1]);
      to.put_pairs(n, v, ds);
    }
}

}  // namespace regard
