// Facts about the weights of one call: blocks of queries sweep over the scores that the forward computes, by its own functions.
//
// The scores of a block against all keys that it sees are kept, where they are not too many, so that products and exponentials are
// computed once: a first pass finds scores and maxima, a second turns scores into weights and sums them, a third hands the weights,
// whose sum is known by then, to the keys. Where they are too many, the first and the second compute a tile's scores, each anew, and
// the second does the third's work.
#pragma once
#include "facts/by_key.h"
#include "facts/by_place.h"
#include "facts/top_keys.h"
#include "core/work.h"

namespace regard {

constexpr int64_t kKept = (3 << 18) / kQueries;  // keys whose scores against a block are kept: 3 MB of a thread

// One thread's desk.
struct FactScratch {
  Scratch w;
  TopKeys top_keys;
  Places places;
  float* scores;  // [least of nk and kKept, a tile at least][kQueries]
};

// Where the sums of one item go.
struct Sums {
  float *received, *most;  // [nk]
  int64_t *readers, *reached;
  Cells cells;
};

REGARD_INLINE bool asks_keys(const regard_fact_args& a) { return a.received || a.most || a.map || a.levels; }

template <int V, class Op>
struct FactBlock {
  const regard_fact_args& a;
  FactScratch& d;
  const Sums& sums;
  Block<V> b;
  Found<V> f;
  bool keep;        // whether all scores of the block are kept
  int64_t row;      // the block's first row among all rows of the answers
  vf sink;
};

// Runs body(t, x) for each tile that some row of the block sees, with the place of its scores in w.s.
template <int V, class Op, class Body>
REGARD_INLINE void each_tile(FactBlock<V, Op>& q, const Body& body) {
  const regard_call& c = q.b.c;
  const int64_t lo = q.b.lo, hi = q.b.hi;
  const void* keys = moved(c.k.data, offset(c.k, q.b.p, q.b.p.h / (c.heads / c.key_heads)), c.dtype);
  for (int64_t j = lo / kKeys * kKeys; j < hi; j += kKeys) {
    const int64_t from = j > lo ? j : lo, to = j + kKeys < hi ? j + kKeys : hi;
    Source x{keys, nullptr, from, to - from, nullptr, nullptr, 0, 0, false, false, false, -1};
    Tile t = tile_for_block(q.b, x, j);
    if (!t.count) continue;
    t.keys = ahead_of(c, c.k, keys, c.dk, j + kKeys, hi, false);
    q.d.w.s = q.d.scores + (q.keep ? (t.j - lo) * kQueries : 0);
    body(t, x);
  }
}

// Scores of a tile, and their maxima.
template <int V, class Op>
REGARD_INLINE void score(FactBlock<V, Op>& q, Tile& t, Source& x, vf (&top)[V]) {
  uint64_t bits[kKeys];
  load_extras<V>(q.b, t, bits);
  load_keys<Op>(q.b.c, q.d.w, x);
  for (int v = 0; v < V; ++v) top[v] = splat(-kInf);
  score_tile<V, Op>(q.b, t, x.k + (t.j - x.j) * x.k_row, x.k_row, top);
}

// The sums of weights so far, relative to the largest score so far.
template <int V>
static void sum_on(Block<V>& b, const Found<V>& f, float* s, int64_t count) {
  for (int v = 0; v < V; ++v) {
    const vf shift = f.top[v] == splat(-kInf) ? vf{} : f.top[v];
    b.l[v] = b.l[v] * exp2v(b.m[v] - shift);
    b.m[v] = f.top[v];
  }
  weigh_plain<V, false>(s, b.l, b.m, count);
}

// First pass: scores, and what must be known of all of them before they become weights.
template <int V, class Op>
static void find_maxima(FactBlock<V, Op>& q) {
  const TopKeys& l = q.d.top_keys;
  int64_t slot = 0;
  each_tile(q, [&](Tile& t, Source& x) {
    vf top[V];
    score(q, t, x, top);
    take_tops(q.f, top, t.j);
    if (l.count) slot = take_grains(l, slot, q.d.w.s, t.count, top);
    if (!q.keep && asks_keys(q.a)) sum_on(q.b, q.f, q.d.w.s, t.count);
  });
  if (l.count) bound(l, q.f);
}

// What scores are relative to, and, where the sums of weights are known already, what makes them 1.
template <int V, class Op>
static void shift_rows(FactBlock<V, Op>& q) {
  for (int v = 0; v < V; ++v) {
    const vf most = greater_of(q.sink, q.f.top[v]);
    const vf shift = q.f.shift[v] = most == splat(-kInf) ? vf{} : most;
    const vf sum = q.b.l[v] * exp2v((q.b.m[v] == splat(-kInf) ? vf{} : q.b.m[v]) - shift) + exp2v(q.sink - shift);
    q.f.inverse[v] = sum == vf{} ? vf{} : splat(1.0f) / sum;
  }
}

// A tile's weights go to its keys and its cells.
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
    receive<V, careful>(e, counted, q.sums.received + t.j, t.count);
  }
  if (a.most) receive_most<V, careful>(e, share, q.sums.most + t.j, t.count);
  if (a.map) pool<V>(q.b, q.sums.cells, e, share, t.j, t.count);
  if (a.levels) reach<V>(e, share, a.level, a.levels, q.sums.reached, t.count);
}

