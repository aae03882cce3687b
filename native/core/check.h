// What an entry point looks at before it computes anything: that no size, code or index leads beside what the caller has. How large
// the caller's tensors are is not known here: addresses and strides are trusted.
#pragma once
#include "core/block.h"
#include "abi/structs.h"

namespace regard {

constexpr int64_t kMostKeys = (int64_t)1 << 31;  // queries, keys, and offsets: lanes count them in 32 bits

REGARD_INLINE bool known_dtype(int32_t dtype) { return dtype >= REGARD_F32 && dtype <= REGARD_F16; }
REGARD_INLINE bool both_or_none(const void* a, const void* b) { return !a == !b; }

// Whether sizes are possible, and products of them are 64-bit numbers.
static bool right_sizes(const regard_call& c) {
  double pairs = 1;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) {
    if (c.batch[n] < 1) return false;
    pairs *= (double)c.batch[n];
  }
  if (c.heads < 1 || c.key_heads < 1 || c.heads % c.key_heads) return false;
  if (c.nq < 1 || c.nq >= kMostKeys || c.nk < 1 || c.nk >= kMostKeys || c.dk < 0 || c.dv < 0) return false;
  if (c.offsets_count < 0 || c.offsets_count >= kMostKeys) return false;
  const double numbers = (double)c.nq + (double)c.nk + (double)c.offsets_count, width = (double)c.dk + (double)c.dv;
  return pairs * (double)c.heads * (numbers + 1024) * (width + 1024) < 0x1p58;
}

// Whether what the steps after the similarity read is there.
static bool right_steps(const regard_call& c) {
  if (c.caps_stride < 0 || c.caps_stride > 1 || c.slopes_stride < 0 || c.slopes_stride > 1) return false;
  if (!both_or_none(c.points_of_q, c.points_of_k) || !both_or_none(c.q_at, c.k_at) || !both_or_none(c.q_cell, c.k_cell)) return false;
  if (c.points_of_q && (c.dims < 0 || c.dims > REGARD_DIMS)) return false;
  if (c.slopes && !c.points_of_q && !c.q_at) return false;
  if (c.threshold && !c.q_at) return false;
  if (!c.offsets) return true;
  return (c.offsets_stride == 0 || c.offsets_stride >= c.offsets_count) && (c.q_cell || c.offsets_count >= c.nq + c.nk - 1);
}

// The places along an axis that are not the first one again.
REGARD_INLINE int64_t distinct(int64_t size, int64_t stride) { return stride == 0 ? 1 : size; }

// body(place) for each batch element, but not again where strides a and b lead to the same numbers. False as soon as it says so.
template <class Body>
static bool each_element(const regard_call& c, const int64_t* a, const int64_t* b, const Body& body) {
  int64_t size[REGARD_BATCH_AXES], count = 1;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) size[n] = distinct(c.batch[n], a[n] | b[n]), count *= size[n];
  for (int64_t element = 0; element < count; ++element) {
    Place p{};
    int64_t rest = element;
    for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) p.at[n] = rest % size[n], rest /= size[n];
    if (!body(p)) return false;
  }
  return true;
}

// Whether every query's interval of keys that is not empty lies within the keys.
static bool right_intervals(const regard_call& c) {
  const int64_t heads = distinct(c.heads, c.start.head | c.stop.head), rows = distinct(c.nq, c.start.row | c.stop.row);
  const int32_t nk = (int32_t)c.nk;
  return each_element(c, c.start.batch, c.stop.batch, [&](const Place& p) {
    for (int64_t h = 0; h < heads; ++h) {
      const int32_t *start = at<int32_t>(c.start, p, h), *stop = at<int32_t>(c.stop, p, h);
      bool wrong = false;
      for (int64_t i = 0; i < rows; ++i) {
        const int32_t first = start[i * c.start.row], last = stop[i * c.stop.row];
        wrong |= (first < last) & ((first < 0) | (last > nk));
      }
      if (wrong) return false;
    }
    return true;
  });
}

// Whether every tile is hidden (-1), seen (-2) or has bits.
static bool right_tiles(const regard_call& c) {
  const int64_t heads = distinct(c.heads, c.tiles.head);
  const int64_t rows = distinct((c.nq + kQueries - 1) / kQueries, c.tiles.row), cols = distinct((c.nk + kKeys - 1) / kKeys, c.tiles.col);
  return each_element(c, c.tiles.batch, c.tiles.batch, [&](const Place& p) {
    bool wrong = false;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t n = 0; n < rows; ++n)
        for (int64_t m = 0; m < cols; ++m) {
          const int32_t which = at<int32_t>(c.tiles, p, h)[n * c.tiles.row + m * c.tiles.col];
          wrong |= (which < -2) | (which >= c.bits_count);
        }
    return !wrong;
  });
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
    low = here < low ? here : low, high = here > high ? here : high;
  }
  Range r{x[0], x[0]};
  for (int m = 0; m < W; ++m) r.least = low[m] < r.least ? low[m] : r.least, r.most = high[m] > r.most ? high[m] : r.most;
  for (; n < count; ++n) r.least = x[n] < r.least ? x[n] : r.least, r.most = x[n] > r.most ? x[n] : r.most;
  return r;
}

// Whether the table of offsets has every difference of a query's cell and a key's.
static bool right_cells(const regard_call& c) {
  return each_element(c, c.q_cell_batch, c.k_cell_batch, [&](const Place& p) {
    const Range q = range_of(c.q_cell + offset(c.q_cell_batch, p), c.nq), k = range_of(c.k_cell + offset(c.k_cell_batch, p), c.nk);
    return (int64_t)q.least - k.most >= 0 && (int64_t)q.most - k.least < c.offsets_count;
  });
}

// 0, or what is wrong with a call. Values and results are looked at where dv is not 0.
static int32_t check_call(const regard_call& c) {
  if (!right_sizes(c) || !right_steps(c)) return REGARD_BAD_ARGUMENT;
  if (!known_dtype(c.dtype) || !known_dtype(c.out_dtype) || (c.bias.data && !known_dtype(c.bias_dtype))) return REGARD_BAD_ARGUMENT;
  if (c.dk && (!c.q.data || !c.k.data)) return REGARD_BAD_ARGUMENT;
  if (c.dv && (!c.v.data || !c.out.data)) return REGARD_BAD_ARGUMENT;
  if (!both_or_none(c.start.data, c.stop.data)) return REGARD_BAD_ARGUMENT;
  if (c.tiles.data && (c.bits_count < 0 || (c.bits_count && !c.bits))) return REGARD_BAD_ARGUMENT;
  if (c.start.data && !right_intervals(c)) return REGARD_BAD_INTERVAL;
  if (c.tiles.data && !right_tiles(c)) return REGARD_BAD_TILE;
  return c.offsets && c.q_cell && !right_cells(c) ? REGARD_BAD_CELL : REGARD_DONE;
}

}  // namespace regard
