// SVE of exactly 256 bits with products of bfloat16 (Neoverse V1: AWS Graviton 3): eight lanes. The compiler knows the
// length (-msve-vector-bits=256), so its vectors of 32 bytes are SVE registers.
#pragma once
#include <arm_sve.h>

#define REGARD_W 8
#include "isa/plain.h"

namespace regard {

typedef svfloat32_t sve_float __attribute__((arm_sve_vector_bits(256)));
typedef svfloat16_t sve_half __attribute__((arm_sve_vector_bits(256)));
typedef svfloat64_t sve_double __attribute__((arm_sve_vector_bits(256)));
typedef svuint32_t sve_word __attribute__((arm_sve_vector_bits(256)));
typedef svbfloat16_t sve_bf16 __attribute__((arm_sve_vector_bits(256)));

struct Isa : PlainIsa<Isa> {
  static constexpr bool kPairs = true, kZippedPairs = true, kUnzips = true, kExp2 = true;

  REGARD_INLINE vf multiply_add(vf acc, vf a, vf b) {
    // written out, because GCC picks forms that overwrite a, and then moves accumulators about
    __asm__("fmla %0.s, %1/m, %2.s, %3.s" : "+w"(acc) : "Upl"(svptrue_b32()), "w"(a), "w"(b));
    return acc;
  }

  REGARD_INLINE vf multiply_add_pairs(vf acc, vf a, vf b) {
    return (vf)(sve_float)svbfdot_f32((sve_float)acc, (sve_bf16)a, (sve_bf16)b);
  }

  REGARD_INLINE vf pair_of(vf first, vf second) {
    const svbool_t all = svptrue_b32();
    return (vf)(sve_bf16)svcvtnt_bf16_f32_x(svcvt_bf16_f32_x(all, (sve_float)first), all, (sve_float)second);
  }

  REGARD_INLINE uint32_t lanes_set(vi c) {
    const vu bit = {1, 2, 4, 8, 16, 32, 64, 128};
    return svorv_u32(svptrue_b32(), (sve_word)((vu)c & bit));
  }

  // Of halves of a vector GCC makes whole ones through memory. A register of NEON is the low half of one of SVE.
  REGARD_INLINE vu widen_uint16(vh x) {
    vu wide;
    __asm__("uunpklo %0.s, %0.h" : "=w"(wide) : "0"(x));
    return wide;
  }

  REGARD_INLINE vf widen_fp16(vh x) { return (vf)(sve_float)svcvt_f32_f16_x(svptrue_b32(), (sve_half)widen_uint16(x)); }

  REGARD_INLINE vh narrow_fp16(vf x) {
    return __builtin_convertvector((vu)(sve_half)svcvt_f16_f32_x(svptrue_b32(), (sve_float)x), vh);
  }

  REGARD_INLINE vi widen_int8(vb x) {
    vi wide;
    __asm__("sunpklo %0.h, %0.b\n\tsunpklo %0.s, %0.h" : "=w"(wide) : "0"(x));
    return wide;
  }

  template <int step>
  REGARD_INLINE void exchange_blocks(vf& x, vf& y) {
    const sve_float a = (sve_float)x, b = (sve_float)y;
    if constexpr (step == 1) {
      x = (vf)(sve_float)svtrn1_f32(a, b), y = (vf)(sve_float)svtrn2_f32(a, b);
    } else if constexpr (step == 2) {
      const vf even = even_doubles(x, y);
      y = odd_doubles(x, y), x = even;
    } else {
      const svbool_t low = svptrue_pat_b32(SV_VL4);
      const sve_float middle = svext_f32(a, b, 4);  // the high half of a, the low half of b
      x = (vf)(sve_float)svsel_f32(low, a, middle), y = (vf)(sve_float)svsel_f32(low, middle, b);
    }
  }

  // exp2v with FEXPA, which has the powers of 2^(1/64) in a table: it reads n from the low bits of t, the exponent's
  // bias included, and |f| ≤ 1/128 takes two terms fewer.
  REGARD_INLINE vf exp2(vf x) {
    const vf y = (vf)(sve_float)svmax_f32_x(svptrue_b32(), (sve_float)x, (sve_float)splat(-127.0f));  // NaN stays
    const vf shift = splat(196735.0f), t = y + shift, f = y - (t - shift);  // 1.5 · 2^17 + 127
    const vf scale = (vf)(sve_float)svexpa_f32((sve_word)t);
    const vf p = (splat(5.5504109e-2f) * f + splat(2.40226507e-1f)) * f + splat(6.93147182e-1f);
    return p * (f * scale) + scale;
  }

