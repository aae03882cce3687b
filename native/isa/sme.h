// NEON beside Arm's matrix unit (SME, Apple M4): it adds the outer products of two vectors of 16 numbers to tiles of
// 16 × 16 sums, of which it has four.
#pragma once
#include "isa/neon.h"

namespace regard {

// All vector registers: smstart and smstop clear them.
#define REGARD_VECTORS                                                                                                \
  "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", \
      "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

#define REGARD_ADD_TO_TILE(multiply, kind, tile, a) \
  multiply " za" #tile ".s, p5/m, p5/m, z" #a "." kind ", z0." kind "\n"

// Stores the rows of a tile that there are.
#define REGARD_STORE_TILE(tile) \
  "mov w12, #0\n"               \
  "2: st1w {za" #tile           \
  "h.s[w12, 0]}, p0, [%[to]]\n" \
  "add %[to], %[to], %[ld]\n"   \
  "subs %[rows], %[rows], #1\n" \
  "b.eq 3f\n"                   \
  "add w12, w12, #1\n"          \
  "cmp w12, #16\n"              \
  "b.ne 2b\n"

// clang-format off
// One piece, as the compiler must put no instruction of NEON between smstart and smstop: the processor has others
// there. multiply: the instruction, kind: of which elements. What is not there is loaded as 0.
#define REGARD_OUTER_PRODUCTS(multiply, kind)                                                                  \
  __asm__ volatile(                                                                                            \
      ".arch_extension sme\n"                                                                                  \
      "smstart\n"                                                                                              \
      "zero {za}\n"                                                                                            \
      "ptrue p5.b\n"                                                                                           \
      "whilelt p0.s, xzr, %[columns]\n"                                                                        \
      "whilelt p1.s, xzr, %[rows]\n"                                                                           \
      "mov x12, #16\n"                                                                                         \
      "whilelt p2.s, x12, %[rows]\n"                                                                           \
      "mov x12, #32\n"                                                                                         \
      "whilelt p3.s, x12, %[rows]\n"                                                                           \
      "mov x12, #48\n"                                                                                         \
      "whilelt p4.s, x12, %[rows]\n"                                                                           \
      "cbz %[count], 4f\n"                                                                                     \
      "1: ld1w {z0.s}, p0/z, [%[b]]\n"                                                                         \
      "ld1w {z1.s}, p1/z, [%[first]]\n"                                                                        \
      "ld1w {z2.s}, p2/z, [%[second]]\n"                                                                       \
      "ld1w {z3.s}, p3/z, [%[third]]\n"                                                                        \
      "ld1w {z4.s}, p4/z, [%[fourth]]\n"                                                                       \
      REGARD_ADD_TO_TILE(multiply, kind, 0, 1) REGARD_ADD_TO_TILE(multiply, kind, 1, 2)                        \
      REGARD_ADD_TO_TILE(multiply, kind, 2, 3) REGARD_ADD_TO_TILE(multiply, kind, 3, 4)                        \
      "add %[b], %[b], %[ldb]\n"                                                                               \
      "add %[first], %[first], %[step]\n"                                                                      \
      "add %[second], %[second], %[step]\n"                                                                    \
      "add %[third], %[third], %[step]\n"                                                                      \
      "add %[fourth], %[fourth], %[step]\n"                                                                    \
      "subs %[count], %[count], #1\n"                                                                          \
      "b.ne 1b\n"                                                                                              \
      "4:\n"                                                                                                   \
      REGARD_STORE_TILE(0) REGARD_STORE_TILE(1) REGARD_STORE_TILE(2) REGARD_STORE_TILE(3)                      \
      "3: smstop"                                                                                              \
      : [to] "+r"(to), [first] "+r"(first), [second] "+r"(second), [third] "+r"(third), [fourth] "+r"(fourth), \
        [b] "+r"(b), [count] "+r"(count), [rows] "+r"(rows)                                                    \
      : [ld] "r"(4 * ld), [step] "r"(4 * a.step), [ldb] "r"(4 * ldb), [columns] "r"(columns)                   \
      : "memory", "cc", "x12", REGARD_VECTORS)
// clang-format on

struct Isa : NeonPairsIsa<Isa> {
  static constexpr bool kOuterProducts = true;

  // to[i · ld + j] = Σ_k a[i][k] · b[k · ldb + j] for rows × columns, at most 16 of the latter.
  // Each sum has the additions of multiply_tiles in their order, and so its bits.
  template <class Elements>
  REGARD_NOINLINE void outer_products(float* to, int64_t ld, const Panels& a, int64_t rows, const float* b, int64_t ldb,
                                      int64_t columns, int64_t count) {
    alignas(64) char tiles[kTileBytes];
    const bool used = in_use();
    if (used) move_tiles<false>(tiles);
    for (int64_t n = 0; n < rows; n += 64) {
      const int64_t some = rows - n < 64 ? rows - n : 64;
      multiply<Elements>(to + n * ld, ld, {a.at + n / 16 * a.panel, a.panel, a.step}, some, b, ldb, columns, count);
    }
    if (used) move_tiles<true>(tiles);
  }

 private:
  static constexpr int64_t kTileBytes = 64 * 64;

  // Whether a function that called this one, however far away, has numbers in the tiles, and expects them there later.
  REGARD_INLINE bool in_use() {
    uint64_t state;
    __asm__ volatile("mrs %0, s3_3_c4_c2_2" : "=r"(state));  // SVCR, of which bit 1 says whether there are tiles
    return state & 2;
  }

  // Loads all tiles from memory, or stores them.
  template <bool loads>
  static void move_tiles(char* at) {
    if (loads) __asm__ volatile(".arch_extension sme\nsmstart za" ::: "memory");
    for (int64_t n = 0; n < 64; ++n, at += 64)
      if (loads)
        __asm__ volatile(".arch_extension sme\nmov w12, %w0\nldr za[w12, 0], [%1]" ::"r"(n), "r"(at) : "memory", "x12");
      else
        __asm__ volatile(".arch_extension sme\nmov w12, %w0\nstr za[w12, 0], [%1]" ::"r"(n), "r"(at) : "memory", "x12");
  }

  // Of up to 64 rows.
  template <class Elements>
  REGARD_INLINE void multiply(float* to, int64_t ld, const Panels& a, int64_t rows, const float* b, int64_t ldb,
                              int64_t columns, int64_t count) {
    const float *first = a.at, *second = first + a.panel, *third = second + a.panel, *fourth = third + a.panel;
    if constexpr (Elements::pairs) REGARD_OUTER_PRODUCTS("bfmopa", "h");
    else REGARD_OUTER_PRODUCTS("fmopa", "s");
  }
};

#undef REGARD_VECTORS
#undef REGARD_ADD_TO_TILE
#undef REGARD_STORE_TILE
#undef REGARD_OUTER_PRODUCTS

}  // namespace regard
