// The second phase of the backward: gradients, for each tile of keys.
#pragma once
#include "attention/matrix_backward.h"
#include "core/work.h"

namespace regard {

struct KeyTile {
  int64_t element, key_head, j, count;
  int64_t part, first, last;                  // of the keys and queries together; its queries [first, last)
  int finite;                                 // whether the keys are all finite; -1 before that is computed
};

static void run_share(const BackwardCall& w, const BackwardScratch& s, const Place& p, const Tile& t, const BlockShare& x,
                      const float* dout, float* dq, int64_t part) {
  switch ((p.rows + W - 1) / W) {
    case 1: return run_block<1>(w, s, p, t, x, dout, dq, part);
    case 2: return run_block<2>(w, s, p, t, x, dout, dq, part);
    case 3: return run_block<3>(w, s, p, t, x, dout, dq, part);
    default: return run_block<kVectors>(w, s, p, t, x, dout, dq, part);
  }
}

// The queries [first, last) of a head, at most kQueriesAtOnce, against a tile of keys.
static void run_group(const BackwardCall& w, const BackwardScratch& s, KeyTile& k, int64_t head, int64_t first, int64_t last, float* dq) {
  const regard_call& c = w.c;
  Term by_value[kBlocksAtOnce], by_score[kBlocksAtOnce];
  int64_t count = 0;
  for (int64_t row = first; row < last; row += kQueries) {
    const Place p = place_at(c, k.element, head, row);
    uint64_t bits[kTile];
    Tile t;
    BlockShare x{};
    if (!visit(w, p, k.j, k.count, bits, t, x)) continue;
    const int64_t at = ((k.element * c.heads + head) * w.blocks) * kQueries + row;
    x.p = s.p + count * kTile * kQueries, x.ds = s.ds + count * kTile * kQueries;
    x.shift = w.shift + at, x.inverse = w.inverse + at, x.delta = w.delta + at;
    float *q = s.q + count * kQueries * w.ldk, *dout = s.dout + count * kQueries * w.ldv;
    widen_rows(q, w.ldk, (const char*)c.q.data + size_of(c.dtype) * (offset(c.q, p, head) + row * c.q.row), c.dtype, c.q.row, c.q.col,
               p.rows, c.dk);
    const regard_tensor& g = w.g.dout;
    widen_rows(dout, w.ldv, (const char*)g.data + size_of(w.g.dout_dtype) * (offset(g, p, head) + row * g.row), w.g.dout_dtype, g.row,
               g.col, p.rows, c.dv);
    if (t.edge || t.bits) {
      if (k.finite < 0) k.finite = all_finite(s.k, 1, w.ldk, w.ldk, k.count);
      x.mark = !k.finite || !all_finite(q, 1, w.ldk, w.ldk, p.rows) || !all_finite(dout, 1, w.ldv, w.ldv, p.rows);
    }
    run_share(w, s, p, t, x, dout, dq ? dq + (row - k.first) * w.ldk : nullptr, k.part);
    const float* marks = x.mark ? x.p : nullptr;
    by_value[count] = Term{x.p, kQueries, 1, dout, w.ldv, p.rows, x.from, x.to, marks};
    by_score[count] = Term{x.ds, kQueries, 1, q, w.ldk, p.rows, x.from, x.to, marks};
    ++count;
  }
  if (count == 0) return;
  if (w.g.dv.data) add_product(s.dv, w.ldv, by_value, count, k.count, round_up(c.dv));
  if (w.g.dk.data) add_product(s.dk, w.ldk, by_score, count, k.count, round_up(c.dk));
}

// Writes the gradients of a tile of keys or values to their tensor, or, where queries are split, to the sums of the part.
static void put_rows(const BackwardCall& w, const KeyTile& k, const regard_tensor& to, float* sums, int64_t query_part, const float* from,
                     int64_t ld, int64_t cols, float scale) {
  const regard_call& c = w.c;
  if (!to.data) return;
  const Place p = place_at(c, k.element, 0, 0);
  if (!sums) {
    char* at = (char*)to.data + size_of(w.g.gradient_dtype) * (offset(to, p, k.key_head) + k.j * to.row);
    return write_rows(at, w.g.gradient_dtype, to.row, to.col, from, ld, 1, 0, k.count, cols, scale);
  }
  float* at = sums + (((query_part * w.elements + k.element) * c.key_heads + k.key_head) * c.nk + k.j) * ld;
  __builtin_memcpy(at, from, sizeof(float) * (size_t)(k.count * ld));
}

// A block of queries against a tile of keys as without a matrix unit: where 0 · NaN is to be skipped. dq: [dk][kQueries].
static void run_block_marked(const BackwardCall& w, const BackwardScratch& s, KeyTile k, int64_t head, int64_t row, float* dq) {
  const regard_call& c = w.c;
  const Place p = place_at(c, k.element, 0, 0);
  const auto widen_tile = [&](float* to, int64_t ld, const regard_tensor& t, int64_t width) {
    const void* at = advance(t.data, offset(t, p, k.key_head) + k.j * t.row, c.dtype);
    widen_rows(to, ld, (const char*)at, c.dtype, t.row, t.col, k.count, width);
  };
  widen_tile(s.k, w.ldk, c.k, c.dk), widen_tile(s.v, w.ldv, c.v, c.dv);
  __builtin_memset(s.spare, 0, sizeof(float) * (size_t)(kQueries * w.ldk));
  k.first = row;
  run_group(w, s, k, head, row, row + kQueries < k.last ? row + kQueries : k.last, dq ? s.spare : nullptr);
  for (int64_t i = 0; dq && i < kQueries; ++i)
    for (int64_t f = 0; f < c.dk; ++f) dq[f * kQueries + i] += s.spare[i * w.ldk + f];
}

// Packs the blocks of queries of a part, of all heads of a group.
static void pack_blocks(const BackwardCall& w, const BackwardScratch& s, const KeyTile& k) {
  const regard_call& c = w.c;
  const regard_tensor& g = w.g.dout;
  const int64_t group = c.heads / c.key_heads, dk = whole_depth(c.dk), dv = whole_depth(c.dv);
  int64_t block = 0;
  for (int64_t m = 0; m < group; ++m)
    for (int64_t row = k.first; row < k.last; row += kQueries, ++block) {
      const Place p = place_at(c, k.element, k.key_head * group + m, row);
      const PackedBlock to = packed_block(c, s.blocks + block * packed_size(c));
      const void* q = advance(c.q.data, offset(c.q, p, p.h) + row * c.q.row, c.dtype);
      const LeftParts rows = left_rows(q, c.dtype, c.q.row, c.q.col, p.rows, kQueries, c.dk, s.block_rows);
      bool finite = finite_rows(rows.at, rows.row, p.rows, dk);
      pack_block(to.q, to.q_rows, rows, p.rows, dk);
      const void* dout = advance(g.data, offset(g, p, p.h) + row * g.row, w.g.dout_dtype);
      const LeftParts more = left_rows(dout, w.g.dout_dtype, g.row, g.col, p.rows, kQueries, c.dv, s.block_rows);
      finite &= finite_rows(more.at, more.row, p.rows, dv);
      pack_block(to.dout, to.dout_rows, more, p.rows, dv);
      s.finite[block] = finite;
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
          for (int n = 0; n < W; ++n) x[n] = load(from + (f + n) * kQueries + i);
          transpose(x);
          for (int n = 0; n < W; ++n) store(s.spare + (i + n) * w.ldk + f, x[n]);
        }
      if (w.dq) {
        float* to = w.dq + (((key_part * w.elements + k.element) * c.heads + p.h) * c.nq + row) * w.ldk;
        __builtin_memcpy(to, s.spare, sizeof(float) * (size_t)(p.rows * w.ldk));
        continue;
      }
      char* to = (char*)w.g.dq.data + size_of(w.g.gradient_dtype) * (offset(w.g.dq, p, p.h) + row * w.g.dq.row);
      write_rows(to, w.g.gradient_dtype, w.g.dq.row, w.g.dq.col, s.spare, w.ldk, 1, 0, p.rows, c.dk, c.scale);
    }
}

