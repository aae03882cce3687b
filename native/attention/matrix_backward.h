// The backward of bfloat16 calls on a matrix unit: the five products of backward_block.h, of values that are rounded to bfloat16.
//
//   S = K Qᵀ and dP = V dOᵀ       rows of K and V as they lie, times pairs of features of Q and dO
//   dV += P dO and dK += dS Q      rows of weights, times pairs of queries
//   dQᵀ += Kᵀ dS                   K transposed once a tile, times pairs of keys
#pragma once
#include "attention/backward_block.h"
#include "core/parts.h"

namespace regard {

// What the products of a block of queries read of its q and dO, packed once for all tiles of keys.
struct PackedBlock {
  float *q, *dout;          // [2][width / 2][32]: pairs of features, for 32 queries twice
  float *q_rows, *dout_rows;  // [kQueries / 2][width]: pairs of queries
};

// Whether no cotangent of the output would have to be rounded to bfloat16: those of a call in bfloat16 may come as float32; those of a state
// are any float32.
static bool bfloat16_cotangents(const regard_gradients& g) {
  const regard_call& c = g.call;
  if (g.dout_dtype != REGARD_F32) return g.dout_dtype == REGARD_BF16;
  vu some = vu{};
  for (int64_t b = 0; b < elements(c); ++b)
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t i = 0; i < c.nq; ++i) {
        const float* row = at<float>(g.dout, place_in_batch(c, b), h) + i * g.dout.row;
        for (int64_t n = 0; n < c.dv; n += W) some |= (vu)floats(row, n * g.dout.col, g.dout.col, c.dv - n, REGARD_F32) & 0xffffu;
      }
  return Isa::lanes_set((vi)some != 0) == 0;
}

// Whether a backward's products go to the matrix unit. Its scores are then those of the forward, bit for bit.
static bool on_matrix_unit(const regard_gradients& g) {
  const regard_call& c = g.call;
  return matrix_parts(c) == 1 && !has_few_rows(c) && !Modifiers::multiply_delta(g) && bfloat16_cotangents(g);
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

REGARD_INLINE int64_t packed_size(const regard_call& c) { return 2 * kQueries * (whole_depth(c.dk) + whole_depth(c.dv)) / 2; }

// Rows (count, width) at src as a left operand: in place where they are bfloat16 and `readable` rows hold whole tiles, else rounded and padded
// in `copy`.
static LeftParts left_rows(const void* src, int dtype, int64_t row, int64_t col, int64_t count, int64_t readable, int64_t width,
                           uint16_t* copy) {
  const int64_t depth = whole_depth(width);
  if (dtype == REGARD_BF16 && col == 1 && depth == width && whole_rows(count) <= readable) return {(const uint16_t*)src, row, 32, 0};
  split_rows<1>({copy, depth, 32, 0}, depth, src, dtype, row, col, count, width, 1, Sizes::of_scores(dtype));
  return {copy, depth, 32, 0};
}

// Packs rows of a block in both orders.
static void pack_block(float* by_features, float* by_queries, const LeftParts& rows, int64_t count, int64_t depth) {
  pack_columns<kVectors>(by_features, rows.at, rows.row, count, depth);
  interleave(by_queries, rows.at, rows.row, 1, count, depth);
  const int64_t pairs = (count + 1) / 2;
  __builtin_memset(by_queries + pairs * depth, 0, sizeof(float) * (size_t)((kQueries / 2 - pairs) * depth));
}

static PackedBlock packed_block(const regard_call& c, float* at) {
  const int64_t dk = whole_depth(c.dk) * kQueries / 2, dv = whole_depth(c.dv) * kQueries / 2;
  return {at, at + dk, at + dk + dv, at + 2 * dk + dv};
}

// Two rows of a block's scores, of neighbouring keys: weights and gradients of scores, as bfloat16.
struct RoundedRows {
  uint16_t *p, *ds;
  float* pairs;

  REGARD_INLINE void put_row(uint16_t* to, const vf (&x)[kVectors]) {
    for (int v = 0; v < kVectors; v += 2) store((float*)(to + v * W), Isa::row_of(x[v], x[v + 1]));
  }

  void put(int64_t n, const vf (&p0)[kVectors], const vf (&p1)[kVectors], const vf (&ds0)[kVectors], const vf (&ds1)[kVectors]) const {
    put_row(p + n * kQueries, p0), put_row(p + (n + 1) * kQueries, p1);
    put_row(ds + n * kQueries, ds0), put_row(ds + (n + 1) * kQueries, ds1);
    for (int v = 0; v < kVectors; ++v) store(pairs + n / 2 * kQueries + v * W, Isa::pair_of(ds0[v], ds1[v]));
  }
};

// Weights and gradients of scores of the keys [from, end), two at a time, where no step changes scores. s, dp: [key - from][kQueries].
static void weigh_rounded(const BlockShare& x, const RoundedRows& to, const float* s, const float* dp, float factor, int64_t from,
                          int64_t end) {
  const vf unit = splat(factor);
  for (int64_t n = from; n < end; n += 2, s += 2 * kQueries, dp += 2 * kQueries) {
    vf p[2][kVectors], ds[2][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const vf shift = load(x.shift + v * W), inverse = load(x.inverse + v * W), delta = load(x.delta + v * W);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const int64_t at = i * kQueries + v * W;
        p[i][v] = Isa::exp2_quick(Isa::product(load(s + at), unit) - shift) * inverse;
        ds[i][v] = p[i][v] * (load(dp + at) - delta);
      }
    }
    to.put(n, p[0], p[1], ds[0], ds[1]);
  }
}

