// Dot products of few rows with a chunk of keys. Lanes are features: each vector of K is read, and widened, once for
// several rows.
#pragma once
#include "attention/few_rows.h"

namespace regard {

// Adds the products of one vector of features, `valid` of them real, of K keys and R rows.
template <int K, int R, int dtype>
REGARD_INLINE void times(vf (&acc)[K][R], const float* q, int64_t width, const char* const (&k)[K], int64_t d,
                         int64_t valid) {
  vf a[R];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) a[i] = load(q + i * width + d);
#pragma GCC unroll 16
  for (int n = 0; n < K; ++n) {
    vf b = floats(k[n], d, 1, valid, dtype);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) acc[n][i] += a[i] * b;
  }
}

// The same of 2 V vectors of features; q is in the order of TwoVectors::read. A key is read to the end before the next
// one, which is how it lies in memory: with reads in the order that compilers chose a step took 3 to 5 % longer.
template <int V, int K, int R, int dtype>
REGARD_INLINE void times_two(vf (&acc)[K][R], const float* q, int64_t width, const char* const (&k)[K], int64_t d) {
  TwoVectors a[V][R];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v)
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      const float* at = q + i * width + d + 2 * v * W;
      a[v][i] = {load(at), load(at + W)};
    }
#pragma GCC unroll 16
  for (int n = 0; n < K; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const TwoVectors b = TwoVectors::read<dtype>(k[n], d + 2 * v * W);
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        acc[n][i] += a[v][i].a * b.a;
        acc[n][i] += a[v][i].b * b.b;
      }
      if constexpr (V > 1) keep_order();
    }
}

// Whether pairs of neighbouring features are multiplied: where they fill whole vectors.
[[maybe_unused]] static bool multiplies_pairs(const regard_call& c) { return reads_pairs(c) && c.dk % (2 * W) == 0; }

// The same of one vector of pairs; d counts pairs.
template <int K, int R>
REGARD_INLINE void times_pairs(vf (&acc)[K][R], const float* q, int64_t width, const char* const (&k)[K], int64_t d) {
  vf a[R];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) a[i] = load(q + i * width + d);
#pragma GCC unroll 16
  for (int n = 0; n < K; ++n) {
    const vf b = load((const float*)k[n] + d);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) acc[n][i] = Isa::multiply_add_pairs(acc[n][i], a[i], b);
  }
}

// Puts a row of floats in the order of TwoVectors::read, in which products() with rows of bfloat16 wants it.
static void split_row(float* row, int64_t dk) {
  for (int64_t d = 0; d + 2 * W <= dk; d += 2 * W) {
    const TwoVectors x = TwoVectors{load(row + d), load(row + d + W)}.split();
    store(row + d, x.a);
    store(row + d + W, x.b);
  }
}

// W keys against R rows: x[i][m] holds the products of row i and key m, whose lanes are to be summed. Elements: Pairs,
// where q holds pairs. part: keys behind `last` do not exist. ahead: rows of which n + kChunk and those behind it, keys
// of the next chunk, are prefetched, since the hardware prefetcher stops where K and V take turns; null for none.
template <int R, int dtype, class Elements, bool part, class Rows>
REGARD_INLINE void products(vf (&x)[R][W], const float* q, int64_t dk, Run keys, int64_t last, const Rows* ahead,
                            int64_t n) {
  constexpr int K = vectors_at_once(R, W), V = R == 1 ? 2 : 1;
  const int64_t width = round_up(dk);
  for (int m = 0; m < W; m += K) {
    const char* k[K];
#pragma GCC unroll 16
    for (int i = 0; i < K; ++i) k[i] = keys[part && m + i > last ? last : m + i];
    if (ahead) {
      const Run next = ahead->run(n + kChunk);
#pragma GCC unroll 16
      for (int i = 0; i < K; ++i) fetch(next[m + i], dk * size_of(dtype));
    }
    vf acc[K][R];
    clear(acc);
    int64_t d = 0;
    if constexpr (Elements::pairs) {
      for (; d < dk / 2; d += W) times_pairs<K, R>(acc, q, width, k, d);
    } else {
      for (; d + 2 * V * W <= dk; d += 2 * V * W) times_two<V, K, R, dtype>(acc, q, width, k, d);
      if (V > 1)
        for (; d + 2 * W <= dk; d += 2 * W) times_two<1, K, R, dtype>(acc, q, width, k, d);
      for (; d < dk; d += W) times<K, R, dtype>(acc, q, width, k, d, dk - d);
    }
#pragma GCC unroll 16
    for (int l = 0; l < K; ++l)
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) x[i][m + l] = acc[l][i];
  }
}

