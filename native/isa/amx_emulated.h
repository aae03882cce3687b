// isa/amx.h in plain code, for tests on processors without a matrix unit: no installation has it. Tiles are memory of
// the thread.
#pragma once
#define REGARD_W 16
#include "isa/matrix_unit.h"
#include "isa/plain.h"

namespace regard {

struct EmulatedTiles {
  float sums[4][16][16], left[2][16][16], right[2][16][16];  // of the operands, each float is a pair of bfloat16
};
// One for all sources of an object: the linker merges the functions that use them.
inline thread_local EmulatedTiles emulated_tiles;
inline thread_local bool emulated_tiles_configured = false;  // without, a unit's instructions are illegal

struct Isa : PlainIsa<Isa>, MatrixUnit<Isa> {
  static constexpr bool kMatrixUnit = true;
  using MatrixUnit<Isa>::multiply_blocks;
  using MatrixUnit<Isa>::store_block;

  // What is in the tiles when a session begins is NaN, and what it leaves behind too: no result may depend on it.
  struct MatrixUnitSession {
    MatrixUnitSession() { set(true); }
    ~MatrixUnitSession() { set(false); }
    MatrixUnitSession(const MatrixUnitSession&) = delete;

   private:
    static void set(bool configured) {
      __builtin_memset(&emulated_tiles, 0xff, sizeof emulated_tiles);
      emulated_tiles_configured = configured;
    }
  };

  static void keep_awake() {
    if (!emulated_tiles_configured) __builtin_trap();
    __builtin_memset(&emulated_tiles.left, 0xff, sizeof emulated_tiles.left);
    __builtin_memset(&emulated_tiles.right, 0xff, sizeof emulated_tiles.right);
  }

  REGARD_INLINE vf product(vf a, vf b) {
    vf x = a * b;
    __asm__("" : "+m"(x));
    return x;
  }

  REGARD_INLINE vf pair_of(vf first, vf second) {
    return (vf)((rounded(first) >> 16) | (rounded(second) & 0xffff0000u));
  }

  REGARD_INLINE vf row_of(vf first, vf second) { return cut_row((vf)rounded(first), (vf)rounded(second)); }

  REGARD_INLINE vf cut_row(vf first, vf second) {
    const vu a = (vu)first, b = (vu)second;
    uint16_t row[2 * W];
    for (int n = 0; n < W; ++n) {
      row[n] = (uint16_t)(a[n] >> 16);
      row[W + n] = (uint16_t)(b[n] >> 16);
    }
    vf both;
    __builtin_memcpy(&both, row, sizeof both);
    return both;
  }

  REGARD_INLINE vf multiply_add_pairs(vf acc, vf a, vf b) { return acc + low(a) * low(b) + high(a) * high(b); }

  REGARD_INLINE vf exp2_to_cut(vf x) {
    const vf y = exp2v(x);
    return y == y ? (vf)((vu)y + 0x8000u) : y;
  }

  template <int X, bool left = true, bool right = true, bool = false>
  static void multiply_tile(const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row) {
    if (!emulated_tiles_configured) __builtin_trap();
    EmulatedTiles& t = emulated_tiles;
    if (X == 0 && left) copy(t.left[0], a, a_row);
    if (X == 0 && right) copy(t.right[0], b, b_row);
    if (X == 1 && right) copy(t.right[1], b + 32, b_row);
    if (X == 2 && left) copy(t.left[1], a + 16 * a_row, a_row);
    for (int n = 0; n < 16; ++n) {
      vf sum = load(t.sums[X][n]);
      for (int k = 0; k < 16; ++k) {
        const vf pair = splat_any(&t.left[X / 2][n][k]), row = load(t.right[X % 2][k]);
        sum = normal(sum + normal(low(pair)) * normal(low(row)));
        sum = normal(sum + normal(high(pair)) * normal(high(row)));
      }
      store(t.sums[X][n], sum);
    }
  }

  template <int X, bool = false>
  static void begin_tile(const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row, float* before,
                         int64_t before_ld, const float* from, int64_t from_ld) {
    if (before) store_tile<X>(before, before_ld);
    for (int n = 0; n < 16; ++n)
      store(emulated_tiles.sums[X][n], from ? load(from + (X / 2 * 16 + n) * from_ld + X % 2 * 16) : vf{});
    multiply_tile<X>(a, a_row, b, b_row);
  }

  template <int X>
  static void store_tile(float* to, int64_t ld) {
    for (int n = 0; n < 16; ++n) store(to + (X / 2 * 16 + n) * ld + X % 2 * 16, load(emulated_tiles.sums[X][n]));
  }

 private:
  // The two numbers of pairs.
  REGARD_INLINE vf low(vf pairs) { return (vf)((vu)pairs << 16); }
  REGARD_INLINE vf high(vf pairs) { return (vf)((vu)pairs & 0xffff0000u); }

  // The bits of the nearest bfloat16, ties to even, in the upper halves.
  REGARD_INLINE vu rounded(vf x) {
    const vu u = (vu)x;
    return x == x ? u + 0x7fffu + ((u >> 16) & 1u) : u | 0x400000u;
  }

  // The unit takes denormal numbers for 0, and makes none.
  REGARD_INLINE vf normal(vf x) { return ((vu)x & 0x7f800000u) == 0u ? vf{} : x; }

  static void copy(float (&tile)[16][16], const uint16_t* from, int64_t row) {
    for (int n = 0; n < 16; ++n) __builtin_memcpy(tile[n], from + n * row, sizeof tile[n]);
  }
};

}  // namespace regard
