// Operands of a matrix unit: numbers as sums of bfloat16, in rows whose length is a multiple of what the unit takes.
#pragma once
#include "core/place.h"

namespace regard {

// Rows of a left operand, and elements of a sum, are multiples of these.
REGARD_INLINE int64_t whole_rows(int64_t n) { return (n + 15) / 16 * 16; }
REGARD_INLINE int64_t whole_depth(int64_t n) { return (n + 31) / 32 * 32; }

// How many bfloat16 a number of this dtype is the sum of.
constexpr int parts_of(int dtype) { return dtype == REGARD_BF16 ? 1 : dtype == REGARD_F16 ? 2 : 3; }

// The parts of the numbers that a call's forward multiplies on the matrix unit, for nq queries of a head; 0 where it
// does not. Of several parts it does
//   where many queries share the time that it takes to split keys and values; more of them where a backward may follow;
//   not where rows must not depend on others: a number that has no parts takes its block of queries to other
//   instructions.
REGARD_INLINE int matrix_parts(const regard_call& c, int64_t nq) {
  if (!Isa::kMatrixUnit) return 0;
  const int dtype = product_dtype(c);
  const bool half = dtype == REGARD_F16;
  const int64_t least = c.row_stats.data ? (half ? 2 : 4) * kQueries : (half ? 1 : 3) * kQueries / 2;  // measured
  const bool pays = dtype == REGARD_BF16 || (nq >= least && !c.invariant);
  return pays && c.dk > 0 && c.dv > 0 ? parts_of(dtype) : 0;
}
REGARD_INLINE int matrix_parts(const regard_call& c) { return matrix_parts(c, c.nq); }

// Which numbers have parts whose products are as exact as those of the numbers: 0, and sizes from `least` up to below
// `most`.
struct Sizes {
  float least, most;

  // Queries and keys: what is lost of small ones, 2^-126, is nothing in a score of other numbers below 2^60.
  static Sizes of_scores(int dtype) { return {0, dtype == REGARD_F32 ? 0x1p60f : kInf}; }
  static Sizes of_values(int dtype) { return dtype == REGARD_F32 ? Sizes{0x1p-90f, 0x1p90f} : Sizes{0, kInf}; }
  // Operands of the backward: products of three of them are finite, and parts of products of two are not denormal.
  static Sizes of_gradients(int dtype) { return dtype == REGARD_F32 ? Sizes{0x1p-80f, 0x1p40f} : Sizes{0, kInf}; }
};

// Floats of scratch, for each of kQueries, that hold a packed query: as parts, or as floats where some number of its
// block has none.
REGARD_INLINE int64_t query_floats(const regard_call& c) {
  const int64_t parts = matrix_parts(c) * whole_depth(c.dk) / 2;
  return parts > c.dk ? parts : c.dk;
}

// Where the rows of a left operand are written.
struct PartRows {
  uint16_t* at;
  int64_t row, step, part;  // as in LeftParts
  operator LeftParts() const { return {at, row, step, part}; }
};

// The smallest and the largest size of numbers that are not 0, as the bits of floats, which have the same order.
struct SizeRange {
  vu less_one = ~vu{};  // the smallest, minus 1, of which 0 is the largest
  vi most = vi{};

  __attribute__((always_inline)) void take(vf x) {
    const vi size = (vi)absolute(x);
    const vu less = (vu)size - 1;
    less_one = less < less_one ? less : less_one;
    most = size > most ? size : most;
  }
  bool within(const Sizes& sizes) const {
    const vi small = ((vf)(less_one + 1) < splat(sizes.least)) & (vi)(less_one != ~vu{}),
             large = ~((vf)most < splat(sizes.most));
    return Isa::lanes_set(small | large) == 0;
  }
};

// The same of numbers that have two parts, which are right where they are finite.
struct FiniteRange {
  vf sum = vf{};  // of zeros: NaN where a number is not finite

