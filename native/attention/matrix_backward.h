// The backward on a matrix unit: the five products of backward_block.h, of numbers as sums of bfloat16.
//
//   S = K Qᵀ and dP = V dOᵀ       rows of K and V, times pairs of features of Q and dO
//   dV += P dO and dK += dS Q      rows of weights, times pairs of queries
//   dQᵀ += Kᵀ dS                   K transposed once a tile, times pairs of keys
//
// Weights and gradients of scores have as many parts as the call's numbers: in bfloat16 they are rounded to it.
#pragma once
#include "attention/matrix_backward_weights.h"

namespace regard {

// Tiles of keys that are held at once, at most, and the floats of what is held of them: a block of queries is then read
// from outside of the second-level cache once for all of them.
constexpr int64_t kHeldTiles = 8, kHeldFloats = 1 << 18;

REGARD_INLINE int64_t held_tiles(const regard_call& c, int64_t parts) {
  const int64_t dk = whole_depth(c.dk), dv = whole_depth(c.dv), of_tile = kTile * (dk + dv + parts * (2 * dk + dv) / 2);
  const int64_t most = kHeldFloats / of_tile < kHeldTiles ? kHeldFloats / of_tile : kHeldTiles;
  return most > 1 ? most : 1;
}

// What the products of a block of queries read of its q and dO, packed once for all tiles of keys.
struct PackedBlock {
  RightParts q, dout;            // pairs of features, for 32 queries twice
  RightParts q_rows, dout_rows;  // pairs of queries
};

// Floats of a block's rows of `depth` features in one order, of one part.
REGARD_INLINE int64_t packed_part(int64_t depth) { return kQueries * depth / 2; }
REGARD_INLINE int64_t packed_size(const regard_call& c, int64_t parts) {
  return 2 * parts * (packed_part(whole_depth(c.dk)) + packed_part(whole_depth(c.dv)));
}

static PackedBlock packed_block(const regard_call& c, int64_t parts, float* at) {
  const auto take = [&](int64_t depth, bool by_queries) {
    const uint16_t* from = (const uint16_t*)at;
    const int64_t part = 2 * packed_part(depth);
    at += parts * packed_part(depth);
    return by_queries ? RightParts{from, 2 * depth, 64, part} : RightParts{from, 64, depth * 32, part};
  };
  const int64_t dk = whole_depth(c.dk), dv = whole_depth(c.dv);
  const RightParts q = take(dk, false), dout = take(dv, false), q_rows = take(dk, true);
  return {q, dout, q_rows, take(dv, true)};
}

// Takes a product to memory, in rows of `stride` floats; `add`: to what stands there.
struct ProductInto {
  float* at;
  int64_t stride;
  bool add;

  float* place(int64_t row, int vector) const { return at + row * stride + vector * W; }
  const float* from(int64_t row, int vector) const { return add ? place(row, vector) : nullptr; }
  template <int C>
  void take(int64_t, int, int64_t) const {}
};

// Adds a product to memory, in rows of `ld` floats. A product's sum starts at 0: long sums have two levels.
struct ProductOnto {
  static constexpr int64_t stride = 2 * W;
  float* at;
  int64_t ld;
  float (*blocks)[32 * stride];  // two: this one, and that which the unit multiplies

