// What an additive score is found with: its keys, a block of its queries and its weights, in the forms that a tile may ask for.
#pragma once
#include "additive/activation.h"
#include "attention/forward.h"
#include "core/work.h"

namespace regard {

REGARD_INLINE int64_t round_even(int64_t n) { return (n + 1) / 2 * 2; }

// Whether queries, or keys, that reach so far have exponentials.
REGARD_INLINE bool separable_reach(const regard_additive& x, float most) {
  return x.activation != REGARD_LEAKY_RELU && most * __builtin_fabsf(separable(x.activation).rate) <= kFar;
}

// What is made once of the keys of a (batch element, key head): C, and how far each tile's c reach.
struct Exponentials {
  float* c;      // [batch element, key head][nk][dk rounded up to 2]
  float* reach;  // [batch element, key head][tiles]
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
    const float most = to.reach[item] = reach(rows, count * width);
    if (!separable_reach(x, most)) return;
    int64_t n = 0;
    for (; n + W <= count * width; n += W) store(rows + n, expv(load(rows + n) * splat(form.rate)));
    for (; n < count * width; ++n) {
      vf one = expv(splat(rows[n] * form.rate));
      rows[n] = one[0];
    }
  }
};

enum Way { kNearWay, kFarWay, kDirectWay };

// One head's parameters and some queries, in each form that a tile may ask for. Features k and k + step share a division, step of
// them after the other: width is dk rounded up to 2 steps.
struct Prepared {
  float* a;       // [width][kQueries] of a block, [width] of one query
  float* exponentials;  // A
  float* near;    // A / weight
  float* plain;   // [width] w
  float* weight;  // the same in units of the largest, none 0 but those past dk
  float* inverse;
  float* middle;  // [width / 2] what the near sum of two has at r = 1/2
  float largest, total, unit;  // unit: of the scores, base 2 or that of the cap
  float reach;
  int bits;  // of the largest inverse
};

static int64_t prepared_size(const regard_call& c) { return round_even(c.dk) * (3 * kQueries + 4) + 8 * W; }

// Where the parameters lie, and the queries; what lies behind them is returned.
static float* weight_places(Prepared& x, int64_t width, float* at) {
  x.plain = at, at += width;
  x.weight = at, at += width;
  x.inverse = at, at += width;
  x.middle = at;
  return at + width / 2;
}

static float* query_places(Prepared& x, int64_t size, float* at) {
  x.a = at, at += size;
  x.exponentials = at, at += size;
  x.near = at;
  return at + size;
}

static Prepared prepared_places(const regard_call& c, float* at) {
  const int64_t width = round_even(c.dk);
  Prepared x{};
  weight_places(x, width, query_places(x, width * kQueries, at));
  return x;
}

static void prepare_weights(const regard_additive& x, Prepared& to, int64_t head, int64_t width, int64_t step) {
  const regard_call& c = x.call;
  const float* w = x.w + head * x.w_stride;
  double total = 0;
  to.largest = 0, to.bits = 0;
  for (int64_t k = 0; k < c.dk; ++k) {
    float size = __builtin_fabsf(w[k]);
    total += w[k];
    to.largest = size > to.largest ? size : to.largest;
  }
  to.total = (float)total;
  const float scale = to.largest > 0 ? to.largest : 1, least = __builtin_ldexpf(1, -kLeast);
  float small = 1;
  for (int64_t k = 0; k < c.dk; ++k) {
    to.plain[k] = w[k];
    float weight = to.plain[k] / scale;
    if (__builtin_fabsf(weight) < least) weight = __builtin_copysignf(least, weight);
    small = __builtin_fabsf(weight) < small ? __builtin_fabsf(weight) : small;
    to.weight[k] = weight, to.inverse[k] = 1 / weight;
  }
  for (int64_t k = c.dk; k < width; ++k) to.plain[k] = to.weight[k] = 0, to.inverse[k] = 1;
  const auto half = [&](int64_t k) { return k < c.dk ? 0.5f * to.weight[k] : 1.0f; };
  for (int64_t k = 0; k < width; k += 2 * step)
    for (int64_t n = k; n < k + step; ++n) to.middle[n - k / 2] = half(n) + half(n + step);
  for (; small < 1; small *= 2) ++to.bits;
  to.unit = SoftCap::used(c) ? 1 / SoftCap::of(c, head) : kLog2e;
}

template <int V>
static void prepare_block(const regard_additive& x, Prepared& to, const Place& p) {
  const regard_call& c = x.call;
  const float* q = at<float>(c.q, p, p.h) + p.row * c.q.row;
  const int64_t width = round_even(c.dk);
  pack<V>(to.a, kQueries, q, REGARD_F32, c.q.row, c.q.col, p.rows, c.dk, 1.0f);
  float most = 0;
  for (int64_t k = 0; k < c.dk; ++k) {
    float one = reach(to.a + k * kQueries, V * W);
    most = one > most ? one : most;
  }
  to.reach = most;
  prepare_weights(x, to, p.h, width, 1);
  const Separable form = separable(x.activation);
  if (!separable_reach(x, most)) return;
  for (int64_t k = 0; k < width; ++k)
    for (int v = 0; v < V; ++v) {
      const int64_t n = k * kQueries + v * W;
      vf exponentials = k < c.dk ? expv(load(to.a + n) * splat(form.rate)) : vf{};
      store(to.exponentials + n, exponentials);
      store(to.near + n, exponentials * splat(to.inverse[k]));
    }
}

// How scores are found, by how far their queries and keys reach.
static Way way_of(const regard_additive& x, const Prepared& q, float most) {
  if (!separable_reach(x, most) || !separable_reach(x, q.reach)) return kDirectWay;
  const float rate = __builtin_fabsf(separable(x.activation).rate);
  return rate * (most + q.reach) * kLog2e + (float)q.bits < kNear ? kNearWay : kFarWay;
}

// A score is scale · the sum that a way finds + base.
struct Units {
  float scale, base;
};

static Units units_of(const regard_additive& x, const Prepared& q, Way way) {
  if (way == kDirectWay) return {q.unit, 0};
  const Separable form = separable(x.activation);
  return {form.factor * q.largest * q.unit, form.middle * q.total * q.unit};
}

}  // namespace regard
