// The functions of an instruction set in plain code on compiler vectors; each set replaces those for which it has
// instructions.
#pragma once
#include "isa/types.h"

namespace regard {

REGARD_INLINE vf exp2v(vf x);  // core/vec.h

// The off-diagonal step × step blocks of each 2 step × 2 step block, exchanged.
template <int step>
struct Low {
  static constexpr int lane(int n) { return n & step ? (n - step) + W : n; }
};

template <int step>
struct High {
  static constexpr int lane(int n) { return n & step ? n + W : n + step; }
};

// Own: the instruction set that inherits this one, so that the functions here call its functions.
template <class Own>
struct PlainIsa {
  static constexpr bool kPairs = false;   // whether one instruction multiplies pairs of bfloat16
  static constexpr bool kExp2 = false;    // whether there is an exp2 that is quicker than exp2v's polynomial
  static constexpr bool kUnzips = false;  // whether one instruction takes the even, or odd, lanes of two vectors
  // whether each two rows of pairs of B are zipped by words: core/pack.h
  static constexpr bool kZippedPairs = false;
  static constexpr bool kMatrixUnit =
      false;  // whether there are multiply_blocks and MatrixUnitSession: isa/matrix_unit.h
  // whether there is outer_products: isa/sme.h
  static constexpr bool kOuterProducts = false;
#if defined(__aarch64__)
  static constexpr bool kManyRegisters = true;  // 32 of vectors, not 16
#else
  static constexpr bool kManyRegisters = W == 16;
#endif
  static constexpr int kBlockVectors =
      kManyRegisters ? 4 : 3;  // vectors of queries in a block: with kMR, as many products as registers hold

  REGARD_INLINE vf multiply_add(vf acc, vf a, vf b) { return acc + a * b; }

  // acc + the sums of products of neighbouring bfloat16.
  REGARD_INLINE vf multiply_add_pairs(vf acc, vf, vf) { return acc; }

  // Two vectors of floats as one of pairs of bfloat16.
  REGARD_INLINE vf pair_of(vf first, vf) { return first; }

  REGARD_INLINE vf widen_fp16(vh h) {
    const vu u = Own::widen_uint16(h), sign = (u & 0x8000u) << 16, body = (u & 0x7fffu) << 13;
    const vf scaled = (vf)body * splat(0x1p112f);  // exact, and normalises denormals
    return (vf)((body >= 0x0f800000u ? (body | 0x7f800000u) : (vu)scaled) | sign);
  }

  // The nearest float16, ties to even: infinite from 65520 on; NaN stays NaN.
  REGARD_INLINE vh narrow_fp16(vf x) {
    const vu u = (vu)x, sign = (u >> 16) & 0x8000u, body = u & 0x7fffffffu;
    // below 2^-14 fixed point, by adding 0.5, whose last place is 2^-24
    const vu tiny = (vu)((vf)body + splat(0.5f)) - 0x3f000000u;
    const vu normal = (body + 0xfffu + ((body >> 13) & 1u) - (112u << 23)) >> 13;
    vu h = body < 0x38800000u ? tiny : normal;
    h = body >= 0x477ff000u ? 0x7c00u + vu{} : h;
    h = body > 0x7f800000u ? 0x7e00u + vu{} : h;
    return __builtin_convertvector(sign | h, vh);
  }

  REGARD_INLINE vu widen_uint16(vh x) { return __builtin_convertvector(x, vu); }

  // In two steps, each of which compilers know as few instructions; of one step they make one a lane.
  REGARD_INLINE vi widen_int8(vb x) { return __builtin_convertvector(__builtin_convertvector(x, vs), vi); }

  // Exchanges the off-diagonal step × step blocks of a and b, a step of a transpose.
  template <int step>
  REGARD_INLINE void exchange_blocks(vf& a, vf& b) {
    const vf low = shuffle<Low<step>>(a, b);
    b = shuffle<High<step>>(a, b);
    a = low;
  }

  // a / b to 1 ulp, for b from 1 to 2^64.
  REGARD_INLINE vf quotient(vf a, vf b) { return a / b; }

