// AVX-512 with Intel's matrix unit: tiles of 16 × 16 sums in float of products of 16 × 32 by 32 × 16 bfloat16.
#pragma once
#include <immintrin.h>

#include "isa/avx512.h"
#include "isa/matrix_unit.h"

namespace regard {

// Written out, since the intrinsics of some compilers may move a store to memory behind the load of a tile from it.
#define REGARD_TILE_LOAD(tile, at, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"((const void*)(at)), "r"((int64_t)(stride)) : "memory")
// The same without room in the first-level cache: for what is used a few times, then not for long.
#define REGARD_TILE_LOAD_PAST(tile, at, stride) \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile::"r"((const void*)(at)), "r"((int64_t)(stride)) : "memory")
#define REGARD_TILE_STORE(tile, at, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void*)(at)), "r"((int64_t)(stride)) : "memory")
#define REGARD_TILE_CLEAR(tile) __asm__ volatile("tilezero %%tmm" #tile::: "memory")
#define REGARD_TILE_MULTIPLY(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum::: "memory")

struct Isa : Avx512Isa<Isa>, MatrixUnit<Isa> {
  static constexpr bool kMatrixUnit = true;
  using MatrixUnit<Isa>::multiply_blocks;
  using MatrixUnit<Isa>::store_block;

  // The unit's registers are configured while one of these lives. Without: the processor would save them at each switch
  // of threads.
  struct MatrixUnitSession {
    MatrixUnitSession() {
      struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } config;
      __asm__ volatile("ldtilecfg %0" ::"m"(config));
    }
    ~MatrixUnitSession() { __asm__ volatile("tilerelease"); }
    MatrixUnitSession(const MatrixUnitSession&) = delete;
  };

  // A product that nobody reads, of the registers of operands, which must not be in use. A unit that has had no work
  // for about 2,000 cycles sleeps, and its next product then waits 1,000 cycles for it.
  REGARD_INLINE void keep_awake() { REGARD_TILE_MULTIPLY(7, 4, 5); }

