// Facts of rows: what a block of queries gathers from each tile of scores, and what becomes of it. Lanes are queries.
#pragma once
#include "facts_args.h"
#include "forward.h"

namespace regard {

// What is known of a block of queries; base 2.
template <int V>
struct Found {
  vf top[V];              // the largest score
  vi at[V];               // the first key of the first tile that holds it
  vf shift[V];            // what scores are relative to: the largest, the sink's included
  vf ones[V], others[V];  // how many weights are 1, and the sum of the lesser: a sum barely above 1 keeps its digits
  vf lack[V];             // the sum of weights times what their scores are below shift
  vf inverse[V];          // what makes weights of sum 1; 0 for lanes that are no row and for rows that see nothing
  vf least[V];            // scores above this one may be among the top
};

// The heaviest keys of each row so far. Before the first is looked for, maxima of grains tell how small the last of them can be: as
// many grains as keys are asked for have a maximum that is at least so much.
struct Leaders {
  int64_t count, wide;  // asked for; rounded up to whole vectors
  int64_t grain;        // keys whose maximum is kept
  float* maxima;        // [grains][kQueries]
  float* scores;        // [kQueries][W + wide], descending from W on
  int32_t* keys;        // [kQueries][W + wide]

  template <class T>
  T* of(T* rows, int64_t row) const {
    return rows + row * (W + wide) + W;
  }
};

constexpr int64_t kLeastGrain = 4;

// Four grains and more for each key that is asked for leave few keys to look at.
static int64_t grain_of(int64_t keys, int64_t count) {
  int64_t grain = kKeys;
  while (grain > kLeastGrain && keys < 4 * count * grain) grain /= 2;
  return grain;
}

// One bit for each lane that is set.
REGARD_INLINE uint32_t lanes_set(vi c) {
#if defined(__AVX512DQ__) && REGARD_W == 16
  return (uint32_t)__builtin_ia32_cvtd2mask512((__attribute__((vector_size(64))) int)c);
#elif defined(__AVX__) && REGARD_W == 8
  return (uint32_t)__builtin_ia32_movmskps256((vf)c);
#elif defined(__SSE__) && REGARD_W == 4
  return (uint32_t)__builtin_ia32_movmskps((vf)c);
#else
  uint32_t bits = 0;
  for (int n = 0; n < W; ++n) bits |= (uint32_t)(c[n] & 1) << n;
  return bits;
#endif
}

// ln(1 + x) for x ≥ 0 (Higham, Accuracy and Stability of Numerical Algorithms, 1.14.1): what rounding does to 1 + x cancels.
REGARD_INLINE vf log1pv(vf x) {
  const vf u = splat(1.0f) + x, moved = u - splat(1.0f);
  return moved == vf{} ? x : logv(u) * (x / moved);
}

// --- first pass: maxima ---

template <int V>
REGARD_INLINE void take_tops(Found<V>& f, const vf (&top)[V], int64_t j) {
  for (int v = 0; v < V; ++v) {
    f.at[v] = top[v] > f.top[v] ? splat_int((int32_t)j) : f.at[v];
    f.top[v] = greater_of(top[v], f.top[v]);
  }
}

// The maxima of a tile's grains; how many there are.
template <int V>
REGARD_ALONE int64_t take_grains(float* maxima, const float* s, int64_t grain, int64_t count) {
  const int64_t grains = (count + grain - 1) / grain;
  for (int v = 0; v < V; ++v)
    for (int64_t g = 0; g < grains; ++g) {
      const int64_t end = (g + 1) * grain < count ? (g + 1) * grain : count;
      vf most = splat(-kInf);
      for (int64_t n = g * grain; n < end; ++n) most = greater_of(load(s + n * kQueries + v * W), most);
      store(maxima + g * kQueries + v * W, most);
    }
  return grains;
}

// A number for each row that no more than some of the `count` largest scores are below, by halving: those that are have no weight.
template <int V>
REGARD_ALONE void bound(const Leaders& l, int64_t grains, Found<V>& f) {
  constexpr int kHalvings = 16;
  for (int v = 0; v < V; ++v) {
    vf low = f.top[v] - splat(127.0f), high = f.top[v];
    for (int n = 0; n < kHalvings; ++n) {
      const vf middle = low + (high - low) * splat(0.5f);
      vi reached = vi{};
      for (int64_t g = 0; g < grains; ++g) reached -= load(l.maxima + g * kQueries + v * W) >= middle;
      const vi enough = reached >= splat_int((int32_t)l.count);
      low = enough ? middle : low;
      high = enough ? high : middle;
    }
    const vf size = (vf)((vi)low & splat_int(0x7fffffff));
    f.least[v] = low - (size * splat(1e-6f) + splat(1e-30f));  // a little less: the bound itself may be among them
  }
}

// --- second pass: sums, and keys by name ---

// Scores become weights relative to the largest, in place.
template <int V, bool entropy>
REGARD_ALONE void weigh_tile(float* s, int64_t count, Found<V>& f) {
  for (int v = 0; v < V; ++v) {
    const vf shift = f.shift[v], one = splat(1.0f), low = splat(-126.0f);
    vf ones = vf{}, others = vf{}, lack = vf{};
    float* place = s + v * W;
    for (int64_t n = 0; n < count; ++n, place += kQueries) {
      const vf below = load(place) - shift, e = exp2v(below);
      const vi whole = e >= one;
      ones += (vf)((vi)one & whole);
      others += (vf)((vi)e & ~whole);
      if (entropy) lack += e * greater_of(low, below);  // below that, e is 0, and 0 · -inf would be NaN
      store(place, e);
    }
    f.ones[v] += ones, f.others[v] += others, f.lack[v] -= lack;
  }
}

// A score finds its place among descending ones, behind its equals; what precedes the first is +inf. From the end on, whole vectors at
// a time, so that nothing is read after it was moved.
REGARD_INLINE void insert(float* scores, int32_t* keys, int64_t wide, float score, int32_t key) {
  const vf s = splat(score);
  for (int64_t n = wide - W; n >= 0; n -= W) {
    const vf here = load(scores + n), before = load(scores + n - 1);
    const vi stays = here >= s, moves = before < s;
    store(scores + n, stays ? here : moves ? before : s);
    const vi key_here = *(const vi_any*)(keys + n), key_before = *(const vi_any*)(keys + n - 1);
    *(vi_any*)(keys + n) = stays ? key_here : moves ? key_before : splat_int(key);
  }
}

// The lanes of one vector of scores that are above `least` join their leaders.
static void promote(const Leaders& l, vf s, uint32_t lanes, int64_t row, int64_t key, vf& least) {
  for (; lanes; lanes &= lanes - 1) {
    const int n = __builtin_ctz(lanes);
    float* scores = l.of(l.scores, row + n);
    insert(scores, l.of(l.keys, row + n), l.wide, s[n], (int32_t)key);
    if (scores[l.count - 1] > least[n]) least[n] = scores[l.count - 1];
  }
}

// Four keys are looked at together: few of them hold anything.
template <int V>
REGARD_ALONE void promote_tile(const Leaders& l, const float* s, int64_t j, int64_t count, Found<V>& f) {
  for (int v = 0; v < V; ++v) {
    vf least = f.least[v];
    const float* place = s + v * W;
    for (int64_t n = 0; n < count; n += 4, place += 4 * kQueries) {
      const int64_t some = count - n < 4 ? count - n : 4;
      vi above = vi{};
      if (some == 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) above |= load(place + i * kQueries) > least;
      if (some == 4 && !lanes_set(above)) continue;
      for (int64_t i = 0; i < some; ++i) {
        const vf x = load(place + i * kQueries);
        promote(l, x, lanes_set(x > least), v * W, j + n + i, least);
      }
    }
    f.least[v] = least;
  }
}

// The first key of each row that has the largest score, for the rows whose tile this is.
template <int V>
REGARD_ALONE void name_peaks(const Block<V>& b, const Found<V>& f, const float* s, int64_t j, int64_t count, int64_t* keys) {
  for (int v = 0; v < V; ++v)
    for (uint32_t lanes = lanes_set(f.at[v] == splat_int((int32_t)j)); lanes; lanes &= lanes - 1) {
      const int n = __builtin_ctz(lanes);
      const int64_t row = v * W + n;
      if (row >= b.p.rows) break;
      for (int64_t k = 0; k < count; ++k)
        if (s[k * kQueries + row] == f.top[v][n]) {
          keys[row] = j + k;
          break;
        }
    }
}

// --- at the end ---

template <int V>
REGARD_INLINE void write(float* to, const Block<V>& b, const vf (&x)[V]) {
  if (to)
    for (int64_t n = 0; n < b.p.rows; ++n) to[n] = x[n / W][n % W];
}

// Weights of sum 1 from the sums: what remains to be known of the rows, but for their heaviest keys.
template <int V>
REGARD_ALONE void close_rows(const regard_fact_args& a, const Block<V>& b, Found<V>& f, vf sink, int64_t row) {
  vf lse[V], score[V], entropy[V];
  for (int v = 0; v < V; ++v) {
    const vf one = splat(1.0f), joined = exp2v(sink - f.shift[v]);
    const vf ones = f.ones[v] + (joined >= one ? one : vf{}), others = f.others[v] + (joined >= one ? vf{} : joined);
    const vf sum = ones + others, ln = log1pv((ones - one) + others);
    const vi none = sum == vf{}, lost = (sum != sum) & (f.top[v] < splat(kInf));
    f.inverse[v] = none ? vf{} : one / sum;
    lse[v] = none ? splat(-kInf) : f.shift[v] * splat(kLn2) + ln;
    score[v] = lost ? sum : f.top[v] * splat(kLn2);
    const vf mass = f.ones[v] + f.others[v];
    entropy[v] = none ? vf{} : (f.lack[v] * splat(kLn2) + mass * ln) * f.inverse[v];
  }
  write(a.lse ? a.lse + row : nullptr, b, lse);
  write(a.max_score ? a.max_score + row : nullptr, b, score);
  write(a.entropy ? a.entropy + row : nullptr, b, entropy);
}

// The heaviest keys of a row, their weights, and what they leave.
template <int V>
REGARD_ALONE void close_leaders(const regard_fact_args& a, const Block<V>& b, const Found<V>& f, const Leaders& l, int64_t row) {
  for (int64_t n = 0; n < b.p.rows; ++n) {
    const vf shift = splat(f.shift[n / W][n % W]);
    const float inverse = f.inverse[n / W][n % W];
    float* scores = l.of(l.scores, n);
    const int32_t* named = l.of(l.keys, n);
    float *weights = a.top_weights + (row + n) * l.count, ones = f.ones[n / W][n % W], others = f.others[n / W][n % W];
    int64_t* keys = a.top_keys + (row + n) * l.count;
    for (int64_t k = 0; k < l.wide; k += W) store(scores + k, exp2v(load(scores + k) - shift));
    for (int64_t k = 0; k < l.count; ++k) {
      (scores[k] < 1.0f ? others : ones) -= scores[k];
      weights[k] = scores[k] * inverse;
      keys[k] = weights[k] == 0 ? -1 : named[k];
    }
    const float rest = (ones + others) * inverse;
    a.top_rest[row + n] = rest < 0 ? 0 : rest;
  }
}

}  // namespace regard
