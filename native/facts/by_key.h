// Facts of keys and of the cells of a map: sums and maxima over the queries of a block, from weights whose sum is
// known.
#pragma once
#include "facts/by_row.h"
#include "attention/few_rows.h"

namespace regard {

// A weight times what normalises its row. careful: 0 · NaN is 0, for hidden keys and for lanes without a row.
template <bool careful>
REGARD_INLINE vf share_of(vf e, vf share) {
  const vf p = e * share;
  return careful ? (vf)((vi)p & (e != vf{}) & (share != vf{})) : p;
}

// The sum of the lanes of x, added in the same order as `sums` adds.
REGARD_INLINE float total(vf x) {
  for (int step = 1; step < W; step *= 2)
    for (int n = 0; n + step < W; n += 2 * step) x[n] += x[n + step];
  return x[0];
}

// to[n] += Σ over rows of weight · share
template <int V, bool careful>
REGARD_NOINLINE void add_received(const float* e, const vf* share, float* to, int64_t count) {
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
REGARD_INLINE vf max_or_nan(vf a, vf b) { return ((a > b) | (a != a)) ? a : b; }

// to[n] = the largest of itself and the weights of the rows
template <int V, bool careful>
REGARD_NOINLINE void max_received(const float* e, const vf* share, float* to, int64_t count) {
  for (int64_t n = 0; n < count; n += W) {
    vf x[W];
    for (int64_t k = 0; k < W; ++k) {
      const float* row = e + (n + k < count ? n + k : n) * kQueries;
      x[k] = share_of<careful>(load(row), share[0]);
      for (int v = 1; v < V; ++v) x[k] = max_or_nan(share_of<careful>(load(row + v * W), share[v]), x[k]);
    }
    transpose(x);
    for (int k = 1; k < W; ++k) x[0] = max_or_nan(x[k], x[0]);
    if (n + W <= count) store(to + n, max_or_nan(x[0], load(to + n)));
    else
      for (int64_t k = n; k < count; ++k) to[k] = max_or_nan(splat(to[k]), splat(x[0][k - n]))[0];
  }
}

// Counts the pairs whose weight is at least each level.
template <int V>
REGARD_NOINLINE void count_levels(const float* e, const vf* share, const float* level, int64_t levels, int64_t* reached,
                                  int64_t count) {
  for (int64_t k = 0; k < levels; ++k) {
    if (level[k] <= 0) continue;  // hidden pairs weigh 0 too: see count_zero_levels
    vi sum = vi{};
    for (int v = 0; v < V; ++v)
      for (int64_t n = 0; n < count; ++n) sum -= load(e + n * kQueries + v * W) * share[v] >= splat(level[k]);
    for (int n = 0; n < W; ++n) reached[k] += sum[n];
  }
}

// For levels of 0 or less: all visible pairs, but for those of rows with a NaN, which weigh NaN.
template <int V>
static void count_zero_levels(const Block<V>& b, const RowFacts<V>& f, const float* level, int64_t levels,
                              int64_t* reached) {
  for (int64_t k = 0; k < levels; ++k)
    for (int64_t n = 0; level[k] <= 0 && n < b.p.rows; ++n) {
      const float inverse = f.inverse[n / W][n % W];
      if (inverse == inverse) reached[k] += f.visible[n / W][n % W];
    }
}

// The first of `n` tokens that lies in cell a, of `cells`; token i is in cell i · cells / n, rounded down.
REGARD_INLINE int64_t cell_start(int64_t a, int64_t cells, int64_t n) { return (a * n + cells - 1) / cells; }

// The cells of a map that an item adds to: its rows of cells from `first` on.
struct Cells {
  float* to;
  int64_t* queries;  // how many of each row of cells see anything
  int64_t rows, cols, first;
};

template <int V>
static void count_queries(const Block<V>& b, const RowFacts<V>& f, const Cells& m) {
  for (int64_t n = 0; n < b.p.rows; ++n) {
    // next to a large sink all weights may be 0; a NaN is visible, but is no largest score
    const bool sees = f.max[n / W][n % W] > -kInf || f.lesser_sum[n / W][n % W] != 0;
    m.queries[(b.p.row + n) * m.rows / b.c.nq - m.first] += sees;
  }
}

// Adds the weights of the block's rows, summed over the keys of each cell ([W][kQueries]), to columns [col, col +
// count) of the map.
template <int V>
REGARD_NOINLINE void fill_cells(const Block<V>& b, const Cells& m, const float* runs, const vf* share, int64_t col,
                                int64_t count) {
  int64_t i = b.p.row, a = i * m.rows / b.c.nq, next = cell_start(a + 1, m.rows, b.c.nq);
  const int64_t end = i + b.p.rows;
  vf sum = vf{};
  for (int v = 0; v < V; ++v) {
    vf x[W];
    for (int n = 0; n < W; ++n) x[n] = n < count ? share_of<true>(load(runs + n * kQueries + v * W), share[v]) : vf{};
    transpose(x);
    for (int n = 0; n < W && i < end; ++n) {
      sum += x[n];
      ++i;
      if (i < next && i < end) continue;
      float* to = m.to + (a - m.first) * m.cols + col;
      if (count == W) store(to, load(to) + sum);
      else
        for (int64_t k = 0; k < count; ++k) to[k] += sum[k];
      sum = vf{};
      next = cell_start(++a + 1, m.rows, b.c.nq);
    }
  }
}

template <int V>
REGARD_NOINLINE void pool(const Block<V>& b, const Cells& m, const float* e, const vf* share, int64_t j,
                          int64_t count) {
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
    col += held;
    held = 0;
  }
}

}  // namespace regard