  __attribute__((always_inline)) void take(vf x) { sum = Isa::multiply_add(sum, x, vf{}); }
  bool within(const Sizes&) const { return Isa::lanes_set(sum != sum) == 0; }
};

// Splits 2 W floats into parts, `part` elements apart. Of several, the first is rounded, so that what is left has 16
// bits; the others are cut off, which loses nothing and takes the fewest instructions.
template <int parts>
REGARD_INLINE void split(uint16_t* to, int64_t part, vf x, vf next) {
  if (parts == 1) return store((float*)to, Isa::row_of(x, next));
#pragma GCC unroll 3
  for (int n = 0; n < parts; ++n, to += part) {
    const vu bias = (vu)splat_int(n ? 0 : 0x8000), first = (vu)x + bias, second = (vu)next + bias;
    store((float*)to, Isa::cut_row((vf)first, (vf)second));
    if (n + 1 < parts) {
      x -= (vf)(first & 0xffff0000u);
      next -= (vf)(second & 0xffff0000u);
    }
  }
}

// rows × cols elements at src, times factor, as parts of `width` columns, a multiple of 32: what is missing is 0.
// Returns whether no number is outside these sizes.
template <int parts, int dtype>
static bool split_rows_of(const PartRows& to, int64_t width, const void* src, int64_t row, int64_t col, int64_t rows,
                          int64_t cols, float factor, const Sizes& sizes) {
  std::conditional_t<parts == 3, SizeRange, FiniteRange> range[2];
  for (int64_t n = 0; n < rows; ++n) {
    uint16_t* at = to.at + n * to.row;
    for (int64_t f = 0; f < width; f += 2 * W, at += to.step) {
      vf x, next;
      if (col == 1 && f + 2 * W <= cols) {
        x = load_some(src, n * row + f, dtype);
        next = load_some(src, n * row + f + W, dtype);
      } else {
        float some[2 * W];
        for (int64_t m = 0; m < 2 * W; ++m)
          some[m] = f + m < cols ? load_one(src, n * row + (f + m) * col, dtype) : 0.0f;
        x = load(some);
        next = load(some + W);
      }
      if (parts == 3) {
        x *= splat(factor);
        next *= splat(factor);
      }
      if (parts > 1) {
        range[0].take(x);
        range[1].take(next);
      }
      split<parts>(at, to.part, x, next);
    }
  }
  return range[0].within(sizes) && range[1].within(sizes);
}

// The same of a dtype. factor: 1 but for three parts.
template <int parts>
static bool split_rows(const PartRows& to, int64_t width, const void* src, int dtype, int64_t row, int64_t col,
                       int64_t rows, int64_t cols, float factor, const Sizes& sizes) {
  const auto split = dtype == REGARD_F32    ? split_rows_of<parts, REGARD_F32>
                     : dtype == REGARD_BF16 ? split_rows_of<parts, REGARD_BF16>
                                            : split_rows_of<parts, REGARD_F16>;
  return split(to, width, src, row, col, rows, cols, factor, sizes);
}

// Rows of bfloat16 as columns of a right operand, V vectors of them: to[vector / 2][depth / 2][32], pairs of features.
// Rows that are missing are 0.
template <int V>
static void pack_columns(float* to, const uint16_t* rows, int64_t row, int64_t count, int64_t depth) {
  for (int v = 0; v < V; v += 2, to += W * depth, rows += 2 * W * row, count -= 2 * W) {
    const auto pack = V - v == 1 ? pack_pairs<1> : pack_pairs<2>;
    pack(to, 2 * W, rows, row, count > 0 ? count : 0, depth / 2);
  }
}

// 32 rows of 32 bfloat16, transposed to rows of ld.
REGARD_INLINE void transpose_block(uint16_t* to, int64_t ld, const uint16_t* src, int64_t row) {
  vf even[W], odd[W];  // of features 2w and 2w + 1: the pairs of keys 2n and 2n + 1
#pragma GCC unroll 16
  for (int n = 0; n < W; ++n) {
    const vu a = (vu)load((const float*)(src + 2 * n * row)), b = (vu)load((const float*)(src + (2 * n + 1) * row));
    even[n] = (vf)((a & 0xffffu) | (b << 16));
    odd[n] = (vf)((a >> 16) | (b & 0xffff0000u));
  }
  transpose(even);
  transpose(odd);
#pragma GCC unroll 16
  for (int w = 0; w < W; ++w) {
    store((float*)(to + 2 * w * ld), even[w]);
    store((float*)(to + (2 * w + 1) * ld), odd[w]);
  }
}

// Whether rows × cols bfloat16 are finite; cols is a multiple of 2 W.
static bool finite_rows(const uint16_t* x, int64_t row, int64_t rows, int64_t cols) {
  vi wrong = vi{};
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t f = 0; f < cols; f += 2 * W) {
      const vi words = (vi)load((const float*)(x + n * row + f));
      wrong |= ((words & 0x7f800000) == 0x7f800000) | ((words & 0x7f80) == 0x7f80);
    }
  return Isa::lanes_set(wrong) == 0;
}

