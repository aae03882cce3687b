// Entry points check their call before they compute anything: no size, code or index may lead out of the caller's tensors. How large
// these are is not known here: addresses and strides are trusted.
#pragma once
#include "core/pages.h"
#include "steps/steps.h"

namespace regard {

constexpr int64_t kMaxIndex = (int64_t)1 << 31;  // queries, keys, and offsets: lanes count them in 32 bits

// Whether sizes are possible, and products of them are 64-bit numbers.
static bool right_sizes(const regard_call& c) {
  double pairs = 1;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) {
    if (c.batch[n] < 1) return false;
    pairs *= (double)c.batch[n];
  }
  if (c.heads < 1 || c.key_heads < 1 || c.heads % c.key_heads) return false;
  if (c.nq < 1 || c.nq >= kMaxIndex || c.nk < 1 || c.nk >= kMaxIndex || c.dk < 0 || c.dv < 0) return false;
  if (c.offsets_count < 0 || c.offsets_count >= kMaxIndex) return false;
  const double numbers = (double)c.nq + (double)c.nk + (double)c.offsets_count, width = (double)c.dk + (double)c.dv;
  return pairs * (double)c.heads * (numbers + 1024) * (width + 1024) < 0x1p58;
}

// Returns REGARD_DONE, or the code of what is wrong with a call. v and out are checked where dv is not 0.
static int32_t check_call(const regard_call& c) {
  if (!right_sizes(c) || !known_dtype(c.dtype) || !known_dtype(c.out_dtype)) return REGARD_BAD_ARGUMENT;
  if (c.dk && (!c.q.data || !c.k.data)) return REGARD_BAD_ARGUMENT;
  if (c.dv && (!c.v.data || !c.out.data)) return REGARD_BAD_ARGUMENT;
  if (!both_or_none(c.q_at, c.k_at)) return REGARD_BAD_ARGUMENT;
  int32_t wrong = Modifiers::check(c);
  if (!wrong) wrong = Interval::check(c);
  if (!wrong) wrong = Bits::check(c);
  if (!wrong) wrong = Dropout::check(c);
  if (!wrong) wrong = check_pages(c);
  return wrong;
}

// The same for kernels that read no pages.
[[maybe_unused]] static int32_t check_contiguous_call(const regard_call& c) { return c.block_table ? REGARD_BAD_ARGUMENT : check_call(c); }

}  // namespace regard
