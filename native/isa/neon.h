// NEON (Advanced SIMD) of aarch64: four lanes.
#pragma once
#include <arm_neon.h>

#include <type_traits>

#define REGARD_W 4
#include "isa/plain.h"

namespace regard {

template <class Own>
struct NeonIsa : PlainIsa<Own> {
  REGARD_INLINE vf multiply_add(vf acc, vf a, vf b) {
    return (vf)vfmaq_f32((float32x4_t)acc, (float32x4_t)a, (float32x4_t)b);
  }

  REGARD_INLINE uint32_t lanes_set(vi c) {
    const uint32x4_t bit = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32((uint32x4_t)c, bit));
  }

  REGARD_INLINE vf widen_fp16(vh h) { return (vf)vcvt_f32_f16((float16x4_t)h); }

  REGARD_INLINE vh narrow_fp16(vf x) { return (vh)vcvt_f16_f32((float32x4_t)x); }

  // Where four elements of A are neighbours they are loaded at once, and multiplied by lane. The compiler would load
  // and broadcast each, and broadcasts take the place of products. The order of additions is that of the plain one.
  template <class Elements, int M, int V>
  REGARD_INLINE void multiply_tiles(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b,
                                    int64_t ldb, int64_t count) {
    if constexpr (M == 4)
      for (; rs == 1 && count; --count, a += cs, b += ldb) {
        const vf x = load(a);
        add_row<0>(acc[0], x, b), add_row<1>(acc[1], x, b), add_row<2>(acc[2], x, b), add_row<3>(acc[3], x, b);
      }
    if (cs == 1)
      for (; count >= 4; count -= 4, a += 4, b += 4 * ldb) {
        vf x[M];
#pragma GCC unroll 32
        for (int i = 0; i < M; ++i) x[i] = load(a + i * rs);
        add_column<0>(acc, x, b), add_column<1>(acc, x, b + ldb), add_column<2>(acc, x, b + 2 * ldb),
            add_column<3>(acc, x, b + 3 * ldb);
      }
    PlainIsa<Own>::template multiply_tiles<Elements, M, V>(acc, a, rs, cs, b, ldb, count);
  }

 private:
  // x[lane] times a row of B.
  template <int lane, int V>
  REGARD_INLINE void add_row(vf (&acc)[V], vf x, const float* b) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      acc[v] = (vf)vfmaq_laneq_f32((float32x4_t)acc[v], (float32x4_t)load(b + v * W), (float32x4_t)x, lane);
  }

  template <int lane, int M, int V>
  REGARD_INLINE void add_column(vf (&acc)[M][V], const vf (&x)[M], const float* b) {
#pragma GCC unroll 32
    for (int i = 0; i < M; ++i) add_row<lane>(acc[i], x[i], b);
  }
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// With products of pairs of bfloat16, summed in float.
template <class Own>
struct NeonPairsIsa : NeonIsa<Own> {
  static constexpr bool kPairs = true;

  REGARD_INLINE vf multiply_add_pairs(vf acc, vf a, vf b) {
    return (vf)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }

  REGARD_INLINE vf pair_of(vf first, vf second) {
    const uint16x8_t low = (uint16x8_t)vcvtq_low_bf16_f32((float32x4_t)first);
    return (vf)vzip1q_u16(low, (uint16x8_t)vcvtq_low_bf16_f32((float32x4_t)second));
  }

  template <class Elements, int M, int V>
  REGARD_INLINE void multiply_tiles(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b,
                                    int64_t ldb, int64_t count) {
    using Products = std::conditional_t<Elements::pairs, PlainIsa<Own>, NeonIsa<Own>>;
    Products::template multiply_tiles<Elements, M, V>(acc, a, rs, cs, b, ldb, count);
  }
};
#else
struct Isa : NeonIsa<Isa> {};
#endif

}  // namespace regard
