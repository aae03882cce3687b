// Facts of where a row's weights lie: their sums over groups of keys and over ranges of distance, and the mean
// distance.
#pragma once
#include "facts/by_row.h"

namespace regard {

// Sums of one block's weights: mass [groups][kQueries], distance [kQueries], within [bands][kQueries].
struct Places {
  float *mass, *distance, *within;
};

static int64_t place_count(const regard_fact_args& a) { return a.groups + (a.distance ? 1 : 0) + a.bands; }

// Adds a tile's weights to the groups of their keys. Neighbouring keys of one group are summed first.
template <int V>
REGARD_NOINLINE void add_mass(const int32_t* group, float* mass, const float* e, int64_t count) {
  for (int64_t n = 0; n < count;) {
    const int32_t g = group[n];
    vf run[V];
    for (int v = 0; v < V; ++v) run[v] = vf{};
    for (; n < count && group[n] == g; ++n)
      for (int v = 0; v < V; ++v) run[v] += load(e + n * kQueries + v * W);
    if (g >= 0)
      for (int v = 0; v < V; ++v) store(mass + g * kQueries + v * W, load(mass + g * kQueries + v * W) + run[v]);
  }
}

// Signed distances from the queries of a block to the keys of a tile.
template <int V>
struct Distances {
  vi relative[V];       // positions of the queries, relative to base
  int64_t base;         // position of the first query
  const int64_t* k_at;  // positions of the tile's keys

  vi ahead(int v, int64_t n) const { return wrapping_sub(relative[v], splat_int(wrapping_sub(k_at[n], base))); }
};

template <int V>
static Distances<V> distances_of(const regard_fact_args& a, const Place& p, int64_t j) {
  const int64_t* q_at = a.q_at + p.b * a.call.nq + p.row;
  Distances<V> s{{}, q_at[0], a.k_at + p.b * a.call.nk + j};
  for (int64_t n = 0; n < V * W; ++n) s.relative[n / W][n % W] = wrapping_sub(q_at[n < p.rows ? n : 0], s.base);
  return s;
}

template <int V>
REGARD_NOINLINE void add_distance(const Distances<V>& at, float* distance, const float* e, int64_t count) {
  for (int v = 0; v < V; ++v) {
    vf sum = vf{};
    for (int64_t n = 0; n < count; ++n) {
      const vf ahead = __builtin_convertvector(at.ahead(v, n), vf);
      sum += load(e + n * kQueries + v * W) * absolute(ahead);
    }
    store(distance + v * W, load(distance + v * W) + sum);
  }
}

// Adds the weights whose distance is in [band[0], band[1]].
template <int V>
REGARD_NOINLINE void add_within(const Distances<V>& at, const int32_t* band, float* within, const float* e,
                                int64_t count) {
  for (int v = 0; v < V; ++v) {
    vf sum = vf{};
    for (int64_t n = 0; n < count; ++n) {
      const vi ahead = at.ahead(v, n), here = (ahead >= splat_int(band[0])) & (ahead <= splat_int(band[1]));
      sum += (vf)((vi)load(e + n * kQueries + v * W) & here);
    }
    store(within + v * W, load(within + v * W) + sum);
  }
}

struct Span {
  int64_t least, greatest;
};

// The least and the greatest distance of a tile's pairs.
template <int V>
static Span span_of(const Distances<V>& at, int64_t count) {
  Span q{0, 0}, k{at.k_at[0], at.k_at[0]};
  for (int64_t n = 0; n < V * W; ++n) {
    const int32_t x = at.relative[n / W][n % W];
    q.least = x < q.least ? x : q.least;
    q.greatest = x > q.greatest ? x : q.greatest;
  }
  for (int64_t n = 1; n < count; ++n) {
    const int64_t x = at.k_at[n];
    k.least = x < k.least ? x : k.least;
    k.greatest = x > k.greatest ? x : k.greatest;
  }
  return Span{at.base + q.least - k.greatest, at.base + q.greatest - k.least};
}

template <int V>
static void add_places(const regard_fact_args& a, const Block<V>& b, const Places& to, const float* e, int64_t j,
                       int64_t count) {
  if (a.groups) add_mass<V>(a.group + b.p.b * a.call.nk + j, to.mass, e, count);
  if (!a.distance && !a.bands) return;
  const Distances<V> at = distances_of<V>(a, b.p, j);
  if (a.distance) add_distance<V>(at, to.distance, e, count);
  if (!a.bands) return;
  const Span span = span_of(at, count);
  for (int64_t n = 0; n < a.bands; ++n) {
    const int32_t* band = a.band + 2 * n;
    if (band[0] <= span.greatest && band[1] >= span.least) add_within<V>(at, band, to.within + n * kQueries, e, count);
  }
}

// Writes sums [count][kQueries], normalised, to (rows, count). A sum of 0 stays 0 in a row that has a NaN.
template <int V>
static void write_sums(float* to, const float* from, const Block<V>& b, const RowFacts<V>& f, int64_t count) {
  for (int64_t n = 0; n < b.p.rows; ++n)
    for (int64_t g = 0; g < count; ++g) {
      const float sum = from[g * kQueries + n];
      to[n * count + g] = sum == 0 ? 0 : sum * f.inverse[n / W][n % W];
    }
}

template <int V>
REGARD_NOINLINE void finalize_places(const regard_fact_args& a, const Block<V>& b, const RowFacts<V>& f,
                                     const Places& from, int64_t row) {
  if (a.groups) write_sums(a.mass + row * a.groups, from.mass, b, f, a.groups);
  if (a.distance) write_sums(a.distance + row, from.distance, b, f, 1);
  if (a.bands) write_sums(a.within + row * a.bands, from.within, b, f, a.bands);
}

}  // namespace regard
