// AVX-512 (F, BW, VL, DQ, CD): sixteen lanes.
#pragma once
#define REGARD_W 16
#include <immintrin.h>

#include "isa/plain.h"

namespace regard {

template <class Own>
struct Avx512Isa : PlainIsa<Own> {
  REGARD_INLINE vf multiply_add(vf acc, vf a, vf b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));  // as for AVX2
    return acc;
  }

  REGARD_INLINE vf widen_fp16(vh h) { return (vf)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h); }

  REGARD_INLINE vh narrow_fp16(vf x) { return (vh)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT); }

  REGARD_INLINE vi widen_int8(vb x) { return (vi)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)x); }

  // A quotient of 14 bits, and what is left of a divided in the same way: half of the cycles of a division.
  REGARD_INLINE vf quotient(vf a, vf b) {
    const vf inverse = (vf)_mm512_maskz_rcp14_ps(0xffff, (__m512)b), near = a * inverse;
    return near + (a - b * near) * inverse;
  }

  REGARD_INLINE vf bounded(vf x, float most) {
    constexpr int kNearerToZero = 2, kSpecial = 0x01 | 0x08 | 0x10 | 0x80;  // NaN, inf, -inf, NaN that signals
    const __m512 any = (__m512)x;
    const __m512 inside = _mm512_maskz_range_ps(0xffff, any, (__m512)splat(most), kNearerToZero);
    return (vf)_mm512_mask_mov_ps(inside, _mm512_fpclass_ps_mask(any, kSpecial), any);
  }

  REGARD_INLINE uint32_t lanes_set(vi c) {
    return (uint32_t)__builtin_ia32_cvtd2mask512((__attribute__((vector_size(64))) int)c);
  }
};

#if !defined(__AVX512BF16__)  // isa/avx512bf16.h has more
struct Isa : Avx512Isa<Isa> {};
#endif

}  // namespace regard
