// How far apart the positions of queries and keys are, for the modifiers that ask.
#pragma once
#include "steps/list.h"

namespace regard {

// |position of the query - position of the key|, of the block's queries and one key.
template <int V>
REGARD_INLINE void position_distances(const Block<V>& b, int64_t key, vf (&distance)[V]) {
  const vi ahead = splat_int(wrapping_sub(b.c.k_at[offset(b.c.k_at_batch, b.p) + key], b.base));
  for (int v = 0; v < V; ++v) distance[v] = absolute(__builtin_convertvector(wrapping_sub(b.relative[v], ahead), vf));
}

// The same of a row's query and W keys.
REGARD_INLINE vf position_distances(const RowKeys& x) {
  const regard_call& c = x.f.c;
  const int32_t ahead =
      wrapping_sub(c.q_at[offset(c.q_at_batch, x.f.p) + x.row.i], c.k_at[offset(c.k_at_batch, x.f.p) + x.t.j]);
  return absolute(__builtin_convertvector(wrapping_sub(splat_int(ahead), x.f.at[x.n / W]), vf));
}

}  // namespace regard
