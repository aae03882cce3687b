// The second phase of the backward on a matrix unit: for some tiles of keys at a time, all blocks of queries.
#pragma once
#include "attention/backward_group.h"
#include "attention/matrix_backward.h"

namespace regard {

// A block of queries against a tile of keys as without a matrix unit: where 0 · NaN is to be skipped. dq: as of
// GradientProducts.
static void run_block_marked(const BackwardCall& w, const BackwardScratch& s, KeyTile k, const MatrixTile& tile,
                             const Place& p, float* dq) {
  const regard_call& c = w.c;
  const Place origin = place_at(c, k.element, 0, 0);
  BackwardScratch of = s;
  of.dk = s.rows_dk;
  of.dv = s.rows_dv;
  const auto widen_tile = [&](float* to, int64_t ld, const regard_tensor& t, int64_t width) {
    const void* at = advance(t.data, offset(t, origin, k.key_head) + k.j * t.row, c.dtype);
    widen_rows(to, ld, (const char*)at, c.dtype, t.row, t.col, k.count, width);
  };
  widen_tile(s.k, w.ldk, c.k, c.dk);
  widen_tile(s.v, w.ldv, c.v, c.dv);
  __builtin_memset(s.spare, 0, sizeof(float) * (size_t)(kQueries * w.ldk));
  __builtin_memset(of.dk, 0, sizeof(float) * (size_t)(k.count * w.ldk));
  __builtin_memset(of.dv, 0, sizeof(float) * (size_t)(k.count * w.ldv));
  k.first = p.row;
  run_group(w, of, k, p.h, p.row, p.row + p.rows, dq ? s.spare : nullptr);
  add_rows_to_blocks(tile.dk, of.dk, w.ldk, k.count, c.dk);
  add_rows_to_blocks(tile.dv, of.dv, w.ldv, k.count, c.dv);
  for (int64_t i = 0; dq && i < kQueries; ++i)
    for (int64_t f = 0; f < c.dk; ++f)
      dq[(i / kBlock * whole_depth(c.dk) + f) * kBlock + i % kBlock] += s.spare[i * w.ldk + f];
}

// Packs the blocks of queries of a part, of all heads of a group.
template <int parts>
static void pack_blocks(const BackwardCall& w, const BackwardScratch& s, const KeyTile& k,
                        const PackedQueries& packed) {
  const regard_call& c = w.c;
  const regard_tensor& g = w.g.dout;
  const int64_t group = c.heads / c.key_heads, dk = whole_depth(c.dk), dv = whole_depth(c.dv);
  const auto copy = [&](int64_t depth) { return PartRows{s.block_rows, depth, 32, kQueries * depth}; };
  int64_t block = 0;
  for (int64_t m = 0; m < group; ++m)
    for (int64_t row = k.first; row < k.last; row += kQueries, ++block) {
      const Place p = place_at(c, k.element, k.key_head * group + m, row);
      const PackedQueries to = packed.from_block(block);
      const void* q = advance(c.q.data, offset(c.q, p, p.h) + row * c.q.row, c.dtype);
      if (parts == 3) {
        split_rows<parts>(copy(dk), dk, q, c.dtype, c.q.row, c.q.col, p.rows, c.dk, dot_factor(c, p.h),
                          Sizes::of_scores(c.dtype));
        pack_features<parts>(to.q, copy(dk), p.rows, dk);
      }
      const LeftParts rows = left_rows<parts>(q, c.dtype, c.q.row, c.q.col, p.rows, kQueries, c.dk, copy(dk));
      bool finite = parts > 1 || finite_rows(rows.at, rows.row, p.rows, dk);
      if (parts < 3) pack_features<parts>(to.q, rows, p.rows, dk);
      pack_queries<parts>(to.q_rows, rows, p.rows, dk);
      const void* dout = advance(g.data, offset(g, p, p.h) + row * g.row, dtype_of(w.g.dout));
      const LeftParts more = left_rows<parts>(dout, dtype_of(w.g.dout), g.row, g.col, p.rows, kQueries, c.dv, copy(dv));
      finite &= parts > 1 || finite_rows(more.at, more.row, p.rows, dv);
      pack_features<parts>(to.dout, more, p.rows, dv);
      pack_queries<parts>(to.dout_rows, more, p.rows, dv);
      s.finite[block] = finite;
    }
}

// Loads the n-th of the tiles that are held: keys and values from j on.
template <int parts>
static MatrixTile load_tile(const BackwardCall& w, const BackwardScratch& s, const KeyTile& k, int64_t n, int64_t j) {
  const regard_call& c = w.c;
  const int64_t dk = whole_depth(c.dk), count = c.nk - j < kTile ? c.nk - j : kTile;
  const Place origin = place_at(c, k.element, 0, 0);
  const auto rows = [&](const regard_tensor& t, int64_t width, uint16_t* copy) {
    const void* at = advance(t.data, offset(t, origin, k.key_head) + j * t.row, c.dtype);
    const int64_t depth = whole_depth(width);
    const PartRows to{copy + n * parts * kTile * depth, 32, kTile * 32, kTile * depth};
    return left_rows<parts>(at, c.dtype, t.row, t.col, count, c.nk - j, width, to);
  };
  MatrixTile tile{rows(c.k, c.dk, s.k_rows),
                  rows(c.v, c.dv, s.v_rows),
                  {s.kt + n * parts * kTile * dk, 32, parts * dk * 32, dk * 32},
                  s.dk + n * kTile * dk,
                  s.dv + n * kTile * whole_depth(c.dv),
                  j,
                  count,
                  true};
  const void* keys = advance(c.k.data, offset(c.k, origin, k.key_head) + j * c.k.row, c.dtype);
  tile.finite = transpose_values<parts>((uint16_t*)tile.kt.at, keys, c.dtype, c.k.row, c.k.col, count, c.dk, s.split) ||
                parts > 1;
  __builtin_memset(tile.dk, 0, sizeof(float) * (size_t)(kTile * dk));
  __builtin_memset(tile.dv, 0, sizeof(float) * (size_t)(kTile * whole_depth(c.dv)));
  return tile;
}

// Blocks of queries of a head, packed from `block` on, and the tile of keys that they meet.
template <int parts>
struct BlocksOnTile {
  const BackwardCall& w;
  const BackwardScratch& s;
  const MatrixTile& tile;
  const Place& p;
  const PackedQueries& packed;
  int64_t block;

