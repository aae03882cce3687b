// The one microkernel: acc[i][v] += splat(A[i * rs + k * cs]) * B[k][v]. Lanes are queries; every product goes through it.
#pragma once
#include <type_traits>

#include "core/vec.h"

namespace regard {

// Functions that hold a microkernel are not inlined: inside a large function the compiler moves its accumulators to memory.
#define REGARD_ALONE static __attribute__((noinline))

// What one element of A does with a vector of B, both 4 bytes wide: a float, or a pair of bfloat16.
struct Floats {
  static constexpr bool pairs = false;
  REGARD_INLINE vf run(vf acc, vf a, vf b) { return Isa::multiply_add(acc, a, b); }
};

// Floats, where the instruction set has no products of pairs: nothing is compiled twice.
struct PairProducts {
  static constexpr bool pairs = true;
  REGARD_INLINE vf run(vf acc, vf a, vf b) { return Isa::multiply_add_pairs(acc, a, b); }
};
using Pairs = std::conditional_t<Isa::kPairs, PairProducts, Floats>;

// Vectors of rows for V vectors of queries: what the accumulators' registers hold.
constexpr int rows_of(int vectors) { return (W == 16 ? 24 : 12) / vectors; }

template <class Op, int M, int V>
REGARD_INLINE void product(vf (&acc)[M][V], const float* a, int64_t rs, const float* b) {
  vf column[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) column[v] = load(b + v * W);
#pragma GCC unroll 32
  for (int i = 0; i < M; ++i) {
    vf x = splat_any(a + i * rs);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[i][v] = Op::run(acc[i][v], x, column[v]);
  }
}

template <class Op, int M, int V>
REGARD_INLINE void micro(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b, int64_t ldb, int64_t count) {
  // four at a time, written out: the compiler declines to unroll this loop, and its end is mispredicted the less
  int64_t k = count;
  for (; k >= 4; k -= 4, b += 4 * ldb) {
    product<Op, M, V>(acc, a, rs, b), a += cs;
    product<Op, M, V>(acc, a, rs, b + ldb), a += cs;
    product<Op, M, V>(acc, a, rs, b + 2 * ldb), a += cs;
    product<Op, M, V>(acc, a, rs, b + 3 * ldb), a += cs;
  }
  for (; k; --k, a += cs, b += ldb) product<Op, M, V>(acc, a, rs, b);
}

template <int M, int V>
REGARD_INLINE void clear(vf (&acc)[M][V]) {
#pragma GCC unroll 32
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[i][v] = vf{};
}

}  // namespace regard
