// The few queries of several heads, or batch elements, that share their keys, as rows of one head: a block for each
// would leave lanes empty, and read the keys again.
#pragma once
#include "attention/decode.h"
#include "core/parts.h"
#include "core/work.h"

namespace regard {

// Whether heads of a group, and batch elements, differ only in their queries and intervals.
static bool rows_alike(const regard_call& c) {
  return !Modifiers::differ_by_head(c) && !c.allowed.data && !c.tiles.data && !TileMasks::used(c) && !c.threshold &&
         !c.sink.data;
}

// Whether the heads of a group become one: where the group has many rows, and each head alone would be a block with few
// lanes or vectors filled. Where few rows, or rows that the unit would not multiply by themselves, leave too few items
// of work for many threads, they do not: split keys (decode.h), or a block for each head, give more.
static bool packs_heads(const regard_call& c) {
  constexpr int64_t kMinRows = 16, kMinItems = 8;
  constexpr int64_t kMinRowsInt8 = 3 * W;  // measured: fewer took up to 25 % longer as a block, more up to 15 % less
  if (c.heads == c.key_heads || !rows_alike(c)) return false;
  const int64_t rows = few_rows(c), pairs = elements(c) * c.key_heads;
  if (has_few_rows(c)) return rows >= (c.k_scales.data ? kMinRowsInt8 : kMinRows) && pairs >= kMinItems;
  if (matrix_parts(c)) return c.nq < kQueries / 2;  // it multiplies 32 rows at once
  if (rows > kMaxRows && 2 * c.nq <= W) return true;
  if (pairs * ((rows + kQueries - 1) / kQueries) < kMinItems) return false;
  // measured, 2 to 8 heads of a group: by vectors 9 to 24 queries took 50 to 90 % of the time, 31 as long as alone
  return matrix_parts(c, rows) ? c.nq < kQueries / 2 : 8 * c.nq <= 3 * kQueries;
}

// Whether batch elements along an axis have the same keys and values: tensors that were expanded.
static bool shares_keys(const regard_call& c, int axis) {
  if (c.batch[axis] <= 1) return false;
  for (const regard_tensor* t : {&c.k, &c.v, &c.k_scales, &c.v_scales})
    if (t->batch[axis]) return false;
  return true;
}

// Whether batch elements that share their keys become heads of a group: under the same conditions, each alone.
static bool packs_batch(const regard_call& c) {
  bool shared = false;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) shared |= shares_keys(c, n);
  return shared && (has_few_rows(c) || c.nq <= W / 2) && rows_alike(c);
}

// Where rows that share keys lie in a packed call: (batch, key head, row), a row for each sharing batch element, head
// of the group and query, in this order. Axes of batch elements that share keys have size 1, and stride 0.
struct SharedKeys {
  const regard_call& c;
  int64_t batch[REGARD_BATCH_AXES],
      sharing = 1;  // sizes of the packed call's batch axes; how many batch elements share keys

  explicit SharedKeys(const regard_call& call) : c(call) {
    const bool packs = packs_batch(c);
    for (int n = 0; n < REGARD_BATCH_AXES; ++n) {
      const bool shared = packs && shares_keys(c, n);
      batch[n] = shared ? 1 : c.batch[n];
      sharing *= shared ? c.batch[n] : 1;
    }
  }

  int64_t group() const { return c.heads / c.key_heads; }
  int64_t rows() const { return sharing * few_rows(c); }

  // The call with the batch elements that share keys as heads of a group; its tensors are still those of the call.
  regard_call grouped() const {
    regard_call rows = c;
    __builtin_memcpy(rows.batch, batch, sizeof rows.batch);
    rows.heads = c.key_heads * sharing * group();
    return rows;
  }

  // A contiguous tensor.
  regard_tensor tensor(void* data, int64_t width) const {
    regard_tensor t = without_gaps(data, batch, c.key_heads, rows(), width);
    for (int n = 0; n < REGARD_BATCH_AXES; ++n)
      if (batch[n] != c.batch[n]) t.batch[n] = 0;
    return t;
  }

  // The number of a batch element among those that share its keys.
  int64_t place_among(const Place& p) const {
    int64_t place = 0;
    for (int n = 0; n < REGARD_BATCH_AXES; ++n)
      if (batch[n] != c.batch[n]) place = place * c.batch[n] + p.at[n];
    return place;
  }

  // Copies rows of the call to packed rows, or back.
  template <class T>
  void copy(const regard_tensor& own, const regard_tensor& packed, int64_t width, bool back) const {
    for (int64_t b = 0; b < elements(c); ++b) {
      const Place p = place_in_batch(c, b);
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t i = 0; i < c.nq; ++i) {
          T* one = at<T>(own, p, h) + i * own.row;
          T* other = at<T>(packed, p, h / group()) + ((place_among(p) * group() + h % group()) * c.nq + i) * packed.row;
          for (int64_t n = 0; n < width; ++n)
            if (back) one[n * own.col] = other[n];
            else other[n] = one[n * own.col];
        }
    }
  }

  void copy(const regard_tensor& own, const regard_tensor& packed, int dtype, int64_t width, bool back) const {
    if (dtype == REGARD_F32) copy<float>(own, packed, width, back);
    else copy<uint16_t>(own, packed, width, back);
  }
};

// Calls run with the same call, packed, and unpacks its results; returns 1 if memory ran out. The packed rows are those
// of one head where packs_heads says so, else heads of a group.
template <class Run>
static int32_t forward_packed(const regard_call& c, const Run& run) {
  const SharedKeys packing(c);
  const int64_t rows = elements(c) * c.heads * c.nq;
  float* memory = (float*)malloc((size_t)(rows * (c.dk + c.dv + 5)) * sizeof(float));
  if (!memory) return 1;
  float* next = memory;
  const auto take = [&](int64_t width) {
    next += rows * width;
    return packing.tensor(next - rows * width, width);
  };
  regard_call packed = packing.grouped();
  packed.q_at = packed.k_at = nullptr;  // read by what tells rows apart
  packed.q = take(c.dk);
  packed.out = take(c.dv);
  packing.copy(c.q, packed.q, c.dtype, c.dk, false);
  if (c.start.data) {
    packed.start = take(1);
    packed.stop = take(1);
    packing.copy<int32_t>(c.start, packed.start, 1, false);
    packing.copy<int32_t>(c.stop, packed.stop, 1, false);
  }
  if (c.lse.data) packed.lse = take(1);
  if (c.row_stats.data) packed.row_stats = take(2);
  regard_call grouped = packed;
  for (regard_tensor* t : {&grouped.q, &grouped.out, &grouped.start, &grouped.stop, &grouped.lse, &grouped.row_stats})
    t->head = c.nq * t->row;
  packed.heads = c.key_heads;
  packed.nq = packing.rows();
  const int32_t failed = run(packs_heads(grouped) ? packed : grouped);
  if (!failed) {
    packing.copy(c.out, packed.out, c.out_dtype, c.dv, true);
    if (c.lse.data) packing.copy<float>(c.lse, packed.lse, 1, true);
    if (c.row_stats.data) packing.copy<float>(c.row_stats, packed.row_stats, 2, true);
  }
  free(memory);
  return failed;
}

}  // namespace regard
