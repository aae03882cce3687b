// What a block of queries leaves when it has seen all its keys: rows of out, their lse and statistics.
#pragma once
#include "steps/steps.h"

namespace regard {

// Where the rows of a block will be written: stores wait for what memory holds there.
static Prefetch rows_of_results(const regard_call& c, const Place& p) {
  return prefetch_rows(c.out, c.out_dtype, p, p.h, p.row, p.rows, c.dv);
}

// What o becomes: times a factor; 0 in rows that saw no key, whatever the values are that no weight multiplied.
struct OutputScale {
  vf factor;
  vi keyless;

  __attribute__((always_inline)) vf of(vf o) const { return select(keyless, vf{}, o * factor); }
};

// Writes the o of vector v of a block to `rows` rows of out.
template <int V>
static void write_values(const Block<V>& b, int v, OutputScale scale, char* out, int64_t rows) {
  const regard_call& c = b.c;
  for (int64_t f = 0; f < c.dv; f += W) {
    const int64_t features = c.dv - f < W ? c.dv - f : W;
    const float* from = b.sums(f, v);
    vf r[W];
#pragma GCC unroll 16
    for (int n = 0; n < W; ++n) r[n] = scale.of(load(from + (n < features ? n : 0) * b.o_row));
    transpose(r);
    for (int64_t i = 0; i < rows; ++i)
      store_some(out + size_of(c.out_dtype) * (i * c.out.row + f * c.out.col), c.out_dtype, c.out.col, features, r[i]);
  }
}

// The same in half precision, where the features of a row are neighbours: two features are transposed as one number.
template <int dtype, int V>
static void write_halves(const Block<V>& b, int v, OutputScale scale, uint16_t* out, int64_t rows) {
  const regard_call& c = b.c;
  for (int64_t f = 0; f < c.dv; f += 2 * W) {
    const int64_t features = c.dv - f < 2 * W ? c.dv - f : 2 * W;
    const float* from = b.sums(f, v);
    const auto value = [&](int64_t n) { return scale.of(load(from + (n < features ? n : 0) * b.o_row)); };
    vf r[W];
#pragma GCC unroll 16
    for (int n = 0; n < W; ++n) r[n] = half_pair<dtype>(value(2 * n), value(2 * n + 1));
    transpose(r);
    for (int64_t i = 0; i < rows; ++i) {
      uint16_t* to = out + i * c.out.row + f;
      if (features == 2 * W) __builtin_memcpy(to, &r[i], sizeof(vf));  // aligned to 2 bytes alone
      else __builtin_memcpy(to, &r[i], (size_t)features * sizeof(uint16_t));
    }
  }
}

// Adds the sink to the state, and writes out, lse and row statistics.
template <int V>
REGARD_NOINLINE void finish(Block<V>& b) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  float* lse = c.lse.data ? at<float>(c.lse, p, p.h) + p.row * c.lse.row : nullptr;
  float* row_stats = c.row_stats.data ? at<float>(c.row_stats, p, p.h) + p.row * c.row_stats.row : nullptr;
  const int64_t base = offset(c.out, p, p.h) + p.row * c.out.row;
  const vf sink = splat(sink_of(c, p, p.h));
  for (int v = 0; v < V && v * W < p.rows; ++v) {
    SoftmaxState<vf> state = b.state[v], unrounded{state.m, b.rounded ? b.unrounded[v] : state.l};
    const vi keyless = state.empty();
    vf alpha = splat(1.0f);
    if (c.sink.data) {
      alpha = state.merge_sink(sink);
      unrounded.merge_sink(sink);
    }
    const OutputScale scale{alpha / state.l, keyless};
    const int64_t rows = p.rows - v * W < W ? p.rows - v * W : W;
    if (lse) {
      const vf sum = unrounded.lse();
      for (int64_t n = 0; n < rows; ++n) lse[(v * W + n) * c.lse.row] = sum[n];
    }
    if (row_stats) {
      const RowStats<vf> stats = unrounded.stats();
      for (int64_t n = 0; n < rows; ++n) {
        float* row = row_stats + (v * W + n) * c.row_stats.row;
        row[0] = stats.shift[n];
        row[c.row_stats.col] = stats.inverse[n];
      }
    }
    char* out = (char*)c.out.data + size_of(c.out_dtype) * (base + v * W * c.out.row);
    if (c.out_dtype == REGARD_F32 || c.out.col != 1) write_values(b, v, scale, out, rows);
    else if (c.out_dtype == REGARD_BF16) write_halves<REGARD_BF16>(b, v, scale, (uint16_t*)out, rows);
    else write_halves<REGARD_F16>(b, v, scale, (uint16_t*)out, rows);
  }
}

}  // namespace regard
