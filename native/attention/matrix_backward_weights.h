// Weights and gradients of scores of a block of queries and a tile of keys, as operands of the backward's products on a
// matrix unit.
#pragma once
#include "attention/backward_block.h"
#include "attention/matrix_plan.h"

namespace regard {

// Weights and gradients of scores of neighbouring keys, as left operands, and the latter as a right one, of pairs of
// keys.
template <int parts>
struct WeightParts {
  uint16_t *p, *ds;
  float* pairs;
  static constexpr int64_t kStep = kTile * 32, kPart = kTile * kQueries, kPairsPart = kTile / 2 * kQueries;

  static LeftParts rows(const uint16_t* at) { return {at, 32, kStep, kPart}; }
  RightParts right() const { return {(const uint16_t*)pairs, 2 * kQueries, 64, 2 * kPairsPart}; }

  // Of a key, and of vectors v and v + 1 of queries.
  __attribute__((always_inline)) void put_key(int64_t n, int v, const vf (&of_p)[2], const vf (&of_ds)[2]) const {
    const int64_t at = v / 2 * kStep + n * 32;
    split<parts>(p + at, kPart, of_p[0], of_p[1]);
    split<parts>(ds + at, kPart, of_ds[0], of_ds[1]);
  }

  // Of the keys n and n + 1: of_ds[key][vector].
  __attribute__((always_inline)) void put_pairs(int64_t n, int v, const vf (&of_ds)[2][2]) const {
    for (int m = 0; m < 2; ++m)
      store_parts<parts>(pairs + n / 2 * kQueries + (v + m) * W, kPairsPart, of_ds[0][m], of_ds[1][m]);
  }
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

