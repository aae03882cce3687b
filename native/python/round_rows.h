// A few new rows rounded to int8, with a scale each: what src/regard/core/int8_rows.py defines as `rounded`, to the
// bit.
#pragma once
#include "python/rows.h"

namespace regard {

// One number of a row of float32 or bfloat16, as float.
static float number_at(const char* row, int64_t n, bool half) {
  if (!half) return ((const float*)row)[n];
  const uint32_t bits = (uint32_t)((const uint16_t*)row)[n] << 16;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// Rounds a row to `to`; returns its scale.
static float round_row(const char* row, int64_t width, bool half, int8_t* to) {
  constexpr float kSteps = 127,
                  kMagic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to the nearest integer, half to even
  float most = 0;
  bool finite = true;
  for (int64_t n = 0; n < width; ++n) {
    const float x = __builtin_fabsf(number_at(row, n, half));
    finite &= x < __builtin_inff();
    most = x > most ? x : most;
  }
  const float scale = finite ? most / kSteps : __builtin_nanf("");
  if (!(scale > 0)) {
    for (int64_t n = 0; n < width; ++n) to[n] = 0;
    return scale;
  }
  for (int64_t n = 0; n < width; ++n) {
    const float y = number_at(row, n, half) / scale, whole = (y + kMagic) - kMagic;
    to[n] = (int8_t)(whole > kSteps ? kSteps : whole < -kSteps ? -kSteps : whole);
  }
  return scale;
}

// New rows t (*lead, n, width), and contiguous tensors of the same rows: int8 numbers, and float scales (*lead, n, 1).
struct RoundedRows {
  DLTensor t, numbers, scales;

  // Whether they fit, and are so few that torch's operations would take longer.
  bool fit() const {
    constexpr int64_t kMostNumbers = 1 << 14;
    const bool known =
        (t.dtype.code == kDLFloat && t.dtype.bits == 32) || (t.dtype.code == kDLBfloat && t.dtype.bits == 16);
    if (!known || t.ndim < 2 || numbers.ndim != t.ndim || scales.ndim != t.ndim || t.strides[t.ndim - 1] != 1)
      return false;
    if (dtype_of(numbers.dtype) != REGARD_I8 || dtype_of(scales.dtype) != REGARD_F32 || scales.shape[t.ndim - 1] != 1)
      return false;
    int64_t count = 1;
    for (int n = t.ndim - 1; n >= 0; --n) {
      const bool last = n == t.ndim - 1;
      if (t.shape[n] < 1 || t.shape[n] > kMostNumbers || numbers.shape[n] != t.shape[n]) return false;
      if (!last && scales.shape[n] != t.shape[n]) return false;
      if (numbers.shape[n] > 1 && numbers.strides[n] != count) return false;
      if (!last && scales.shape[n] > 1 && scales.strides[n] != count / t.shape[t.ndim - 1]) return false;
      count *= t.shape[n];
      if (count > kMostNumbers) return false;
    }
    return true;
  }

  void round() const {
    int8_t* to = (int8_t*)address(numbers);
    float* scale = (float*)address(scales);
    round_axis(0, address(t), to, scale);
  }

 private:
  void round_axis(int axis, const char* from, int8_t*& to, float*& scale) const {
    const int64_t width = t.shape[t.ndim - 1];
    if (axis == t.ndim - 1) {
      *scale++ = round_row(from, width, t.dtype.bits == 16, to);
      to += width;
      return;
    }
    for (int64_t n = 0; n < t.shape[axis]; ++n, from += t.strides[axis] * (t.dtype.bits / 8))
      round_axis(axis + 1, from, to, scale);
  }
};

}  // namespace regard
