// Entry points check their call before they compute anything: no size, code, stride or index may lead out of the
// caller's tensors, whose sizes and dtypes operands (regard_tensor) carry. Arrays behind plain pointers are trusted:
// where they are set (bind.py), their dtype is compared.
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

// Whether keys (values) have a row for each key: in the pages of a pool, or one behind another for each batch element.
static bool right_keys(const regard_call& c, const regard_tensor& t, int64_t dtype, int64_t width) {
  if (!c.block_table) return fits(t, dtype, c.batch, c.key_heads, c.nk, width);
  const int64_t pages[REGARD_BATCH_AXES] = {1, 1, 1, c.pages};
  return fits(t, dtype, pages, c.key_heads, c.page_size, width);
}

// Whether every operand of a call has the dtype and the elements that the kernels read. qk_dtype: that of q and k.
static bool right_operands(const regard_call& c, int64_t qk_dtype) {
  const auto of_rows = [&](const regard_tensor& t, int64_t dtype, int64_t cols) {
    return fits(t, dtype, c.batch, c.heads, c.nq, cols);
  };
  const int64_t row_blocks = (c.nq + kQueries - 1) / kQueries, key_blocks = (c.nk + kKeys - 1) / kKeys;
  const int64_t k_dtype = c.k_scales.data ? (int64_t)REGARD_I8 : qk_dtype;
  return of_rows(c.q, qk_dtype, c.dk) && right_keys(c, c.k, k_dtype, c.dk) && right_keys(c, c.v, kv_dtype(c), c.dv) &&
         right_keys(c, c.k_scales, REGARD_F32, 1) && right_keys(c, c.v_scales, REGARD_F32, 1) &&
         of_rows(c.out, c.out_dtype, c.dv) && of_rows(c.lse, REGARD_F32, 1) && of_rows(c.row_stats, REGARD_F32, 2) &&
         of_rows(c.start, REGARD_I32, 1) && of_rows(c.stop, REGARD_I32, 1) && of_rows(c.allowed, REGARD_BOOL, c.nk) &&
         fits(c.tiles, REGARD_I32, c.batch, c.heads, row_blocks, key_blocks) &&
         fits(c.sink, REGARD_F32, c.batch, c.heads, 1, 1);
}

// Returns REGARD_DONE, or the code of what is wrong with a call. v and out are checked where dv is not 0.
static int32_t check_call(const regard_call& c, int64_t qk_dtype) {
  if (!right_sizes(c) || !known_dtype(c.dtype) || !known_dtype(c.out_dtype)) return REGARD_BAD_ARGUMENT;
  if (!right_operands(c, qk_dtype)) return REGARD_BAD_ARGUMENT;
  if (c.dk && (!c.q.data || !c.k.data)) return REGARD_BAD_ARGUMENT;
  if (c.dv && (!c.v.data || !c.out.data)) return REGARD_BAD_ARGUMENT;
  if (!both_or_none(c.q_at, c.k_at) || !both_or_none(c.k_scales.data, c.v_scales.data)) return REGARD_BAD_ARGUMENT;
  int32_t wrong = Modifiers::check(c);
  if (!wrong) wrong = Interval::check(c);
  if (!wrong) wrong = Bits::check(c);
  if (!wrong) wrong = TileMasks::check(c);
  if (!wrong) wrong = Dropout::check(c);
  if (!wrong) wrong = check_pages(c);
  return wrong;
}

// The same for kernels that read neither pages nor int8.
[[maybe_unused]] static int32_t check_contiguous_call(const regard_call& c, int64_t qk_dtype) {
  return c.block_table || c.k_scales.data ? REGARD_BAD_ARGUMENT : check_call(c, qk_dtype);
}

}  // namespace regard
