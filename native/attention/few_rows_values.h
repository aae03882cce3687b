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

// acc[i][v] = Σ over keys of the weight of row r + i times V vectors of features from d on. part: fewer than W features
// are left. careful: hidden keys are skipped instead of multiplied by 0, since 0 · NaN is NaN.
template <int R, int V, int dtype, bool part, bool careful, class Rows>
REGARD_INLINE void weighted(vf (&acc)[R][V], const FewRows& f, const Chunk& t, const Rows& values, int64_t r,
                            int64_t d) {
  const float* s = f.s + r * kChunk;
  const bool ahead = t.more && r == 0;
  clear(acc);
  for (int64_t first = 0; first < t.count; first += W) {
    const Run rows = values.run(first), next = ahead ? values.run(first + kChunk) : rows;
    const int64_t count = t.count - first < W ? t.count - first : W;
    for (int64_t n = 0; n < count; ++n) {
      vf column[V];
      if (ahead) fetch(next[n] + d * size_of(dtype), V * W * size_of(dtype));
      if constexpr (V == 1) {
        column[0] = floats(rows[n], d, 1, part ? f.c.dv - d : W, dtype);
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < V; v += 2) {
          const TwoVectors two = TwoVectors::read<dtype>(rows[n], d + v * W);
          column[v] = two.a;
          column[v + 1] = two.b;
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        vf p = splat_any(s + i * kChunk + first + n);
        if (careful && ((vi)p)[0] == INT32_MIN) continue;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[i][v] += p * column[v];
      }
    }
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
