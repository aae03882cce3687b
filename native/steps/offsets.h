// Offsets (relative position bias): s + table[cell of the query - cell of the key]. Where the call has no cells, query
// i has cell i + nk - 1 and key j has cell j.
#pragma once
#include "steps/list.h"
#include "steps/sums_by_distance.h"

namespace regard {

struct Offsets : Modifier {
  template <int V>
  struct State {
    const float* offsets;   // of the head
    vi cell[V];             // of each lane's query
    int32_t first_cell[V];  // of lane 0, where the cells of a vector's lanes count up by one; else -1
  };

  static int32_t check(const regard_call& c) {
    if (!both_or_none(c.q_cell, c.k_cell)) return REGARD_BAD_ARGUMENT;
    if (!c.offsets) return REGARD_DONE;
    if (c.offsets_stride != 0 && c.offsets_stride < c.offsets_count) return REGARD_BAD_ARGUMENT;
    if (!c.q_cell) return c.offsets_count < c.nq + c.nk - 1 ? REGARD_BAD_ARGUMENT : REGARD_DONE;
    // the table has every difference of a query's cell and a key's
    const bool right = each_element(c, c.q_cell_batch, c.k_cell_batch, [&](const Place& p) {
      const Range q = range_of(c.q_cell + offset(c.q_cell_batch, p), c.nq),
                  k = range_of(c.k_cell + offset(c.k_cell_batch, p), c.nk);
      return (int64_t)q.least - k.most >= 0 && (int64_t)q.most - k.least < c.offsets_count;
    });
    return right ? REGARD_DONE : REGARD_BAD_CELL;
  }

  static bool used(const regard_call& c) { return c.offsets; }

  // Lanes without a query, even all of a vector, read at most a block past the end of the table, which has padding
  // there; never a cell past the last query's.
  template <int V>
  static void begin(Block<V>& b, float*) {
    const regard_call& c = b.c;
    const Place& p = b.p;
    b.offsets = c.offsets + c.offsets_stride * p.h;
    const int32_t* cell = c.q_cell ? c.q_cell + offset(c.q_cell_batch, p) + p.row : nullptr;
    for (int64_t v = 0; v < V; ++v) {
      b.first_cell[v] = cell ? cell[v * W < p.rows ? v * W : 0] : (int32_t)(p.row + v * W + c.nk - 1);
      for (int64_t n = v * W; cell && n < (v + 1) * W; ++n) {
        b.cell[v][n % W] = cell[n < p.rows ? n : 0];
        if (n < p.rows && cell[n] - (int64_t)cell[v * W] != n % W) b.first_cell[v] = -1;
      }
    }
  }

  template <int V>
  REGARD_INLINE int32_t key_cell(const Block<V>& b, int64_t key) {
    return b.c.k_cell ? b.c.k_cell[offset(b.c.k_cell_batch, b.p) + key] : (int32_t)key;
  }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], vf (&)[V]) {
    for (int v = 0; v < V; ++v) s[v] = simply(b, t.j, v)(s[v], n);
  }

  static constexpr bool simple = true;

  template <int V>
  static auto simply(const Block<V>& b, int64_t first, int v) {
    const int32_t* cells = b.c.k_cell ? b.c.k_cell + offset(b.c.k_cell_batch, b.p) + first : nullptr;
    return [cells, first, table = b.offsets, start = b.first_cell[v], cell = b.cell[v]](vf s, int64_t n)
               __attribute__((always_inline)) {
                 const float* from = table - (cells ? cells[n] : (int32_t)(first + n));
                 return plus_natural(s, start < 0 ? take(from, cell) : load(from + start));
               };
  }

  // The offsets of a row's query and W keys.
  REGARD_INLINE vf of_row(const RowKeys& x) {
    const regard_call& c = x.f.c;
    const int64_t key = x.key(), valid = x.valid();
    const float* table = c.offsets + c.offsets_stride * x.row.h;
    if (!c.k_cell) return floats(table, x.row.i + c.nk - 1 - key, -1, valid, REGARD_F32);
    const int32_t *cells = c.k_cell + offset(c.k_cell_batch, x.f.p) + key,
                  cell = c.q_cell[offset(c.q_cell_batch, x.f.p) + x.row.i];
    vf added;
    for (int m = 0; m < W; ++m) added[m] = table[cell - cells[m < valid ? m : 0]];
    return added;
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf&) { s = plus_natural(s, of_row(x)); }

  static bool wants_grad(const regard_gradients& g) { return g.doffsets; }
  // lanes without a query add 0, at most kQueries past the end
  static int64_t grad_size(const regard_gradients& g) { return g.doffsets ? g.call.offsets_count + kQueries : 0; }

  // For any cells, one by one.
  template <int V>
  static void add_by_cell(double* sum, const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
    const int32_t* cells = b.c.q_cell + offset(b.c.q_cell_batch, b.p) + b.p.row;
    for (int64_t n = from; n < to; ++n) {
      double* of = sum - key_cell(b, t.j + n);
      for (int64_t i = 0; i < b.p.rows; ++i) of[cells[i]] += ds[n * kQueries + i];
    }
  }

  // Without cells, neighbouring lanes are neighbouring offsets.
  template <int V>
  static void add_by_lane(double* sum, const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
    if (b.c.q_cell) return add_by_cell<V>(sum, b, t, ds, from, to);
    float sums[kDistances] = {};
    add_by_distance<V>(sums, ds, from, to);
    double* first = sum + b.p.row - (t.j + to) + b.c.nk;
    for (int64_t n = 0; n < to - from - 1 + V * W; ++n) first[n] += sums[n];
  }

  template <int V>
  static void backward(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* sum) {
    if (g.wanted.doffsets) add_by_lane<V>(sum, b, t, g.ds, g.from, g.to);
  }

  static void write_grad(const regard_gradients& g, int64_t head, const double* sum) {
    const int64_t count = g.call.offsets_count;
    for (int64_t n = 0; n < count; ++n) g.doffsets[head * count + n] = (float)sum[n];
  }
};

}  // namespace regard
