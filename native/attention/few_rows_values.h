// Few rows against a chunk of keys: from scores to weights, and weighted sums of values.
#pragma once
#include "attention/few_rows.h"

namespace regard {

// Scores of one row become weights; returns their sum before dropout. Of values of int8, the weights are multiplied by
// the scales.
[[maybe_unused]] static float weigh_row(const FewRows& f, const Chunk& t, int64_t r, float shift) {
  const regard_call& c = f.c;
  vf sum = vf{};
  vu word = vu{};
  if (c.threshold) word = Dropout::row_word(f, f.row[r]);
  for (int64_t n = 0; n < t.count; n += W) {
    float* at = f.s + r * kChunk + n;
    vf s = load(at), p = exp2v(s - splat(shift));
    sum += p;
    if (c.threshold) p = Dropout::apply(c, word, f.word[n / W], p);
    if (c.v_scales.data) p *= load(f.v_scale + n);
    if (t.some) p = select(s == splat(-kInf), splat(-0.0f), p);
    store(at, p);
  }
  return sum_of_lanes(sum);
}

// acc[i][v] += the weight p of row i, kChunk numbers after that of the row before it, times V vectors of features of a
// row of values. valid: features that are left, where V is 1. careful: see weighted().
template <int R, int V, int dtype, bool careful>
REGARD_INLINE void add_weighted(vf (&acc)[R][V], const float* p, const char* value, int64_t d, int64_t valid) {
  vf weight[R];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) weight[i] = splat_any(p + i * kChunk);
  if constexpr (V == 1) {
    const vf column = floats(value, d, 1, valid, dtype);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
      if (!careful || ((vi)weight[i])[0] != INT32_MIN) acc[i][0] += weight[i] * column;
  } else {
    // two vectors are read, and multiplied, at a time: of eight that are read first, a sum would find no register
#pragma GCC unroll 4
    for (int v = 0; v < V; v += 2) {
      const TwoVectors two = TwoVectors::read<dtype>(value, d + v * W);
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        acc[i][v] += weight[i] * two.a;
        acc[i][v + 1] += weight[i] * two.b;
      }
    }
  }
}

// acc[i][v] = Σ over keys of the weight of row r + i times V vectors of features from d on. part: fewer than W features
// are left. careful: hidden keys are skipped instead of multiplied by 0, since 0 · NaN is NaN.
template <int R, int V, int dtype, bool part, bool careful, class Rows>
REGARD_INLINE void weighted(vf (&acc)[R][V], const FewRows& f, const Chunk& t, const Rows& values, int64_t r,
                            int64_t d) {
  const float* s = f.s + r * kChunk;
  const int64_t valid = part ? f.c.dv - d : W;
  const bool ahead = t.more && r == 0;
  clear(acc);
  int64_t first = 0;
  for (; first + W <= t.count; first += W) {
    const Run rows = values.run(first);
    if (ahead) {
      const Run next = values.run(first + kChunk);
      for (int n = 0; n < W; ++n) fetch(next[n] + d * size_of(dtype), V * W * size_of(dtype));
    }
#pragma GCC unroll 2
    for (int n = 0; n < W; ++n) add_weighted<R, V, dtype, careful>(acc, s + first + n, rows[n], d, valid);
  }
  if (first < t.count) {
    const Run rows = values.run(first);
    for (int64_t n = 0; first + n < t.count; ++n)
      add_weighted<R, V, dtype, careful>(acc, s + first + n, rows[n], d, valid);
  }
  if constexpr (V > 1)
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < V; v += 2) {
        const TwoVectors two = TwoVectors{acc[i][v], acc[i][v + 1]}.in_order<dtype>();
        acc[i][v] = two.a;
        acc[i][v + 1] = two.b;
      }
}

template <int R, int V>
REGARD_INLINE bool finite(const vf (&x)[R][V]) {
  vf rest = vf{};  // x - x is 0 for what is finite and NaN for what is not
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) rest += x[i][v] - x[i][v];
  float sum = 0;
  for (int n = 0; n < W; ++n) sum += rest[n];
  return sum == 0;
}

template <int dtype, bool part, class Rows>
static void add_visible(const FewRows& f, const Chunk& t, const Rows& values, int rows, int vectors, int64_t r,
                        int64_t d) {
  for (int i = 0; i < rows; ++i)
    for (int v = 0; v < vectors; ++v) {
      vf acc[1][1];
      weighted<1, 1, dtype, part, true>(acc, f, t, values, r + i, d + v * W);
      merge_values(state_of(f, r + i).o() + d + v * W, splat(f.alpha[r + i]), acc[0][0]);
    }
}

template <int R, int V, int dtype, bool part, class Rows>
static void add_values(const FewRows& f, const Chunk& t, const Rows& values, int64_t r, int64_t d) {
  vf acc[R][V];
  weighted<R, V, dtype, part, false>(acc, f, t, values, r, d);
  if (t.some && !finite(acc)) return add_visible<dtype, part>(f, t, values, R, V, r, d);
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) merge_values(state_of(f, r + i).o() + d + v * W, splat(f.alpha[r + i]), acc[i][v]);
}

// All features of R rows: V vectors of them at once, then half as many, and so on.
template <int R, int V, int dtype, class Rows>
REGARD_INLINE void add_rows(const FewRows& f, const Chunk& t, const Rows& values, int64_t r, int64_t d) {
  for (; d + V * W <= f.c.dv; d += V * W) add_values<R, V, dtype, false>(f, t, values, r, d);
  if constexpr (V > 1) add_rows<R, V / 2, dtype>(f, t, values, r, d);
  else if (d < f.c.dv) add_values<R, 1, dtype, true>(f, t, values, r, d);
}

template <int dtype, class Rows>
static void add_chunk(const FewRows& f, const Chunk& t, const Rows& values) {
  with_rows<kRowsAtOnce>(
      f.rows, [&](auto rows, int64_t r) { add_rows<rows, vectors_at_once(rows, 8), dtype>(f, t, values, r, 0); });
}

}  // namespace regard
