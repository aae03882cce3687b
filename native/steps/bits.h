// Bits: any mask, one bit for each pair. They come from a tile map, whose tiles are hidden, visible or have bits, or
// from boolean bytes.
#pragma once
#include "core/check.h"
#include "core/rows.h"

namespace regard {

struct Bits {
  // Whether every tile is hidden (-1), visible (-2) or has bits.
  static int32_t check(const regard_call& c) {
    if (!c.tiles.data) return REGARD_DONE;
    if (c.bits_count < 0 || (c.bits_count && !c.bits)) return REGARD_BAD_ARGUMENT;
    const int64_t heads = distinct(c.heads, c.tiles.head);
    const int64_t rows = distinct((c.nq + kQueries - 1) / kQueries, c.tiles.row),
                  cols = distinct((c.nk + kKeys - 1) / kKeys, c.tiles.col);
    const bool right = each_element(c, c.tiles.batch, c.tiles.batch, [&](const Place& p) {
      bool wrong = false;
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t n = 0; n < rows; ++n)
          for (int64_t m = 0; m < cols; ++m) {
            const int32_t which = at<int32_t>(c.tiles, p, h)[n * c.tiles.row + m * c.tiles.col];
            wrong |= (which < -2) | (which >= c.bits_count);
          }
      return !wrong;
    });
    return right ? REGARD_DONE : REGARD_BAD_TILE;
  }

  // The words of a tile whose entry of the map is `which`.
  static const uint64_t* words(const regard_call& c, int64_t which) { return (const uint64_t*)c.bits + which * kKeys; }

  // Boolean bytes [row][key] of a tile as bits [key] of rows (64 at most): eight rows become a byte, bytes become
  // words.
  static void pack(uint64_t* bits, const uint8_t* allowed, int64_t row, int64_t col, int64_t rows, int64_t keys) {
    typedef uint8_t vb __attribute__((vector_size(W), aligned(1), may_alias));
    for (int64_t n = 0; n < keys; ++n) bits[n] = 0;
    for (int64_t r = 0; r < rows; r += 8) {
      const int64_t some = rows - r < 8 ? rows - r : 8;
      const uint8_t* line = allowed + r * row;
      int64_t n = 0;
      if (col == 1)
        for (; n + 2 * W <= keys; n += 2 * W) {
          alignas(2 * W) uint8_t eight[2 * W];
          vb a = {}, z = {};
          for (int64_t i = some - 1; i >= 0; --i) {
            const vb* at = (const vb*)(line + i * row + n);
            a = a + a + ((at[0] != 0) & 1);
            z = z + z + ((at[1] != 0) & 1);
          }
          *(vb*)eight = a;
          *(vb*)(eight + W) = z;
          for (int m = 0; m < 2 * W; ++m) bits[n + m] |= (uint64_t)eight[m] << r;
        }
      for (; n < keys; ++n)
        for (int64_t i = 0; i < some; ++i) bits[n] |= (uint64_t)(line[i * row + n * col] != 0) << (r + i);
    }
  }

  // A score, or -inf in the lanes whose bit is 0.
  REGARD_INLINE vf apply(vf s, uint64_t word) {
    vi bit;
    for (int k = 0; k < W; ++k) bit[k] = 1 << k;
    return (splat_int((int32_t)word) & bit) != 0 ? s : splat(-kInf);
  }

  // Which of W keys the boolean bytes let a row see.
  REGARD_INLINE vi visible(const RowKeys& x) {
    const regard_tensor& allowed = x.f.c.allowed;
    const uint8_t* p = at<uint8_t>(allowed, x.f.p, x.row.h) + x.row.i * allowed.row + x.key() * allowed.col;
    if (allowed.col == 1 && x.valid() >= W) return Isa::widen_int8(*(const vb_any*)p) != 0;
    float flag[W];
    for (int m = 0; m < W; ++m) flag[m] = m < x.valid() ? (float)p[m * allowed.col] : 0.0f;
    return load(flag) != vf{};
  }
};

}  // namespace regard
