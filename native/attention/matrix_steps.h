// Tiles that are streamed on a matrix unit, and what changes the scores of one of their blocks of 32 keys × 32 queries,
// where it stands, before it is weighed: a modifier or a program, intervals, bits.
#pragma once
#include "attention/matrix_plan.h"

namespace regard {

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

// The queries [W vector, W vector + 32) of a block.
template <int V>
static Place place_of_rows(const Block<V>& b, int vector) {
  Place p = b.p;
  p.row += vector * W;
  p.rows -= vector * W;
  p.rows = p.rows < kBlock ? p.rows : kBlock;
  return p;
}

// Loads what these queries' program reads that no key changes.
template <int V>
static void load_program(const Block<V>& b, int vector) {
  if (Program::used(b.c)) Program::load_shared<2>(b.c, place_of_rows(b, vector), *b.registers);
}

// Scores of `count` keys of a block, from j on, times factor, become those of the program. largest: of each vector.
template <int V>
static void run_program_of_rows(const Block<V>& b, int vector, int64_t j, int64_t count, float* s, vf (&largest)[2]) {
  for (int64_t n = 0; b.factor != 1 && n < count * kBlock; n += W)
    store(s + n, Isa::product(load(s + n), splat(b.factor)));
  for (vf& most : largest) most = splat(-kInf);
  Program::run<2>(b.c, place_of_rows(b, vector), *b.registers, s, kBlock, j, count, nullptr, largest,
                  [] { Isa::keep_awake(); });
}

// The largest of a block's scores, of a vector.
static vf largest_score(const float* s, int v) {
  vf top = splat(-kInf);
  for (int64_t n = 0; n < kBlock; ++n) top = greater_of(load(s + n * kBlock + v * W), top);
  return top;
}

// The steps of a block of scores: times factor, a modifier, intervals, bits. Scores of keys past the tile become -inf.
// largest: of the scores of each vector.
template <int V, class One, bool edge, bool bits>
REGARD_NOINLINE void step_block(const Block<V>& b, const SteppedKeys& keys, int vector, float factor, float* s,
                                vf (&largest)[2]) {
  const auto read = [factor](const float* at)
                        __attribute__((always_inline)) { return Isa::product(load(at), splat(factor)); };
  for (int v = 0; v < 2; ++v) {
    for (int64_t n = keys.to - keys.from; n < kBlock; ++n) store(s + n * kBlock + v * W, splat(-kInf));
    largest[v] = step_vector<V, One, edge, bits>(b, vector + v, keys, s + v * W, kBlock, splat(-kInf), read);
  }
}

// The same where there is something to do. seen: the keys that some, and all, of the queries see.
template <int V>
static void step_block(const Block<V>& b, const StreamedTile& t, int64_t block, int vector, const Limits& seen,
                       float* s, vf (&largest)[2]) {
  const int64_t first = block * kBlock, key = t.j + first, count = t.count - first < kBlock ? t.count - first : kBlock;
  const bool edge = b.c.start.data && (key < seen.inner_lo || key + kBlock > seen.inner_hi);
  const bool bits = t.hidden_bits(block, vector), modified = Modifiers::used(b.c);
  if (!edge && !bits && !modified && count == kBlock) return;
  const int64_t from = t.from + first;
  const SteppedKeys keys{t.j - t.from, from, from + count, bits ? t.bits + first : nullptr};
  const auto step = [&](auto one, float factor) {
    with_hiding(edge, bits, [&](auto hides, auto has_bits) {
      step_block<V, decltype(one), decltype(hides)::value, decltype(has_bits)::value>(b, keys, vector, factor, s,
                                                                                      largest);
    });
  };
  if (Program::used(b.c)) {
    run_program_of_rows(b, vector, key, count, s, largest);
    if (edge || bits || count < kBlock) step(NoModifier{}, 1.0f);
    return;
  }
  Modifiers::simply(b.c, [&](auto one) { step(one, modified ? b.factor : 1.0f); });
}

// Whether the tiles of a block are streamed: scores change by intervals, bits and one simple modifier, or a program,
// alone. Not where rows must not depend on others: which scores share a maximum would then depend on whether a mask has
// bits for another row.
template <int V, class Op>
static bool streams(const Block<V>& b) {
  const regard_call& c = b.c;
  const bool whole = V % 2 == 0 && c.dv % kBlock == 0 && c.dv <= 16 * kBlock;
  const bool steps = Program::used(c) || Modifiers::simply(c, [](auto) {});
  return Op::parts && whole && !c.threshold && !c.invariant && b.factor > 0 && steps;
}

}  // namespace regard
