// AVX-512 with products of pairs of bfloat16, summed in float.
#pragma once
#include <immintrin.h>

#include "isa/avx512.h"

namespace regard {

struct Isa : Avx512Isa<Isa> {
  static constexpr bool kPairs = true;

  REGARD_INLINE vf multiply_add_pairs(vf acc, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }

  REGARD_INLINE vf pair_of(vf first, vf second) {
    __m512i order;
    {
      alignas(64) uint16_t index[32];
      for (int n = 0; n < 16; ++n) {
        index[2 * n] = (uint16_t)n;
        index[2 * n + 1] = (uint16_t)(16 + n);
      }
      order = _mm512_load_si512(index);
    }
    return (vf)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  }
};

}  // namespace regard
