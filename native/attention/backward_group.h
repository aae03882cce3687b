// Blocks of queries against a tile of keys, by vectors: its gradients, and where they go.
#pragma once
#include "attention/backward_block.h"
#include "core/work.h"

namespace regard {

struct KeyTile {
  int64_t element, key_head, j, count;
  int64_t part, first, last;  // of the keys and queries together; its queries [first, last)
  int finite;                 // whether the keys are all finite; -1 before that is computed
};

// The queries [first, last) of a head, at most kQueriesAtOnce, against a tile of keys.
static void run_group(const BackwardCall& w, const BackwardScratch& s, KeyTile& k, int64_t head, int64_t first,
                      int64_t last, float* dq) {
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
    x.p = s.p + count * kTile * kQueries;
    x.ds = s.ds + count * kTile * kQueries;
    x.shift = w.shift + at;
    x.inverse = w.inverse + at;
    x.delta = w.delta + at;
    float *q = s.q + count * kQueries * w.ldk, *dout = s.dout + count * kQueries * w.ldv;
    widen_rows(q, w.ldk, (const char*)c.q.data + size_of(c.dtype) * (offset(c.q, p, head) + row * c.q.row), c.dtype,
               c.q.row, c.q.col, p.rows, c.dk);
    const regard_tensor& g = w.g.dout;
    widen_rows(dout, w.ldv, (const char*)g.data + size_of(dtype_of(w.g.dout)) * (offset(g, p, head) + row * g.row),
               dtype_of(w.g.dout), g.row, g.col, p.rows, c.dv);
    if (t.edge || t.bits) {
      if (k.finite < 0) k.finite = all_finite(s.k, 1, w.ldk, w.ldk, k.count);
      x.mark = !k.finite || !all_finite(q, 1, w.ldk, w.ldk, p.rows) || !all_finite(dout, 1, w.ldv, w.ldv, p.rows);
    }
    float* to = dq ? dq + (row - k.first) * w.ldk : nullptr;
    with_vectors(p.rows, [&](auto vectors) { run_block<vectors>(w, s, p, t, x, dout, to, k.part); });
    const float* marks = x.mark ? x.p : nullptr;
    by_value[count] = Term{x.p, kQueries, 1, dout, w.ldv, p.rows, x.from, x.to, marks};
    by_score[count] = Term{x.ds, kQueries, 1, q, w.ldk, p.rows, x.from, x.to, marks};
    ++count;
  }
  if (count == 0) return;
  if (w.g.dv.data) add_product(s.dv, w.ldv, by_value, count, k.count, round_up(c.dv));
  if (w.g.dk.data) add_product(s.dk, w.ldk, by_score, count, k.count, round_up(c.dk));
}

// Where the rows of a tile's keys lie in the sums of a part of the queries.
static float* part_rows(const BackwardCall& w, const KeyTile& k, float* sums, int64_t query_part, int64_t ld) {
  const regard_call& c = w.c;
  return sums + (((query_part * w.elements + k.element) * c.key_heads + k.key_head) * c.nk + k.j) * ld;
}

// Writes the gradients of a tile of keys or values to their tensor, or, where queries are split, to the sums of the
// part.
static void put_rows(const BackwardCall& w, const KeyTile& k, const regard_tensor& to, float* sums, int64_t query_part,
                     const float* from, int64_t ld, int64_t cols, float scale) {
  const regard_call& c = w.c;
  if (!to.data) return;
  const Place p = place_at(c, k.element, 0, 0);
  if (!sums) {
    char* at = (char*)to.data + size_of(w.g.call.dtype) * (offset(to, p, k.key_head) + k.j * to.row);
    return write_rows(at, w.g.call.dtype, to.row, to.col, from, ld, 1, 0, k.count, cols, scale);
  }
  __builtin_memcpy(part_rows(w, k, sums, query_part, ld), from, sizeof(float) * (size_t)(k.count * ld));
}

}  // namespace regard
