// Facts of rows: what a block of queries gathers from each tile of scores, and what becomes of it. Lanes are queries.
#pragma once
#include "abi/structs.h"
#include "attention/forward.h"

namespace regard {

// What is known of a block of queries; base 2.
template <int V>
struct Found {
  vf top[V];              // the largest score
  vi at[V];               // the first key of the first tile that holds it
  vi lost[V];             // whether some score is NaN
  vi seen[V];             // how many are not -inf
  vf shift[V];            // what scores are relative to: the largest, the sink's included
  vi ones[V];             // how many weights are 1
  vf others[V];           // the sum of the lesser: a sum barely above 1 keeps its digits
  vf lack[V];             // the sum of weights times what their scores are below shift
  vf inverse[V];          // what makes weights of sum 1; 0 for rows that see nothing
  vf least[V];            // scores above this one may be among the heaviest
  vf left[V];             // the sum of weights that are not
};

template <int V>
static void clear_rows(Found<V>& f) {
  for (int v = 0; v < V; ++v) {
    f.top[v] = f.least[v] = splat(-kInf), f.at[v] = splat_int(-1);
    f.others[v] = f.lack[v] = f.left[v] = vf{};
    f.lost[v] = f.seen[v] = f.ones[v] = vi{};
  }
}

template <int V>
REGARD_INLINE void take_tops(Found<V>& f, const vf (&top)[V], int64_t j) {
  for (int v = 0; v < V; ++v) {
    f.at[v] = top[v] > f.top[v] ? splat_int((int32_t)j) : f.at[v];
    f.top[v] = greater_of(top[v], f.top[v]);
  }
}

// Sums of weights relative to the largest. Where later facts ask for weights, they take the place of the scores.
template <int V, bool entropy, bool top, bool later>
REGARD_ALONE void weigh_tile(float* s, int64_t count, Found<V>& f) {
  for (int v = 0; v < V; ++v) {
    const vf shift = f.shift[v], least = f.least[v], one = splat(1.0f), low = splat(-126.0f);
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
    f.ones[v] += ones, f.others[v] += others, f.lack[v] -= lack, f.left[v] += left;
  }
}

// The first key of each row that has the largest score, or the first whose score is NaN.
template <int V>
REGARD_ALONE void name_peaks(const Block<V>& b, Found<V>& f, const float* s, int64_t j, int64_t count, int64_t* keys) {
  for (int v = 0; v < V; ++v) {
    vi lost = vi{};
    for (int64_t n = 0; n < count; ++n) {
      const vf score = load(s + n * kQueries + v * W);
      lost |= score != score;
    }
    lost &= ~f.lost[v];
    const vi here = lost | ((f.at[v] == splat_int((int32_t)j)) & ~f.lost[v]);
    for (uint32_t lanes = Isa::lanes_set(here); lanes; lanes &= lanes - 1) {
      const int n = __builtin_ctz(lanes);
      const float* score = s + v * W + n;
      int64_t k = 0;
      while (k < count - 1 && (lost[n] ? score[k * kQueries] == score[k * kQueries] : score[k * kQueries] != f.top[v][n])) ++k;
      if (v * W + n < b.p.rows) keys[v * W + n] = j + k;
    }
    f.lost[v] |= lost;
  }
}

// How many keys each row sees, and how many rows see each key.
template <int V>
REGARD_ALONE void count_seen(const Block<V>& b, Found<V>& f, const float* s, int64_t count, int64_t* readers) {
  for (int v = 0; v < V; ++v) {
    const int64_t rows = b.p.rows - v * W;
    const uint32_t real = rows >= W ? ~0u : (1u << rows) - 1;
    for (int64_t n = 0; n < count; ++n) {
      const vi seen = load(s + n * kQueries + v * W) != splat(-kInf);
      f.seen[v] -= seen;
      if (readers) readers[n] += __builtin_popcount(Isa::lanes_set(seen) & real);
    }
  }
}

template <class T, class X>
REGARD_INLINE void write(T* to, int64_t rows, const X* x) {
  if (to)
    for (int64_t n = 0; n < rows; ++n) to[n] = x[n / W][n % W];
}

// What makes weights of sum 1, and what the sums tell of the rows.
template <int V>
REGARD_ALONE void finalize_rows(const regard_fact_args& a, const Block<V>& b, Found<V>& f, vf sink, int64_t row) {
  vf lse[V], score[V], entropy[V];
  for (int v = 0; v < V; ++v) {
    const vf one = splat(1.0f), joined = exp2v(sink - f.shift[v]);
    const vf counted = __builtin_convertvector(f.ones[v], vf);
    const vf ones = counted + (joined >= one ? one : vf{}), others = f.others[v] + (joined >= one ? vf{} : joined);
    const vf sum = ones + others, ln = log1pv((ones - one) + others);
    const vi none = sum == vf{};
    f.inverse[v] = none ? vf{} : one / sum;
    lse[v] = none ? splat(-kInf) : natural(f.shift[v]) + ln;
    score[v] = f.lost[v] ? splat(__builtin_nanf("")) : natural(f.top[v]);
    const vf mass = counted + f.others[v];
    entropy[v] = none ? vf{} : (f.lack[v] * splat(kLn2) + mass * ln) * f.inverse[v];
  }
  write(a.lse ? a.lse + row : nullptr, b.p.rows, lse);
  write(a.max_score ? a.max_score + row : nullptr, b.p.rows, score);
  write(a.entropy ? a.entropy + row : nullptr, b.p.rows, entropy);
  write(a.visible ? a.visible + row : nullptr, b.p.rows, f.seen);
}

}  // namespace regard