  // Those from `first` up to `end`, or the last one.
  StreamedQueries queries(int64_t first, int64_t end) const {
    StreamedQueries of{p, factor_of_scores<parts>(w.c, p.h), nullptr, nullptr, nullptr};
    of.p.row += first;
    of.p.rows = (end < p.rows ? end : p.rows) - first;
    const int64_t at = (p.b * w.c.heads + p.h) * w.blocks * kQueries + of.p.row;
    of.shift = w.shift + at;
    of.inverse = w.inverse + at;
    of.delta = w.delta + at;
    return of;
  }

  // dQ^T of those from `first` on, null where it isn't asked for.
  float* dq(int64_t first) const {
    return w.g.dq.data ? s.dqt + (block + first / kQueries) * whole_depth(w.c.dk) * kQueries : nullptr;
  }

  bool finite(int64_t first) const { return tile.finite && s.finite[block + first / kQueries] != 0; }

  // Calls f with the products of those from `first` on.
  template <class F>
  void multiply(int64_t first, const F& f) const {
    alignas(64) float sums[kBlock * kBlock];
    const PackedQueries q = packed.from_block(block + first / kQueries);
    const WeightParts<parts> weights{s.p_parts, s.ds_parts, s.ds_pairs};
    GradientProducts<parts> products{w, q, tile, weights, dq(first), sums};
    f(products);
  }

  void stream(int64_t first, int64_t end) const {
    if (first >= end) return;
    multiply(first, [&](auto& products) { stream_tile<parts>(w, s, queries(first, end), products); });
  }

