// The additive similarity in the forward loop: lanes are queries, as everywhere; see activation.h for the formulas.
#pragma once
#include "activation.h"
#include "forward.h"
#include "work.h"

namespace regard {

constexpr int kTogether = 2;     // keys whose scores are found together
constexpr int64_t kStretch = 64;  // features of one sum; sums of sums then lose less

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
  to.unit = c.cap != 0 ? 1 / c.cap : kLog2e;
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

// Σ_k w_k (r_k - 1/2) of M keys, in units of the largest weight, to s[M][kQueries]. c: their rows of C.
template <int V, int M>
REGARD_INLINE void near_rows(const Prepared& q, const float* c, int64_t width, float* s) {
  vf sum[M][V];
  clear(sum);
  for (int64_t begin = 0; begin < width; begin += kStretch) {
    const int64_t end = width - begin < kStretch ? width : begin + kStretch;
    vf acc[M][V];
    clear(acc);
    for (int64_t k = begin; k < end; k += 2) {
      const vf g = splat(q.inverse[k]), h = splat(q.inverse[k + 1]), middle = splat(q.middle[k / 2]);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const vf x = splat(c[i * width + k]), y = splat(c[i * width + k + 1]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const vf a = g + load(q.near + k * kQueries + v * W) * x, b = h + load(q.near + (k + 1) * kQueries + v * W) * y;
          acc[i][v] += (a + b) / (a * b) - middle;
        }
      }
    }
    for (int i = 0; i < M; ++i)
      for (int v = 0; v < V; ++v) sum[i][v] += acc[i][v];
  }
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < V; ++v) store(s + i * kQueries + v * W, sum[i][v]);
}

// Of its own, so that its registers are: inlined into the rest of a block it runs at half the speed.
template <int V>
REGARD_ALONE void near_tile(const Prepared& q, const float* c, int64_t width, int64_t count, float* s) {
  int64_t n = 0;
  for (; n + kTogether <= count; n += kTogether) near_rows<V, kTogether>(q, c + n * width, width, s + n * kQueries);
  for (; n < count; ++n) near_rows<V, 1>(q, c + n * width, width, s + n * kQueries);
}

// The same where a product of two sums may overflow: a sum beyond 2^60 counts as that.
template <int V>
REGARD_ALONE void far_tile(const Prepared& q, const float* c, int64_t width, int64_t count, float* s) {
  const vf one = splat(1.0f), most = splat(0x1p60f);
  for (int64_t n = 0; n < count; ++n)
    for (int v = 0; v < V; ++v) {
      vf sum = vf{};
      for (int64_t k = 0; k < width; k += 2) {
        vf a = one + load(q.raised + k * kQueries + v * W) * splat(c[n * width + k]);
        vf b = one + load(q.raised + (k + 1) * kQueries + v * W) * splat(c[n * width + k + 1]);
        a = a < most ? a : most, b = b < most ? b : most;
        sum += (splat(q.weight[k]) * b + splat(q.weight[k + 1]) * a) / (a * b) - splat(q.middle[k / 2]);
      }
      store(s + n * kQueries + v * W, sum);
    }
}

// Σ_k w_k f(a_k + c_k). c: keys as they are.
template <int V, class F>
REGARD_ALONE void direct_tile(const Prepared& q, const regard_additive& x, const float* c, int64_t count,
                                                  float* s) {
  const regard_call& call = x.call;
  for (int64_t n = 0; n < count; ++n)
    for (int v = 0; v < V; ++v) {
      vf sum = vf{};
      for (int64_t k = 0; k < call.dk; ++k) {
        const vf z = load(q.a + k * kQueries + v * W) + splat(c[n * call.k.row + k * call.k.col]);
        sum += splat(q.plain[k]) * F::value(z, x.slope);
      }
      store(s + n * kQueries + v * W, sum);
    }
}

// Which pair of (batch element, key head) a block reads.
REGARD_INLINE int64_t pair_of_block(const regard_call& c, const Place& p) {
  return p.b * c.key_heads + p.h / (c.heads / c.key_heads);
}