  // Where four elements of A are neighbours they are loaded at once, to both halves of a register, and multiplied by
  // lane. The order of additions is that of the plain one. Pairs: as in isa/neonbf16.h, each half of a register being
  // one of its blocks.
  template <class Elements, int M, int V>
  REGARD_INLINE void multiply_tiles(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b,
                                    int64_t ldb, int64_t count) {
    if constexpr (!Elements::pairs) {
      multiply_floats(acc, a, rs, cs, b, ldb, count);
    } else {
      const int64_t zipped = count / 2 * 2;
      if constexpr (M == 1) multiply_row(acc[0], a, cs, b, ldb, zipped);
      else multiply_zipped(acc, a, rs, cs, b, ldb, zipped);
      if (count > zipped)
        PlainIsa::template multiply_tiles<Elements, M, V>(acc, a + zipped * cs, rs, cs, b + zipped * ldb, ldb, 1);
    }
  }

 private:
  template <int M, int V>
  REGARD_INLINE void multiply_floats(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b,
                                     int64_t ldb, int64_t count) {
    if (rs == 1 && M % 4 == 0) {
      for (; count; --count, a += cs, b += ldb) {
        vf x[(M + 3) / 4];
#pragma GCC unroll 32
        for (int i = 0; i < M; i += 4) x[i / 4] = load_four(a + i);
        add_rows(acc, x, b);
      }
    } else if (cs == 1) {
      for (; count >= 4; count -= 4, a += 4, b += 4 * ldb) {
        vf x[M];
#pragma GCC unroll 32
        for (int i = 0; i < M; ++i) x[i] = load_four(a + i * rs);
        add_column<0>(acc, x, b);
        keep_order();
        add_column<1>(acc, x, b + ldb);
        keep_order();
        add_column<2>(acc, x, b + 2 * ldb);
        keep_order();
        add_column<3>(acc, x, b + 3 * ldb);
      }
    }
    PlainIsa::template multiply_tiles<Floats, M, V>(acc, a, rs, cs, b, ldb, count);
  }

  // The compiler moves no load across this: of all rows of B at once, it would run out of registers.
  REGARD_INLINE void keep_order() { __asm__ volatile("" ::: "memory"); }

  // acc + b · x[lane], a lane of each half. Written out, because GCC sorts the products by what they are added to, and
  // each then waits for the one before.
  template <int lane>
  REGARD_INLINE vf add_lane(vf acc, vf x, vf b) {
    __asm__("fmla %0.s, %1.s, %2.s[%3]" : "+w"(acc) : "w"(b), "y"(x), "i"(lane));
    return acc;
  }

  template <int lane, int M, int V>
  REGARD_INLINE void add_column(vf (&acc)[M][V], const vf (&x)[M], const float* b) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vf row = load(b + v * W);
#pragma GCC unroll 32
      for (int i = 0; i < M; ++i) acc[i][v] = add_lane<lane>(acc[i][v], x[i], row);
    }
  }

  // Row i of the sums takes lane i % 4 of x[i / 4].
  template <int M, int V>
  REGARD_INLINE void add_rows(vf (&acc)[M][V], const vf (&x)[(M + 3) / 4], const float* b) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vf row = load(b + v * W);
