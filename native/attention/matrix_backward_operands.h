// What the backward's products read on a matrix unit: blocks of queries and tiles of keys as sums of bfloat16, and
// where the gradients of a tile are added up.
#pragma once
#include "attention/backward_block.h"
#include "attention/matrix_plan.h"

namespace regard {

// Tiles of keys that are held at once, at most, and the floats of what is held of them: a block of queries is then read
// from outside of the second-level cache once for all of them.
constexpr int64_t kHeldTiles = 8, kHeldFloats = 1 << 18;

REGARD_INLINE int64_t held_tiles(const regard_call& c, int64_t parts) {
  const int64_t dk = whole_depth(c.dk), dv = whole_depth(c.dv), of_tile = kTile * (dk + dv + parts * (2 * dk + dv) / 2);
  const int64_t most = kHeldFloats / of_tile < kHeldTiles ? kHeldFloats / of_tile : kHeldTiles;
  return most > 1 ? most : 1;
}

// What products of pairs are multiplied by: of float32, queries were.
template <int parts>
static float factor_of_scores(const regard_call& c, int64_t head) {
  return parts == 3 ? 1 : dot_factor(c, head);
}

// What products read of the q and dO of blocks of queries, one block after the other, packed once for all tiles of
// keys.
struct PackedQueries {
  RightParts q, dout;            // pairs of features, for 32 queries after the other
  RightParts q_rows, dout_rows;  // pairs of queries

  // The same from the n-th block on.
  PackedQueries from_block(int64_t n) const {
    const auto moved = [](RightParts to, int64_t by) {
      to.at += by;
      return to;
    };
    const int64_t columns = n * kQueries / kBlock, pairs = n * kQueries / 2;
    return {moved(q, columns * q.column), moved(dout, columns * dout.column), moved(q_rows, pairs * q_rows.row),
            moved(dout_rows, pairs * dout_rows.row)};
  }
};

// Floats of a block's rows of `depth` features in one order, of one part.
REGARD_INLINE int64_t packed_part(int64_t depth) { return kQueries * depth / 2; }
REGARD_INLINE int64_t packed_size(const regard_call& c, int64_t parts) {
  return 2 * parts * (packed_part(whole_depth(c.dk)) + packed_part(whole_depth(c.dv)));
}

static PackedQueries packed_queries(const regard_call& c, int64_t parts, int64_t blocks, float* at) {
  const auto take = [&](int64_t depth, bool by_queries) {
    const uint16_t* from = (const uint16_t*)at;
    const int64_t part = blocks * 2 * packed_part(depth);
    at += parts * blocks * packed_part(depth);
    return by_queries ? RightParts{from, 2 * depth, 64, part} : RightParts{from, 64, depth * 32, part};
  };
  const int64_t dk = whole_depth(c.dk), dv = whole_depth(c.dv);
  const RightParts q = take(dk, false), dout = take(dv, false), q_rows = take(dk, true);
  return {q, dout, q_rows, take(dv, true)};
}

// Rows (count, width) at src as a left operand: in place where they are bfloat16 and `readable` rows hold whole tiles,
// else in `copy`.
template <int parts>
static LeftParts left_rows(const void* src, int dtype, int64_t row, int64_t col, int64_t count, int64_t readable,
                           int64_t width, const PartRows& copy) {
  const int64_t depth = whole_depth(width);
  if (dtype == REGARD_BF16 && col == 1 && depth == width && whole_depth(count) <= readable)
    return {(const uint16_t*)src, row, 32, 0};
  split_rows<parts>(copy, depth, src, dtype, row, col, count, width, 1, Sizes::of_scores(dtype));
  return copy;
}

// Packs rows of a block as pairs of features, and as pairs of queries.
template <int parts>
static void pack_features(const RightParts& to, const LeftParts& rows, int64_t count, int64_t depth) {
  for (int n = 0; n < parts; ++n)
    pack_columns<kVectors>((float*)(to.at + n * to.part), rows.at + n * rows.part, rows.row, count, depth);
}

template <int parts>
static void pack_queries(const RightParts& to, const LeftParts& rows, int64_t count, int64_t depth) {
  const int64_t pairs = (count + 1) / 2;
  for (int n = 0; n < parts; ++n) {
    float* at = (float*)(to.at + n * to.part);
    interleave(at, rows.at + n * rows.part, rows.row, 1, count, depth);
    __builtin_memset(at + pairs * depth, 0, sizeof(float) * (size_t)((kQueries / 2 - pairs) * depth));
  }
}

// A tile of keys and values as left operands, and its gradients, of 32 features after the other: [features / 32][kTile]
// [32], so that a product of 32 keys lies in one piece.
struct MatrixTile {
  LeftParts k, v, kt;
  float *dk, *dv;
  int64_t j, count;
  bool finite;  // its keys

  // Where the gradients of 32 keys from `key` on begin, of the f-th 32 features.
  static int64_t place(int64_t key, int64_t f) { return f * kTile * kBlock + key * kBlock; }
};

// Adds rows of ld floats to gradients that are laid out so.
static void add_rows_to_blocks(float* to, const float* from, int64_t ld, int64_t count, int64_t width) {
  for (int64_t f = 0; f < width; f += W)
    for (int64_t n = 0; n < count; ++n) {
      float* at = to + MatrixTile::place(n, f / kBlock) + f % kBlock;
      store(at, load(at) + load(from + n * ld + f));
    }
}

static LeftParts from_row(LeftParts a, int64_t row) {
  a.at += row * a.row;
  return a;
}

}  // namespace regard
