// FewRows queries of each of several heads that share their keys, as rows of one head: a block for each head would leave lanes empty.
#pragma once
#include "attention/decode.h"
#include "core/work.h"

namespace regard {

// Whether the heads of a group differ in nothing but their queries.
static bool alike(const regard_call& c) {
  return !Modifiers::differ_by_head(c) && !c.allowed.data && !c.tiles.data && !c.threshold && !c.sink.data;
}

// Whether a call goes this way: where rows of a group are more than a few, or so many that each head alone would be a block with few
// lanes filled. With few pairs of batch element and key head, only splitting the keys makes work for many threads.
static bool packs_gqa(const regard_call& c) {
  constexpr int64_t kLeast = 16, kPairs = 8;
  if (c.heads == c.key_heads || !alike(c)) return false;
  if (has_few_rows(c)) return few_rows(c) >= kLeast && elements(c) * c.key_heads >= kPairs;
  return few_rows(c) > kFew && c.nq <= W / 2;
}

struct Fold {
  const regard_call& c;

  int64_t group() const { return c.heads / c.key_heads; }

  // How a tensor (batch, key head, row of the group, width) lies, without gaps.
  regard_tensor tensor(void* data, int64_t width) const {
    regard_tensor t{};
    t.data = data, t.col = 1, t.row = width, t.head = few_rows(c) * width;
    int64_t step = c.key_heads * t.head;
    for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) t.batch[n] = step, step *= c.batch[n];
    return t;
  }

  // From rows of heads to rows of groups, or back.
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

// run(packed) with the same call, packed; 1 where memory ran out.
template <class Run>
static int32_t forward_packed(const regard_call& c, const Run& run) {
  const Fold fold{c};
  const int64_t rows = elements(c) * c.heads * c.nq;
  float* memory = (float*)malloc((size_t)(rows * (c.dk + c.dv + 5)) * sizeof(float));
  if (!memory) return 1;
  float* next = memory;
  const auto take = [&](int64_t width) { return next += rows * width, fold.tensor(next - rows * width, width); };
  regard_call packed = c;
  packed.heads = c.key_heads, packed.nq = few_rows(c);
  packed.q = take(c.dk), packed.out = take(c.dv);
  fold.copy(c.q, packed.q, c.dtype, c.dk, false);
  if (c.start.data) {
    packed.start = take(1), packed.stop = take(1);
    fold.copy<int32_t>(c.start, packed.start, 1, false);
    fold.copy<int32_t>(c.stop, packed.stop, 1, false);
  }
  if (c.lse.data) packed.lse = take(1);
  if (c.row_stats.data) packed.row_stats = take(2);
  const int32_t failed = run(packed);
  if (!failed) {
    fold.copy(c.out, packed.out, c.out_dtype, c.dv, true);
    if (c.lse.data) fold.copy<float>(c.lse, packed.lse, 1, true);
    if (c.row_stats.data) fold.copy<float>(c.row_stats, packed.row_stats, 2, true);
  }
  free(memory);
  return failed;
}

}  // namespace regard
