// The heaviest keys of each row of a block.
#pragma once
#include "facts/by_row.h"

namespace regard {

// First the maxima of grains (runs of keys) bound the last of them from below: if `count` grains have a maximum of at
// least x, so have `count` keys a score.
struct TopKeys {
  int64_t count, padded;  // how many keys are wanted; the same rounded up to whole vectors
  int64_t grain, slots;   // keys of a grain; how many maxima are stored (further grains join the first ones)
  float* maxima;          // [slots][kQueries]
  float* scores;          // [kQueries][W + padded], descending from W on
  int32_t* keys;          // [kQueries][W + padded]

  template <class T>
  T* of(T* rows, int64_t row) const {
    return rows + row * (W + padded) + W;
  }
};

constexpr int64_t kMinGrain = 4;

// At least four grains for each wanted key: then few keys are above the threshold.
static int64_t grain_of(int64_t keys, int64_t count) {
  int64_t grain = kKeys;
  while (grain > kMinGrain && keys < 4 * count * grain) grain /= 2;
  return grain;
}

template <int V>
static void clear_top_keys(const TopKeys& l) {
  for (int64_t row = 0; row < V * W; ++row)
    for (int64_t n = -W; n < l.padded; n += W) store(l.of(l.scores, row) + n, splat(n < 0 ? kInf : -kInf));
  for (int64_t n = 0; n < l.slots * kQueries; n += W) store(l.maxima + n, splat(-kInf));
}

// Adds the maxima of a tile's grains to the slots from `slot` on, in turn; returns the next slot. top: the maxima of
// the tile.
template <int V>
REGARD_NOINLINE int64_t add_grains(const TopKeys& l, int64_t slot, const float* s, int64_t count, const vf (&top)[V]) {
  for (int64_t first = 0; first < count; first += l.grain, slot = slot + 1 < l.slots ? slot + 1 : 0) {
    const int64_t end = first + l.grain < count ? first + l.grain : count;
    for (int v = 0; v < V; ++v) {
      float* slots = l.maxima + slot * kQueries + v * W;
      vf most = load(slots);
      if (l.grain < kKeys)
        for (int64_t n = first; n < end; ++n) most = greater_of(load(s + n * kQueries + v * W), most);
      else most = greater_of(top[v], most);
      store(slots, most);
    }
  }
  return slot;
}

// Whether at least `count` maxima are at least `score`.
REGARD_INLINE vi enough(const TopKeys& l, int v, vf score) {
  vi reached = vi{};
  for (int64_t g = 0; g < l.slots; ++g) reached -= load(l.maxima + g * kQueries + v * W) >= score;
  return reached >= splat_int((int32_t)l.count);
}

// Finds a threshold slightly below a number that at least `count` maxima reach, by bisection from the smallest maximum;
// -inf where they do not reach that one.
template <int V>
REGARD_NOINLINE void bound(const TopKeys& l, RowFacts<V>& f) {
  constexpr int kHalvings = 8;
  for (int v = 0; v < V; ++v) {
    vf low = f.max[v], high = low;
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
    f.threshold[v] = some ? low - (absolute(low) * splat(1e-6f) + splat(1e-30f)) : splat(-kInf);
  }
}

// Inserts a score into descending ones, after its equals; before the first lies +inf. It goes from the end to the
// front, whole vectors at a time, so that no element is read after it was moved.
REGARD_INLINE void insert(float* scores, int32_t* keys, int64_t padded, float score, int32_t key) {
  const vf s = splat(score);
  for (int64_t n = padded - W; n >= 0; n -= W) {
    const vf here = load(scores + n), before = load(scores + n - 1);
    const vi stays = here >= s, moves = before < s;
    store(scores + n, stays ? here : moves ? before : s);
    const vi key_here = *(const vi_any*)(keys + n), key_before = *(const vi_any*)(keys + n - 1);
    *(vi_any*)(keys + n) = stays ? key_here : moves ? key_before : splat_int(key);
  }
}

// Inserts the given lanes of one vector of scores into their rows' lists. Weights that are not, or no longer, in a list
// go to `left`.
static void promote(const TopKeys& l, vf s, uint32_t lanes, int64_t row, int64_t key, vf shift, vf& left) {
  for (; lanes; lanes &= lanes - 1) {
    const int n = __builtin_ctz(lanes);
    float *scores = l.of(l.scores, row + n), last = scores[l.count - 1];
    left[n] += exp2v(splat((s[n] > last ? last : s[n]) - shift[n]))[0];
    if (s[n] > last) insert(scores, l.of(l.keys, row + n), l.padded, s[n], (int32_t)key);
  }
}

// Compares four keys at a time with the threshold: few are above it.
template <int V>
REGARD_NOINLINE void promote_tile(const TopKeys& l, const float* s, int64_t j, int64_t count, RowFacts<V>& f) {
  for (int v = 0; v < V; ++v) {
    const vf least = f.threshold[v];
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
        promote(l, x, Isa::lanes_set(x > least), v * W, j + n + i, f.shift[v], f.rest_sum[v]);
      }
    }
  }
}

// After a tile, scores must be above the last of a list: of equal ones the first stay.
template <int V>
static void raise_least(const TopKeys& l, RowFacts<V>& f) {
  for (int64_t n = 0; n < V * W; ++n) {
    const float last = l.of(l.scores, n)[l.count - 1];
    if (last > f.threshold[n / W][n % W]) f.threshold[n / W][n % W] = last;
  }
}

// Writes the heaviest keys of each row, their weights, and the mass of all other keys.
template <int V>
REGARD_NOINLINE void finalize_top_keys(const regard_fact_args& a, const Block<V>& b, const RowFacts<V>& f,
                                       const TopKeys& l, int64_t row) {
  for (int64_t n = 0; n < b.p.rows; ++n) {
    float* scores = l.of(l.scores, n);
    const int32_t* named = l.of(l.keys, n);
    const float inverse = f.inverse[n / W][n % W];
    const vf shift = splat(f.shift[n / W][n % W]);
    float* weights = a.top_weights + (row + n) * l.count;
    int64_t* keys = a.top_keys + (row + n) * l.count;
    for (int64_t k = 0; k < l.count; ++k) keys[k] = scores[k] == -kInf ? -1 : named[k];
    for (int64_t k = 0; k < l.padded; k += W) store(scores + k, exp2v(load(scores + k) - shift));
    for (int64_t k = 0; k < l.count; ++k) weights[k] = scores[k] * inverse;
    a.top_rest[row + n] = f.rest_sum[n / W][n % W] * inverse;
  }
}

}  // namespace regard
