// Packing: operands as the microkernel reads them (transposed, widened to float, interleaved in pairs), and whether
// they are finite.
#pragma once
#include "abi/structs.h"
#include "core/micro.h"

namespace regard {

REGARD_INLINE float load_one(const void* p, int64_t n, int dtype) {
  if (dtype == REGARD_F32) return ((const float*)p)[n];
  if (dtype == REGARD_I8) return ((const int8_t*)p)[n];
  uint16_t h = ((const uint16_t*)p)[n];
  return dtype == REGARD_BF16 ? bf16_to_float(h) : fp16_to_float(h);
}

REGARD_INLINE vf load_some(const void* p, int64_t n, int dtype) {
  if (dtype == REGARD_F32) return load((const float*)p + n);
  if (dtype == REGARD_I8) return load_int8((const int8_t*)p + n);
  const uint16_t* h = (const uint16_t*)p + n;
  return dtype == REGARD_BF16 ? load_bf16(h) : load_fp16(h);
}

// W elements from n on, `step` elements from one to the next, as floats; 0 for those past `valid`.
REGARD_INLINE vf floats(const void* p, int64_t n, int64_t step, int64_t valid, int dtype) {
  if (step == 1 && valid >= W) return load_some(p, n, dtype);
  float x[W];
  for (int m = 0; m < W; ++m) x[m] = m < valid ? load_one(p, n + m * step, dtype) : 0.0f;
  return load(x);
}

// Stores the first `count` of W numbers, `col` elements from one to the next.
REGARD_INLINE void store_some(void* p, int dtype, int64_t col, int64_t count, vf x) {
  const bool whole = count == W && col == 1;
  if (dtype == REGARD_F32) {
    if (whole) return store((float*)p, x);
    for (int64_t n = 0; n < count; ++n) ((float*)p)[n * col] = x[n];
    return;
  }
  uint16_t some[W], *at = whole ? (uint16_t*)p : some;
  if (dtype == REGARD_BF16) store_bf16(at, x);
  else store_fp16(at, x);
  for (int64_t n = 0; !whole && n < count; ++n) ((uint16_t*)p)[n * col] = some[n];
}

// The dtype of keys and values.
REGARD_INLINE int kv_dtype(const regard_call& c) { return c.k_scales.data ? REGARD_I8 : c.dtype; }

// The dtype of the numbers that are multiplied: int8 times its scale is float.
REGARD_INLINE int product_dtype(const regard_call& c) { return c.k_scales.data ? REGARD_F32 : c.dtype; }

// Whether queries and keys are read in place as pairs of neighbouring features.
[[maybe_unused]] static bool reads_pairs(const regard_call& c) {
  return Isa::kPairs && kv_dtype(c) == REGARD_BF16 && c.dk % 2 == 0 && c.q.col == 1 && c.k.col == 1 && c.k.row % 2 == 0;
}

template <int half>
struct Zipped {
  static constexpr int lane(int n) { return n / 2 + half * W / 2 + n % 2 * W; }
};

// Where the instruction set wants them so, zips rows 2n and 2n + 1 of `rows` rows of pairs, the right operand of a
// product: a vector then holds two columns of four elements each. A last row without a partner stays as it is.
template <int V>
static void zip_pairs(float* b, int64_t ld, int64_t rows) {
  if constexpr (Isa::kZippedPairs)
    for (; rows >= 2; rows -= 2, b += 2 * ld)
      for (int v = 0; v < V; ++v) {
        const vf even = load(b + v * W), odd = load(b + ld + v * W);
        store(b + v * W, shuffle<Zipped<0>>(even, odd));
        store(b + ld + v * W, shuffle<Zipped<1>>(even, odd));
      }
}

// Transposes rows × cols pairs of bfloat16 at src to dst[cols][ld], without conversion, and zips them; missing rows are
// 0.
template <int V>
static void pack_pairs(float* dst, int64_t ld, const uint16_t* src, int64_t row, int64_t rows, int64_t cols) {
  int64_t c = 0;
  for (; c + W <= cols; c += W)
    for (int v = 0; v < V; ++v) {
      vf r[W];
      for (int n = 0; n < W; ++n)
        r[n] = v * W + n < rows ? load((const float*)(src + (v * W + n) * row + 2 * c)) : vf{};
      transpose(r);
      for (int n = 0; n < W; ++n) store(dst + (c + n) * ld + v * W, r[n]);
    }
  for (; c < cols; ++c)
    for (int64_t i = 0; i < V * W; ++i) {
      uint32_t pair = 0;
      if (i < rows) __builtin_memcpy(&pair, src + i * row + 2 * c, 4);
      __builtin_memcpy(dst + c * ld + i, &pair, 4);
    }
  zip_pairs<V>(dst, ld, cols);
}

// Transposes rows × cols elements at src (strides row, col) to floats dst[cols][ld], and applies `map` to each vector;
// missing rows are 0.
template <int V, class Map>
static void pack_by(float* dst, int64_t ld, const void* src, int dtype, int64_t row, int64_t col, int64_t rows,
                    int64_t cols, const Map& map) {
  const int64_t whole = col == 1 ? cols / W * W : 0;
  // rows a power of two apart map to few sets of the cache: W of them at a time, along whole lines
  for (int v = 0; v < V; ++v)
    for (int64_t c = 0; c < whole; c += W) {
      vf r[W];
      for (int n = 0; n < W; ++n) {
        int64_t i = v * W + n;
        r[n] = i < rows ? load_some(src, i * row + c, dtype) : vf{};
      }
      transpose(r);
      for (int n = 0; n < W; ++n) store(dst + (c + n) * ld + v * W, map(r[n]));
    }
  for (int64_t c = whole; c < cols; ++c)
    for (int v = 0; v < V; ++v) {
      float* to = dst + c * ld + v * W;
      for (int64_t i = 0; i < W; ++i)
        to[i] = v * W + i < rows ? load_one(src, (v * W + i) * row + c * col, dtype) : 0.0f;
      store(to, map(load(to)));
    }
}

// The same, where `map` is to multiply by a factor.
template <int V>
static void pack(float* dst, int64_t ld, const void* src, int dtype, int64_t row, int64_t col, int64_t rows,
                 int64_t cols, float factor) {
  pack_by<V>(dst, ld, src, dtype, row, col, rows, cols,
             [factor](vf x) __attribute__((always_inline)) { return x * splat(factor); });
}

// Converts rows × cols elements to contiguous floats.
static void widen(float* dst, const void* src, int dtype, int64_t row, int64_t col, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
    if (col == 1)
      for (; c + W <= cols; c += W) store(dst + r * cols + c, load_some(src, r * row + c, dtype));
    for (; c < cols; ++c) dst[r * cols + c] = load_one(src, r * row + c * col, dtype);
  }
}