#pragma GCC unroll 32
      for (int i = 0; i + 4 <= M; i += 4) {
        acc[i][v] = add_lane<0>(acc[i][v], x[i / 4], row);
        acc[i + 1][v] = add_lane<1>(acc[i + 1][v], x[i / 4], row);
        acc[i + 2][v] = add_lane<2>(acc[i + 2][v], x[i / 4], row);
        acc[i + 3][v] = add_lane<3>(acc[i + 3][v], x[i / 4], row);
      }
    }
  }

  template <int V>
  REGARD_INLINE void multiply_row(vf (&acc)[V], const float* a, int64_t cs, const float* b, int64_t ldb,
                                  int64_t count) {
    for (; count; count -= 2, a += 2 * cs, b += 2 * ldb) {
      const vf first = splat_any(a), second = splat_any(a + cs);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const sve_float low = (sve_float)load(b + v * W), high = (sve_float)load(b + ldb + v * W);
        acc[v] = multiply_add_pairs(acc[v], first, (vf)(sve_float)svuzp1_f32(low, high));
        acc[v] = multiply_add_pairs(acc[v], second, (vf)(sve_float)svuzp2_f32(low, high));
      }
    }
  }

  // The rows of A that are multiplied together: where four rows may be loaded at once, each with the second next.
  template <int M>
  struct RowPair {
    static_assert(M % 2 == 0, "rows are multiplied by two");
    static constexpr int first(int n) { return M % 4 ? 2 * n : n / 2 * 4 + n % 2; }
    static constexpr int second(int n) { return first(n) + (M % 4 ? 1 : 2); }
  };

  template <int M, int V>
  REGARD_INLINE void multiply_zipped(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b,
                                     int64_t ldb, int64_t count) {
    using Pair = RowPair<M>;
    rows_to_blocks(acc);
    if constexpr (M % 4 == 0)
      for (; rs == 1 && count; count -= 2, a += 2 * cs, b += 2 * ldb) {
        vf left[M / 2];
#pragma GCC unroll 32
        for (int i = 0; i < M; i += 4) {
          const sve_float column = (sve_float)load_four(a + i), next = (sve_float)load_four(a + i + cs);
          left[i / 2] = (vf)(sve_float)svtrn1_f32(column, next);
          left[i / 2 + 1] = (vf)(sve_float)svtrn2_f32(column, next);
        }
        add_blocks(acc, left, b, ldb);
      }
    for (; cs == 1 && count >= 4; count -= 4, a += 4, b += 4 * ldb) {
      vf left[2][M / 2];
#pragma GCC unroll 32
      for (int n = 0; n < M / 2; ++n) {
        const vf row = load_four(a + Pair::first(n) * rs), next = load_four(a + Pair::second(n) * rs);
        left[0][n] = even_doubles(row, next);
        left[1][n] = odd_doubles(row, next);
      }
      add_blocks(acc, left[0], b, ldb);
      add_blocks(acc, left[1], b + 2 * ldb, ldb);
    }
    for (; count; count -= 2, a += 2 * cs, b += 2 * ldb) {
      vf left[M / 2];
#pragma GCC unroll 32
      for (int n = 0; n < M / 2; ++n) {
        const float *row = a + Pair::first(n) * rs, *next = a + Pair::second(n) * rs;
        left[n] = even_doubles(alternating(row, row + cs), alternating(next, next + cs));
      }
      add_blocks(acc, left, b, ldb);
    }
    blocks_to_rows(acc);
  }

  // Four floats, or pairs, in each half.
  REGARD_INLINE vf load_four(const float* p) { return (vf)(sve_float)svld1rq_f32(svptrue_b32(), p); }
  REGARD_INLINE vf alternating(const float* even, const float* odd) {
    return (vf)(sve_float)svtrn1_f32((sve_float)splat_any(even), (sve_float)splat_any(odd));
  }
  REGARD_INLINE vf even_doubles(vf a, vf b) { return (vf)(sve_double)svtrn1_f64((sve_double)a, (sve_double)b); }
  REGARD_INLINE vf odd_doubles(vf a, vf b) { return (vf)(sve_double)svtrn2_f64((sve_double)a, (sve_double)b); }

  // Sums of two rows, eight columns each, become four blocks of 2 × 2, and back.
  template <int M, int V>
  REGARD_INLINE void rows_to_blocks(vf (&acc)[M][V]) {
    each_pair(acc, [](vf& x, vf& y) __attribute__((always_inline)) {
      const sve_double row = (sve_double)x, next = (sve_double)y;
      x = (vf)(sve_double)svzip1_f64(row, next), y = (vf)(sve_double)svzip2_f64(row, next);
    });
  }

  template <int M, int V>
  REGARD_INLINE void blocks_to_rows(vf (&acc)[M][V]) {
    each_pair(acc, [](vf& x, vf& y) __attribute__((always_inline)) {
      const sve_double low = (sve_double)x, high = (sve_double)y;
      x = (vf)(sve_double)svuzp1_f64(low, high), y = (vf)(sve_double)svuzp2_f64(low, high);
    });
  }

  template <int M, int V, class Body>
  REGARD_INLINE void each_pair(vf (&acc)[M][V], const Body& body) {
#pragma GCC unroll 32
    for (int n = 0; n < M / 2; ++n)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) body(acc[RowPair<M>::first(n)][v], acc[RowPair<M>::second(n)][v]);
  }

  // left: of two rows of A each, two pairs; b: two rows of pairs, zipped.
  template <int M, int V>
  REGARD_INLINE void add_blocks(vf (&acc)[M][V], const vf (&left)[M / 2], const float* b, int64_t ldb) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vf first = load(b + v * W), second = load(b + ldb + v * W);
#pragma GCC unroll 32
      for (int n = 0; n < M / 2; ++n) {
        vf &low = acc[RowPair<M>::first(n)][v], &high = acc[RowPair<M>::second(n)][v];
        low = multiply_block(low, left[n], first);
        high = multiply_block(high, left[n], second);
      }
    }
  }

  REGARD_INLINE vf multiply_block(vf acc, vf a, vf b) {
    return (vf)(sve_float)svbfmmla_f32((sve_float)acc, (sve_bf16)a, (sve_bf16)b);
  }
};

}  // namespace regard
