// The entry points, once for each instruction set. No state, no STL, nothing at load time.
#include <math.h>

#include "attention/interval_rule.h"
#include "attention/ragged.h"
#include "attention/shared_keys.h"
#include "attention/tile_counts.h"
#include "core/api.h"

using namespace regard;

namespace {

int32_t forward(const regard_call& c, regard_parallel parallel) {
  if (has_few_rows(c) && c.block_table) return forward_few_rows<Dots<PagedRows>>(c, parallel);
  if (has_few_rows(c)) return forward_few_rows<Dots<StridedRows>>(c, parallel);
  const Forward forward{c, group_of(c, all_blocks(c) * elements(c))};
  return share(forward, forward.items(), c.threads, parallel);
}

}  // namespace

REGARD_API int64_t regard_queries() { return kQueries; }

// Of how many bfloat16 numbers the matrix unit multiplies each number in a forward; 0: vectors multiply, or there is no
// call; -1: there is no unit. Of the results only whether they are there counts.
REGARD_API int64_t regard_matrix_parts(const regard_call* call) {
  if (!Isa::kMatrixUnit) return -1;
  if (!call || !call->key_heads) return 0;
  int64_t parts = 0;
  with_intervals(*call, [&parts](const regard_call& c) {
    const regard_call rows = packs_batch(c) ? SharedKeys(c).grouped() : c;
    if (packs_heads(rows)) parts = matrix_parts(rows, few_rows(rows));
    else parts = has_few_rows(rows) ? 0 : matrix_parts(rows);
    return (int32_t)REGARD_DONE;
  });
  return parts;
}

// The name of the n-th instruction set that this processor runs, best first; null past the last.
REGARD_API const char* regard_runnable(int64_t n) { return runnable(n); }

// `count` times as many independent vector multiply-adds as registers hold, for measuring the peak; returns how many
// floating-point operations that was.
REGARD_API double regard_peak(int64_t count) {
  constexpr int kChains = Isa::kManyRegisters ? 24 : 12;
  vf acc[kChains];
  for (int n = 0; n < kChains; ++n) acc[n] = splat((float)n);
  const vf a = splat(0.999f), b = splat(1e-3f);
  for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 24
    for (int n = 0; n < kChains; ++n) acc[n] = acc[n] * a + b;
  }
  vf sum = vf{};
  for (int n = 0; n < kChains; ++n) sum += acc[n];
  volatile float keep = sum[0];
  (void)keep;
  return 2.0 * W * kChains * (double)count;
}

// The sum of `count` floats, for measuring how fast memory is read.
REGARD_API float regard_bandwidth(const float* data, int64_t count) {
  constexpr int kSums = 8;
  vf acc[1][kSums];
  clear(acc);
  for (int64_t n = 0; n + kSums * W <= count; n += kSums * W)
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) acc[0][i] += load(data + n + i * W);
  vf sum = vf{};
  for (int i = 0; i < kSums; ++i) sum += acc[0][i];
  float total = 0;
  for (int n = 0; n < W; ++n) total += sum[n];
  for (int64_t n = count / (kSums * W) * (kSums * W); n < count; ++n) total += data[n];
  return total;
}

// The number of the structs that this object was built with: see abi.py.
REGARD_API uint64_t regard_abi() { return REGARD_ABI; }

REGARD_API int64_t regard_keys() { return kKeys; }

REGARD_API int32_t regard_forward(const regard_call* call, regard_parallel parallel) {
  return with_intervals(*call, [parallel](const regard_call& c) {
    if (const int32_t wrong = check_call(c, c.dtype)) return wrong;
    if (packs_batch(c) || packs_heads(c))
      return forward_packed(c, [parallel](const regard_call& rows) { return forward(rows, parallel); });
    return forward(c, parallel);
  });
}

// Fills in TileCounts of a forward that takes blocks of queries.
REGARD_API int32_t regard_count_tiles(const regard_call* call, int64_t* counts) {
  return with_intervals(*call, [counts](const regard_call& c) {
    if (const int32_t wrong = check_call(c, c.dtype)) return wrong;
    const TileCounts found = TileCounts::of(c);
    const int64_t each[] = {found.skipped, found.hidden, found.whole, found.mixed};
    for (int n = 0; n < 4; ++n) counts[n] = each[n];
    return (int32_t)REGARD_DONE;
  });
}

REGARD_API int32_t regard_forward_ragged(const regard_ragged* ragged, regard_parallel parallel) {
  if (ragged->call.block_table) return forward_ragged<PagedRows>(*ragged, parallel);
  return forward_ragged<StridedRows>(*ragged, parallel);
}