template <int R, int dtype, class Elements, bool part, class Rows>
static void score_rows(FewRows& f, const Chunk& t, const float* q, Run keys, const Rows* ahead, int64_t n, int64_t r) {
  vf x[R][W];
  products<R, dtype, Elements, part>(x, q + r * round_up(f.c.dk), f.c.dk, keys, t.count - n - 1, ahead, n);
  for (int i = 0; i < R; ++i) {
    vf s = sums(x[i]);
    if (Elements::pairs) s *= splat(dot_factor(f.c, f.row[r + i].h));
    if (f.c.k_scales.data) s *= load(f.k_scale + n);
    keep_scores(f, t, n, r + i, s);
  }
}

template <int dtype, class Elements, bool part, class Rows>
static void score_keys(FewRows& f, const Chunk& t, const float* q, const Rows& keys, int64_t n) {
  const Run k = keys.run(n);
  const Rows* ahead = t.more ? &keys : nullptr;
  with_rows<kRowsAtOnce>(f.rows, [&](auto rows, int64_t r) {
    score_rows<rows, dtype, Elements, part>(f, t, q, k, ahead, n, r);
    ahead = nullptr;
  });
}

template <int dtype, class Elements, class Rows>
static void score_chunk(FewRows& f, const Chunk& t, const float* q, const Rows& keys) {
  open_chunk(f, t);
  int64_t n = 0;
  for (; n + W <= t.count; n += W) score_keys<dtype, Elements, false>(f, t, q, keys, n);
  if (n < t.count) score_keys<dtype, Elements, true>(f, t, q, keys, n);
}

// The dot products of few rows: a Score of FewRowsForward. KvRows: where keys and values are, StridedRows or PagedRows.
template <class KvRows>
struct Dots {
  using Given = regard_call;
  using Rows = KvRows;
  // [rows][width], scaled, base 2; width is dk rounded up to W, padded by zeros; in the order of TwoVectors::read. Or,
  // where multiplies_pairs(c), pairs of bfloat16 as they come, not scaled.
  float* q;
  float* k;  // what cannot be read in place: [kChunk][width], or what Rows copies
  Rows keys;

  static const regard_call& call(const Given& c) { return c; }
  static int64_t size(const Given& c, int64_t rows) {
    return rows * round_up(c.dk) + (c.k.col == 1 ? Rows::scratch(c, c.dk) : kChunk * round_up(c.dk));
  }
  Dots(const Given& c, int64_t rows, float* at) : q(at), k(at + rows * round_up(c.dk)), keys(c, c.dk, k) {}

  void begin(const FewRows& f, int64_t r) const {
    const regard_call& c = f.c;
    const int64_t width = round_up(c.dk);
    float* to = q + r * width;
    if (multiplies_pairs(c)) {
      __builtin_memcpy(to, row_ptr(c.q, f.p, f.row[r].h, f.row[r].i, c.dtype), (size_t)(c.dk * 2));
      return;
    }
    gather(to, width, row_ptr(c.q, f.p, f.row[r].h, f.row[r].i, c.dtype), c.q, c.dtype, c.dk,
           dot_factor(c, f.row[r].h));
    if (kv_dtype(c) == REGARD_BF16 && c.k.col == 1) split_row(to, c.dk);
  }

  void score(FewRows& f, const Chunk& t) {
    const regard_call& c = f.c;
    if (c.k.col != 1) {
      const StridedRows rows = gather_rows(f, t, c.k, c.dk, k);
      return score_chunk<REGARD_F32, Floats>(f, t, q, rows);
    }
    keys.find(f, t, c.k);
    if (multiplies_pairs(c)) return score_chunk<REGARD_BF16, Pairs>(f, t, q, keys);
    with_kv_dtype(kv_dtype(c), [&](auto dtype) { score_chunk<dtype, Floats>(f, t, q, keys); });
  }
};

}  // namespace regard
