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

// New rows t (*lead, n, width), and where they go: rows of int8 numbers (*lead, capacity, width) and of float scales
// (*lead, capacity, 1); in pages, whose first axis is that of the pages.
struct RoundedRows {
  DLTensor t, numbers, scales;

  bool read(PyObject* const* given) {
    return regard::read(given[0], t, true) && regard::read(given[1], numbers, true) &&
           regard::read(given[2], scales, true);
  }

  // Whether they are rows that can be rounded there, and so few that torch's operations would take longer. first: the
  // first axis of which numbers and scales have as many as t.
  bool fit(int first) const {
    constexpr int64_t kMostNumbers = 1 << 14;
    const bool known =
        (t.dtype.code == kDLFloat && t.dtype.bits == 32) || (t.dtype.code == kDLBfloat && t.dtype.bits == 16);
    if (!known || t.ndim < 2 || numbers.ndim != t.ndim || scales.ndim != t.ndim) return false;
    const int last = t.ndim - 1;
    if (dtype_of(numbers.dtype) != REGARD_I8 || dtype_of(scales.dtype) != REGARD_F32 || scales.shape[last] != 1 ||
        t.strides[last] != 1 || numbers.strides[last] != 1)
      return false;
    int64_t count = 1;
    for (int n = 0; n <= last; ++n) {
      if (t.shape[n] < 1 || t.shape[n] > kMostNumbers) return false;
      count *= t.shape[n];
      if (count > kMostNumbers) return false;
      if (n < first || n == last - 1) continue;
      if (numbers.shape[n] != t.shape[n] || (n < last && scales.shape[n] != t.shape[n])) return false;
    }
    return true;
  }

  // Whether there are rows for them from `row` on.
  bool have_room(int64_t row) const {
    return row >= 0 && row <= rows_of(numbers) - rows_of(t) && row <= rows_of(scales) - rows_of(t);
  }

  // Rounds what fits from axis 0 on, to the rows from `row` on.
  void round(int64_t row) const {
    const int rows = t.ndim - 2;
    round_axis(0, address(t), (int8_t*)address(numbers) + row * numbers.strides[rows],
               (float*)address(scales) + row * scales.strides[rows]);
  }

  // Rounds row n of sequence b to row `to` of a page: t (batch, heads, n, width).
  void round_to_page(int64_t b, int64_t n, int64_t page, int64_t to) const {
    const char* from = address(t) + (b * t.strides[0] + n * t.strides[2]) * (t.dtype.bits / 8);
    int8_t* row = (int8_t*)address(numbers) + page * numbers.strides[0] + to * numbers.strides[2];
    float* scale = (float*)address(scales) + page * scales.strides[0] + to * scales.strides[2];
    for (int64_t head = 0; head < t.shape[1]; ++head) {
      *scale = round_row(from, t.shape[3], t.dtype.bits == 16, row);
      from += t.strides[1] * (t.dtype.bits / 8);
      row += numbers.strides[1];
      scale += scales.strides[1];
    }
  }

 private:
  void round_axis(int axis, const char* from, int8_t* to, float* scale) const {
    if (axis == t.ndim - 1) {
      *scale = round_row(from, t.shape[axis], t.dtype.bits == 16, to);
      return;
    }
    for (int64_t n = 0; n < t.shape[axis]; ++n) {
      round_axis(axis + 1, from, to, scale);
      from += t.strides[axis] * (t.dtype.bits / 8);
      to += numbers.strides[axis];
      scale += scales.strides[axis];
    }
  }
};

}  // namespace regard
