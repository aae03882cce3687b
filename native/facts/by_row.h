// Facts of rows: sums over the tiles of a block of queries, and the results. Lanes are queries.
#pragma once
#include "abi/structs.h"
#include "attention/forward.h"

namespace regard {

// The state of a block's rows. Scores are in base 2.
template <int V>
struct RowFacts {
  vf max[V];          // the largest score
  vi max_tile[V];     // the first key of the first tile that holds it
  vi has_nan[V];      // whether some score is NaN
  vi visible[V];      // how many scores are not -inf
  vf shift[V];        // subtracted from the scores: the largest of them and of the sink
  vi ones[V];         // how many weights exp2(s - shift) are 1
  vf lesser_sum[V];   // the sum of all other weights: a sum barely above 1 keeps its digits
  vf entropy_sum[V];  // the sum of weights times (shift - score)
  vf square_sum[V];   // the sum of squared weights
  vf inverse[V];      // 1 / the sum of the weights; 0 for rows that see nothing
  vf threshold[V];    // scores above this one may be among the heaviest
  vf rest_sum[V];     // the sum of the weights that are not
};

template <int V>
static void clear_rows(RowFacts<V>& f) {
  for (int v = 0; v < V; ++v) {
    f.max[v] = f.threshold[v] = splat(-kInf);
    f.max_tile[v] = splat_int(-1);
    f.lesser_sum[v] = f.entropy_sum[v] = f.square_sum[v] = f.rest_sum[v] = vf{};
    f.has_nan[v] = f.visible[v] = f.ones[v] = vi{};
  }
}

template <int V>
REGARD_INLINE void update_max(RowFacts<V>& f, const vf (&top)[V], int64_t j) {
  for (int v = 0; v < V; ++v) {
    f.max_tile[v] = top[v] > f.max[v] ? splat_int((int32_t)j) : f.max_tile[v];
    f.max[v] = greater_of(top[v], f.max[v]);
  }
}

// Adds a tile's weights exp2(s - shift). later: other facts need the weights, which replace the scores.
template <int V, bool entropy, bool top, bool later>
REGARD_NOINLINE void weigh_tile(float* s, int64_t count, RowFacts<V>& f) {
  for (int v = 0; v < V; ++v) {
    const vf shift = f.shift[v], least = f.threshold[v], one = splat(1.0f), low = splat(-126.0f);
    vf others = vf{}, lack = vf{}, left = vf{};
    vi ones = vi{};
    float* place = s + v * W;
    for (int64_t n = 0; n < count; ++n, place += kQueries) {
      const vf score = load(place), below = score - shift, e = exp2v(below);
      const vi whole = e >= one;
      ones -= whole;
      others += (vf)((vi)e & ~whole);
      if (entropy) lack += e * greater_of(low, below);  // below that, e is 0, and 0 · -inf would be NaN
      if (top) left += (vf)((vi)e & ~(score > least));
      if (later) store(place, e);
    }
    f.ones[v] += ones;
    f.lesser_sum[v] += others;
    f.entropy_sum[v] -= lack;
    f.rest_sum[v] += left;
  }
}

// Sums of squares of the weights that weigh_tile left in the place of the scores.
template <int V>
REGARD_NOINLINE void square_tile(const float* e, int64_t count, RowFacts<V>& f) {
  for (int v = 0; v < V; ++v) {
    vf squares = vf{};
    for (int64_t n = 0; n < count; ++n) {
      const vf weight = load(e + n * kQueries + v * W);
      squares += weight * weight;
    }
    f.square_sum[v] += squares;
  }
}

// The first key of each row that has the largest score, or the first whose score is NaN.
template <int V>
REGARD_NOINLINE void find_max_keys(const Block<V>& b, RowFacts<V>& f, const float* s, int64_t j, int64_t count,
                                   int64_t* keys) {
  for (int v = 0; v < V; ++v) {
    vi lost = vi{};
    for (int64_t n = 0; n < count; ++n) {
      const vf score = load(s + n * kQueries + v * W);
      lost |= score != score;
    }
    lost &= ~f.has_nan[v];
    const vi here = lost | ((f.max_tile[v] == splat_int((int32_t)j)) & ~f.has_nan[v]);
    for (uint32_t lanes = Isa::lanes_set(here); lanes; lanes &= lanes - 1) {
      const int n = __builtin_ctz(lanes);
      const float* score = s + v * W + n;
      int64_t k = 0;
      while (k < count - 1 &&
             (lost[n] ? score[k * kQueries] == score[k * kQueries] : score[k * kQueries] != f.max[v][n]))
        ++k;
      if (v * W + n < b.p.rows) keys[v * W + n] = j + k;
    }
    f.has_nan[v] |= lost;
  }
}

// How many keys each row sees, and how many rows see each key.
template <int V>
REGARD_NOINLINE void count_visible(const Block<V>& b, RowFacts<V>& f, const float* s, int64_t count, int64_t* readers) {
  for (int v = 0; v < V; ++v) {
    const int64_t rows = b.p.rows - v * W;
    const uint32_t real = rows >= W ? ~0u : (1u << rows) - 1;
    for (int64_t n = 0; n < count; ++n) {
      const vi seen = load(s + n * kQueries + v * W) != splat(-kInf);
      f.visible[v] -= seen;
      if (readers) readers[n] += __builtin_popcount(Isa::lanes_set(seen) & real);
    }
  }
}

template <class T, class X>
REGARD_INLINE void write(T* to, int64_t rows, const X* x) {
  if (to)
    for (int64_t n = 0; n < rows; ++n) to[n] = x[n / W][n % W];
}

// Normalises the sums, with the sink, and writes the facts of rows.
template <int V>
REGARD_NOINLINE void finalize_rows(const regard_fact_args& a, const Block<V>& b, RowFacts<V>& f, vf sink, int64_t row) {
  vf lse[V], score[V], entropy[V], concentration[V];
  for (int v = 0; v < V; ++v) {
    const vf one = splat(1.0f), joined = exp2v(sink - f.shift[v]);
    const vf counted = __builtin_convertvector(f.ones[v], vf);
    const vf ones = counted + (joined >= one ? one : vf{}), others = f.lesser_sum[v] + (joined >= one ? vf{} : joined);
    const vf sum = ones + others, ln = log1pv((ones - one) + others);
    const vi none = sum == vf{};
    f.inverse[v] = none ? vf{} : one / sum;
    lse[v] = none ? splat(-kInf) : natural(f.shift[v]) + ln;
    score[v] = f.has_nan[v] ? splat(__builtin_nanf("")) : natural(f.max[v]);
    const vf mass = counted + f.lesser_sum[v];
    entropy[v] = none ? vf{} : (f.entropy_sum[v] * splat(kLn2) + mass * ln) * f.inverse[v];
    concentration[v] = f.square_sum[v] * f.inverse[v] * f.inverse[v];
  }
  write(a.lse ? a.lse + row : nullptr, b.p.rows, lse);
  write(a.max_score ? a.max_score + row : nullptr, b.p.rows, score);
  write(a.entropy ? a.entropy + row : nullptr, b.p.rows, entropy);
  write(a.concentration ? a.concentration + row : nullptr, b.p.rows, concentration);
  write(a.visible ? a.visible + row : nullptr, b.p.rows, f.visible);
}

}  // namespace regard
