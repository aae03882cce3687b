// The second phase of the backward: gradients, for each tile of keys.
#pragma once
#include "attention/matrix_backward_tiles.h"

namespace regard {

// One (batch element, key head), a part of the keys and a part of the queries.
static void run_pair(const BackwardCall& w, const BackwardScratch& s, int64_t element, int64_t key_head,
                     int64_t key_part, int64_t query_part) {
  const regard_call& c = w.c;
  const int64_t group = c.heads / c.key_heads;
  KeyTile k{element, key_head, 0, 0, key_part * w.query_parts + query_part, 0, 0, -1};
  k.first = cut(w.blocks, query_part, w.query_parts) * kQueries;
  k.last = cut(w.blocks, query_part + 1, w.query_parts) * kQueries;
  k.last = k.last < c.nq ? k.last : c.nq;
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
  for (int64_t tile = cut(w.tiles, key_part, w.key_parts); tile < cut(w.tiles, key_part + 1, w.key_parts); ++tile) {
    k.j = tile * kTile;
    k.count = c.nk - k.j < kTile ? c.nk - k.j : kTile;
    k.finite = -1;
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
  w.sharing.each_pair(
      w.c, own, [&](int64_t element, int64_t key_head) { run_pair(w, s, element, key_head, key_part, query_part); });
}

}  // namespace regard
