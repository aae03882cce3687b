// Log distances (KERPLE): s - weight · ln(1 + rate · |position of the query - position of the key|).
#pragma once
#include "steps/distance.h"

namespace regard {

struct LogPenalty {
  float weight, rate;

  static LogPenalty of(const regard_call& c, int64_t head) {
    return {c.log_distance_weights[c.log_distance_weights_stride * head],
            c.log_distance_rates[c.log_distance_rates_stride * head]};
  }

  __attribute__((always_inline)) vf subtract(vf s, vf distance) const {
    return s - splat(weight * kLog2e) * log1pv(splat(rate) * distance);
  }

  __attribute__((always_inline)) void derivatives(vf distance, vf& by_weight, vf& by_rate) const {
    const vf x = splat(rate) * distance;
    by_weight = log1pv(x);
    by_rate = splat(weight) * distance / (splat(1.0f) + x);
  }
};

struct LogDistance : DistancePenalty<LogDistance, LogPenalty> {
  template <int V>
  struct State {
    LogPenalty log_penalty;
  };

  template <class B>
  REGARD_INLINE auto& in_block(B& b) {
    return b.log_penalty;
  }

  static int32_t check(const regard_call& c) {
    return check_numbers(c.log_distance_weights, c.log_distance_weights_stride, c.log_distance_rates,
                         c.log_distance_rates_stride);
  }

  static bool used(const regard_call& c) { return c.log_distance_weights; }

  static bool wants_grad(const regard_gradients& g) { return g.dlog_distance_weights || g.dlog_distance_rates; }

  static void write_grad(const regard_gradients& g, int64_t head, const double* sum) {
    write_numbers(g.dlog_distance_weights, g.dlog_distance_rates, head, sum);
  }
};

}  // namespace regard
