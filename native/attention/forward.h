// Forward: blocks of queries (the lanes) stream over tiles of keys; the blocks of an item share each tile. See tile.h
// for the products.
#pragma once
#include <new>

#include "attention/forward_memory.h"
#include "attention/kv_tile.h"
#include "attention/matrix_stream.h"
#include "attention/output.h"
#include "attention/tile.h"

namespace regard {

// Loads what modifiers read of a tile.
template <int V>
static void load_modifiers(const Block<V>& b, const Tile& t) {
  Modifiers::load_tile(b, t);
  Bias::fetch_next(b, t, b.hi);
}

// The same, and what masks read; bits: room for those of the mask.
template <int V>
static void load_extras(const Block<V>& b, Tile& t, uint64_t* bits) {
  load_bits(b.c, b.p, t, bits);
  load_modifiers(b, t);
}

// The same, of the keys of a tile that some query sees, to which it is cut; returns false if there is none.
template <int V>
static bool load_seen(const Block<V>& b, Tile& t, uint64_t* bits) {
  load_bits(b.c, b.p, t, bits);
  cut_to_seen(t);
  if (t.count) load_modifiers(b, t);
  return t.count != 0;
}

// A tile's scores become weights, and the weighted values are added to o. top: the maxima of these and all earlier
// scores.
template <int V, class Op>
static void accumulate_tile(Block<V>& b, const Tile& t, KvTile& x, const vf (&top)[V]) {
  const regard_call& c = b.c;
  const int64_t skip = t.j - x.j;
  vf alpha[V];
  raise_state<V>(b, top, alpha);
  const bool partner = Op::pairs && t.count % 2 && skip + t.count < x.count;  // the last key has one, of weight 0
  const bool careful = (t.edge || t.bits || partner) && !finite_values<Op>(c, b.w, x) &&
                       !(Op::pairs && finite_pairs(c, b.w, x, skip, t.count));
  if (Op::pairs && !careful) {
    weigh<V, true>(b, t, false);
    zip_pairs<V>(b.w.s, kQueries, (t.count + 1) / 2);
    load_pairs(c, b.w, x);
    return value_tile<V, Op>(b, t, b.w.pairs + skip / 2 * c.dv, c.dv, alpha);
  }
  weigh<V, false>(b, t, careful);
  load_values(c, b.w, x);
  const float* v = x.v + skip * x.v_row;
  if (careful) return value_tile_careful<V>(b, t, v, x.v_row, alpha);
  value_tile<V, Floats>(b, t, v, x.v_row, alpha);
}

template <int V, class Op>
static void run_tile(Block<V>& b, Tile& t, KvTile& x) {
  uint64_t bits[kKeys];
  if constexpr (Op::parts) {
    load_extras(b, t, bits);
    if (hides_all(t)) return;
    b.w.stream->template finish<Op::parts>();
    return run_matrix_tile<V, Op>(b, t, x);
  }
  if (!load_seen(b, t, bits)) return;
  load_keys<Op>(b.c, b.w, x);
  vf top[V];
  for (int v = 0; v < V; ++v) top[v] = b.state[v].m;
  score_tile<V, Op>(b, t, x.k + (t.j - x.j) * x.k_row, x.k_row, top);
  accumulate_tile<V, Op>(b, t, x, top);
}

// Which keys a block may see: its intervals, and its row of the tile map.
template <int V>
static void set_limits(Block<V>& b) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  const Limits limits = Interval::limits(c, p);
  b.lo = limits.lo / kKeyStep * kKeyStep;
  b.hi = limits.hi;
  b.inner_lo = limits.inner_lo;
  b.inner_hi = limits.inner_hi;
  b.map = c.tiles.data ? at<int32_t>(c.tiles, p, p.h) + p.row / kQueries * c.tiles.row : nullptr;
}

// Starts an empty state, and fills what the steps need to know of the block's queries.
template <int V>
static void begin_state(Block<V>& b) {
  const regard_call& c = b.c;
  set_limits(b);
  if (c.start.data) Interval::begin(b);
  for (int64_t n = 0; n < c.dv * kQueries; n += W) store(b.w.o + n, vf{});
  for (int v = 0; v < V; ++v) b.state[v] = {};
  begin_steps(b);
}

