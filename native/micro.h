// The one microkernel: acc[i][v] += splat(A[i * rs + k * cs]) * B[k][v]. Lanes are queries; every product goes through it.
#pragma once
#include "vec.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace regard {

// What one element of A does with a vector of B, both 4 bytes wide: a float, or a pair of bfloat16.
struct Floats {
  static constexpr bool pairs = false;
  REGARD_INLINE vf run(vf acc, vf a, vf b) { return acc + a * b; }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr bool pairs = true;
  REGARD_INLINE vf run(vf acc, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
};
#endif

template <class Op, int M, int V>
REGARD_INLINE void micro(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b, int64_t ldb, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    vf column[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) column[v] = load(b + k * ldb + v * W);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      vf x = splat_any(a + i * rs + k * cs);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[i][v] = Op::run(acc[i][v], x, column[v]);
    }
  }
}

template <int M, int V>
REGARD_INLINE void clear(vf (&acc)[M][V]) {
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < V; ++v) acc[i][v] = vf{};
}

}  // namespace regard