// Multiplies rows × cols of int8 by a scale each, to contiguous floats.
static void widen_scaled(float* dst, const void* src, const float* scales, int64_t row, int64_t col, int64_t rows,
                         int64_t cols) {
  for (int64_t r = 0; r < rows; ++r, dst += cols) {
    const int8_t* from = (const int8_t*)src + r * row;
    int64_t c = 0;
    if (col == 1)
      for (; c + W <= cols; c += W) store(dst + c, load_int8(from + c) * splat(scales[r]));
    for (; c < cols; ++c) dst[c] = (float)from[c * col] * scales[r];
  }
}

// Interleaves values (count, cols) of bfloat16 to dst[(count + 1) / 2][cols]: pairs of neighbouring keys; after an odd
// count, 0.
static void interleave(float* dst, const uint16_t* src, int64_t row, int64_t col, int64_t count, int64_t cols) {
  for (int64_t n = 0; n < count; n += 2) {
    const uint16_t *a = src + n * row, *b = a + row;
    uint32_t* to = (uint32_t*)dst + n / 2 * cols;
    int64_t f = 0;
    bool alone = n + 1 == count;
    if (col == 1)
      for (; f + W <= cols; f += W) {
        vu low = Isa::widen_uint16(*(const vh_any*)(a + f));
        vu high = alone ? vu{} : Isa::widen_uint16(*(const vh_any*)(b + f));
        *(vu_any*)(to + f) = low | (high << 16);
      }
    for (; f < cols; ++f) to[f] = a[f * col] | (alone ? 0u : (uint32_t)b[f * col] << 16);
  }
}

static bool all_finite_bf16(const uint16_t* x, int64_t row, int64_t col, int64_t count, int64_t cols) {
  for (int64_t n = 0; n < count; ++n)
    for (int64_t f = 0; f < cols; ++f)
      if ((x[n * row + f * col] & 0x7f80) == 0x7f80) return false;
  return true;
}

REGARD_INLINE bool all_finite(const float* x, int64_t rs, int64_t cs, int64_t features, int64_t count) {
  float sum = 0;  // x - x is 0 for what is finite and NaN for what is not
  if (rs == 1) {
    vf total = vf{};
    for (int64_t n = 0; n < count; ++n) {
      const float* row = x + n * cs;
      int64_t f = 0;
      for (; f + W <= features; f += W) total += load(row + f) - load(row + f);
      for (; f < features; ++f) sum += row[f] - row[f];
    }
    for (int n = 0; n < W; ++n) sum += total[n];
  } else {
    for (int64_t n = 0; n < count; ++n)
      for (int64_t f = 0; f < features; ++f) sum += x[f * rs + n * cs] - x[f * rs + n * cs];
  }
  return sum == 0;
}

}  // namespace regard