  // x, or the number of its sign that is `most` from 0 where that is nearer; infinities and NaN stay so.
  REGARD_INLINE vf bounded(vf x, float most) {
    const vf nearest = x < vf{} ? splat(-most) : splat(most), far = (vf)((vi)x & splat_int(0x7fffffff));
    return ((far < splat(__builtin_inff())) & (far > splat(most))) ? nearest : x;
  }

  REGARD_INLINE vf exp2(vf x) { return x; }

  // 2^x to 2 ulp, with what is quickest: see exp2v.
  REGARD_INLINE vf exp2_quick(vf x) { return exp2v(x); }

  // One bit for each lane that is set.
  REGARD_INLINE uint32_t lanes_set(vi c) {
    uint32_t bits = 0;
    for (int n = 0; n < W; ++n) bits |= (uint32_t)(c[n] & 1) << n;
    return bits;
  }

  // The microkernel, through which every product goes: adds the product of a tile of A, M rows × count, and a tile of
  // B, count × V vectors, to acc in registers:
  //   acc[i][v] += Σ_k A[i · rs + k · cs] · B[k · ldb + v · W]
  // An instruction set with a matrix unit has one of its own. Elements: what one element of A, and of a lane of B,
  // holds.
  template <class Elements, int M, int V>
  REGARD_INLINE void multiply_tiles(vf (&acc)[M][V], const float* a, int64_t rs, int64_t cs, const float* b,
                                    int64_t ldb, int64_t count) {
    // four at a time, written out: the compiler declines to unroll this loop, and its end is mispredicted the less
    int64_t k = count;
    for (; k >= 4; k -= 4, b += 4 * ldb) {
      multiply_column<Elements, M, V>(acc, a, rs, b);
      a += cs;
      multiply_column<Elements, M, V>(acc, a, rs, b + ldb);
      a += cs;
      multiply_column<Elements, M, V>(acc, a, rs, b + 2 * ldb);
      a += cs;
      multiply_column<Elements, M, V>(acc, a, rs, b + 3 * ldb);
      a += cs;
    }
    for (; k; --k, a += cs, b += ldb) multiply_column<Elements, M, V>(acc, a, rs, b);
  }

  template <class Elements>
  REGARD_INLINE void outer_products(float*, int64_t, const Panels&, int64_t, const float*, int64_t, int64_t, int64_t) {}

  // What code for a matrix unit calls, so that it compiles where there is none; it never runs there.
  struct MatrixUnitSession {
    ~MatrixUnitSession() {}
  };
  REGARD_INLINE void keep_awake() {}
  REGARD_INLINE vf product(vf a, vf b) { return a * b; }

  template <int parts, int V, class To>
  REGARD_INLINE void multiply_blocks(To&, const LeftParts&, const RightParts&, int64_t, int64_t) {}
  REGARD_INLINE vf row_of(vf first, vf) { return first; }
  REGARD_INLINE vf cut_row(vf first, vf) { return first; }
  template <int X, bool = true, bool = true, bool = false>
  REGARD_INLINE void multiply_tile(const uint16_t*, int64_t, const uint16_t*, int64_t) {}
  template <int X, bool = false>
  REGARD_INLINE void begin_tile(const uint16_t*, int64_t, const uint16_t*, int64_t, float*, int64_t, const float*,
                                int64_t) {}
  template <int R, int C>
  REGARD_INLINE void store_block(float*, int64_t) {}
  REGARD_INLINE vf exp2_to_cut(vf x) { return exp2v(x); }
  REGARD_INLINE vf exp2_whole(vf x) { return exp2v(x); }

 private:
  // One column of A times one row of B.
  template <class Elements, int M, int V>
  REGARD_INLINE void multiply_column(vf (&acc)[M][V], const float* a, int64_t rs, const float* b) {
    vf row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = load(b + v * W);
#pragma GCC unroll 32
    for (int i = 0; i < M; ++i) {
      vf x = splat_any(a + i * rs);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        if constexpr (Elements::pairs) acc[i][v] = Own::multiply_add_pairs(acc[i][v], x, row[v]);
        else acc[i][v] = Own::multiply_add(acc[i][v], x, row[v]);
      }
    }
  }
};

}  // namespace regard
