// The few queries of each of several heads that share their keys, as rows of one head: a block for each head would leave lanes empty.
#pragma once
#include "attention/decode.h"
#include "core/work.h"

namespace regard {

// Whether the heads of a group differ only in their queries.
static bool heads_alike(const regard_call& c) {
  return !Modifiers::differ_by_head(c) && !c.allowed.data && !c.tiles.data && !Documents::used(c) && !c.threshold && !c.sink.data;
}

// Whether a call is packed: where a group has many rows, and each head alone would be a block with few lanes filled. With few (batch
// element, key head) pairs it is not, since only split keys (decode.h) give work to many threads.
static bool packs_gqa(const regard_call& c) {
  constexpr int64_t kMinRows = 16, kMinPairs = 8;
  if (c.heads == c.key_heads || !heads_alike(c)) return false;
  if (has_few_rows(c)) return few_rows(c) >= kMinRows && elements(c) * c.key_heads >= kMinPairs;
  return few_rows(c) > kMaxRows && c.nq <= W / 2;
}

struct GqaPacking {
  const regard_call& c;

  int64_t group() const { return c.heads / c.key_heads; }

  // A contiguous tensor (batch, key head, row of the group, width).
  regard_tensor tensor(void* data, int64_t width) const {
    regard_tensor t{};
    t.data = data, t.col = 1, t.row = width, t.head = few_rows(c) * width;
    int64_t step = c.key_heads * t.head;
    for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) t.batch[n] = step, step *= c.batch[n];
    return t;
  }

  // Copies rows of heads to rows of groups, or back.
  template <class T>
  void copy(const regard_tensor& heads, const regard_tensor& groups, int64_t width, bool back) const {
    for (int64_t b = 0; b < elements(c); ++b) {
      const Place p = place_in_batch(c, b);
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t i = 0; i < c.nq; ++i) {
          T* one = at<T>(heads, p, h) + i * heads.row;
          T* other = at<T>(groups, p, h / group()) + (h % group() * c.nq + i) * groups.row;
          for (int64_t n = 0; n < width; ++n)
            if (back) one[n * heads.col] = other[n];
            else other[n] = one[n * heads.col];
        }
    }
  }

  void copy(const regard_tensor& heads, const regard_tensor& groups, int dtype, int64_t width, bool back) const {
    if (dtype == REGARD_F32) copy<float>(heads, groups, width, back);
    else copy<uint16_t>(heads, groups, width, back);
  }
};

// Calls run with the same call, packed, and unpacks its results; returns 1 if memory ran out.
template <class Run>
static int32_t forward_packed(const regard_call& c, const Run& run) {
  const GqaPacking packing{c};
  const int64_t rows = elements(c) * c.heads * c.nq;
  float* memory = (float*)malloc((size_t)(rows * (c.dk + c.dv + 5)) * sizeof(float));
  if (!memory) return 1;
  float* next = memory;
  const auto take = [&](int64_t width) { return next += rows * width, packing.tensor(next - rows * width, width); };
  regard_call packed = c;
  packed.heads = c.key_heads, packed.nq = few_rows(c);
  packed.q = take(c.dk), packed.out = take(c.dv);
  packing.copy(c.q, packed.q, c.dtype, c.dk, false);
  if (c.start.data) {
    packed.start = take(1), packed.stop = take(1);
    packing.copy<int32_t>(c.start, packed.start, 1, false);
    packing.copy<int32_t>(c.stop, packed.stop, 1, false);
  }
  if (c.lse.data) packed.lse = take(1);
  if (c.row_stats.data) packed.row_stats = take(2);
  const int32_t failed = run(packed);
  if (!failed) {
    packing.copy(c.out, packed.out, c.out_dtype, c.dv, true);
    if (c.lse.data) packing.copy<float>(c.lse, packed.lse, 1, true);
    if (c.row_stats.data) packing.copy<float>(c.row_stats, packed.row_stats, 2, true);
  }
  free(memory);
  return failed;
}

}  // namespace regard
