// How far apart the positions of queries and keys are, for the modifiers that ask.
#pragma once
#include "steps/list.h"

namespace regard {

// |position of the query - position of the key|, of queries at `relative` to base and a key.
REGARD_INLINE vf position_distance(vi relative, int64_t at, int64_t base) {
  return absolute(__builtin_convertvector(wrapping_sub(relative, splat_int(wrapping_sub(at, base))), vf));
}

// The same of a block's queries and one key.
template <int V>
REGARD_INLINE void position_distances(const Block<V>& b, int64_t key, vf (&distance)[V]) {
  const int64_t at = b.c.k_at[offset(b.c.k_at_batch, b.p) + key];
  for (int v = 0; v < V; ++v) distance[v] = position_distance(b.relative[v], at, b.base);
}

// The same of a row's query and W keys.
REGARD_INLINE vf position_distances(const RowKeys& x) {
  const regard_call& c = x.f.c;
  const int32_t ahead =
      wrapping_sub(c.q_at[offset(c.q_at_batch, x.f.p) + x.row.i], c.k_at[offset(c.k_at_batch, x.f.p) + x.t.j]);
  return absolute(__builtin_convertvector(wrapping_sub(splat_int(ahead), x.f.at[x.n / W]), vf));
}

}  // namespace regard
