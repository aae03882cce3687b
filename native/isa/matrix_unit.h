// What instruction sets with a matrix unit have in common: products of blocks of matrices of bfloat16, and of numbers
// that are sums of several bfloat16.
#pragma once
#include "isa/types.h"

namespace regard {

static_assert(W == 16, "a matrix unit's columns are the lanes of a vector");

// Own: the instruction set, which multiplies blocks of up to 2 × 2 tiles: begin_tile, multiply_tile, store_tile.
template <class Own>
struct MatrixUnit {
  // A · B, a block of up to 32 rows and 2 vectors after the other; rows is a multiple of 16 and depth one of 32. `to`
  // takes them:
  //   to.place(row, vector)            where the block that begins there is stored, in rows of to.stride floats
  //   to.from(row, vector)             what it is added to, laid out alike; null for 0
  //   to.template take<vectors>(row, vector, rows)   called when it is, while the unit multiplies the next one
  template <int parts, int V, class To>
  REGARD_INLINE void multiply_blocks(To& to, const LeftParts& a, const RightParts& b, int64_t rows, int64_t depth) {
    multiply_columns<parts, V == 1 ? 1 : 2>(to, a, b, 0, rows, depth);
    if constexpr (V > 2)
      multiply_columns<parts, V == 3 ? 1 : 2>(to, a, {b.at + b.column, b.row, b.column, b.part}, 2, rows, depth);
  }

  // The same for all tiles of a block of R × C; loads: which operands are not those of the step before.
  template <int R, int C, Loads loads = Loads::kBoth>
  REGARD_INLINE void multiply_step(const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row) {
    constexpr bool left = loads != Loads::kRight, right = loads != Loads::kLeft;
    Own::template multiply_tile<0, left, right>(a, a_row, b, b_row);
    if (C == 2) Own::template multiply_tile<1, left, right>(a, a_row, b, b_row);
    if (R == 2) Own::template multiply_tile<2, left, right>(a, a_row, b, b_row);
    if (R == 2 && C == 2) Own::template multiply_tile<3, left, right>(a, a_row, b, b_row);
  }

  template <int R, int C>
  REGARD_INLINE void begin_block(const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row, float* before,
                                 const float* from, int64_t ld) {
    Own::template begin_tile<0>(a, a_row, b, b_row, before, ld, from, ld);
    if (C == 2) Own::template begin_tile<1>(a, a_row, b, b_row, before, ld, from, ld);
    if (R == 2) Own::template begin_tile<2>(a, a_row, b, b_row, before, ld, from, ld);
    if (R == 2 && C == 2) Own::template begin_tile<3>(a, a_row, b, b_row, before, ld, from, ld);
  }

  template <int R, int C>
  REGARD_INLINE void store_block(float* to, int64_t ld) {
    Own::template store_tile<0>(to, ld);
    if (C == 2) Own::template store_tile<1>(to, ld);
    if (R == 2) Own::template store_tile<2>(to, ld);
    if (R == 2 && C == 2) Own::template store_tile<3>(to, ld);
  }

 private:
  template <int parts, int C, class To>
  REGARD_INLINE void multiply_columns(To& to, const LeftParts& a, const RightParts& b, int vector, int64_t rows,
                                      int64_t depth) {
    LeftParts left = a;
    float* before = nullptr;
    int64_t row = 0;
    for (; row + 32 <= rows; row += 32, left.at += 32 * a.row) {
      multiply_block<2, C, parts>(left, b, depth, before, to.from(row, vector), to.stride);
      if (before) to.template take<C>(row - 32, vector, 32);
      before = to.place(row, vector);
    }
    if (before) {
      store_block<2, C>(before, to.stride);
      to.template take<C>(row - 32, vector, 32);
    }
    if (row == rows) return;
    multiply_block<1, C, parts>(left, b, depth, nullptr, to.from(row, vector), to.stride);
    store_block<1, C>(to.place(row, vector), to.stride);
    to.template take<C>(row, vector, 16);
  }

  template <int R, int C, int parts>
  REGARD_INLINE void multiply_block(const LeftParts& a, const RightParts& b, int64_t depth, float* before,
                                    const float* from, int64_t ld) {
    multiply_step_of<R, C, parts, 0, true>(a, b, 0, before, from, ld);
    for (int64_t k = 1; k < depth / 32; ++k) multiply_step_of<R, C, parts, 0, false>(a, b, k, nullptr, nullptr, ld);
    if constexpr (MatrixTerms<parts>::kChains > 1)
      for (int64_t k = 0; k < depth / 32; ++k) multiply_step_of<R, C, parts, 1, false>(a, b, k, nullptr, nullptr, ld);
  }

  // The terms of a chain from `term` on, for columns 32 k and on of A.
  template <int R, int C, int parts, int chain, bool begins, int term = 0>
  REGARD_INLINE void multiply_step_of(const LeftParts& a, const RightParts& b, int64_t k, float* before,
                                      const float* from, int64_t ld) {
    constexpr MatrixTerm of = MatrixTerms<parts>::kChain[chain].terms[term];
    const uint16_t *left = a.at + k * a.step + of.a * a.part, *right = b.at + 16 * k * b.row + of.b * b.part;
    if constexpr (begins) begin_block<R, C>(left, a.row, right, b.row, before, from, ld);
    else multiply_step<R, C, of.loads>(left, a.row, right, b.row);
    if constexpr (term + 1 < MatrixTerms<parts>::kChain[chain].count)
      multiply_step_of<R, C, parts, chain, false, term + 1>(a, b, k, before, from, ld);
  }
};

}  // namespace regard
