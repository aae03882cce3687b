// Facts about the weights of one call: passes over the scores of each block of queries, computed by the forward's own
// functions.
//
// Where a block's scores for all keys are not too many, they are kept, so that products and exponentials are computed
// once: the first pass computes scores and maxima, the second turns scores into weights and sums them, the third adds
// the weights, whose sum is then known, to the keys. Otherwise the first and the second pass compute the scores of each
// tile again, and the second also adds to the keys.
#pragma once
#include "facts/by_key.h"
#include "facts/by_place.h"
#include "facts/top_keys.h"
#include "core/work.h"

namespace regard {

constexpr int64_t kMaxKeptKeys = (3 << 18) / kQueries;  // keys whose scores against a block are kept: 3 MB of a thread

// Scratch of one thread.
struct FactScratch {
  Scratch w;
  TopKeys top_keys;
  Places places;
  float* scores;  // [min(nk, kMaxKeptKeys), at least a tile][kQueries]
};

// Where the sums of one item go.
struct Sums {
  float *received, *most;  // [nk]
  int64_t *readers, *reached;
  Cells cells;
};

REGARD_INLINE bool wants_key_facts(const regard_fact_args& a) { return a.received || a.most || a.map || a.levels; }

template <int V, class Op>
struct FactBlock {
  const regard_fact_args& a;
  FactScratch& d;
  const Sums& sums;
  Block<V> b;
  RowFacts<V> f;
  bool keep;    // whether all scores of the block are kept
  int64_t row;  // the number of the block's first row in the results
  vf sink;
};

// Calls body(t, x) for each tile that some row of the block sees; w.s points to its scores.
template <int V, class Op, class Body>
REGARD_INLINE void each_tile(FactBlock<V, Op>& q, const Body& body) {
  const regard_call& c = q.b.c;
  const int64_t lo = q.b.lo, hi = q.b.hi;
  for (int64_t j = lo / kKeys * kKeys; j < hi; j += kKeys) {
    const int64_t from = j > lo ? j : lo, to = j + kKeys < hi ? j + kKeys : hi;
    KvTile x{q.b.p, q.b.p.h / (c.heads / c.key_heads), from, to - from};
    Tile t = tile_for_block(q.b, x, j);
    if (!t.count) continue;
    t.keys = prefetch_next(c, c.k, x, c.dk, j + kKeys, hi, false);
    q.d.w.s = q.d.scores + (q.keep ? (t.j - lo) * kQueries : 0);
    body(t, x);
  }
}

// Computes the scores of a tile, and their maxima.
template <int V, class Op>
REGARD_INLINE void score(FactBlock<V, Op>& q, Tile& t, KvTile& x, vf (&top)[V]) {
  uint64_t bits[kKeys];
  load_extras<V>(q.b, t, bits);
  load_keys<Op>(q.b.c, q.d.w, x);
  for (int v = 0; v < V; ++v) top[v] = splat(-kInf);
  score_tile<V, Op>(q.b, t, x.k + (t.j - x.j) * x.k_row, x.k_row, top);
}

// Adds the weights of a tile to l, relative to the largest score so far.
template <int V>
static void sum_on(Block<V>& b, const RowFacts<V>& f, float* s, int64_t count) {
  for (int v = 0; v < V; ++v) b.state[v].raise(f.max[v]);
  weigh_plain<V, false>(s, b.state, count);
}

// First pass: scores, their maxima, and the threshold of the heaviest keys.
template <int V, class Op>
static void find_maxima(FactBlock<V, Op>& q) {
  const TopKeys& l = q.d.top_keys;
  int64_t slot = 0;
  each_tile(q, [&](Tile& t, KvTile& x) {
    vf top[V];
    score(q, t, x, top);
    update_max(q.f, top, t.j);
    if (l.count) slot = add_grains(l, slot, q.d.w.s, t.count, top);
    if (!q.keep && wants_key_facts(q.a)) sum_on(q.b, q.f, q.d.w.s, t.count);
  });
  if (l.count) bound(l, q.f);
}

// Sets shift and, where the sums of weights are known already, inverse.
template <int V, class Op>
static void shift_rows(FactBlock<V, Op>& q) {
  for (int v = 0; v < V; ++v) {
    const vf most = greater_of(q.sink, q.f.max[v]);
    SoftmaxState<vf> state = q.b.state[v];
    q.f.shift[v] = finite_shift(most);
    state.merge(most, exp2v(q.sink - q.f.shift[v]));
    q.f.inverse[v] = state.stats().inverse;
  }
}

// Adds a tile's weights to the facts of its keys and of its cells.
template <int V, class Op, bool careful>
static void distribute(FactBlock<V, Op>& q, const Tile& t, const vf (&share)[V]) {
  const regard_fact_args& a = q.a;
  const float* e = q.d.w.s;
  if (a.received) {
    vf counted[V];
    for (int v = 0; v < V; ++v) counted[v] = share[v];
    for (int64_t n = 0; a.shares && n < q.b.p.rows; ++n) {
      const float x = a.shares[q.row + n];
      counted[n / W][n % W] = x == 0 ? 0 : counted[n / W][n % W] * x;
    }
    add_received<V, careful>(e, counted, q.sums.received + t.j, t.count);
  }
  if (a.most) max_received<V, careful>(e, share, q.sums.most + t.j, t.count);
  if (a.map) pool<V>(q.b, q.sums.cells, e, share, t.j, t.count);
  if (a.levels) count_levels<V>(e, share, a.level, a.levels, q.sums.reached, t.count);
}

// The same with the share of each lane: 0 for lanes without a row.
template <int V, class Op>
static void distribute(FactBlock<V, Op>& q, const Tile& t) {
  const vi rows = splat_int((int32_t)q.b.p.rows);
  vf share[V];
  bool plain = true;
  for (int v = 0; v < V; ++v) {
    share[v] = lanes() + splat_int(v * W) < rows ? q.f.inverse[v] : vf{};
    plain &= !Isa::lanes_set(q.f.inverse[v] != q.f.inverse[v]);
  }
  if (plain) return distribute<V, Op, false>(q, t, share);
  distribute<V, Op, true>(q, t, share);
}

template <int V, bool later>
static void weigh(const regard_fact_args& a, float* s, int64_t count, RowFacts<V>& f) {
  if (a.entropy && a.top) return weigh_tile<V, true, true, later>(s, count, f);
  if (a.entropy) return weigh_tile<V, true, false, later>(s, count, f);
  if (a.top) return weigh_tile<V, false, true, later>(s, count, f);
  weigh_tile<V, false, false, later>(s, count, f);
}

// Second pass: scores become weights.
template <int V, class Op>
static void weigh_all(FactBlock<V, Op>& q) {
  const regard_fact_args& a = q.a;
  const bool later = wants_key_facts(a) || place_count(a) || a.concentration;
  each_tile(q, [&](Tile& t, KvTile& x) {
    float* s = q.d.w.s;
    vf top[V];
    if (!q.keep) score(q, t, x, top);
    if (a.max_key) find_max_keys<V>(q.b, q.f, s, t.j, t.count, a.max_key + q.row);
    if (a.visible || a.readers || a.levels)
      count_visible<V>(q.b, q.f, s, t.count, a.readers ? q.sums.readers + t.j : nullptr);
    if (a.top) promote_tile<V>(q.d.top_keys, s, t.j, t.count, q.f);
    if (later) weigh<V, true>(a, s, t.count, q.f);
    else weigh<V, false>(a, s, t.count, q.f);
    if (a.concentration) square_tile<V>(s, t.count, q.f);
    if (a.top) raise_least(q.d.top_keys, q.f);
    add_places<V>(a, q.b, q.d.places, s, t.j, t.count);
    if (!q.keep && wants_key_facts(a)) distribute(q, t);
  });
}

template <int V, class Op>
static void block_facts(const regard_fact_args& a, FactScratch& d, const Sums& sums, const Place& p) {
  const regard_call& c = a.call;
  FactBlock<V, Op> q{a, d, sums, {c, d.w, p}, {}, false, (p.b * c.heads + p.h) * c.nq + p.row, {}};
  begin<V, Op>(q.b);
  q.keep = q.b.hi - q.b.lo <= kMaxKeptKeys;
  q.sink = splat(sink_of(c, p, p.h));
  clear_rows(q.f);
  if (a.top) d.top_keys.grain = grain_of(q.b.hi - q.b.lo, a.top);
  clear_top_keys<V>(d.top_keys);
  for (int64_t n = 0; n < place_count(a) * kQueries; n += W) store(d.places.mass + n, vf{});
  for (int64_t n = 0; a.max_key && n < p.rows; ++n) a.max_key[q.row + n] = -1;
  find_maxima(q);
  shift_rows(q);
  weigh_all(q);
  finalize_rows<V>(a, q.b, q.f, q.sink, q.row);
  if (a.top) finalize_top_keys<V>(a, q.b, q.f, d.top_keys, q.row);
  finalize_places<V>(a, q.b, q.f, d.places, q.row);
  if (a.map) count_queries(q.b, q.f, sums.cells);
  count_zero_levels(q.b, q.f, a.level, a.levels, sums.reached);
  if (q.keep && wants_key_facts(a)) each_tile(q, [&](Tile& t, KvTile&) { distribute(q, t); });
}

// The rows of p, with as few vectors as hold a block's.
template <class Op>
static void item_facts(const regard_fact_args& a, FactScratch& d, const Sums& sums, Place p) {
  for (int64_t left = p.rows; left > 0; left -= kQueries, p.row += kQueries) {
    p.rows = left < kQueries ? left : kQueries;
    with_vectors(p.rows, [&](auto vectors) { block_facts<vectors, Op>(a, d, sums, p); });
  }
}

[[maybe_unused]] static void part_facts(const regard_fact_args& a, FactScratch& d, const Sums& sums, const Place& p) {
  if (reads_pairs(a.call)) return item_facts<Pairs>(a, d, sums, p);
  item_facts<Floats>(a, d, sums, p);
}

}  // namespace regard
