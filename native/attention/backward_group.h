// Blocks of queries against a tile of keys, by vectors: its gradients, and where they go.
#pragma once
#include "attention/backward_block.h"
#include "core/work.h"

namespace regard {

struct KeyTile {
  int64_t element, key_head, j, count;
  int64_t part, first, last;  // of the keys and queries together; its queries [first, last)
  int finite;                 // whether the keys are all finite; -1 before that is computed
  Ahead ahead = {};           // what is prefetched meanwhile: in `shares` shares, of which `taken` are taken
  int64_t taken = 0, shares = 1;
  uint64_t held = 0;  // which blocks of queries scratch holds

  // Whether it holds the n-th block already; from now on it does.
  bool holds(int64_t n) {
    const uint64_t bit = (uint64_t)1 << n, before = held & bit;
    held |= bit;
    return before != 0;
  }

  // The next share, for a block of `rows` queries and the keys that it sees.
  Ahead next_share(int64_t rows, const BlockShare& x) {
    const int64_t at_once = backward_rows_at_once((int)((rows + W - 1) / W));
    return ahead.share(taken++, shares, (x.to - x.from + at_once - 1) / at_once);
  }
};

// The queries of a block, and their cotangents, as floats.
static void read_queries(const BackwardCall& w, const BackwardScratch& s, const Place& p) {
  const regard_call& c = w.c;
  const auto read = [&](float* to, int64_t ld, const regard_tensor& t, int dtype, int64_t features) {
    const void* first = advance(t.data, offset(t, p, p.h) + p.row * t.row, dtype);
    widen_rows(to, ld, (const char*)first, dtype, t.row, t.col, p.rows, features);
  };
  read(s.q, w.ldk, c.q, c.dtype, c.dk);
  read(s.dout, w.ldv, w.g.dout, dtype_of(w.g.dout), c.dv);
}

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
    const int64_t blocks = (k.last - k.first + kQueries - 1) / kQueries, group = c.heads / c.key_heads;
    const int64_t slot = w.held ? head % group * blocks + (row - k.first) / kQueries : count;
    const BackwardScratch own = s.of_block(w, slot);
    const bool held = w.held && k.holds(slot);
    if (!held) read_queries(w, own, p);
    if (t.edge || t.bits) {
      if (k.finite < 0) k.finite = all_finite(s.k, 1, w.ldk, w.ldk, k.count);
      x.mark =
          !k.finite || !all_finite(own.q, 1, w.ldk, w.ldk, p.rows) || !all_finite(own.dout, 1, w.ldv, w.ldv, p.rows);
    }
    const Ahead ahead = k.next_share(p.rows, x);
    x.ahead = &ahead;
    float* to = dq ? dq + (row - k.first) * w.ldk : nullptr;
    with_vectors(p.rows, [&](auto vectors) { run_block<vectors>(w, own, p, t, x, held, to, k.part); });
    const float* marks = x.mark ? x.p : nullptr;
    by_value[count] = Term{x.p, kQueries, 1, own.dout, w.ldv, p.rows, x.from, x.to, marks};
    by_score[count] = Term{x.ds, kQueries, 1, own.q, w.ldk, p.rows, x.from, x.to, marks};
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