// The same for any steps, after which scores lie in x.p and dP in x.ds, as floats; x.p takes weights, x.ds gradients of scores.
static void weigh_floats(const Block<kVectors>& b, const Tile& t, const BlockShare& x) {
  const int64_t* k_at = b.c.threshold ? b.c.k_at + offset(b.c.k_at_batch, b.p) + t.j : nullptr;
  for (int64_t n = x.from; n < x.to; ++n) {
    const vu word = (k_at ? Dropout::key_word(k_at[n]) : 0u) + vu{};
    for (int v = 0; v < kVectors; ++v) {
      float *at = x.p + n * kQueries + v * W, *ds = x.ds + n * kQueries + v * W;
      const vf s = load(at);
      const vi hidden = s == splat(-kInf);
      vf p = Isa::exp2_quick(s - load(x.shift + v * W)) * load(x.inverse + v * W), dp = load(ds);
      p = hidden ? vf{} : p;
      const vf dropped = k_at ? Dropout::apply(b.c, b.word[v], word, p) : p;
      if (k_at) dp = Dropout::apply(b.c, b.word[v], word, dp);
      store(at, dropped), store(ds, hidden ? vf{} : p * (dp - load(x.delta + v * W)));
    }
  }
}

// Rounds weights and gradients of scores of the keys [x.from, x.to); those of the others, up to `end`, are 0.
static void round_floats(const BlockShare& x, const RoundedRows& to, int64_t end) {
  for (int64_t n = 0; n < end; n += 2) {
    vf p[2][kVectors], ds[2][kVectors];
    for (int i = 0; i < 2; ++i)
      for (int v = 0; v < kVectors; ++v) {
        const bool there = n + i >= x.from && n + i < x.to;
        const int64_t at = (n + i) * kQueries + v * W;
        p[i][v] = there ? load(x.p + at) : vf{}, ds[i][v] = there ? load(x.ds + at) : vf{};
      }
    to.put(n, p[0], p[1], ds[0], ds[1]);
  }
}

// A tile of keys and values as left operands.
struct MatrixTile {
  LeftParts k, v, kt;
  int64_t count;
};

