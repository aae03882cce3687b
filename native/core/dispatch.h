// Numbers that are known when a call runs, as template arguments: each function compiles its body once for each number.
#pragma once
#include "core/place.h"

namespace regard {

template <int n>
using Constant = std::integral_constant<int, n>;

// Returns run(Constant<V>), with V the number of vectors that hold `rows` queries of a block.
template <int V = 1, class Run>
REGARD_INLINE decltype(auto) with_vectors(int64_t rows, const Run& run) {
  if constexpr (V < kVectors) {
    if (rows > V * W) return with_vectors<V + 1>(rows, run);
  }
  return run(Constant<V>{});
}

// Returns run(Constant<dtype>) for a dtype of keys and values.
template <class Run>
REGARD_INLINE decltype(auto) with_kv_dtype(int dtype, const Run& run) {
  switch (dtype) {
    case REGARD_F32: return run(Constant<REGARD_F32>{});
    case REGARD_BF16: return run(Constant<REGARD_BF16>{});
    case REGARD_I8: return run(Constant<REGARD_I8>{});
    default: return run(Constant<REGARD_F16>{});
  }
}

// Calls run(Constant<count>, r), if there are rows from r on, which are at most `most`.
template <int most, class Run>
REGARD_INLINE void with_last_rows(int64_t count, int64_t r, const Run& run) {
  if constexpr (most > 0) {
    if (count == most) return run(Constant<most>{}, r);
    with_last_rows<most - 1>(count, r, run);
  }
}

// Calls run(Constant<R>, r) for R rows from r on at a time, then once for those that are left.
template <int R, class Run>
REGARD_INLINE void with_rows(int64_t rows, const Run& run) {
  int64_t r = 0;
  for (; r + R <= rows; r += R) run(Constant<R>{}, r);
  with_last_rows<R - 1>(rows - r, r, run);
}

}  // namespace regard