  REGARD_INLINE vf pair_of(vf first, vf second) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (vf)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder),
                                        (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  }

  // a · b in a rounding of its own: the compiler makes no fused multiply-add of it.
  REGARD_INLINE vf product(vf a, vf b) {
    vf x = a * b;
    __asm__("" : "+v"(x));
    return x;
  }

  // Two vectors of floats as one of bfloat16, in this order.
  REGARD_INLINE vf row_of(vf first, vf second) {
    return (vf)(__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  }

  // The same cut off, not rounded.
  REGARD_INLINE vf cut_row(vf first, vf second) {
    struct Odd {
      alignas(64) uint16_t lanes[2 * W];
      constexpr Odd() : lanes() {
        for (int n = 0; n < 2 * W; ++n) lanes[n] = (uint16_t)(2 * n + 1);
      }
    };
    static constexpr Odd odd;
    return (vf)_mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(odd.lanes), (__m512i)second);
  }

  REGARD_INLINE vf multiply_add_pairs(vf acc, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }

  // 2^x to 8e-5, plus half of the last place that a bfloat16 has: cut off, it is 2^x rounded. 0 for -inf; NaN stays
  // NaN.
  REGARD_INLINE vf exp2_to_cut(vf x) {
    const vf f = (vf)_mm512_maskz_reduce_ps(0xffff, (__m512)x, 0x09);
    vf p = splat(7.802452264e-2f) * f + splat(2.260671554e-1f);
    p = p * f + splat(6.958335405e-1f);
    p = p * f + splat(9.999252186e-1f + 0x1p-8f);
    return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);
  }

  // To 2e-7: 2^floor(x) times a polynomial of the fraction. 0 for -inf; NaN stays NaN.
  REGARD_INLINE vf exp2_quick(vf x) {
    const vf f = (vf)_mm512_maskz_reduce_ps(0xffff, (__m512)x, 0x09);
    vf p = splat(1.877576675e-3f) * f + splat(8.989340091e-3f);
    p = p * f + splat(5.582631805e-2f);
    p = p * f + splat(2.401536170e-1f);
    p = p * f + splat(6.931530732e-1f);
    p = p * f + splat(9.999999251e-1f);
    return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);
  }

  // To 1 ulp, like exp2v: 2^n times a polynomial of what is beside the nearest whole number n.
  REGARD_INLINE vf exp2_whole(vf x) {
    const vf f = (vf)_mm512_maskz_reduce_ps(0xffff, (__m512)x, 0x08), n = x - f;
    vf p = splat(1.534580023e-4f) * f + splat(1.339993145e-3f);
    p = p * f + splat(9.618488997e-3f);
    p = p * f + splat(5.550328777e-2f);
    p = p * f + splat(2.402264689e-1f);
    p = p * f + splat(6.931472057e-1f);
    p = p * f + splat(1.0f);
    return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
  }

  // Tile X (row X / 2, column X % 2) of a step of a block of up to 2 × 2 tiles: its sums, in registers, take the
  // products of 32 columns of A and rows of B. The tiles of a step are multiplied in order. left, right: whether the
  // operand is not that of the step before; passing: whether the right one is used a few times alone.
  template <int X, bool left = true, bool right = true, bool passing = false>
  REGARD_INLINE void multiply_tile(const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row) {
    load_operands<X, left, right, passing>(a, a_row, b, b_row);
    multiply<X>();
  }

  // The same in the first step of a block. before: where the sums go that the registers hold, those of the block
  // before, in rows of before_ld floats, or null; from: what the new sums begin with, or null for 0.
  template <int X, bool passing = false>
  REGARD_INLINE void begin_tile(const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row, float* before,
                                int64_t before_ld, const float* from, int64_t from_ld) {
    load_operands<X, true, true, passing>(a, a_row, b, b_row);
    if (before) store_tile<X>(before, before_ld);
    if (from) load_sums<X>(from + X / 2 * 16 * from_ld + X % 2 * 16, from_ld);
    else clear<X>();
    multiply<X>();
  }

  // Stores the sums of a tile.
  template <int X>
  REGARD_INLINE void store_tile(float* to, int64_t ld) {
    float* at = to + X / 2 * 16 * ld + X % 2 * 16;
    if constexpr (X == 0) REGARD_TILE_STORE(0, at, 4 * ld);
    if constexpr (X == 1) REGARD_TILE_STORE(1, at, 4 * ld);
    if constexpr (X == 2) REGARD_TILE_STORE(2, at, 4 * ld);
    if constexpr (X == 3) REGARD_TILE_STORE(3, at, 4 * ld);
  }

 private:
  template <int X, bool left, bool right, bool passing>
  REGARD_INLINE void load_operands(const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row) {
    if constexpr (X == 0 && left) REGARD_TILE_LOAD_PAST(4, a, 2 * a_row);
    if constexpr (X == 0 && right && passing) REGARD_TILE_LOAD_PAST(6, b, 2 * b_row);
    if constexpr (X == 0 && right && !passing) REGARD_TILE_LOAD(6, b, 2 * b_row);
    if constexpr (X == 1 && right && passing) REGARD_TILE_LOAD_PAST(7, b + 32, 2 * b_row);
    if constexpr (X == 1 && right && !passing) REGARD_TILE_LOAD(7, b + 32, 2 * b_row);
    if constexpr (X == 2 && left) REGARD_TILE_LOAD_PAST(5, a + 16 * a_row, 2 * a_row);
  }

  template <int X>
  REGARD_INLINE void load_sums(const float* from, int64_t ld) {
    if constexpr (X == 0) REGARD_TILE_LOAD(0, from, 4 * ld);
    if constexpr (X == 1) REGARD_TILE_LOAD(1, from, 4 * ld);
    if constexpr (X == 2) REGARD_TILE_LOAD(2, from, 4 * ld);
    if constexpr (X == 3) REGARD_TILE_LOAD(3, from, 4 * ld);
  }

  template <int X>
  REGARD_INLINE void clear() {
    if constexpr (X == 0) REGARD_TILE_CLEAR(0);
    if constexpr (X == 1) REGARD_TILE_CLEAR(1);
    if constexpr (X == 2) REGARD_TILE_CLEAR(2);
    if constexpr (X == 3) REGARD_TILE_CLEAR(3);
  }

  template <int X>
  REGARD_INLINE void multiply() {
    if constexpr (X == 0) REGARD_TILE_MULTIPLY(0, 4, 6);
    if constexpr (X == 1) REGARD_TILE_MULTIPLY(1, 4, 7);
    if constexpr (X == 2) REGARD_TILE_MULTIPLY(2, 5, 6);
    if constexpr (X == 3) REGARD_TILE_MULTIPLY(3, 5, 7);
  }
};

#undef REGARD_TILE_LOAD
#undef REGARD_TILE_LOAD_PAST
#undef REGARD_TILE_STORE
#undef REGARD_TILE_CLEAR
#undef REGARD_TILE_MULTIPLY

}  // namespace regard