// One block of queries against one tile of keys.
static void run_matrix_block(const BackwardCall& w, const BackwardScratch& s, const Place& p, const Tile& t,
                             const BlockShare& x, const PackedBlock& q, const MatrixTile& tile, float* dq, int64_t part) {
  const regard_call& c = w.c;
  const int64_t dk = whole_depth(c.dk), dv = whole_depth(c.dv), end = whole_depth(tile.count);
  const Scratch scratch{s.qt, x.p, nullptr, s.modifiers, nullptr, nullptr};
  Block<kVectors> b{c, scratch, p};
  Interval::begin(b);
  begin_steps(b);
  b.factor = dot_factor(c, p.h);
  const RoundedRows rounded{s.rounded_p, s.rounded_ds, s.ds_pairs};
  const RightParts by_key{(const uint16_t*)q.q, 64, dk * 32, 0}, by_value{(const uint16_t*)q.dout, 64, dv * 32, 0};
  const auto multiply = [&](LeftParts a, const RightParts& r, float* to, int64_t from, int64_t rows, int64_t depth) {
    a.at += from * a.row;
    ProductInto into{to, kQueries, false};
    Isa::multiply_blocks<1, kVectors>(into, a, r, rows, depth);
  };
  if (x.plain && !t.edge && !c.threshold && tile.count % 32 == 0 && x.from == 0 && x.to == tile.count) {
    for (int64_t n = 0; n < tile.count; n += 32) {
      multiply(tile.k, by_key, x.p, n, 32, dk);
      multiply(tile.v, by_value, x.ds, n, 32, dv);
      weigh_rounded(x, rounded, x.p, x.ds, b.factor, n, n + 32);
    }
  } else {
    Modifiers::load_tile(b, t);
    multiply(tile.k, by_key, x.p, 0, whole_rows(tile.count), dk);
    multiply(tile.v, by_value, x.ds, 0, whole_rows(tile.count), dv);
    for (int64_t n = x.from; n < x.to; ++n) {
      vf scores[kVectors];
      for (int v = 0; v < kVectors; ++v) scores[v] = Isa::product(load(x.p + n * kQueries + v * W), splat(b.factor));
      apply_steps<kVectors>(b, t, n, scores, s.kept + n * kQueries);
      for (int v = 0; v < kVectors; ++v) store(x.p + n * kQueries + v * W, scores[v]);
    }
    weigh_floats(b, t, x);
    if (w.scores)
      Modifiers::backward(b, t, ScoreGradients{w.g, x.ds, s.kept, x.from, x.to}, w.sums, (part * w.elements + p.b) * c.heads + p.h);
    round_floats(x, rounded, end);
  }
  const int64_t rows = whole_rows(tile.count), depth = whole_depth(p.rows);
  const auto add = [&](float* to, int64_t ld, const uint16_t* left, const float* right, int64_t width, int64_t cols) {
    const LeftParts a{left, kQueries, 32, 0};
    for (int64_t n = 0; n < cols; n += 2 * W) {
      const RightParts r{(const uint16_t*)(right + n), 2 * width, 64, 0};
      ProductInto into{to + n, ld, true};
      if (cols - n > W) Isa::multiply_blocks<1, 2>(into, a, r, rows, depth);
      else Isa::multiply_blocks<1, 1>(into, a, r, rows, depth);
    }
  };
  if (w.g.dv.data) add(s.dv, w.ldv, s.rounded_p, q.dout_rows, dv, round_up(c.dv));
  if (w.g.dk.data) add(s.dk, w.ldk, s.rounded_ds, q.q_rows, dk, round_up(c.dk));
  if (!dq) return;
  ProductInto into{dq, kQueries, true};
  Isa::multiply_blocks<1, kVectors>(into, tile.kt, RightParts{(const uint16_t*)s.ds_pairs, 2 * kQueries, 64, 0}, whole_rows(c.dk), end);
}

}  // namespace regard
