// Functions that check the members of a call: see attention/check_call.h.
#pragma once
#include "core/place.h"

namespace regard {

REGARD_INLINE bool known_dtype(int32_t dtype) { return dtype >= REGARD_F32 && dtype <= REGARD_F16; }

// Whether a tensor (batch..., head, row, column) of these sizes and this dtype is what an operand leads to; or the call
// has no such operand, which is then all zero. An operand that is declared and has no address is wrong.
static bool fits(const regard_tensor& t, int64_t dtype, const int64_t* batch, int64_t heads, int64_t rows,
                 int64_t cols) {
  if (!t.data) return t.size == 0;
  bool empty = false, descends = false;
  double last = 0;  // where the last element lies: exact as far as memory reaches, and beyond it only grows
  const auto add = [&](int64_t size, int64_t stride) {
    empty |= size < 1;
    if (size < 2) return;
    descends |= stride < 0;
    last += (double)(size - 1) * (double)stride;
  };
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) add(batch[n], t.batch[n]);
  add(heads, t.head);
  add(rows, t.row);
  add(cols, t.col);
  return empty || (t.dtype == dtype && !descends && last < (double)t.size);
}

REGARD_INLINE bool both_or_none(const void* a, const void* b) { return !a == !b; }

// How many different places an axis has: 1 where its stride is 0.
REGARD_INLINE int64_t distinct(int64_t size, int64_t stride) { return stride == 0 ? 1 : size; }

// Calls body(place) for each batch element that strides a and b tell apart; returns false as soon as body does.
template <class Body>
static bool each_element(const regard_call& c, const int64_t* a, const int64_t* b, const Body& body) {
  int64_t size[REGARD_BATCH_AXES], count = 1;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) {
    size[n] = distinct(c.batch[n], a[n] | b[n]);
    count *= size[n];
  }
  for (int64_t element = 0; element < count; ++element) {
    Place p{};
    int64_t rest = element;
    for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) {
      p.at[n] = rest % size[n];
      rest /= size[n];
    }
    if (!body(p)) return false;
  }
  return true;
}

// The least and the greatest of some numbers.
struct Range {
  int32_t least, most;
};

static Range range_of(const int32_t* x, int64_t count) {
  vi low = splat_int(x[0]), high = low;
  int64_t n = 0;
  for (; n + W <= count; n += W) {
    const vi here = *(const vi_any*)(x + n);
    low = here < low ? here : low;
    high = here > high ? here : high;
  }
  Range r{x[0], x[0]};
  for (int m = 0; m < W; ++m) {
    r.least = low[m] < r.least ? low[m] : r.least;
    r.most = high[m] > r.most ? high[m] : r.most;
  }
  for (; n < count; ++n) {
    r.least = x[n] < r.least ? x[n] : r.least;
    r.most = x[n] > r.most ? x[n] : r.most;
  }
  return r;
}

}  // namespace regard