  // One block with all steps; x: its keys that are seen.
  void run(int64_t first, const StreamedQueries& of, const Tile& t, BlockShare x, int64_t part) const {
    x.p = s.p;
    x.ds = s.ds;
    x.shift = of.shift;
    x.inverse = of.inverse;
    x.delta = of.delta;
    multiply(first, [&](auto& products) { run_steps<parts>(w, s, of.p, t, x, products, part); });
  }
};

// Runs each block by the way that it can take. Those that a stream takes and that follow one another are in one.
template <int parts>
static void run_tile(const BlocksOnTile<parts>& blocks, KeyTile k) {
  const BackwardCall& w = blocks.w;
  const Place& p = blocks.p;
  k.j = blocks.tile.j;
  k.count = blocks.tile.count;
  k.finite = -1;
  int64_t streamed = 0;  // from here on, blocks wait that a stream takes
  for (int64_t first = 0; first < p.rows; first += kQueries) {
    const StreamedQueries of = blocks.queries(first, first + kQueries);
    uint64_t bits[kTile];
    Tile t;
    BlockShare x{};
    const bool seen = visit(w, of.p, k.j, k.count, bits, t, x);
    const Limits& limits = w.limits[(p.b * w.c.heads + p.h) * w.blocks + of.p.row / kQueries];
    const int64_t whole = whole_depth(x.to), to = whole < k.count ? whole : k.count;
    // queries that are missing, and those of other keys of a block of 32, see nothing: 0 times a key may be NaN.
    // Products take 32 queries at a time, gradients of scores all of a block.
    t.edge |= of.p.rows % (w.scores ? kQueries : kBlock) != 0 || k.j + x.from / 32 * 32 < limits.inner_lo ||
              k.j + to > limits.inner_hi;
    const bool marked = (t.edge || t.bits) && !blocks.finite(first);
    if (seen && !marked && hides_alone(w, of, t)) continue;
    blocks.stream(streamed, first);
    streamed = first + kQueries;
    if (!seen) continue;
    if (marked) run_block_marked(w, blocks.s, k, blocks.tile, of.p, blocks.dq(first));
    else blocks.run(first, of, t, x, k.part);
  }
  blocks.stream(streamed, p.rows);
}

// Writes the gradients of a tile's keys, which are laid out as in MatrixTile.
static void put_blocks(const BackwardCall& w, const KeyTile& k, const regard_tensor& to, float* sums,
                       int64_t query_part, const float* from, int64_t ld, int64_t cols, float scale) {
  if (!to.data) return;
  const int dtype = w.g.call.dtype;
  const Place p = place_at(w.c, k.element, 0, 0);
  for (int64_t f = 0; f < cols; f += kBlock, from += MatrixTile::place(0, 1)) {
    const int64_t some = cols - f < kBlock ? cols - f : kBlock;
    char* at = (char*)to.data + size_of(dtype) * (offset(to, p, k.key_head) + k.j * to.row + f * to.col);
    if (sums)
      write_rows(part_rows(w, k, sums, query_part, ld) + f, REGARD_F32, ld, 1, from, kBlock, 1, 0, k.count, some, 1);
    else write_rows(at, dtype, to.row, to.col, from, kBlock, 1, 0, k.count, some, scale);
  }
}

// Writes dQ of the blocks of a part.
static void put_queries(const BackwardCall& w, const BackwardScratch& s, const KeyTile& k, int64_t key_part) {
  const regard_call& c = w.c;
  const int64_t group = c.heads / c.key_heads, dk = whole_depth(c.dk);
  const float* from = s.dqt;
  for (int64_t m = 0; m < group; ++m)
    for (int64_t row = k.first; row < k.last; row += kQueries, from += dk * kQueries) {
      const Place p = place_at(c, k.element, k.key_head * group + m, row);
      for (int64_t f = 0; f < round_up(c.dk); f += W)
        for (int64_t i = 0; i < kQueries; i += W) {
          vf x[W];
          for (int n = 0; n < W; ++n) x[n] = load(from + (i / kBlock * dk + f + n) * kBlock + i % kBlock);
          transpose(x);
          for (int n = 0; n < W; ++n) store(s.spare + (i + n) * w.ldk + f, x[n]);
        }
      if (w.dq) {
        float* to = w.dq + (((key_part * w.elements + k.element) * c.heads + p.h) * c.nq + row) * w.ldk;
        __builtin_memcpy(to, s.spare, sizeof(float) * (size_t)(p.rows * w.ldk));
        continue;
      }
      char* to = (char*)w.g.dq.data + size_of(w.g.call.dtype) * (offset(w.g.dq, p, p.h) + row * w.g.dq.row);
      write_rows(to, w.g.call.dtype, w.g.dq.row, w.g.dq.col, s.spare, w.ldk, 1, 0, p.rows, c.dk, c.scale);
    }
}

// One (batch element, key head), a part of the keys and a part of the queries.
template <int parts>
static void run_pair_on_unit(const BackwardCall& w, const BackwardScratch& s, KeyTile k, int64_t key_part,
                             int64_t query_part) {
  const regard_call& c = w.c;
  const int64_t group = c.heads / c.key_heads, dk = whole_depth(c.dk);
  const Isa::MatrixUnitSession session;
  const int64_t blocks = (k.last - k.first + kQueries - 1) / kQueries, end = cut(w.tiles, key_part + 1, w.key_parts);
  const PackedQueries packed = packed_queries(c, parts, group * blocks, s.blocks);
  pack_blocks<parts>(w, s, k, packed);
  __builtin_memset(s.dqt, 0, sizeof(float) * (size_t)(group * blocks * dk * kQueries));
  for (int64_t n = cut(w.tiles, key_part, w.key_parts), count; n < end; n += count) {
    MatrixTile tiles[kHeldTiles];
    count = end - n < held_tiles(c, parts) ? end - n : held_tiles(c, parts);
    for (int64_t i = 0; i < count; ++i) tiles[i] = load_tile<parts>(w, s, k, i, (n + i) * kTile);
    for (int64_t m = 0; m < group; ++m)
      for (int64_t row = k.first; row < k.last; row += held_queries(parts)) {
        const int64_t most = k.last - row < held_queries(parts) ? k.last - row : held_queries(parts);
        const Place p = place_at(c, k.element, k.key_head * group + m, row, most);
        for (int64_t i = 0; i < count; ++i)
          run_tile<parts>({w, s, tiles[i], p, packed, m * blocks + (row - k.first) / kQueries}, k);
      }
    for (int64_t i = 0; i < count; ++i) {
      k.j = tiles[i].j;
      k.count = tiles[i].count;
      put_blocks(w, k, w.g.dk, w.dk, query_part, tiles[i].dk, w.ldk, c.dk, c.scale);
      put_blocks(w, k, w.g.dv, w.dv, query_part, tiles[i].dv, w.ldv, c.dv, 1.0f);
    }
  }
  if (w.g.dq.data) put_queries(w, s, k, key_part);
}

}  // namespace regard
