// NEON with products of bfloat16 (FEAT_BF16: Neoverse V1, N2 and later, Apple M2 and later), summed in float.
#pragma once
#include <arm_neon.h>

#include "isa/neon.h"

namespace regard {

struct Isa : NeonPairsIsa<Isa> {
  static constexpr bool kZippedPairs = true;

  // One BFMMLA multiplies 2 rows × 4 elements of A by 4 elements × 2 columns of B: as many products as two BFDOT, of
  // which it has the bits, so that M does not change a result. Two rows of pairs of B lie zipped (kZippedPairs).
  template <class Elements, int M, int V>
  REGARD_INLINE void multiply_tiles(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b,
                                    int64_t ldb, int64_t count) {
    if constexpr (!Elements::pairs) {
      NeonIsa<Isa>::template multiply_tiles<Elements, M, V>(acc, a, rs, cs, b, ldb, count);
    } else {
      const int64_t zipped = count / 2 * 2;
      if constexpr (M == 1) multiply_row(acc[0], a, cs, b, ldb, zipped);
      else multiply_zipped(acc, a, rs, cs, b, ldb, zipped);
      if (count > zipped)
        PlainIsa<Isa>::template multiply_tiles<Elements, M, V>(acc, a + zipped * cs, rs, cs, b + zipped * ldb, ldb, 1);
    }
  }

 private:
  template <int V>
  REGARD_INLINE void multiply_row(vf (&acc)[V], const float* a, int64_t cs, const float* b, int64_t ldb,
                                  int64_t count) {
    for (; count; count -= 2, a += 2 * cs, b += 2 * ldb) {
      const vf first = splat_any(a), second = splat_any(a + cs);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const float32x4_t low = (float32x4_t)load(b + v * W), high = (float32x4_t)load(b + ldb + v * W);
        acc[v] = multiply_add_pairs(acc[v], first, (vf)vuzp1q_f32(low, high));
        acc[v] = multiply_add_pairs(acc[v], second, (vf)vuzp2q_f32(low, high));
      }
    }
  }

  template <int M, int V>
  REGARD_INLINE void multiply_zipped(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b,
                                     int64_t ldb, int64_t count) {
    exchange_halves(acc);
    if constexpr (M % 4 == 0)
      for (; rs == 1 && count; count -= 2, a += 2 * cs, b += 2 * ldb) {
        vf left[M / 2];
#pragma GCC unroll 32
        for (int i = 0; i < M; i += 4) {
          const float32x4_t column = (float32x4_t)load_pairs(a + i), next = (float32x4_t)load_pairs(a + i + cs);
          left[i / 2] = (vf)vzip1q_f32(column, next), left[i / 2 + 1] = (vf)vzip2q_f32(column, next);
        }
        add_blocks(acc, left, b, ldb);
      }
    for (; cs == 1 && count >= 4; count -= 4, a += 4, b += 4 * ldb) {
      vf left[2][M / 2];
#pragma GCC unroll 32
      for (int i = 0; i < M; i += 2) {
        const vf row = load_pairs(a + i * rs), next = load_pairs(a + (i + 1) * rs);
        left[0][i / 2] = low_halves(row, next);
        left[1][i / 2] = high_halves(row, next);
      }
      add_blocks(acc, left[0], b, ldb);
      add_blocks(acc, left[1], b + 2 * ldb, ldb);
    }
    for (; count; count -= 2, a += 2 * cs, b += 2 * ldb) {
      vf left[M / 2];
#pragma GCC unroll 32
      for (int i = 0; i < M; i += 2) {
        const float *row = a + i * rs, *next = row + rs;
        const vf first = low_words(splat_any(row), splat_any(row + cs));
        left[i / 2] = low_halves(first, low_words(splat_any(next), splat_any(next + cs)));
      }
      add_blocks(acc, left, b, ldb);
    }
    exchange_halves(acc);
  }

  REGARD_INLINE vf load_pairs(const float* p) { return (vf)vld1q_u16((const uint16_t*)p); }
  REGARD_INLINE vf low_words(vf a, vf b) { return (vf)vzip1q_f32((float32x4_t)a, (float32x4_t)b); }
  REGARD_INLINE vf low_halves(vf a, vf b) { return (vf)vzip1q_f64((float64x2_t)a, (float64x2_t)b); }
  REGARD_INLINE vf high_halves(vf a, vf b) { return (vf)vzip2q_f64((float64x2_t)a, (float64x2_t)b); }

  // Sums of rows i and i + 1, four columns each, become two blocks of 2 × 2, and such blocks become sums of rows.
  template <int M, int V>
  REGARD_INLINE void exchange_halves(vf (&acc)[M][V]) {
    static_assert(M % 2 == 0, "rows are multiplied by two");
#pragma GCC unroll 32
    for (int i = 0; i < M; i += 2)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const vf low = low_halves(acc[i][v], acc[i + 1][v]), high = high_halves(acc[i][v], acc[i + 1][v]);
        acc[i][v] = low, acc[i + 1][v] = high;
      }
  }

  // left: of two rows of A each, two pairs; b: two rows of pairs, zipped.
  template <int M, int V>
  REGARD_INLINE void add_blocks(vf (&acc)[M][V], const vf (&left)[M / 2], const float* b, int64_t ldb) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vf first = load(b + v * W), second = load(b + ldb + v * W);
#pragma GCC unroll 32
      for (int i = 0; i < M; i += 2) {
        acc[i][v] = multiply_block(acc[i][v], left[i / 2], first);
        acc[i + 1][v] = multiply_block(acc[i + 1][v], left[i / 2], second);
      }
    }
  }

  REGARD_INLINE vf multiply_block(vf acc, vf a, vf b) {
    return (vf)vbfmmlaq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
};

}  // namespace regard
