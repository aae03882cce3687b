// Keys and values in pages of a pool: key j of a batch element is row j % page_size of page block_table[j / page_size].
// The axes of k and v are then (page, head, row of a page, column), and batch[REGARD_BATCH_AXES - 1] is the stride from
// page to page.
#pragma once
#include <stddef.h>

#include "core/check.h"

namespace regard {

REGARD_INLINE const int32_t* table_of(const regard_call& c, const Place& p) {
  return c.block_table + offset(c.block_table_batch, p);
}

// Row `row` of a page of keys (of values).
REGARD_INLINE const char* page_row(const regard_tensor& t, int64_t head, int64_t page, int64_t row) {
  return (const char*)advance(t.data, page * t.batch[REGARD_BATCH_AXES - 1] + head * t.head + row * t.row,
                              (int)t.dtype);
}

// Whether keys [j, j + count) lie row after row: not in several pages.
static bool in_one_piece(const regard_call& c, int64_t j, int64_t count) {
  return !c.block_table || (j + count - 1) / c.page_size == j / c.page_size;
}

// Where key (value) j of a head lies, in a page or not.
static const void* row_of(const regard_call& c, const regard_tensor& t, const Place& p, int64_t head, int64_t j) {
  if (!c.block_table) return advance(t.data, offset(t, p, head) + j * t.row, (int)t.dtype);
  return page_row(t, head, table_of(c, p)[j / c.page_size], j % c.page_size);
}

// Calls run(row, n, count) for each run of keys of [j, j + count) that lie in one page: `row` is where key n of them
// lies.
template <class Run>
REGARD_INLINE void each_run(const regard_call& c, const regard_tensor& t, const Place& p, int64_t head, int64_t j,
                            int64_t count, Run run) {
  const int32_t* table = table_of(c, p) + j / c.page_size;
  int64_t first = j % c.page_size;
  for (int64_t n = 0; n < count; ++table) {
    const int64_t left = c.page_size - first, some = left < count - n ? left : count - n;
    run(page_row(t, head, *table, first), n, some);
    n += some;
    first = 0;
  }
}

// Copies keys (values) [j, j + count) of a head from their pages to rows without gaps.
static void copy_from_pages(char* to, const regard_call& c, const regard_tensor& t, const Place& p, int64_t head,
                            int64_t j, int64_t count, int64_t width) {
  const int64_t size = size_of((int)t.dtype);
  each_run(c, t, p, head, j, count, [&](const char* from, int64_t n, int64_t some) {
    char* at = to + n * width * size;
    for (int64_t i = 0; i < some; ++i, from += t.row * size, at += width * size) {
      if (t.col == 1) __builtin_memcpy(at, from, (size_t)(width * size));
      else
        for (int64_t f = 0; f < width; ++f) __builtin_memcpy(at + f * size, from + f * t.col * size, (size_t)size);
    }
  });
}

// Copies the scales of keys (values) [j, j + count) of a head.
static void read_scales(const regard_call& c, const regard_tensor& scales, const Place& p, int64_t head, int64_t j,
                        int64_t count, float* to) {
  const auto copy = [&](const void* from, int64_t n, int64_t some) {
    if (scales.row == 1) __builtin_memcpy(to + n, from, (size_t)some * sizeof(float));
    else
      for (int64_t i = 0; i < some; ++i) to[n + i] = ((const float*)from)[i * scales.row];
  };
  if (c.block_table) each_run(c, scales, p, head, j, count, copy);
  else copy(row_of(c, scales, p, head, j), 0, count);
}

// Whether every page of keys that some query can see is one of the pool.
static int32_t check_pages(const regard_call& c) {
  if (!c.block_table) return REGARD_DONE;
  if (c.page_size < 1 || c.pages < 1 || c.pages > INT32_MAX) return REGARD_BAD_ARGUMENT;
  const bool right = each_element(c, c.block_table_batch, c.key_counts_batch, [&](const Place& p) {
    const int64_t keys = c.key_counts ? c.key_counts[offset(c.key_counts_batch, p)] : c.nk;
    if (keys < 1) return true;
    const Range page = range_of(table_of(c, p), (keys - 1) / c.page_size + 1);
    return page.least >= 0 && page.most < c.pages;
  });
  return right ? REGARD_DONE : REGARD_BAD_PAGE;
}

}  // namespace regard
