// The heaviest keys of each row of a block.
#pragma once
#include "facts/by_row.h"

namespace regard {

// Before the first is looked for, maxima of grains, sets of keys, tell how small the last of them can be: as many grains as keys are
// asked for have a maximum that is at least so much.
struct TopKeys {
  int64_t count, wide;   // asked for; rounded up to whole vectors
  int64_t grain, slots;  // keys in a row whose maximum is kept; how many are kept, later ones join the earlier
  float* maxima;         // [slots][kQueries]
  float* scores;         // [kQueries][W + wide], descending from W on
  int32_t* keys;         // [kQueries][W + wide]

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

template <int V>
static void clear_top_keys(const TopKeys& l) {
  for (int64_t row = 0; row < V * W; ++row)
    for (int64_t n = -W; n < l.wide; n += W) store(l.of(l.scores, row) + n, splat(n < 0 ? kInf : -kInf));
  for (int64_t n = 0; n < l.slots * kQueries; n += W) store(l.maxima + n, splat(-kInf));
}

// The maxima of a tile's grains join the slots from `slot` on, in turn; which slot is next. The tile's own maxima are known.
template <int V>
REGARD_ALONE int64_t take_grains(const TopKeys& l, int64_t slot, const float* s, int64_t count, const vf (&top)[V]) {
  for (int64_t first = 0; first < count; first += l.grain, slot = slot + 1 < l.slots ? slot + 1 : 0) {
    const int64_t end = first + l.grain < count ? first + l.grain : count;
    for (int v = 0; v < V; ++v) {
      float* slots = l.maxima + slot * kQueries + v * W;
      vf most = load(slots);
      if (l.grain < kKeys)
        for (int64_t n = first; n < end; ++n) most = greater_of(load(s + n * kQueries + v * W), most);
      else
        most = greater_of(top[v], most);
      store(slots, most);
    }
  }
  return slot;
}

// How many maxima are at least `score`, for enough of them.
REGARD_INLINE vi enough(const TopKeys& l, int v, vf score) {
  vi reached = vi{};
  for (int64_t g = 0; g < l.slots; ++g) reached -= load(l.maxima + g * kQueries + v * W) >= score;
  return reached >= splat_int((int32_t)l.count);
}

// A little less than a number that enough scores reach, by halving from the least maximum on; -inf where they do not reach that.
template <int V>
REGARD_ALONE void bound(const TopKeys& l, Found<V>& f) {
  constexpr int kHalvings = 8;
  for (int v = 0; v < V; ++v) {
    vf low = f.top[v], high = low;
    for (int64_t g = 0; g < l.slots; ++g) {
      const vf most = load(l.maxima + g * kQueries + v * W);
      low = most < low && most > splat(-kInf) ? most : low;
    }
    const vi some = enough(l, v, low);
    for (int n = 0; n < kHalvings; ++n) {
      const vf middle = low + (high - low) * splat(0.5f);
      const vi reached = enough(l, v, middle);
      low = reached ? middle : low;
      high = reached ? high : middle;
    }
    f.least[v] = some ? low - (absolute(low) * splat(1e-6f) + splat(1e-30f)) : splat(-kInf);
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

// The lanes of one vector of scores join their top_keys. What is no leader, or no longer, is left.
static void promote(const TopKeys& l, vf s, uint32_t lanes, int64_t row, int64_t key, vf shift, vf& left) {
  for (; lanes; lanes &= lanes - 1) {
    const int n = __builtin_ctz(lanes);
    float *scores = l.of(l.scores, row + n), last = scores[l.count - 1];
    left[n] += exp2v(splat((s[n] > last ? last : s[n]) - shift[n]))[0];
    if (s[n] > last) insert(scores, l.of(l.keys, row + n), l.wide, s[n], (int32_t)key);
  }
}

// Four keys are looked at together: few of them hold anything.
template <int V>
REGARD_ALONE void promote_tile(const TopKeys& l, const float* s, int64_t j, int64_t count, Found<V>& f) {
  for (int v = 0; v < V; ++v) {
    const vf least = f.least[v];
    const float* place = s + v * W;
    for (int64_t n = 0; n < count; n += 4, place += 4 * kQueries) {
      const int64_t some = count - n < 4 ? count - n : 4;
      vi above = vi{};
      if (some == 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) above |= load(place + i * kQueries) > least;
      if (some == 4 && !Isa::lanes_set(above)) continue;
      for (int64_t i = 0; i < some; ++i) {
        const vf x = load(place + i * kQueries);
        promote(l, x, Isa::lanes_set(x > least), v * W, j + n + i, f.shift[v], f.left[v]);
      }
    }
  }
}

// What comes after a tile must be above the last top_keys: of equals the first stay.
template <int V>
static void raise_least(const TopKeys& l, Found<V>& f) {
  for (int64_t n = 0; n < V * W; ++n) {
    const float last = l.of(l.scores, n)[l.count - 1];
    if (last > f.least[n / W][n % W]) f.least[n / W][n % W] = last;
  }
}

// The heaviest keys of a row, their weights, and what they leave.
template <int V>
REGARD_ALONE void finalize_top_keys(const regard_fact_args& a, const Block<V>& b, const Found<V>& f, const TopKeys& l, int64_t row) {
  for (int64_t n = 0; n < b.p.rows; ++n) {
    float* scores = l.of(l.scores, n);
    const int32_t* named = l.of(l.keys, n);
    const float inverse = f.inverse[n / W][n % W];
    const vf shift = splat(f.shift[n / W][n % W]);
    float* weights = a.top_weights + (row + n) * l.count;
    int64_t* keys = a.top_keys + (row + n) * l.count;
    for (int64_t k = 0; k < l.count; ++k) keys[k] = scores[k] == -kInf ? -1 : named[k];
    for (int64_t k = 0; k < l.wide; k += W) store(scores + k, exp2v(load(scores + k) - shift));
    for (int64_t k = 0; k < l.count; ++k) weights[k] = scores[k] * inverse;
    a.top_rest[row + n] = f.left[n / W][n % W] * inverse;
  }
}

}  // namespace regard