// One (batch element, key head), a part of the keys and a part of the queries, on the matrix unit.
static void run_pair_on_unit(const BackwardCall& w, const BackwardScratch& s, KeyTile k, int64_t key_part, int64_t query_part) {
  const regard_call& c = w.c;
  const int64_t group = c.heads / c.key_heads, dk = whole_depth(c.dk);
  const Isa::MatrixUnitSession session;
  pack_blocks(w, s, k);
  const int64_t blocks = (k.last - k.first + kQueries - 1) / kQueries;
  __builtin_memset(s.dqt, 0, sizeof(float) * (size_t)(group * blocks * dk * kQueries));
  const Place origin = place_at(c, k.element, 0, 0);
  for (int64_t n = cut(w.tiles, key_part, w.key_parts); n < cut(w.tiles, key_part + 1, w.key_parts); ++n) {
    k.j = n * kTile, k.count = c.nk - k.j < kTile ? c.nk - k.j : kTile;
    const void* keys = advance(c.k.data, offset(c.k, origin, k.key_head) + k.j * c.k.row, c.dtype);
    const void* values = advance(c.v.data, offset(c.v, origin, k.key_head) + k.j * c.v.row, c.dtype);
    const MatrixTile tile{left_rows(keys, c.dtype, c.k.row, c.k.col, k.count, c.nk - k.j, c.dk, s.k_rows),
                          left_rows(values, c.dtype, c.v.row, c.v.col, k.count, c.nk - k.j, c.dv, s.v_rows), {s.kt, 32, dk * 32, 0}, k.count};
    const bool finite = transpose_values<1>(s.kt, keys, c.dtype, c.k.row, c.k.col, k.count, c.dk, s.split);
    k.finite = -1;
    __builtin_memset(s.dk, 0, sizeof(float) * (size_t)(kTile * w.ldk));
    __builtin_memset(s.dv, 0, sizeof(float) * (size_t)(kTile * w.ldv));
    for (int64_t m = 0; m < group; ++m)
      for (int64_t row = k.first; row < k.last; row += kQueries) {
        const int64_t block = m * blocks + (row - k.first) / kQueries, head = k.key_head * group + m;
        const Place p = place_at(c, k.element, head, row);
        uint64_t bits[kTile];
        Tile t;
        BlockShare x{};
        if (!visit(w, p, k.j, k.count, bits, t, x)) continue;
        t.edge |= p.rows % 32 != 0;  // queries that are missing see nothing: 0 times a key may be NaN
        float* dq = w.g.dq.data ? s.dqt + block * dk * kQueries : nullptr;
        if ((t.edge || t.bits) && !(finite && s.finite[block] != 0)) {
          run_block_marked(w, s, k, head, row, dq);
          continue;
        }
        const int64_t at = (k.element * c.heads + head) * w.blocks * kQueries + row;
        x.p = s.p, x.ds = s.ds, x.shift = w.shift + at, x.inverse = w.inverse + at, x.delta = w.delta + at;
        const PackedBlock q = packed_block(c, s.blocks + block * packed_size(c));
        run_matrix_block(w, s, p, t, x, q, tile, dq, k.part);
      }
    put_rows(w, k, w.g.dk, w.dk, query_part, s.dk, w.ldk, c.dk, c.scale);
    put_rows(w, k, w.g.dv, w.dv, query_part, s.dv, w.ldv, c.dv, 1.0f);
  }
  if (w.g.dq.data) put_queries(w, s, k, key_part);
}

