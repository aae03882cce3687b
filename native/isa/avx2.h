// AVX2 with fused multiply-add and conversions of float16: eight lanes.
#pragma once
#define REGARD_W 8
#include <immintrin.h>

#include "isa/plain.h"

namespace regard {

struct Isa : PlainIsa<Isa> {
  REGARD_INLINE vf multiply_add(vf acc, vf a, vf b) {
    // written out, because GCC picks forms that overwrite a or read b from memory again, and then runs out of registers
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }

  REGARD_INLINE vf widen_fp16(vh h) { return (vf)_mm256_cvtph_ps((__m128i)h); }

  REGARD_INLINE vh narrow_fp16(vf x) { return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }

  REGARD_INLINE vi widen_int8(vb x) { return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x)); }

  REGARD_INLINE uint32_t lanes_set(vi c) { return (uint32_t)__builtin_ia32_movmskps256((vf)c); }
};

}  // namespace regard
