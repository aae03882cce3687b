// The second phase of the backward: gradients, for each tile of keys.
#pragma once
#include "attention/backward_rows.h"
#include "attention/matrix_backward_tiles.h"

namespace regard {

constexpr int64_t kMostAhead = 512;  // rows, at most, that are prefetched for another tile or pair

// The pair that this thread turns to when it has done its own; element is -1 where none is known.
struct NextPair {
  int64_t element = -1, key_head = 0;
};

// The first phase of the queries of a pair, which no other item reads.
static void prepare_queries(const BackwardCall& w, const BackwardScratch& s, const KeyTile& k) {
  const int64_t group = w.c.heads / w.c.key_heads;
  for (int64_t m = 0; m < group; ++m)
    for (int64_t row = k.first; row < k.last; row += kQueries)
      prepare(w, s, (k.element * w.c.heads + k.key_head * group + m) * w.blocks + row / kQueries);
}

// What the blocks of queries prefetch of a tile of keys: where its gradients will be written, and the next tile; with
// the last one, where those of the queries will be, and what the next pair reads.
static Ahead ahead_of(const BackwardCall& w, const KeyTile& k, bool last, const NextPair& next) {
  const regard_call& c = w.c;
  const Place p = place_at(c, k.element, 0, 0);
  const int dtype = w.g.call.dtype;
  Ahead ahead;
  if (!w.dk) ahead.add(prefetch_rows(w.g.dk, dtype, p, k.key_head, k.j, k.count, c.dk));
  if (!w.dv) ahead.add(prefetch_rows(w.g.dv, dtype, p, k.key_head, k.j, k.count, c.dv));
  if (!last) {
    const int64_t j = k.j + k.count, rows = c.nk - j < kTile ? c.nk - j : kTile;
    ahead.add(prefetch_rows(c.k, c.dtype, p, k.key_head, j, rows, c.dk));
    ahead.add(prefetch_rows(c.v, c.dtype, p, k.key_head, j, rows, c.dv));
    return ahead;
  }
  const int64_t head = k.key_head * (c.heads / c.key_heads), rows = k.last - k.first;
  if (rows <= kMostAhead) ahead.add(prefetch_rows(w.g.dq, dtype, p, head, k.first, w.dq ? 0 : rows, c.dk));
  if (next.element < 0) return ahead;
  const Place n = place_at(c, next.element, 0, 0);
  const int64_t next_head = next.key_head * (c.heads / c.key_heads), keys = c.nk < kTile ? c.nk : kTile;
  ahead.add(prefetch_rows(c.k, c.dtype, n, next.key_head, 0, keys, c.dk));
  ahead.add(prefetch_rows(c.v, c.dtype, n, next.key_head, 0, keys, c.dv));
  if (c.nq > kMostAhead) return ahead;
  ahead.add(prefetch_rows(c.q, c.dtype, n, next_head, 0, c.nq, c.dk));
  ahead.add(prefetch_rows(w.g.dout, dtype_of(w.g.dout), n, next_head, 0, c.nq, c.dv));
  ahead.add(prefetch_rows(c.out, c.out_dtype, n, next_head, 0, c.nq, c.dv));
  return ahead;
}

// One (batch element, key head), a part of the keys and a part of the queries.
static void run_pair(const BackwardCall& w, const BackwardScratch& s, int64_t element, int64_t key_head,
                     int64_t key_part, int64_t query_part, const NextPair& next) {
  const regard_call& c = w.c;
  const int64_t group = c.heads / c.key_heads;
  KeyTile k{element, key_head, 0, 0, key_part * w.query_parts + query_part, 0, 0, -1};
  k.first = cut(w.blocks, query_part, w.query_parts) * kQueries;
  k.last = cut(w.blocks, query_part + 1, w.query_parts) * kQueries;
  k.last = k.last < c.nq ? k.last : c.nq;
  if (w.key_parts == 1) prepare_queries(w, s, k);
  if constexpr (Isa::kMatrixUnit) {
    if (w.parts == 1) return run_pair_on_unit<1>(w, s, k, key_part, query_part);
    if (w.parts == 2) return run_pair_on_unit<2>(w, s, k, key_part, query_part);
    if (w.parts == 3) return run_pair_on_unit<3>(w, s, k, key_part, query_part);
  }
  const int64_t rows = k.last - k.first;
  float* dq = nullptr;
  int64_t dq_head = 0;  // floats from the sums of one head to those of the next
  if (w.g.dq.data) {
    dq_head = (w.dq ? c.nq : rows) * w.ldk;
    dq = w.dq ? w.dq + ((key_part * w.elements + element) * c.heads + key_head * group) * dq_head + k.first * w.ldk
              : s.dq;
    for (int64_t m = 0; m < group; ++m) __builtin_memset(dq + m * dq_head, 0, sizeof(float) * (size_t)(rows * w.ldk));
  }
  const char* keys = (const char*)c.k.data;
  const char* values = (const char*)c.v.data;
  const Place p = place_at(c, element, 0, 0);
  const int64_t end = cut(w.tiles, key_part + 1, w.key_parts);
  for (int64_t tile = cut(w.tiles, key_part, w.key_parts); tile < end; ++tile) {
    k.j = tile * kTile;
    k.count = c.nk - k.j < kTile ? c.nk - k.j : kTile;
    k.finite = -1;
    k.ahead = ahead_of(w, k, tile + 1 == end, next);
    k.taken = 0;
    k.shares = group * ((rows + kQueries - 1) / kQueries);
    widen_rows(s.k, w.ldk, keys + size_of(c.dtype) * (offset(c.k, p, key_head) + k.j * c.k.row), c.dtype, c.k.row,
               c.k.col, k.count, c.dk);
    widen_rows(s.v, w.ldv, values + size_of(c.dtype) * (offset(c.v, p, key_head) + k.j * c.v.row), c.dtype, c.v.row,
               c.v.col, k.count, c.dv);
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
    char* to =
        (char*)w.g.dq.data + size_of(w.g.call.dtype) * (offset(w.g.dq, p, key_head * group + m) + k.first * w.g.dq.row);
    write_rows(to, w.g.call.dtype, w.g.dq.row, w.g.dq.col, dq + m * dq_head, w.ldk, 1, 0, rows, c.dk, c.scale);
  }
}

// An item: a set of (batch element, key head) pairs that share a gradient, one after the other, for a part of the keys
// and of the queries.
static void run_item(const BackwardCall& w, const BackwardScratch& s, int64_t item) {
  const int64_t own = item % w.independent, part = item / w.independent;
  const int64_t query_part = part % w.query_parts, key_part = part / w.query_parts;
  NextPair next;
  if (const int64_t after = own + w.c.threads;
      after < w.independent)  // the next one of this thread, in step with others
    w.sharing.each_pair(w.c, after, [&](int64_t element, int64_t key_head) {
      if (next.element < 0) next = {element, key_head};
    });
  w.sharing.each_pair(w.c, own, [&](int64_t element, int64_t key_head) {
    run_pair(w, s, element, key_head, key_part, query_part, next);
  });
}

}  // namespace regard