// Scores of a tile, with every step, to the block's scratch; `top` takes their maxima, `bend` the soft cap's derivative.
template <int V>
static void additive_tile(const Block<V>& b, const Tile& t, const regard_additive& x, const Prepared& q, const Raised& keys,
                          vf (&top)[V], float* bend = nullptr) {
  const regard_call& c = x.call;
  const int64_t pair = pair_of_block(c, b.p), width = round_even(c.dk);
  const Way way = way_of(x, q, keys.reach + pair * key_tiles(c), t.j);
  const float* raised = keys.c + (pair * c.nk + t.j) * width;
  const float* plain = at<float>(c.k, b.p, pair % c.key_heads) + t.j * c.k.row;
  if (way == kNearWay) near_tile<V>(q, raised, width, t.count, b.w.s);
  else if (way == kFarWay) far_tile<V>(q, raised, width, t.count, b.w.s);
  else if (x.activation == REGARD_TANH) direct_tile<V, TanhOf>(q, x, plain, t.count, b.w.s);
  else if (x.activation == REGARD_SIGMOID) direct_tile<V, SigmoidOf>(q, x, plain, t.count, b.w.s);
  else direct_tile<V, LeakyReluOf>(q, x, plain, t.count, b.w.s);
  const bool direct = way == kDirectWay;
  const Separable form = separable(x.activation);
  const vf scale = splat(direct ? q.unit : form.factor * q.largest * q.unit);
  const vf base = splat(direct ? 0 : form.middle * q.total * q.unit);
  for (int64_t n = 0; n < t.count; ++n) {
    vf s[V];
    for (int v = 0; v < V; ++v) {
      s[v] = load(b.w.s + n * kQueries + v * W) * scale + base;
      if (!bend) continue;
      const vf y = tanhv(s[v]);
      store(bend + n * kQueries + v * W, splat(1.0f) - y * y);
    }
    steps<V, Floats>(b, t, n, s);
    for (int v = 0; v < V; ++v) {
      top[v] = greater_of(s[v], top[v]);
      store(b.w.s + n * kQueries + v * W, s[v]);
    }
  }
}

// run(tile, source) for each tile of which some lane of the block sees some key.
template <int V, class Run>
REGARD_INLINE void each_tile(const Block<V>& b, Run run) {
  const regard_call& c = b.c;
  const void* values = moved(c.v.data, offset(c.v, b.p, b.p.h / (c.heads / c.key_heads)), c.dtype);
  for (int64_t j = b.lo / kKeys * kKeys; j < b.hi; j += kKeys) {
    const int64_t from = j > b.lo ? j : b.lo, to = j + kKeys < b.hi ? j + kKeys : b.hi;
    Source x{nullptr, values, from, to - from, nullptr, nullptr, 0, 0, false, false, false, -1};
    Tile t = meet(b, x, j);
    uint64_t bits[kKeys];
    if (t.count == 0) continue;
    bring_extras<V>(b, t, bits);
    run(t, x);
  }
}

template <int V>
static void additive_block(const regard_additive& x, const Raised& keys, const Scratch& w, Prepared& q, const Place& p) {
  Block<V> b{x.call, w, p};
  begin_state(b);
  prepare_block<V>(x, q, p);
  each_tile(b, [&](Tile& t, Source& from) {
    vf top[V];
    for (int v = 0; v < V; ++v) top[v] = b.m[v];
    additive_tile(b, t, x, q, keys, top);
    absorb<V, Floats>(b, t, from, top);
  });
  finish<V>(b);
}

struct AdditiveForward {
  const regard_additive& x;
  const Raised& keys;

  int64_t blocks() const { return (x.call.nq + kQueries - 1) / kQueries; }
  int64_t items() const { return elements(x.call) * x.call.heads * blocks(); }
  int64_t scratch() const { return forward_scratch(x.call, 1) + prepared_size(x.call); }

  void run(int64_t item, float* memory) const {
    const regard_call& c = x.call;
    const int64_t rest = item / blocks();
    // heaviest first under a causal mask
    const Place p = place_at(c, rest / c.heads, rest % c.heads, (blocks() - 1 - item % blocks()) * kQueries);
    Scratch w = forward_places(c, 1, memory);
    Prepared q = prepared_places(c, memory + forward_scratch(c, 1));
    switch ((p.rows + W - 1) / W) {
      case 1: return additive_block<1>(x, keys, w, q, p);
      case 2: return additive_block<2>(x, keys, w, q, p);
      case 3: return additive_block<3>(x, keys, w, q, p);
      default: return additive_block<kVectors>(x, keys, w, q, p);
    }
  }
};

}  // namespace regard
