// What an instruction set says of itself, where it has no instruction of its own: plain code on compiler vectors.
#pragma once
#include "isa/types.h"

namespace regard {

struct PlainIsa {
  static constexpr bool kPairs = false;  // whether one instruction multiplies pairs of bfloat16
  static constexpr int kBlockVectors = W == 16 ? 4 : 3;  // vectors of queries in a block: with kRows, as many products as registers hold

  REGARD_INLINE vf multiply_add(vf acc, vf a, vf b) { return acc + a * b; }

  // acc + the sums of products of neighbouring bfloat16.
  REGARD_INLINE vf multiply_add_pairs(vf acc, vf, vf) { return acc; }

  // Two vectors of floats as one of pairs of bfloat16.
  REGARD_INLINE vf pair_of(vf first, vf) { return first; }

  // One bit for each lane that is set.
  REGARD_INLINE uint32_t lanes_set(vi c) {
    uint32_t bits = 0;
    for (int n = 0; n < W; ++n) bits |= (uint32_t)(c[n] & 1) << n;
    return bits;
  }
};

}  // namespace regard
