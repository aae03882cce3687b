// Operands of a matrix unit: numbers as sums of bfloat16, in rows whose length is a multiple of what the unit takes.
#pragma once
#include "core/place.h"

namespace regard {

// Rows of a left operand, and elements of a sum, are multiples of these.
REGARD_INLINE int64_t whole_rows(int64_t n) { return (n + 15) / 16 * 16; }
REGARD_INLINE int64_t whole_depth(int64_t n) { return (n + 31) / 32 * 32; }

// How many bfloat16 a number of this dtype is the sum of.
constexpr int parts_of(int dtype) { return dtype == REGARD_BF16 ? 1 : dtype == REGARD_F16 ? 2 : 3; }

// The parts of the numbers that a call's forward multiplies on the matrix unit; 0 where it does not.
REGARD_INLINE int matrix_parts(const regard_call& c) {
  return Isa::kMatrixUnit && c.dtype == REGARD_BF16 && c.dk > 0 && c.dv > 0 ? parts_of(c.dtype) : 0;
}

// Floats of scratch, for each of kQueries, that hold a packed query.
REGARD_INLINE int64_t query_floats(const regard_call& c) {
  const int parts = matrix_parts(c);
  return parts ? parts * whole_depth(c.dk) / 2 : c.dk;
}

// Splits W floats into parts, `part` elements apart.
template <int parts>
REGARD_INLINE void split(uint16_t* to, int64_t part, vf x) {
#pragma GCC unroll 3
  for (int n = 0; n < parts; ++n, to += part) {
    store_bf16(to, x);
    x -= load_bf16(to);
  }
}

// rows × cols elements at src, times factor, as parts: to[part][rows][ld]. What is missing up to ld is 0.
template <int parts>
static void split_rows(uint16_t* to, int64_t part, int64_t ld, const void* src, int dtype, int64_t row, int64_t col, int64_t rows,
                       int64_t cols, float factor) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t f = 0; f < ld; f += W) {
      float some[W];
      vf x;
      if (col == 1 && f + W <= cols) {
        x = load_some(src, n * row + f, dtype);
      } else {
        for (int64_t m = 0; m < W; ++m) some[m] = f + m < cols ? load_one(src, n * row + (f + m) * col, dtype) : 0.0f;
        x = load(some);
      }
      split<parts>(to + n * ld + f, part, factor == 1 ? x : x * splat(factor));
    }
}

// Rows of bfloat16 as columns of a right operand, V vectors of them: to[vector / 2][depth / 2][32], pairs of features. Rows that are missing
// are 0.
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
    even[n] = (vf)((a & 0xffffu) | (b << 16)), odd[n] = (vf)((a >> 16) | (b & 0xffff0000u));
  }
  transpose(even), transpose(odd);
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

// Values (count, cols) as the left operand of O^T = V^T P^T, in blocks of 32 keys: to[key / 32][part][cols, rounded up][32], a key that is
// missing has 0. Returns whether all are finite. rows: scratch for 32 rows, [part][32][cols, rounded up].
template <int parts>
static bool transpose_values(uint16_t* to, const void* src, int dtype, int64_t row, int64_t col, int64_t count, int64_t cols,
                             uint16_t* rows) {
  const int64_t width = whole_depth(cols), part = 32 * width;
  bool finite = true;
  for (int64_t j = 0; j < count; j += 32) {
    const int64_t some = count - j < 32 ? count - j : 32;
    const uint16_t* from = (const uint16_t*)advance(src, j * row, dtype);
    int64_t step = row;
    const bool in_place = dtype == REGARD_BF16 && col == 1 && some == 32 && width == cols;
    if (!in_place) {
      split_rows<parts>(rows, part, width, from, dtype, row, col, some, cols, 1);
      for (int n = 0; n < parts; ++n)
        for (int64_t i = some * width; i < part; i += W) *(vh_any*)(rows + n * part + i) = vh{};
      from = rows, step = width;
    }
    finite &= finite_rows(from, step, some, width);
    for (int n = 0; n < parts; ++n)
      for (int64_t f = 0; f < width; f += 32) transpose_block(to + (j * parts + n * 32) * width + f * 32, 32, from + n * part + f, step);
  }
  return finite;
}

}  // namespace regard
