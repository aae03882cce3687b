// Gradients of what is added to the scores, from one tile of dS: slopes, offsets, bias.
#pragma once
#include "attention/training.h"

namespace regard {

// -sum of dS · distance. The terms of a row nearly cancel, so only short sums are kept in float.
template <int V>
static double slope_gradient(const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
  constexpr int64_t kShort = 4;
  double total = 0;
  for (int64_t first = from; first < to; first += kShort) {
    vf sum = vf{};
    for (int64_t n = first; n < first + kShort && n < to; ++n) {
      vf away[V];
      away_from(b, t.j + n, away);
      for (int v = 0; v < V; ++v) sum -= load(ds + n * kQueries + v * W) * away[v];
    }
    for (int n = 0; n < W; ++n) total += sum[n];
  }
  return total;
}

// The offsets of any cells, one by one.
template <int V>
static void add_cells(double* offsets, const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
  const int32_t* cells = b.c.q_cell + offset(b.c.q_cell_batch, b.p) + b.p.row;
  for (int64_t n = from; n < to; ++n) {
    double* of = offsets - cell_of(b, t.j + n);
    for (int64_t i = 0; i < b.p.rows; ++i) of[cells[i]] += ds[n * kQueries + i];
  }
}

// Neighbouring lanes are neighbouring offsets. Lanes without a query hold 0, and fall behind the end at most.
template <int V>
static void add_offsets(double* offsets, const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
  if (b.c.q_cell) return add_cells<V>(offsets, b, t, ds, from, to);
  constexpr int64_t size = kTile + kQueries;
  float sums[size] = {};
  for (int64_t n = from; n < to; ++n)
    for (int v = 0; v < V; ++v) {
      float* at = sums + v * W + to - 1 - n;
      store(at, load(at) + load(ds + n * kQueries + v * W));
    }
  double* first = offsets + b.p.row - (t.j + to) + b.c.nk;
  for (int64_t n = 0; n < to - from - 1 + V * W; ++n) first[n] += sums[n];
}

// The bias is shared by all queries or all keys: few numbers, each the sum of many.
template <int V>
static void add_shared_bias(const regard_tensor& x, const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
  double* bias = at<double>(x, b.p, b.p.h) + b.p.row * x.row + t.j * x.col;
  vf by_query[V];
  for (int v = 0; v < V; ++v) by_query[v] = vf{};
  for (int64_t n = from; n < to; ++n) {
    vf sum = vf{};
    for (int v = 0; v < V; ++v) {
      const vf g = load(ds + n * kQueries + v * W);
      sum += g, by_query[v] += g;
    }
    for (int m = 0; m < W && x.row == 0; ++m) bias[n * x.col] += sum[m];
  }
  for (int64_t i = 0; i < b.p.rows && x.row != 0; ++i) bias[i * x.row] += by_query[i / W][i % W];
}

template <int V>
static void add_bias(const regard_tensor& x, const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
  if (x.row == 0 || x.col == 0) return add_shared_bias<V>(x, b, t, ds, from, to);
  float* bias = at<float>(x, b.p, b.p.h) + b.p.row * x.row + t.j * x.col;
  for (int v = 0; v < V; ++v) {
    const int64_t rows = b.p.rows - v * W < W ? b.p.rows - v * W : W;
    int64_t n = from;
    if (x.col == 1)
      for (; n + W <= to; n += W) {
        vf r[W];
        for (int m = 0; m < W; ++m) r[m] = load(ds + (n + m) * kQueries + v * W);
        transpose(r);
        for (int64_t i = 0; i < rows; ++i) {
          float* line = bias + (v * W + i) * x.row + n;
          store(line, load(line) + r[i]);
        }
      }
    for (; n < to; ++n)
      for (int64_t i = 0; i < rows; ++i) bias[(v * W + i) * x.row + n * x.col] += ds[n * kQueries + v * W + i];
  }
}

}  // namespace regard
