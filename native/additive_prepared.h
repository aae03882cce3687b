// What an additive score is found with: its keys, a block of its queries and its weights, in the forms that a tile may ask for.
#pragma once
#include "activation.h"
#include "forward.h"
#include "work.h"

namespace regard {

REGARD_INLINE int64_t round_even(int64_t n) { return (n + 1) / 2 * 2; }

// What is made once of the keys of a (batch element, key head): C, and how far each tile's c reach.
struct Raised {
  float* c;      // [batch element, key head][nk][dk rounded up to 2]
  float* reach;  // [batch element, key head][tiles]
};

static int64_t key_tiles(const regard_call& c) { return (c.nk + kKeys - 1) / kKeys; }

struct Raise {
  const regard_additive& x;
  const Raised& to;

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
    if (!(most * __builtin_fabsf(form.rate) <= kFar) || x.activation == REGARD_LEAKY_RELU) return;
    int64_t n = 0;
    for (; n + W <= count * width; n += W) store(rows + n, expv(load(rows + n) * splat(form.rate)));
    for (; n < count * width; ++n) {
      vf one = expv(splat(rows[n] * form.rate));
      rows[n] = one[0];
    }
  }
};

enum Way { kNearWay, kFarWay, kDirectWay };

// One head's parameters and one block's queries, in each form that a tile may ask for.
struct Prepared {
  float* a;       // [dk rounded up to 2][kQueries]
  float* raised;  // A
  float* near;    // A / weight
  float* plain;   // [dk rounded up to 2] w
  float* weight;  // the same in units of the largest, none 0
  float* inverse;
  float* middle;  // [pairs] what the pair's sum has at r = 1/2
  float largest, total, unit;  // unit: of the scores, base 2 or that of the cap
  float reach;
  int bits;  // of the largest inverse
};

static int64_t prepared_size(const regard_call& c) { return round_even(c.dk) * (3 * kQueries + 4) + 8 * W; }

static Prepared prepared_places(const regard_call& c, float* at) {
  const int64_t width = round_even(c.dk);
  Prepared x{};
  x.a = at, at += width * kQueries;
  x.raised = at, at += width * kQueries;
  x.near = at, at += width * kQueries;
  x.plain = at, at += width;
  x.weight = at, at += width;
  x.inverse = at, at += width;
  x.middle = at;
  return x;
}

static void prepare_weights(const regard_additive& x, Prepared& to, int64_t head) {
  const regard_call& c = x.call;
  const float* w = x.w + head * x.w_stride;
  const int64_t width = round_even(c.dk);
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
  for (int64_t k = 0; k < width; ++k) {
    to.plain[k] = k < c.dk ? w[k] : 0;
    float weight = to.plain[k] / scale;
    if (__builtin_fabsf(weight) < least) weight = __builtin_copysignf(least, weight);
    small = __builtin_fabsf(weight) < small ? __builtin_fabsf(weight) : small;
    to.weight[k] = weight, to.inverse[k] = 1 / weight;
  }
  for (int64_t k = 0; k < width; k += 2) to.middle[k / 2] = 0.5f * (to.weight[k] + to.weight[k + 1]);
  for (; small < 1; small *= 2) ++to.bits;
  to.unit = c.cap != 0 && !c.cap_last ? 1 / cap_of(c, head) : kLog2e;
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
  prepare_weights(x, to, p.h);
  const Separable form = separable(x.activation);
  if (x.activation == REGARD_LEAKY_RELU || !(most * __builtin_fabsf(form.rate) <= kFar)) return;
  for (int64_t k = 0; k < width; ++k)
    for (int v = 0; v < V; ++v) {
      const int64_t n = k * kQueries + v * W;
      vf raised = k < c.dk ? expv(load(to.a + n) * splat(form.rate)) : vf{};
      store(to.raised + n, raised);
      store(to.near + n, raised * splat(to.inverse[k]));
    }
}

// How the scores of a tile are found, by how far its queries and keys reach.
static Way way_of(const regard_additive& x, const Prepared& q, const float* reach, int64_t j) {
  const float most = reach[j / kKeys], rate = __builtin_fabsf(separable(x.activation).rate);
  if (x.activation == REGARD_LEAKY_RELU || !(rate * most <= kFar) || !(rate * q.reach <= kFar)) return kDirectWay;
  return rate * (most + q.reach) * kLog2e + (float)q.bits < kNear ? kNearWay : kFarWay;
}

}  // namespace regard
