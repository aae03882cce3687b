// Sums of the numbers of a tile over all pairs whose places differ by the same: along its diagonals.
#pragma once
#include "core/place.h"
#include "core/vec.h"

namespace regard {

constexpr int64_t kDistances = kTile + kQueries;  // of a tile, and room

// Adds the terms [key][kQueries] of the keys [from, to) of a tile, at most kTile, and of V vectors of queries. Query i
// and key n belong to sum i + to - 1 - n. In float: no sum has more terms than there are queries.
template <int V>
static void add_by_distance(float (&sums)[kDistances], const float* terms, int64_t from, int64_t to) {
  for (int64_t n = from; n < to; ++n)
    for (int v = 0; v < V; ++v) {
      float* at = sums + v * W + to - 1 - n;
      store(at, load(at) + load(terms + n * kQueries + v * W));
    }
}

}  // namespace regard