// Lanes that are no row have no part in it.
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
static void weigh(const regard_fact_args& a, float* s, int64_t count, Found<V>& f) {
  if (a.entropy && a.top) return weigh_tile<V, true, true, later>(s, count, f);
  if (a.entropy) return weigh_tile<V, true, false, later>(s, count, f);
  if (a.top) return weigh_tile<V, false, true, later>(s, count, f);
  weigh_tile<V, false, false, later>(s, count, f);
}

// Second pass: scores become weights.
template <int V, class Op>
static void weigh_all(FactBlock<V, Op>& q) {
  const regard_fact_args& a = q.a;
  const bool later = asks_keys(a) || place_count(a) || a.concentration;
  each_tile(q, [&](Tile& t, Source& x) {
    float* s = q.d.w.s;
    vf top[V];
    if (!q.keep) score(q, t, x, top);
    if (a.max_key) name_peaks<V>(q.b, q.f, s, t.j, t.count, a.max_key + q.row);
    if (a.visible || a.readers || a.levels) count_seen<V>(q.b, q.f, s, t.count, a.readers ? q.sums.readers + t.j : nullptr);
    if (a.top) promote_tile<V>(q.d.top_keys, s, t.j, t.count, q.f);
    if (later) weigh<V, true>(a, s, t.count, q.f);
    else weigh<V, false>(a, s, t.count, q.f);
    if (a.concentration) square_tile<V>(s, t.count, q.f);
    if (a.top) raise_least(q.d.top_keys, q.f);
    add_places<V>(a, q.b, q.d.places, s, t.j, t.count);
    if (!q.keep && asks_keys(a)) distribute(q, t);
  });
}

template <int V, class Op>
static void block_facts(const regard_fact_args& a, FactScratch& d, const Sums& sums, const Place& p) {
  const regard_call& c = a.call;
  FactBlock<V, Op> q{a, d, sums, {c, d.w, p}, {}, false, (p.b * c.heads + p.h) * c.nq + p.row, {}};
  begin<V, Op>(q.b);
  q.keep = q.b.hi - q.b.lo <= kKept;
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
  reach_all(q.b, q.f, a.level, a.levels, sums.reached);
  if (q.keep && asks_keys(a)) each_tile(q, [&](Tile& t, Source&) { distribute(q, t); });
}

// The rows of p, with as few vectors as hold a block's.
template <class Op>
static void item_facts(const regard_fact_args& a, FactScratch& d, const Sums& sums, Place p) {
  for (int64_t left = p.rows; left > 0; left -= kQueries, p.row += kQueries) {
    p.rows = left < kQueries ? left : kQueries;
    switch ((p.rows + W - 1) / W) {
      case 1: block_facts<1, Op>(a, d, sums, p); break;
      case 2: block_facts<2, Op>(a, d, sums, p); break;
      case 3: block_facts<3, Op>(a, d, sums, p); break;
      default: block_facts<kVectors, Op>(a, d, sums, p);
    }
  }
}

[[maybe_unused]] static void facts_of(const regard_fact_args& a, FactScratch& d, const Sums& sums, const Place& p) {
  if (reads_pairs(a.call)) return item_facts<Pairs>(a, d, sums, p);
  item_facts<Floats>(a, d, sums, p);
}

}  // namespace regard