  float* place(int64_t row, int) const { return blocks[row / 32 % 2]; }
  const float* from(int64_t, int) const { return nullptr; }
  template <int C>
  void take(int64_t row, int vector, int64_t rows) const {
    const float* from = blocks[row / 32 % 2];
    float* to = at + row * ld + vector * W;
    for (int64_t n = 0; n < rows; ++n)
#pragma GCC unroll 2
      for (int v = 0; v < C; ++v)
        store(to + n * ld + v * W, load(to + n * ld + v * W) + load(from + n * stride + v * W));
  }
};

// to += A B, V vectors of columns from each of to's rows on.
template <int parts, int V>
REGARD_INLINE void add_blocks(float* to, int64_t ld, const LeftParts& a, const RightParts& b, int64_t rows,
                              int64_t depth) {
  if constexpr (parts == 1) {
    ProductInto into{to, ld, true};
    return Isa::multiply_blocks<parts, V>(into, a, b, rows, depth);
  }
  alignas(64) float blocks[2][32 * ProductOnto::stride];
  ProductOnto onto{to, ld, blocks};
  Isa::multiply_blocks<parts, V>(onto, a, b, rows, depth);
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

// A tile of keys and values as left operands, and its gradients.
struct MatrixTile {
  LeftParts k, v, kt;
  float *dk, *dv;
  int64_t j, count;
  bool finite;  // its keys
};

static LeftParts from_row(LeftParts a, int64_t row) {
  a.at += row * a.row;
  return a;
}

// Computes weights and gradients of scores, as parts, of a block of queries and the keys [x.from, x.to) of a tile, with
// all steps; those of the others of `keys`, whole blocks, are 0.
template <int parts>
static void weigh_steps(const BackwardCall& w, const BackwardScratch& s, const Block<kVectors>& b, const Tile& t,
                        const BlockShare& x, const PackedBlock& q, const MatrixTile& tile,
                        const WeightParts<parts>& weights, const KeyRange& keys, int64_t part) {
  const auto multiply = [&](const LeftParts& a, const RightParts& r, float* to, int64_t depth) {
    ProductInto into{to + keys.from * kQueries, kQueries, false};
    Isa::multiply_blocks<parts, kVectors>(into, from_row(a, keys.from), r, whole_rows(x.to) - keys.from, depth);
  };
  multiply(tile.k, q.q, x.p, whole_depth(w.c.dk));
  multiply(tile.v, q.dout, x.ds, whole_depth(w.c.dv));
  for (int64_t n = x.from; n < x.to; ++n) {
    vf scores[kVectors];
    for (int v = 0; v < kVectors; ++v) scores[v] = Isa::product(load(x.p + n * kQueries + v * W), splat(b.factor));
    if (!Program::used(b.c)) apply_steps<kVectors>(b, t, n, scores, s.kept + n * kQueries);
    for (int v = 0; v < kVectors; ++v) store(x.p + n * kQueries + v * W, scores[v]);
  }
  if (Program::used(b.c)) run_program<kVectors>(b, t, x.p, x.from, x.to, s.kept);
  weigh_floats<parts>(b, t, x);
  if (w.scores)
    Modifiers::backward(b, t, ScoreGradients{w.g, x.ds, s.kept, x.from, x.to}, w.sums,
                        (part * w.elements + b.p.b) * w.c.heads + b.p.h);
  split_floats<parts>(x, weights, keys);
}

// The same of all keys [x.from, x.to): in a stream, where no step but intervals changes a score.
template <int parts>
static void weigh_block(const BackwardCall& w, const BackwardScratch& s, const Place& p, const Tile& t,
                        const BlockShare& x, const PackedBlock& q, const MatrixTile& tile,
                        const WeightParts<parts>& weights, const KeyRange& keys, int64_t part) {
  const regard_call& c = w.c;
  const Scratch scratch{s.qt, x.p, nullptr, s.modifiers, nullptr, nullptr};
  Block<kVectors> b{c, scratch, p};
  b.factor = parts == 3 ? 1 : dot_factor(c, p.h);  // of float32, queries were multiplied by it
  if (hides_alone(w, p, t, x)) return weigh_stream<parts>(w, b, t, x, weights, tile.k, tile.v, q.q, q.dout, keys);
  Interval::begin(b);
  begin_steps(b);
  Modifiers::load_tile(b, t);
  weigh_steps<parts>(w, s, b, t, x, q, tile, weights, keys, part);
}

// One block of queries against one tile of keys.
template <int parts>
static void run_matrix_block(const BackwardCall& w, const BackwardScratch& s, const Place& p, const Tile& t,
                             const BlockShare& x, const PackedBlock& q, const MatrixTile& tile, float* dq,
                             int64_t part) {
  const regard_call& c = w.c;
  const WeightParts<parts> weights{s.p_parts, s.ds_parts, s.ds_pairs};
  const KeyRange keys{x.from / 32 * 32, whole_depth(x.to)};  // whole blocks that hold all keys that are seen
  weigh_block<parts>(w, s, p, t, x, q, tile, weights, keys, part);
  const int64_t rows = whole_rows(x.to) - keys.from, depth = whole_depth(p.rows);
  const auto add = [&](float* to, int64_t ld, const uint16_t* left, RightParts right, int64_t cols) {
    const LeftParts a = from_row(WeightParts<parts>::rows(left), keys.from);
    to += keys.from * ld;
    for (int64_t n = 0; n < cols; n += 2 * W, right.at += 4 * W) {
      if (cols - n > W) add_blocks<parts, 2>(to + n, ld, a, right, rows, depth);
      else add_blocks<parts, 1>(to + n, ld, a, right, rows, depth);
    }
  };
  if (w.g.dv.data) add(tile.dv, w.ldv, weights.p, q.dout_rows, round_up(c.dv));
  if (w.g.dk.data) add(tile.dk, w.ldk, weights.ds, q.q_rows, round_up(c.dk));
  if (!dq) return;
  LeftParts kt = tile.kt;
  RightParts ds = weights.right();
  kt.at += keys.from / 32 * kt.step;
  ds.at += keys.from / 2 * ds.row;
  add_blocks<parts, kVectors>(dq, kQueries, kt, ds, whole_rows(c.dk), keys.to - keys.from);
}

}  // namespace regard
