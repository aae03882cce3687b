// Log distances (KERPLE): s - weight · ln(1 + rate · |position of the query - position of the key|).
#pragma once
#include "steps/distance.h"

namespace regard {

// The penalty of one head. weight: of natural scores.
struct LogPenalty {
  float weight, rate;

  static LogPenalty of(const regard_call& c, int64_t head) {
    return {c.log_distance_weights[c.log_distance_weights_stride * head],
            c.log_distance_rates[c.log_distance_rates_stride * head]};
  }

  __attribute__((always_inline)) vf subtract(vf s, vf distance) const {
    return s - splat(weight * kLog2e) * log1pv(splat(rate) * distance);
  }
};

struct LogDistance : Modifier {
  template <int V>
  struct State {
    LogPenalty log_penalty;
  };

  static int32_t check(const regard_call& c) {
    if (c.log_distance_weights_stride < 0 || c.log_distance_weights_stride > 1) return REGARD_BAD_ARGUMENT;
    if (c.log_distance_rates_stride < 0 || c.log_distance_rates_stride > 1) return REGARD_BAD_ARGUMENT;
    if (!both_or_none(c.log_distance_weights, c.log_distance_rates)) return REGARD_BAD_ARGUMENT;
    return c.log_distance_weights && !c.q_at ? REGARD_BAD_ARGUMENT : REGARD_DONE;
  }

  static bool used(const regard_call& c) { return c.log_distance_weights; }

  template <int V>
  static void begin(Block<V>& b, float*) {
    b.log_penalty = LogPenalty::of(b.c, b.p.h);
  }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], vf (&)[V]) {
    vf distance[V];
    position_distances(b, t.j + n, distance);
    for (int v = 0; v < V; ++v) s[v] = b.log_penalty.subtract(s[v], distance[v]);
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf&) {
    s = LogPenalty::of(x.f.c, x.row.h).subtract(s, position_distances(x));
  }

  static bool wants_grad(const regard_gradients& g) { return g.dlog_distance_weights || g.dlog_distance_rates; }
  static int64_t grad_size(const regard_gradients& g) { return wants_grad(g) ? 2 : 0; }

  // To sum[0] -Σ dS · ln(1 + rate · distance), to sum[1] -Σ dS · weight · distance / (1 + rate · distance). The terms
  // of a row nearly cancel, so only short sums are kept in float.
  template <int V>
  static void backward(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* sum) {
    if (!wants_grad(g.wanted)) return;
    constexpr int64_t kShort = 4;
    const vf weight = splat(b.log_penalty.weight), rate = splat(b.log_penalty.rate);
    for (int64_t first = g.from; first < g.to; first += kShort) {
      vf by_weight = vf{}, by_rate = vf{};
      for (int64_t n = first; n < first + kShort && n < g.to; ++n) {
        vf distance[V];
        position_distances(b, t.j + n, distance);
        for (int v = 0; v < V; ++v) {
          const vf ds = load(g.ds + n * kQueries + v * W), x = rate * distance[v];
          by_weight -= ds * log1pv(x);
          by_rate -= ds * (weight * distance[v] / (splat(1.0f) + x));
        }
      }
      for (int n = 0; n < W; ++n) {
        sum[0] += by_weight[n];
        sum[1] += by_rate[n];
      }
    }
  }

  static void write_grad(const regard_gradients& g, int64_t head, const double* sum) {
    if (g.dlog_distance_weights) g.dlog_distance_weights[head] = (float)sum[0];
    if (g.dlog_distance_rates) g.dlog_distance_rates[head] = (float)sum[1];
  }
};

}  // namespace regard
