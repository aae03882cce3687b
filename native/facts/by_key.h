// Facts of keys and of cells: what the queries of a block give to each key, from weights whose sum is known.
#pragma once
#include "facts/by_row.h"
#include "attention/few_rows.h"

namespace regard {

// A weight and what its row's are multiplied by. careful: 0 · NaN is 0, for what a row does not see and for lanes that are no row.
template <bool careful>
REGARD_INLINE vf share_of(vf e, vf share) {
  const vf p = e * share;
  return careful ? (vf)((vi)p & (e != vf{}) & (share != vf{})) : p;
}

// Adds up the lanes of x, in the order that `sums` has.
REGARD_INLINE float total(vf x) {
  for (int step = 1; step < W; step *= 2)
    for (int n = 0; n + step < W; n += 2 * step) x[n] += x[n + step];
  return x[0];
}

// to[n] += sum over rows of weight times share
template <int V, bool careful>
REGARD_ALONE void receive(const float* e, const vf* share, float* to, int64_t count) {
  int64_t n = 0;
  for (; n + W <= count; n += W, e += W * kQueries) {
    vf x[W];
#pragma GCC unroll 16
    for (int k = 0; k < W; ++k) {
      x[k] = share_of<careful>(load(e + k * kQueries), share[0]);
#pragma GCC unroll 4
      for (int v = 1; v < V; ++v) x[k] += share_of<careful>(load(e + k * kQueries + v * W), share[v]);
    }
    store(to + n, load(to + n) + sums(x));
  }
  for (; n < count; ++n, e += kQueries) {
    vf x = share_of<careful>(load(e), share[0]);
    for (int v = 1; v < V; ++v) x += share_of<careful>(load(e + v * W), share[v]);
    to[n] += total(x);
  }
}

// The greater, or NaN where either is.
REGARD_INLINE vf peak_of(vf a, vf b) { return ((a > b) | (a != a)) ? a : b; }

// to[n] = the largest of itself and the weights of the rows
template <int V, bool careful>
REGARD_ALONE void receive_most(const float* e, const vf* share, float* to, int64_t count) {
  for (int64_t n = 0; n < count; n += W) {
    vf x[W];
    for (int64_t k = 0; k < W; ++k) {
      const float* row = e + (n + k < count ? n + k : n) * kQueries;
      x[k] = share_of<careful>(load(row), share[0]);
      for (int v = 1; v < V; ++v) x[k] = peak_of(share_of<careful>(load(row + v * W), share[v]), x[k]);
    }
    transpose(x);
    for (int k = 1; k < W; ++k) x[0] = peak_of(x[k], x[0]);
    if (n + W <= count) store(to + n, peak_of(x[0], load(to + n)));
    else
      for (int64_t k = n; k < count; ++k) to[k] = peak_of(splat(to[k]), splat(x[0][k - n]))[0];
  }
}

// How many pairs weigh as much as each level, or more.
template <int V>
REGARD_ALONE void reach(const float* e, const vf* share, const float* level, int64_t levels, int64_t* reached, int64_t count) {
  for (int64_t k = 0; k < levels; ++k) {
    if (level[k] <= 0) continue;  // what is hidden weighs 0 too: see reach_all
    vi sum = vi{};
    for (int v = 0; v < V; ++v)
      for (int64_t n = 0; n < count; ++n) sum -= load(e + n * kQueries + v * W) * share[v] >= splat(level[k]);
    for (int n = 0; n < W; ++n) reached[k] += sum[n];
  }
}

// All that is seen weighs 0 or more.
template <int V>
static void reach_all(const Block<V>& b, const Found<V>& f, const float* level, int64_t levels, int64_t* reached) {
  for (int64_t k = 0; k < levels; ++k)
    for (int64_t n = 0; level[k] <= 0 && n < b.p.rows; ++n) reached[k] += f.seen[n / W][n % W];
}

// The first of `n` tokens that lies in cell a, of `cells`; token i is in cell i · cells / n, rounded down.
REGARD_INLINE int64_t cell_start(int64_t a, int64_t cells, int64_t n) { return (a * n + cells - 1) / cells; }

// The cells of a map that an item fills: its rows of cells from `first` on.
struct Cells {
  float* to;
  int64_t* queries;  // how many of each row of cells see anything
  int64_t rows, cols, first;
};

template <int V>
static void count_queries(const Block<V>& b, const Found<V>& f, const Cells& m) {
  for (int64_t n = 0; n < b.p.rows; ++n) {
    // a sink may leave no weight to what is seen; a NaN is seen, and no largest score
    const bool sees = f.top[n / W][n % W] > -kInf || f.others[n / W][n % W] != 0;
    m.queries[(b.p.row + n) * m.rows / b.c.nq - m.first] += sees;
  }
}

// Weights of the block's rows on runs of keys, [W][kQueries], join the cells of their rows: columns [col, col + count).
template <int V>
REGARD_ALONE void fill_cells(const Block<V>& b, const Cells& m, const float* runs, const vf* share, int64_t col, int64_t count) {
  int64_t i = b.p.row, a = i * m.rows / b.c.nq, next = cell_start(a + 1, m.rows, b.c.nq);
  const int64_t end = i + b.p.rows;
  vf sum = vf{};
  for (int v = 0; v < V; ++v) {
    vf x[W];
    for (int n = 0; n < W; ++n) x[n] = n < count ? share_of<true>(load(runs + n * kQueries + v * W), share[v]) : vf{};
    transpose(x);
    for (int n = 0; n < W && i < end; ++n) {
      sum += x[n];
      if (++i < next && i < end) continue;
      float* to = m.to + (a - m.first) * m.cols + col;
      if (count == W) store(to, load(to) + sum);
      else
        for (int64_t k = 0; k < count; ++k) to[k] += sum[k];
      sum = vf{}, next = cell_start(++a + 1, m.rows, b.c.nq);
    }
  }
}

template <int V>
REGARD_ALONE void pool(const Block<V>& b, const Cells& m, const float* e, const vf* share, int64_t j, int64_t count) {
  float runs[W * kQueries];
  int64_t n = 0, col = j * m.cols / b.c.nk, held = 0;
  while (n < count) {
    const int64_t next = cell_start(col + held + 1, m.cols, b.c.nk) - j, stop = next < count ? next : count;
    vf run[V];
    for (int v = 0; v < V; ++v) run[v] = vf{};
    for (; n < stop; ++n)
      for (int v = 0; v < V; ++v) run[v] += load(e + n * kQueries + v * W);
    for (int v = 0; v < V; ++v) store(runs + held * kQueries + v * W, run[v]);
    if (++held < W && n < count) continue;
    fill_cells(b, m, runs, share, col, held);
    col += held, held = 0;
  }
}

}  // namespace regard