  WeighedBlock(const BlockShare& x, const WeightParts<parts>& to, const float* s, const float* dp, float factor,
               int64_t n, int v)
      : s(s), dp(dp), to(to), n(n), v(v), unit(splat(factor)) {
    for (int m = 0; m < 2; ++m) {
      const int64_t at = (v + m) * W;
      shift[m] = load(x.shift + at);
      inverse[m] = load(x.inverse + at);
      delta[m] = load(x.delta + at);
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
// multiply by 0 is then finite, too.
static bool hides_alone(const BackwardCall& w, const Place& p, const Tile& t, const BlockShare& x) {
  if (Modifiers::used(w.c) || t.bits || w.c.threshold || p.rows % 32) return false;
  vf sum = vf{};  // of zeros
  for (int64_t n = 0; n < p.rows; n += W) sum += (load(x.shift + n) + load(x.inverse + n) + load(x.delta + n)) * vf{};
  return Isa::lanes_set(sum != sum) == 0;
}

// A block of 32 keys and 32 queries: the first of its keys, which of the two columns of queries, and whether intervals
// hide some of its pairs.
struct WeightBlock {
  int64_t key;
  int column;
  bool edge;
};

// Makes scores that intervals hide -inf, and dP there 0.
static void hide_pairs(const Block<kVectors>& b, const Tile& t, const WeightBlock& of, float* s, float* dp) {
  for (int v = 0; v < 2; ++v)
    for (int64_t n = 0; n < kBlock; ++n) {
      const int64_t at = n * kBlock + v * W;
      const int vector = 2 * of.column + v;
      const vf score = Interval::apply(load(s + at), t.j + of.key + n, b.first[vector], b.last[vector]);
      store(s + at, score);
      store(dp + at, score == splat(-kInf) ? vf{} : load(dp + at));
    }
}

template <int parts>
static void clear_weights(const WeightParts<parts>& to, const WeightBlock& of) {
  const vf none[2][2] = {};
  for (int64_t n = of.key; n < of.key + kBlock; n += 2) {
    to.put_key(n, 2 * of.column, none[0], none[0]);
    to.put_key(n + 1, 2 * of.column, none[0], none[0]);
    to.put_pairs(n, 2 * of.column, none);
  }
}

// Lists the blocks of keys [range.from, range.to) that some query sees; the weights of the others become 0.
template <int parts>
static int64_t seen_blocks(const BackwardCall& w, Block<kVectors>& b, const Tile& t, const WeightParts<parts>& to,
                           const KeyRange& range, WeightBlock* list) {
  const Limits& limits = w.limits[(b.p.b * w.c.heads + b.p.h) * w.blocks + b.p.row / kQueries];
  const bool whole = t.j + range.from >= limits.inner_lo && t.j + range.to <= limits.inner_hi;
  if (!whole) Interval::begin(b);
  int64_t count = 0;
  for (int column = 0; column * kBlock < b.p.rows; ++column) {
    Place rows = b.p;
    rows.row += column * kBlock;
    rows.rows = kBlock;
    const Limits seen = whole ? limits : Interval::limits(w.c, rows);
    for (int64_t n = range.from; n < range.to; n += kBlock) {
      const int64_t key = t.j + n;
      const WeightBlock block{n, column, key < seen.inner_lo || key + kBlock > seen.inner_hi};
      if (key < seen.hi && key + kBlock > seen.lo) list[count++] = block;
      else clear_weights(to, block);
    }
  }
  return count;
}

// Weights and gradients of scores of whole blocks of keys: while one block of 32 keys and 32 queries is weighed, the
// unit multiplies the next but one. keys, values: of the tile; by_key, by_value: the block's queries and cotangents.
template <int parts>
static void weigh_stream(const BackwardCall& w, Block<kVectors>& b, const Tile& t, const BlockShare& x,
                         const WeightParts<parts>& to, const LeftParts& keys, const LeftParts& values,
                         const RightParts& by_key, const RightParts& by_value, const KeyRange& range) {
  constexpr int kAhead = 2, kHeld = kAhead + 1;
  const int64_t dk = whole_depth(b.c.dk), dv = whole_depth(b.c.dv);
  WeightBlock list[kTile / kBlock * kVectors / 2];
  const int64_t blocks = seen_blocks(w, b, t, to, range, list);
  MatrixStream stream;
  const auto add = [&](UnitPlan<parts>& plan, int64_t block) {
    if (block >= blocks) return;
    const int64_t n = list[block].key, column = list[block].column, at = block % kHeld * kBlock * kBlock;
    LeftParts k = keys, v = values;
    k.at += n * k.row;
    v.at += n * v.row;
    plan.add(
        {k, {by_key.at + column * by_key.column, by_key.row, 0, by_key.part}, dk / kBlock, x.p + at, nullptr, nullptr});
    plan.add({v,
              {by_value.at + column * by_value.column, by_value.row, 0, by_value.part},
              dv / kBlock,
              x.ds + at,
              nullptr,
              nullptr});
  };
  UnitPlan<parts> first{stream};
  for (int64_t block = 0; block < kAhead; ++block) add(first, block);
  first.run();
  for (int64_t block = 0; block < blocks; ++block) {
    UnitPlan<parts> plan{stream};
    add(plan, block + kAhead);
    // what the unit's registers hold is of the next block, and is stored when its next product begins
    if (!plan.count) stream.store_sums();
    const WeightBlock& of = list[block];
    const int64_t at = block % kHeld * kBlock * kBlock;
    if (of.edge) hide_pairs(b, t, of, x.p + at, x.ds + at);
    WeighedBlock<parts> work(x, to, x.p + at, x.ds + at, b.factor, of.key, 2 * of.column);
    plan.run(work, kBlock / 2);
  }
}

// The same for any steps, after which scores lie in x.p and dP in x.ds, as floats; x.p takes weights, x.ds gradients of
// scores.
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

// Weights and gradients of scores of the keys [x.from, x.to) as parts; those of the others of `keys` are 0.
template <int parts>
static void split_floats(const BlockShare& x, const WeightParts<parts>& to, const KeyRange& keys) {
  for (int64_t n = keys.from; n < keys.to; n += 2)
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