// Calls `take` with the vectors of rows × cols numbers at src.
template <class F>
REGARD_INLINE void each_vector(const void* src, int dtype, int64_t row, int64_t col, int64_t rows, int64_t cols,
                               const F& take) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t f = 0; f < cols; f += W) take(floats(src, n * row + f * col, col, cols - f, dtype));
}

// Whether rows × cols numbers at src are of these sizes.
static bool rows_within(const void* src, int dtype, int64_t row, int64_t col, int64_t rows, int64_t cols,
                        const Sizes& sizes) {
  SizeRange range;
  each_vector(src, dtype, row, col, rows, cols, [&](vf x) __attribute__((always_inline)) { range.take(x); });
  return range.within(sizes);
}

// Replaces what is not finite by 0; count is a multiple of 2 W.
static void clear_infinite(uint16_t* x, int64_t count) {
  for (int64_t n = 0; n < count; n += 2 * W) {
    const vu words = (vu)load((const float*)(x + n));
    const vi high = ((vi)words & 0x7f800000) == 0x7f800000, low = ((vi)words & 0x7f80) == 0x7f80;
    store((float*)(x + n), (vf)(words & ~(((vu)high & 0xffff0000u) | ((vu)low & 0xffffu))));
  }
}

// Values (count, cols) as the left operand of O^T = V^T P^T, in blocks of 32 keys: to[key / 32][part][cols, rounded
// up][32], a key that is missing has 0. Returns whether all are finite; of several parts, whether all have them. rows:
// scratch for 32 rows, [part][32][cols, rounded up].
template <int parts>
static bool transpose_values(uint16_t* to, const void* src, int dtype, int64_t row, int64_t col, int64_t count,
                             int64_t cols, uint16_t* rows) {
  const int64_t width = whole_depth(cols), part = 32 * width;
  bool right = true;
  for (int64_t j = 0; j < count; j += 32) {
    const int64_t some = count - j < 32 ? count - j : 32;
    const uint16_t* from = (const uint16_t*)advance(src, j * row, dtype);
    int64_t step = row;
    const bool in_place = dtype == REGARD_BF16 && col == 1 && some == 32 && width == cols;
    if (!in_place) {
      right &= split_rows<parts>({rows, width, 32, part}, width, from, dtype, row, col, some, cols, 1,
                                 Sizes::of_values(dtype));
      for (int n = 0; n < parts; ++n)
        for (int64_t i = some * width; i < part; i += W) *(vh_any*)(rows + n * part + i) = vh{};
      from = rows;
      step = width;
    }
    if (parts == 1) right &= finite_rows(from, step, some, width);
    for (int n = 0; n < parts; ++n)
      for (int64_t f = 0; f < width; f += 32)
        transpose_block(to + (j * parts + n * 32) * width + f * 32, 32, from + n * part + f, step);
  }
  return right;
}

}  // namespace regard