template <int V, class Op>
static void begin(Block<V>& b) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  begin_state(b);
  const void* q = advance(c.q.data, offset(c.q, p, p.h) + p.row * c.q.row, c.dtype);
  b.factor = dot_factor(c, p.h);
  if constexpr (Op::parts) pack_parts<V, Op>(b, q);
  else if (Op::pairs) pack_pairs<V>(b.w.q, kQueries, (const uint16_t*)q, c.q.row, p.rows, c.dk / 2);
  else pack<V>(b.w.q, kQueries, q, c.dtype, c.q.row, c.q.col, p.rows, c.dk, b.factor);
}

// The part of the tile x, which starts at j on the grid, that a block sees; count is 0 if it sees none.
template <int V>
static Tile tile_for_block(const Block<V>& b, const KvTile& x, int64_t j) {
  const regard_call& c = b.c;
  const int64_t from = x.j > b.lo ? x.j : b.lo, to = x.j + x.count < b.hi ? x.j + x.count : b.hi;
  Tile t{from, to - from, false, nullptr, nullptr, 0, {}, {}};
  const int32_t which = b.map ? b.map[j / kKeys * c.tiles.col] : -2;
  if (to <= from || which == -1) {
    t.count = 0;
    return t;
  }
  if (!TileMasks::find(c, b.p, from, to - from, t.masks)) {
    t.count = 0;
    return t;
  }
  t.edge = c.start.data && (from < b.inner_lo || to > b.inner_hi);
  if (which >= 0) t.bits = Bits::words(c, which) + (from - j);
  if (c.allowed.data) t.allowed = at<uint8_t>(c.allowed, b.p, b.p.h) + b.p.row * c.allowed.row + from * c.allowed.col;
  return t;
}

// Runs the tiles that a block sees: what can be in a stream, of several tiles where no modifier loads what it needs for
// one (a program loads that for queries); the rest by itself.
template <int V, class Op>
static void run_tiles(Block<V>& b, KvTile* x, int64_t count) {
  constexpr int64_t kTiles = tiles_at_once(Op::parts);
  const regard_call& c = b.c;
  const bool by_tile = Modifiers::used(c) && !Program::used(c), in_stream = streams<V, Op>(b);
  StreamedTile streamed[kTiles];
  uint64_t bits[kTiles * kKeys];
  int64_t some = 0;
  const auto run_streamed = [&] {
    if constexpr (V % 2 == 0) stream_tiles<V, Op>(b, streamed, some);
    some = 0;
  };
  for (int64_t n = 0; n < count && !b.unfit; ++n) {
    Tile t = tile_for_block(b, x[n], x[n].j / kKeys * kKeys);
    if (!t.count) continue;
    load_key_parts<Op>(c, b.w, x[n]);
    load_value_parts<Op>(c, b.w, x[n]);
    const int64_t skip = t.j - x[n].j;
    b.unfit = x[n].unfit && !have_parts<Op>(c, b.w, x[n], skip, t.count);
    if (!in_stream) {
      run_tile<V, Op>(b, t, x[n]);
      continue;
    }
    load_bits(c, b.p, t, bits + n * kKeys);
    if (hides_all(t)) continue;
    if (by_tile) {
      run_streamed();
      load_modifiers(b, t);
    }
    StreamedTile& to = streamed[some++];
    to = {t.j, 0, t.count, (t.count + kBlock - 1) / kBlock, x[n].key_parts, x[n].value_parts, t.bits};
    to.keys.at += skip * to.keys.row;
    to.values.at += skip / kBlock * to.values.step;
  }
  run_streamed();
}

