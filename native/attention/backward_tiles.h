// Backward over tiles of keys: an item is some (batch, key head) pairs, a part of the keys and a part of the queries.
#pragma once
#include "attention/backward_block.h"
#include "core/work.h"

namespace regard {

// --- first phase: what the weights of a row are computed with ---

static float dot_row(const void* a, int a_dtype, int64_t a_col, const void* b, int b_dtype, int64_t b_col, int64_t count) {
  vf sum = vf{};
  float total = 0;
  int64_t n = 0;
  if (a_col == 1 && b_col == 1)
    for (; n + W <= count; n += W) sum += load_some(a, n, a_dtype) * load_some(b, n, b_dtype);
  for (; n < count; ++n) total += load_one(a, n * a_col, a_dtype) * load_one(b, n * b_col, b_dtype);
  for (int m = 0; m < W; ++m) total += sum[m];
  return total;
}

// Runs `body` on the scores of a block of queries against each tile of keys that it sees.
template <int V, class Body>
REGARD_INLINE void each_tile(const Training& w, const Sweep& s, const Block<V>& b, Share& x, bool values, const Body& body) {
  const regard_call& c = w.c;
  const int64_t key_head = b.p.h / (c.heads / c.key_heads);
  const char* keys = (const char*)c.k.data + size_of(c.dtype) * offset(c.k, b.p, key_head);
  const char* all = (const char*)c.v.data + size_of(c.dtype) * offset(c.v, b.p, key_head);
  for (int64_t j = 0; j < c.nk; j += kTile) {
    const int64_t count = c.nk - j < kTile ? c.nk - j : kTile;
    uint64_t bits[kTile];
    Tile t;
    if (!look(w, b.p, j, count, bits, t, x)) continue;
    widen_rows(s.k, w.wide_k, keys + size_of(c.dtype) * j * c.k.row, c.dtype, c.k.row, c.k.col, count, c.dk);
    if (values) widen_rows(s.v, w.wide_v, all + size_of(c.dtype) * j * c.v.row, c.dtype, c.v.row, c.v.col, count, c.dv);
    Modifiers::load_tile(b, t);
    score_keys<V>(b, t, s, w.wide_k, x);
    body(t);
  }
}

// shift and inverse of a block of queries, where the forward had other scores than these.
template <int V>
static void sum_rows(const Training& w, const Sweep& s, Block<V>& b, Share& x, float* shift, float* inverse) {
  const float sink = sink_of(w.c, b.p, b.p.h);
  for (int v = 0; v < V; ++v) b.m[v] = splat(sink), b.l[v] = splat(sink == -kInf ? 0.0f : 1.0f);
  each_tile<V>(w, s, b, x, false, [&](const Tile&) {
    for (int v = 0; v < V; ++v) {
      const float* at = s.p + v * W;
      vf top = b.m[v], sum = vf{};
      for (int64_t n = x.from; n < x.to; ++n) top = greater_of(load(at + n * kQueries), top);
      const vf finite = top == splat(-kInf) ? vf{} : top;
      for (int64_t n = x.from; n < x.to; ++n) sum += exp2v(load(at + n * kQueries) - finite);
      b.l[v] = b.l[v] * exp2v(b.m[v] - finite) + sum;
      b.m[v] = top;
    }
  });
  for (int v = 0; v < V; ++v) {
    const vi empty = b.m[v] == splat(-kInf);
    store(shift + v * W, empty ? vf{} : b.m[v]);
    store(inverse + v * W, empty ? vf{} : splat(1.0f) / b.l[v]);
  }
}

// delta of a block of queries as the sum of P dP: rowsum(dO · O) is the same but for rounding, which distances (of learned slopes),
// summed over the row, would multiply.
template <int V>
static void sum_block(const Training& w, const Sweep& s, const Place& p, float* shift, float* inverse, float* delta) {
  const regard_call& c = w.c;
  const Scratch scratch{s.qt, s.p, nullptr, s.bias, nullptr, nullptr};
  Block<V> b{c, scratch, p};
  open_block<V>(b, s);
  Share x{0, 0, s.p, s.ds, shift, inverse, delta, false, false};
  if (w.anew) sum_rows<V>(w, s, b, x, shift, inverse);
  const regard_tensor& g = w.g.dout;
  const char* dout = (const char*)g.data + size_of(w.g.dout_dtype) * (offset(g, p, p.h) + p.row * g.row);
  pack<V>(s.doutt, kQueries, dout, w.g.dout_dtype, g.row, g.col, p.rows, c.dv, 1.0f);
  vf row_delta[V];
  for (int v = 0; v < V; ++v) row_delta[v] = vf{}, store(delta + v * W, vf{});
  each_tile<V>(w, s, b, x, true, [&](const Tile& t) {
    weigh_keys<V>(b, t, s, w.wide_v, x);
    for (int v = 0; v < V; ++v) {
      vf sum = vf{};
      for (int64_t n = x.from; n < x.to; ++n) sum += load(s.ds + n * kQueries + v * W);
      row_delta[v] += sum;
    }
  });
  for (int64_t n = 0; n < p.rows; ++n)
    if (inverse[n] != 0) delta[n] = row_delta[n / W][n % W] - (w.g.dlse.data ? at<float>(w.g.dlse, p, p.h)[(p.row + n) * w.g.dlse.row] : 0);
}

// shift, inverse and delta of a block of queries.
static void prepare(const Training& w, const Sweep& s, int64_t item) {
  const regard_call& c = w.c;
  const int64_t pair = item / w.blocks;
  const Place p = place_at(c, pair / c.heads, pair % c.heads, item % w.blocks * kQueries);
  float *shift = w.shift + item * kQueries, *inverse = w.inverse + item * kQueries, *delta = w.delta + item * kQueries;
  w.limits[item] = Interval::limits(c, p);
  const float* row_stats = at<float>(c.row_stats, p, p.h) + p.row * c.row_stats.row;
  const float* dlse = w.g.dlse.data ? at<float>(w.g.dlse, p, p.h) + p.row * w.g.dlse.row : nullptr;
  const char* out = (const char*)c.out.data + size_of(c.out_dtype) * (offset(c.out, p, p.h) + p.row * c.out.row);
  const char* dout = (const char*)w.g.dout.data + size_of(w.g.dout_dtype) * (offset(w.g.dout, p, p.h) + p.row * w.g.dout.row);
  for (int64_t n = 0; n < kQueries; ++n) {
    shift[n] = inverse[n] = delta[n] = 0;
    if (n >= p.rows) continue;
    shift[n] = row_stats[n * c.row_stats.row], inverse[n] = row_stats[n * c.row_stats.row + c.row_stats.col];
    if (inverse[n] == 0) continue;
    delta[n] = dot_row(dout + n * w.g.dout.row * size_of(w.g.dout_dtype), w.g.dout_dtype, w.g.dout.col,
                       out + n * c.out.row * size_of(c.out_dtype), c.out_dtype, c.out.col, c.dv);
    if (dlse) delta[n] -= dlse[n * w.g.dlse.row];
  }
  if (!w.anew && !Modifiers::multiply_delta(w.g)) return;
  switch ((p.rows + W - 1) / W) {
    case 1: return sum_block<1>(w, s, p, shift, inverse, delta);
    case 2: return sum_block<2>(w, s, p, shift, inverse, delta);
    case 3: return sum_block<3>(w, s, p, shift, inverse, delta);
    default: return sum_block<kVectors>(w, s, p, shift, inverse, delta);
  }
}

// --- second phase ---

struct KeyTile {
  int64_t element, key_head, j, count, part;  // part: of keys and queries together
  int64_t first, last;                        // queries
  int finite;                                 // whether the keys are: 1, 0, or -1 as nobody has asked
};

static void run_share(const Training& w, const Sweep& s, const Place& p, const Tile& t, const Share& x, const float* dout, float* dq,
                      int64_t part) {
  switch ((p.rows + W - 1) / W) {
    case 1: return run_block<1>(w, s, p, t, x, dout, dq, part);
    case 2: return run_block<2>(w, s, p, t, x, dout, dq, part);
    case 3: return run_block<3>(w, s, p, t, x, dout, dq, part);
    default: return run_block<kVectors>(w, s, p, t, x, dout, dq, part);
  }
}

// One head's queries [first, last), a group of blocks, against a tile of keys.
static void run_group(const Training& w, const Sweep& s, KeyTile& k, int64_t head, int64_t first, int64_t last, float* dq) {
  const regard_call& c = w.c;
  Term by_value[kBlocks], by_score[kBlocks];
  int64_t count = 0;
  for (int64_t row = first; row < last; row += kQueries) {
    const Place p = place_at(c, k.element, head, row);
    uint64_t bits[kTile];
    Tile t;
    Share x{};
    if (!look(w, p, k.j, k.count, bits, t, x)) continue;
    const int64_t at = ((k.element * c.heads + head) * w.blocks) * kQueries + row;
    x.p = s.p + count * kTile * kQueries, x.ds = s.ds + count * kTile * kQueries;
    x.shift = w.shift + at, x.inverse = w.inverse + at, x.delta = w.delta + at;
    float *q = s.q + count * kQueries * w.wide_k, *dout = s.dout + count * kQueries * w.wide_v;
    widen_rows(q, w.wide_k, (const char*)c.q.data + size_of(c.dtype) * (offset(c.q, p, head) + row * c.q.row), c.dtype, c.q.row, c.q.col,
               p.rows, c.dk);
    const regard_tensor& g = w.g.dout;
    widen_rows(dout, w.wide_v, (const char*)g.data + size_of(w.g.dout_dtype) * (offset(g, p, head) + row * g.row), w.g.dout_dtype, g.row,
               g.col, p.rows, c.dv);
    if (t.edge || t.bits) {
      if (k.finite < 0) k.finite = all_finite(s.k, 1, w.wide_k, w.wide_k, k.count);
      x.mark = !k.finite || !all_finite(q, 1, w.wide_k, w.wide_k, p.rows) || !all_finite(dout, 1, w.wide_v, w.wide_v, p.rows);
    }
    run_share(w, s, p, t, x, dout, dq ? dq + (row - k.first) * w.wide_k : nullptr, k.part);
    const float* marks = x.mark ? x.p : nullptr;
    by_value[count] = Term{x.p, kQueries, 1, dout, w.wide_v, p.rows, x.from, x.to, marks};
    by_score[count] = Term{x.ds, kQueries, 1, q, w.wide_k, p.rows, x.from, x.to, marks};
    ++count;
  }
  if (count == 0) return;
  if (w.g.dv.data) add_product(s.dv, w.wide_v, by_value, count, k.count, round_up(c.dv));
  if (w.g.dk.data) add_product(s.dk, w.wide_k, by_score, count, k.count, round_up(c.dk));
}

// Gradients of a tile of keys or values: to their tensor, or to the sums of a part.
static void put_rows(const Training& w, const KeyTile& k, const regard_tensor& to, float* sums, int64_t query_part, const float* from,
                     int64_t wide, int64_t cols, float scale) {
  const regard_call& c = w.c;
  if (!to.data) return;
  const Place p = place_at(c, k.element, 0, 0);
  if (!sums) {
    char* at = (char*)to.data + size_of(w.g.gradient_dtype) * (offset(to, p, k.key_head) + k.j * to.row);
    return write_rows(at, w.g.gradient_dtype, to.row, to.col, from, wide, 1, 0, k.count, cols, scale);
  }
  float* at = sums + (((query_part * w.elements + k.element) * c.key_heads + k.key_head) * c.nk + k.j) * wide;
  __builtin_memcpy(at, from, sizeof(float) * (size_t)(k.count * wide));
}

// One (batch element, key head).
static void run_pair(const Training& w, const Sweep& s, int64_t element, int64_t key_head, int64_t key_part, int64_t query_part) {
  const regard_call& c = w.c;
  const int64_t group = c.heads / c.key_heads;
  KeyTile k{element, key_head, 0, 0, key_part * w.query_parts + query_part, 0, 0, -1};
  k.first = cut(w.blocks, query_part, w.query_parts) * kQueries;
  k.last = cut(w.blocks, query_part + 1, w.query_parts) * kQueries;
  k.last = k.last < c.nq ? k.last : c.nq;
  const int64_t rows = k.last - k.first;
  float* dq = nullptr;
  int64_t dq_head = 0;  // from one head's sums to the next
  if (w.g.dq.data) {
    dq_head = (w.dq ? c.nq : rows) * w.wide_k;
    dq = w.dq ? w.dq + ((key_part * w.elements + element) * c.heads + key_head * group) * dq_head + k.first * w.wide_k : s.dq;
    for (int64_t m = 0; m < group; ++m) __builtin_memset(dq + m * dq_head, 0, sizeof(float) * (size_t)(rows * w.wide_k));
  }
  const char* keys = (const char*)c.k.data;
  const char* values = (const char*)c.v.data;
  const Place p = place_at(c, element, 0, 0);
  for (int64_t tile = cut(w.tiles, key_part, w.key_parts); tile < cut(w.tiles, key_part + 1, w.key_parts); ++tile) {
    k.j = tile * kTile, k.count = c.nk - k.j < kTile ? c.nk - k.j : kTile, k.finite = -1;
    widen_rows(s.k, w.wide_k, keys + size_of(c.dtype) * (offset(c.k, p, key_head) + k.j * c.k.row), c.dtype, c.k.row, c.k.col, k.count, c.dk);
    widen_rows(s.v, w.wide_v, values + size_of(c.dtype) * (offset(c.v, p, key_head) + k.j * c.v.row), c.dtype, c.v.row, c.v.col, k.count,
               c.dv);
    __builtin_memset(s.dk, 0, sizeof(float) * (size_t)(k.count * w.wide_k));
    __builtin_memset(s.dv, 0, sizeof(float) * (size_t)(k.count * w.wide_v));
    for (int64_t m = 0; m < group; ++m)
      for (int64_t row = k.first; row < k.last; row += kHeld)
        run_group(w, s, k, key_head * group + m, row, row + kHeld < k.last ? row + kHeld : k.last, dq ? dq + m * dq_head : nullptr);
    put_rows(w, k, w.g.dk, w.dk, query_part, s.dk, w.wide_k, c.dk, c.scale);
    put_rows(w, k, w.g.dv, w.dv, query_part, s.dv, w.wide_v, c.dv, 1.0f);
  }
  if (!dq || w.dq) return;
  for (int64_t m = 0; m < group; ++m) {
    char* to = (char*)w.g.dq.data + size_of(w.g.gradient_dtype) * (offset(w.g.dq, p, key_head * group + m) + k.first * w.g.dq.row);
    write_rows(to, w.g.gradient_dtype, w.g.dq.row, w.g.dq.col, dq + m * dq_head, w.wide_k, 1, 0, rows, c.dk, c.scale);
  }
}

// A class: the pairs of its coordinates on the axes that are not tied, one after the other.
static void run_item(const Training& w, const Sweep& s, int64_t item) {
  const regard_call& c = w.c;
  const int64_t own = item % w.classes, query_part = item / w.classes % w.query_parts, key_part = item / w.classes / w.query_parts;
  const int64_t pairs = w.elements * c.key_heads / w.classes;
  for (int64_t n = 0; n < pairs; ++n) {
    int64_t free = own, tied = n, element = 0, step = 1;
    const int64_t key_head = w.tied[REGARD_BATCH_AXES] ? tied % c.key_heads : free % c.key_heads;
    (w.tied[REGARD_BATCH_AXES] ? tied : free) /= c.key_heads;
    for (int m = REGARD_BATCH_AXES - 1; m >= 0; --m) {
      int64_t& rest = w.tied[m] ? tied : free;
      element += rest % c.batch[m] * step;
      rest /= c.batch[m];
      step *= c.batch[m];
    }
    run_pair(w, s, element, key_head, key_part, query_part);
  }
}

}  // namespace regard
