// A few new rows, copied to a buffer that has room for more: the keys and values of a decoding step.
#pragma once
#include <stddef.h>

#include "python/objects.h"

namespace regard {

static int64_t rows_of(const DLTensor& t) { return t.shape[t.ndim - 2]; }

// Whether the numbers of t are copied byte by byte to `to`, and are so few that the time to start threads would be
// longer.
static bool few_of_same_dtype(const DLTensor& to, const DLTensor& t) {
  constexpr int64_t kMostBytes = 1 << 16;
  constexpr uint8_t kComplex = 5;  // may be conjugated, which DLPack does not tell
  if (t.dtype.code != to.dtype.code || t.dtype.bits != to.dtype.bits || t.dtype.code == kComplex || t.dtype.bits % 8)
    return false;
  int64_t bytes = t.dtype.bits / 8;
  for (int n = 0; n < t.ndim; ++n) {
    if (t.shape[n] > kMostBytes) return false;
    bytes = bytes * t.shape[n] > kMostBytes ? kMostBytes + 1 : bytes * t.shape[n];
  }
  return bytes <= kMostBytes;
}

// Whether t (*lead, n, width) can be copied to the rows from `row` on of `to` (*lead, capacity, width).
static bool fits(const DLTensor& to, const DLTensor& t, int64_t row) {
  if (t.ndim != to.ndim || t.ndim < 2 || !few_of_same_dtype(to, t)) return false;
  for (int n = 0; n < t.ndim; ++n)
    if (n != t.ndim - 2 && t.shape[n] != to.shape[n]) return false;
  return row >= 0 && row <= rows_of(to) - rows_of(t);
}

// The rows of one axis and those behind it; at: addresses, which advance along it.
static void copy_axis(const DLTensor& to, const DLTensor& t, int axis, char* at, const char* from) {
  const int64_t element = t.dtype.bits / 8, size = t.shape[axis];
  if (axis == t.ndim - 1 && t.strides[axis] == 1 && to.strides[axis] == 1) {
    __builtin_memcpy(at, from, (size_t)(size * element));
    return;
  }
  for (int64_t n = 0; n < size; ++n, at += to.strides[axis] * element, from += t.strides[axis] * element)
    if (axis == t.ndim - 1) __builtin_memcpy(at, from, (size_t)element);
    else copy_axis(to, t, axis + 1, at, from);
}

// Copies what fits(to, t, row).
static void copy_rows(const DLTensor& to, const DLTensor& t, int64_t row) {
  if (empty(t)) return;  // it may have no address
  copy_axis(to, t, 0, address(to) + row * to.strides[to.ndim - 2] * (to.dtype.bits / 8), address(t));
}

}  // namespace regard
