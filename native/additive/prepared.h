// The keys, queries and weights of additive scores, prepared for each method of computing a tile's scores.
#pragma once
#include "additive/activation.h"
#include "attention/forward.h"
#include "core/work.h"

namespace regard {

REGARD_INLINE int64_t round_even(int64_t n) { return (n + 1) / 2 * 2; }

// Whether numbers up to max_abs have exponentials. (Leaky ReLU has none, nor have features of a program.)
REGARD_INLINE bool has_exponentials(const regard_additive& x, float max_abs) {
  return !x.code && x.activation != REGARD_LEAKY_RELU &&
         max_abs * __builtin_fabsf(separable(x.activation).rate) <= kMaxExponent;
}

// Computed once for the keys of each (batch element, key head): C, and the largest |c| of each tile.
struct Exponentials {
  float* c;        // [batch element, key head][nk][dk rounded up to 2]
  float* max_abs;  // [batch element, key head][tiles]
};

static int64_t key_tiles(const regard_call& c) { return (c.nk + kKeys - 1) / kKeys; }

struct ComputeExponentials {
  const regard_additive& x;
  const Exponentials& to;

  int64_t items() const { return elements(x.call) * x.call.key_heads * key_tiles(x.call); }
  int64_t scratch() const { return W; }

  void run(int64_t item, float*) const {
    const regard_call& c = x.call;
    const int64_t tiles = key_tiles(c), pair = item / tiles, j = item % tiles * kKeys, width = round_even(c.dk);
    const Place p = place_in_batch(c, pair / c.key_heads);
    const int64_t count = c.nk - j < kKeys ? c.nk - j : kKeys;
    const float* from = at<float>(c.k, p, pair % c.key_heads) + j * c.k.row;
    const Separable form = separable(x.activation);
    float* rows = to.c + (pair * c.nk + j) * width;
    for (int64_t n = 0; n < count; ++n) {
      float* row = rows + n * width;
      for (int64_t k = 0; k < c.dk; ++k) row[k] = from[n * c.k.row + k * c.k.col];
      if (width > c.dk) row[c.dk] = 0;
    }
    const float most = to.max_abs[item] = max_abs(rows, count * width);
    if (!has_exponentials(x, most)) return;
    int64_t n = 0;
    for (; n + W <= count * width; n += W) store(rows + n, expv(load(rows + n) * splat(form.rate)));
    for (; n < count * width; ++n) {
      vf one = expv(splat(rows[n] * form.rate));
      rows[n] = one[0];
    }
  }
};

// Two features share a division, (x + y) / (x y), of sums 1 + A C as they are, or clamped where their product could
// overflow; or f itself.
enum Method { kUnclamped, kClamped, kDirect };

// Some queries of a head and the head's weights, prepared for each method. Features k and k + step share a division,
// for each k of a run of `step` features: width is dk rounded up to 2 steps.
struct PreparedQueries {
  float* a;              // [width][kQueries] of a block, [width] of one query
  float* exponentials;   // A
  float* near;           // A / weight, for kUnclamped
  float* plain;          // [width] w
  float* weight;         // w / largest, at least 2^-kWeightBits in size; 0 past dk
  float* inverse;        // 1 / weight; 1 past dk
  float* middle;         // [width / 2] what two features that share a division add up to at r = 1/2
  float* slots;          // of a program of features: FeatureProgram::place
  float largest, total;  // the largest |w|, Σ w
  float unit;            // score_unit
  float max_abs;
  int bits;  // the largest inverse is at most 2^bits
};

static int64_t prepared_size(const regard_call& c) { return round_even(c.dk) * (3 * kQueries + 4) + 8 * W; }

// Point to the places of the weights, and of the queries, from `at` on; return the end.
static float* weight_places(PreparedQueries& x, int64_t width, float* at) {
  x.plain = at;
  at += width;
  x.weight = at;
  at += width;
  x.inverse = at;
  at += width;
  x.middle = at;
  return at + width / 2;
}

static float* query_places(PreparedQueries& x, int64_t size, float* at) {
  x.a = at;
  at += size;
  x.exponentials = at;
  at += size;
  x.near = at;
  return at + size;
}

static PreparedQueries prepared_places(const regard_call& c, float* at) {
  const int64_t width = round_even(c.dk);
  PreparedQueries x{};
  weight_places(x, width, query_places(x, width * kQueries, at));
  x.slots = at + prepared_size(c);
  return x;
}

// What w · f is multiplied by for a feature; a program has no weights.
REGARD_INLINE float weight_of(const regard_additive& x, int64_t head, int64_t k) {
  return x.code ? 1 : x.w[head * x.w_stride + k];
}

// What a head's scores are multiplied by to be in base 2, or divided by the soft cap; a program takes natural ones.
REGARD_INLINE float score_unit(const regard_call& c, int64_t head) {
  if (Program::used(c)) return 1;
  return SoftCap::used(c) ? 1 / SoftCap::of(c, head) : kLog2e;
}

static void prepare_weights(const regard_additive& x, PreparedQueries& to, int64_t head, int64_t width, int64_t step) {
  const regard_call& c = x.call;
  const auto w = [&](int64_t k) { return weight_of(x, head, k); };
  double total = 0;
  to.largest = 0;
  to.bits = 0;
  for (int64_t k = 0; k < c.dk; ++k) {
    float size = __builtin_fabsf(w(k));
    total += w(k);
    to.largest = size > to.largest ? size : to.largest;
  }
  to.total = (float)total;
  const float scale = to.largest > 0 ? to.largest : 1, least = __builtin_ldexpf(1, -kWeightBits);
  float small = 1;
  for (int64_t k = 0; k < c.dk; ++k) {
    to.plain[k] = w(k);
    float weight = to.plain[k] / scale;
    if (__builtin_fabsf(weight) < least) weight = __builtin_copysignf(least, weight);
    small = __builtin_fabsf(weight) < small ? __builtin_fabsf(weight) : small;
    to.weight[k] = weight;
    to.inverse[k] = 1 / weight;
  }
  for (int64_t k = c.dk; k < width; ++k) {
    to.plain[k] = to.weight[k] = 0;
    to.inverse[k] = 1;
  }
  const auto half = [&](int64_t k) { return k < c.dk ? 0.5f * to.weight[k] : 1.0f; };
  for (int64_t k = 0; k < width; k += 2 * step)
    for (int64_t n = k; n < k + step; ++n) to.middle[n - k / 2] = half(n) + half(n + step);
  while (small < 1) {
    small *= 2;
    ++to.bits;
  }
  to.unit = score_unit(c, head);
}

template <int V>
static void prepare_block(const regard_additive& x, PreparedQueries& to, const Place& p) {
  const regard_call& c = x.call;
  const float* q = at<float>(c.q, p, p.h) + p.row * c.q.row;
  const int64_t width = round_even(c.dk);
  pack<V>(to.a, kQueries, q, REGARD_F32, c.q.row, c.q.col, p.rows, c.dk, 1.0f);
  float most = 0;
  for (int64_t k = 0; k < c.dk; ++k) {
    float one = max_abs(to.a + k * kQueries, V * W);
    most = one > most ? one : most;
  }
  to.max_abs = most;
  prepare_weights(x, to, p.h, width, 1);
  const Separable form = separable(x.activation);
  if (!has_exponentials(x, most)) return;
  for (int64_t k = 0; k < width; ++k)
    for (int v = 0; v < V; ++v) {
      const int64_t n = k * kQueries + v * W;
      vf exponentials = k < c.dk ? expv(load(to.a + n) * splat(form.rate)) : vf{};
      store(to.exponentials + n, exponentials);
      store(to.near + n, exponentials * splat(to.inverse[k]));
    }
}

// The method for a tile whose largest |c| is `most`.
static Method method_of(const regard_additive& x, const PreparedQueries& q, float most) {
  if (!has_exponentials(x, most) || !has_exponentials(x, q.max_abs)) return kDirect;
  const float rate = __builtin_fabsf(separable(x.activation).rate);
  return rate * (most + q.max_abs) * kLog2e + (float)q.bits < kProductBits ? kUnclamped : kClamped;
}

// A score is scale · (the sum that a method computes) + base.
struct Units {
  float scale, base;
};

static Units units_of(const regard_additive& x, const PreparedQueries& q, Method method) {
  if (method == kDirect) return {q.unit, 0};
  const Separable form = separable(x.activation);
  return {form.factor * q.largest * q.unit, form.middle * q.total * q.unit};
}

}  // namespace regard