// One (batch element, key head), a part of the keys and a part of the queries.
static void run_pair(const BackwardCall& w, const BackwardScratch& s, int64_t element, int64_t key_head, int64_t key_part,
                     int64_t query_part) {
  const regard_call& c = w.c;
  const int64_t group = c.heads / c.key_heads;
  KeyTile k{element, key_head, 0, 0, key_part * w.query_parts + query_part, 0, 0, -1};
  k.first = cut(w.blocks, query_part, w.query_parts) * kQueries;
  k.last = cut(w.blocks, query_part + 1, w.query_parts) * kQueries;
  k.last = k.last < c.nq ? k.last : c.nq;
  if constexpr (Isa::kMatrixUnit)
    if (w.matrix) return run_pair_on_unit(w, s, k, key_part, query_part);
  const int64_t rows = k.last - k.first;
  float* dq = nullptr;
  int64_t dq_head = 0;  // floats from the sums of one head to those of the next
  if (w.g.dq.data) {
    dq_head = (w.dq ? c.nq : rows) * w.ldk;
    dq = w.dq ? w.dq + ((key_part * w.elements + element) * c.heads + key_head * group) * dq_head + k.first * w.ldk : s.dq;
    for (int64_t m = 0; m < group; ++m) __builtin_memset(dq + m * dq_head, 0, sizeof(float) * (size_t)(rows * w.ldk));
  }
  const char* keys = (const char*)c.k.data;
  const char* values = (const char*)c.v.data;
  const Place p = place_at(c, element, 0, 0);
  for (int64_t tile = cut(w.tiles, key_part, w.key_parts); tile < cut(w.tiles, key_part + 1, w.key_parts); ++tile) {
    k.j = tile * kTile, k.count = c.nk - k.j < kTile ? c.nk - k.j : kTile, k.finite = -1;
    widen_rows(s.k, w.ldk, keys + size_of(c.dtype) * (offset(c.k, p, key_head) + k.j * c.k.row), c.dtype, c.k.row, c.k.col, k.count, c.dk);
    widen_rows(s.v, w.ldv, values + size_of(c.dtype) * (offset(c.v, p, key_head) + k.j * c.v.row), c.dtype, c.v.row, c.v.col, k.count,
               c.dv);
    __builtin_memset(s.dk, 0, sizeof(float) * (size_t)(k.count * w.ldk));
    __builtin_memset(s.dv, 0, sizeof(float) * (size_t)(k.count * w.ldv));
    for (int64_t m = 0; m < group; ++m)
      for (int64_t row = k.first; row < k.last; row += kQueriesAtOnce) {
        const int64_t end = row + kQueriesAtOnce < k.last ? row + kQueriesAtOnce : k.last;
        run_group(w, s, k, key_head * group + m, row, end, dq ? dq + m * dq_head : nullptr);
      }
    put_rows(w, k, w.g.dk, w.dk, query_part, s.dk, w.ldk, c.dk, c.scale);
    put_rows(w, k, w.g.dv, w.dv, query_part, s.dv, w.ldv, c.dv, 1.0f);
  }
  if (!dq || w.dq) return;
  for (int64_t m = 0; m < group; ++m) {
    char* to = (char*)w.g.dq.data + size_of(w.g.gradient_dtype) * (offset(w.g.dq, p, key_head * group + m) + k.first * w.g.dq.row);
    write_rows(to, w.g.gradient_dtype, w.g.dq.row, w.g.dq.col, dq + m * dq_head, w.ldk, 1, 0, rows, c.dk, c.scale);
  }
}

// An item: a set of (batch element, key head) pairs that share a gradient, one after the other, for a part of the keys and of the queries.
static void run_item(const BackwardCall& w, const BackwardScratch& s, int64_t item) {
  const regard_call& c = w.c;
  const int64_t own = item % w.independent, part = item / w.independent;
  const int64_t query_part = part % w.query_parts, key_part = part / w.query_parts;
  const int64_t pairs = w.elements * c.key_heads / w.independent;
  for (int64_t n = 0; n < pairs; ++n) {
    int64_t free = own, shared = n, element = 0, step = 1;
    const int64_t key_head = w.sharing.heads ? shared % c.key_heads : free % c.key_heads;
    (w.sharing.heads ? shared : free) /= c.key_heads;
    for (int m = REGARD_BATCH_AXES - 1; m >= 0; --m) {
      int64_t& rest = w.sharing.batch[m] ? shared : free;
      element += rest % c.batch[m] * step;
      rest /= c.batch[m];
      step *= c.batch[m];
    }
    run_pair(w, s, element, key_head, key_part, query_part);
  }
}

}  // namespace regard