// Runs `blocks` blocks from `all` on: of the same head (across: of the same queries of neighbouring heads).
template <int V, class Op>
static void run_blocks(const regard_call& c, const Scratch& w, const Place& all, int64_t blocks, bool across = false) {
  Scratch part[kGroup];
  alignas(64) char memory[kGroup * sizeof(Block<V>)];
  Block<V>* b = (Block<V>*)memory;
  MatrixStream stream;
  int64_t lo = c.nk, hi = 0;
  for (int64_t g = 0; g < blocks; ++g) {
    Place p = all;
    if (across) p.h += g;
    else {
      p.row += g * kQueries;
      p.rows = all.rows - g * kQueries < kQueries ? all.rows - g * kQueries : kQueries;
    }
    part[g] = w;
    part[g].stream = &stream;
    part[g].q += g * query_floats(c) * kQueries;
    part[g].o += g * c.dv * kQueries;
    begin<V, Op>(*new (b + g) Block<V>{c, part[g], p});
    lo = b[g].lo < lo ? b[g].lo : lo;
    hi = b[g].hi > hi ? b[g].hi : hi;
  }
  const int64_t key_head = all.h / (c.heads / c.key_heads);
  // tiles, and those that are held at once, lie on a grid, so that a row's bits do not depend on the other rows
  constexpr int64_t kTiles = tiles_at_once(Op::parts), kHeld = kTiles * kKeys;
  for (int64_t held = lo / kHeld * kHeld; held < hi; held += kHeld) {
    alignas(KvTile) char tiles[kTiles * sizeof(KvTile)];
    KvTile* x = (KvTile*)tiles;
    int64_t count = 0;
    const int64_t j = held > lo ? held : lo / kKeys * kKeys;
    for (int64_t from = j; from < held + kHeld && from < hi; from += kKeys, ++count) {
      const int64_t first = from > lo ? from : lo;
      int64_t last = from + kKeys < hi ? from + kKeys : hi;
      // a block's last key alone has its neighbour's value beside it, whether or not others see that
      if (Op::pairs && last % 2 && last < c.nk && in_one_piece(c, last - 1, 2)) ++last;
      new (x + count) KvTile{all, key_head, first, last - first, (int)count};
    }
    for (int64_t g = 0; g < blocks; ++g) {
      if constexpr (Op::parts) {
        run_tiles<V, Op>(b[g], x, count);
        continue;
      }
      Tile t = tile_for_block(b[g], x[0], j);
      const bool last = j + kKeys >= hi;
      if (last) t.results = rows_of_results(c, b[g].p);
      if (last && g == blocks - 1) {
        t.keys = w.next.keys;
        t.values = w.next.values;
        w.next.queries.fetch_rows(0, w.next.queries.rows);
      } else if (g == blocks - 1) {
        t.keys = prefetch_next(c, c.k, x[0], c.dk, j + kKeys, hi, blocks == 1);
        t.values = prefetch_next(c, c.v, x[0], c.dv, j + kKeys, hi, blocks == 1);
      }
      if (t.count) run_tile<V, Op>(b[g], t, x[0]);
    }
    if constexpr (Op::parts) stream.finish<Op::parts>();  // the values that wait are in the memory of these tiles
  }
  for (int64_t g = 0; g < blocks; ++g)
    if (!b[g].unfit) finish<V>(b[g]);
  for (int64_t g = 0; Op::parts && g < blocks; ++g)
    if (b[g].unfit) run_blocks<V, Floats>(c, w, b[g].p, 1);
}

// Of one head: whole blocks, then the rest of the rows with as few vectors as hold them. Of several heads: a block
// each. Of several parts, the rest is a block like the others: keys and values would be split for it once more.
template <class Op>
static void run_rows(const regard_call& c, Scratch w, Place p, int64_t heads) {
  const int64_t blocks = heads > 1 ? 0 : (p.rows + (Op::parts > 1 ? kQueries - 1 : 0)) / kQueries;
  if (blocks) {
    Place whole = p;
    if (Op::parts <= 1) whole.rows = blocks * kQueries;
    run_blocks<kVectors, Op>(c, w, whole, blocks);
    w.next = {};
  }
  const int64_t rest = p.rows - blocks * kQueries;
  if (rest <= 0) return;
  p.row += blocks * kQueries;
  p.rows = rest;
  // as one head alone: an item's heads follow from the number of threads, the bits of a row must not
  if constexpr (Op::parts > 1) return run_blocks<kVectors, Op>(c, w, p, heads, true);
  with_vectors(rest, [&](auto vectors) { run_blocks<vectors, Op>(c, w, p, heads, true); });
}

[[maybe_unused]] static void run_item(const regard_call& c, const Scratch& w, const Place& p, int64_t heads) {
  if constexpr (Isa::kMatrixUnit)
    if (const int parts = matrix_parts(c)) {
      const Isa::MatrixUnitSession session;
      if (parts == 1) return run_rows<BFloat16Parts<1>>(c, w, p, heads);
      if (parts == 2) return run_rows<BFloat16Parts<2>>(c, w, p, heads);
      return run_rows<BFloat16Parts<3>>(c, w, p, heads);
    }
  if (reads_pairs(c)) return run_rows<Pairs>(c, w, p, heads);
  run_rows<Floats>(c, w, p, heads);
}

}  // namespace regard
