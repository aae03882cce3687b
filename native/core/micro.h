// The microkernel is the instruction set's: Isa::multiply_tiles, isa/plain.h. Here is what its callers have in common.
#pragma once
#include <type_traits>

#include "core/vec.h"

namespace regard {

// Floats, where the instruction set has no products of pairs: nothing is compiled twice.
using Pairs = std::conditional_t<Isa::kPairs, BFloat16Pairs, Floats>;

template <int M, int V>
REGARD_INLINE void clear(vf (&acc)[M][V]) {
#pragma GCC unroll 32
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[i][v] = vf{};
}

}  // namespace regard
