// The forward of the additive similarity. Lanes are queries; see activation.h for the formulas.
#pragma once
#include "additive/features.h"

namespace regard {

constexpr int kKeysAtOnce = 2;           // keys whose scores are computed together
constexpr int64_t kFeaturesPerSum = 64;  // long sums are sums of such sums, which round less

// Σ_k w_k (r_k - 1/2) of M keys, in units of the largest weight, to s[M][kQueries]. c: their rows of C.
template <int V, int M>
REGARD_INLINE void unclamped_rows(const PreparedQueries& q, const float* c, int64_t width, float* s) {
  vf sum[M][V];
  clear(sum);
  for (int64_t begin = 0; begin < width; begin += kFeaturesPerSum) {
    const int64_t end = width - begin < kFeaturesPerSum ? width : begin + kFeaturesPerSum;
    vf acc[M][V];
    clear(acc);
    for (int64_t k = begin; k < end; k += 2) {
      const vf g = splat(q.inverse[k]), h = splat(q.inverse[k + 1]), middle = splat(q.middle[k / 2]);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const vf x = splat(c[i * width + k]), y = splat(c[i * width + k + 1]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const vf a = g + load(q.near + k * kQueries + v * W) * x,
                   b = h + load(q.near + (k + 1) * kQueries + v * W) * y;
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

// Not inlined: in the rest of a block its registers are spilled, and it runs at half the speed.
template <int V>
REGARD_NOINLINE void unclamped_tile(const PreparedQueries& q, const float* c, int64_t width, int64_t count, float* s) {
  int64_t n = 0;
  for (; n + kKeysAtOnce <= count; n += kKeysAtOnce)
    unclamped_rows<V, kKeysAtOnce>(q, c + n * width, width, s + n * kQueries);
  for (; n < count; ++n) unclamped_rows<V, 1>(q, c + n * width, width, s + n * kQueries);
}

// The same where a product of two sums could overflow: sums are clamped to 2^60.
template <int V>
REGARD_NOINLINE void clamped_tile(const PreparedQueries& q, const float* c, int64_t width, int64_t count, float* s) {
  const vf one = splat(1.0f), most = splat(0x1p60f);
  for (int64_t n = 0; n < count; ++n)
    for (int v = 0; v < V; ++v) {
      vf sum = vf{};
      for (int64_t k = 0; k < width; k += 2) {
        vf a = one + load(q.exponentials + k * kQueries + v * W) * splat(c[n * width + k]);
        vf b = one + load(q.exponentials + (k + 1) * kQueries + v * W) * splat(c[n * width + k + 1]);
        a = a < most ? a : most;
        b = b < most ? b : most;
        sum += (splat(q.weight[k]) * b + splat(q.weight[k + 1]) * a) / (a * b) -
               splat(0.5f * (q.weight[k] + q.weight[k + 1]));
      }
      store(s + n * kQueries + v * W, sum);
    }
}

// Σ_k w_k f(a_k + c_k). c: keys as they are.
template <int V, class F>
REGARD_NOINLINE void direct_tile(const PreparedQueries& q, const regard_additive& x, const float* c, int64_t count,
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

// The number of the (batch element, key head) whose keys a block reads.
REGARD_INLINE int64_t pair_of_block(const regard_call& c, const Place& p) {
  return p.b * c.key_heads + p.h / (c.heads / c.key_heads);
}

// Computes a tile's scores, after all modifiers and masks, in the block's scratch. top: takes their maxima; kept: takes
// what the modifiers keep of it for the backward.
template <int V>
static void additive_tile(const Block<V>& b, const Tile& t, const regard_additive& x, const PreparedQueries& q,
                          const Exponentials& keys, vf (&top)[V], float* kept = nullptr) {
  const regard_call& c = x.call;
  const int64_t pair = pair_of_block(c, b.p), width = round_even(c.dk);
  const Method method = method_of(x, q, keys.max_abs[pair * key_tiles(c) + t.j / kKeys]);
  const float* exponentials = keys.c + (pair * c.nk + t.j) * width;
  const float* plain = at<float>(c.k, b.p, pair % c.key_heads) + t.j * c.k.row;
  if (FeatureProgram::used(x)) FeatureProgram::sum_tile<V>(x, q, b.p.h, plain, c.k.row, c.k.col, t.count, b.w.s);
  else if (method == kUnclamped) unclamped_tile<V>(q, exponentials, width, t.count, b.w.s);
  else if (method == kClamped) clamped_tile<V>(q, exponentials, width, t.count, b.w.s);
  else if (x.activation == REGARD_TANH) direct_tile<V, TanhOf>(q, x, plain, t.count, b.w.s);
  else if (x.activation == REGARD_SIGMOID) direct_tile<V, SigmoidOf>(q, x, plain, t.count, b.w.s);
  else direct_tile<V, LeakyReluOf>(q, x, plain, t.count, b.w.s);
  const Units units = units_of(x, q, method);
  const vf scale = splat(units.scale), base = splat(units.base);
  if (Program::used(c)) {
    for (int64_t n = 0; n < t.count; ++n)
      for (int v = 0; v < V; ++v) {
        float* const s = b.w.s + n * kQueries + v * W;
        store(s, load(s) * scale + base);
      }
    return run_program<V>(b, t, b.w.s, 0, t.count, kept, top);
  }
  const SteppedKeys all{t.j, 0, t.count, t.bits};
  const auto read = [&](const float* at) __attribute__((always_inline)) { return load(at) * scale + base; };
  const bool simple = (!kept || !Modifiers::kept_size(c)) && Modifiers::simply(c, [&](auto one) {
                        with_hiding(t.edge, t.bits, [&](auto edge, auto bits) {
                          for (int v = 0; v < V; ++v)
                            top[v] = step_vector<V, decltype(one), decltype(edge)::value, decltype(bits)::value>(
                                b, v, all, b.w.s + v * W, kQueries, top[v], read);
                        });
                      });
  if (simple) return;
  for (int64_t n = 0; n < t.count; ++n) {
    vf s[V];
    for (int v = 0; v < V; ++v) s[v] = load(b.w.s + n * kQueries + v * W) * scale + base;
    apply_steps<V>(b, t, n, s, kept ? kept + n * kQueries : nullptr);
    for (int v = 0; v < V; ++v) {
      store(b.w.s + n * kQueries + v * W, s[v]);
      top[v] = greater_of(s[v], top[v]);
    }
  }
}

// run(tile, its keys and values) for each tile that has a key which some query of the block sees.
template <int V, class Run>
REGARD_INLINE void each_tile(const Block<V>& b, Run run) {
  const regard_call& c = b.c;
  for (int64_t j = b.lo / kKeys * kKeys; j < b.hi; j += kKeys) {
    const int64_t from = j > b.lo ? j : b.lo, to = j + kKeys < b.hi ? j + kKeys : b.hi;
    KvTile x{b.p, b.p.h / (c.heads / c.key_heads), from, to - from};
    Tile t = tile_for_block(b, x, j);
    uint64_t bits[kKeys];
    if (t.count == 0) continue;
    if (load_seen(b, t, bits)) run(t, x);
  }
}

template <int V>
static void additive_block(const regard_additive& x, const Exponentials& keys, const Scratch& w, PreparedQueries& q,
                           const Place& p) {
  Block<V> b{x.call, w, p};
  begin_state(b);
  prepare_block<V>(x, q, p);
  each_tile(b, [&](Tile& t, KvTile& from) {
    vf top[V];
    for (int v = 0; v < V; ++v) top[v] = b.state[v].m;
    additive_tile(b, t, x, q, keys, top);
    accumulate_tile<V, Floats>(b, t, from, top);
  });
  finish<V>(b);
}

struct AdditiveForward {
  const regard_additive& x;
  const Exponentials& keys;

  int64_t blocks() const { return (x.call.nq + kQueries - 1) / kQueries; }
  int64_t items() const { return elements(x.call) * x.call.heads * blocks(); }
  int64_t scratch() const {
    return forward_scratch(x.call, 1) + prepared_size(x.call) + FeatureProgram::scratch_size(x);
  }

  void run(int64_t item, float* memory) const {
    const regard_call& c = x.call;
    const int64_t rest = item / blocks();
    // the last queries see most keys under a causal mask: the longest items first
    const Place p = place_at(c, rest / c.heads, rest % c.heads, (blocks() - 1 - item % blocks()) * kQueries);
    Scratch w = forward_places(c, 1, memory);
    PreparedQueries q = prepared_places(c, memory + forward_scratch(c, 1));
    with_vectors(p.rows, [&](auto vectors) { additive_block<vectors>(x, keys, w, q, p); });
  }
};

}  // namespace regard
