// Power distances (KERPLE): s - weight · |position of the query - position of the key|^power, and s at distance 0.
#pragma once
#include "steps/distance.h"

namespace regard {

struct PowerPenalty {
  Base2Factor factor;  // the weight
  float weight, power;
  float high;  // the first 12 bits of the power: its products with exponents, which have 5, are exact

  static PowerPenalty of(const regard_call& c, int64_t head) {
    const float weight = c.power_distance_weights[c.power_distance_weights_stride * head];
    const float power = c.power_distance_powers[c.power_distance_powers_stride * head];
    const vi first_bits = (vi)splat(power) & splat_int((int32_t)0xfffff000);
    return {Base2Factor::of(weight), weight, power, ((vf)first_bits)[0]};
  }

  // distance^power to 2 ulp, 0 at 0: 2^(power log2 d), where log2 d is an exponent and a number below 1, so that long
  // distances have all digits. Powers from 2^127 on are the largest float.
  __attribute__((always_inline)) vf raised(vf distance) const {
    const LogParts d = log_parts(distance);
    const vf rest = d.f - d.f * d.f * (splat(0.5f) - d.cubic);  // ln d less that of its power of 2
    const vf whole = splat(high) * d.exponent, part = splat(power - high) * d.exponent + splat(power * kLog2e) * rest;
    const vf y = whole + part, t = greater_of(splat(-127.0f), lesser_of(splat(127.0f), y)) + splat(kMagic);
    const vf z = exp2_parts(t, whole - (t - splat(kMagic)) + part);
    return select(distance == vf{}, vf{}, select(y > splat(127.0f), splat(kMaxFloat), z));
  }

  __attribute__((always_inline)) vf subtract(vf s, vf distance) const { return factor.subtract(s, raised(distance)); }

  __attribute__((always_inline)) void derivatives(vf distance, vf& by_weight, vf& by_power) const {
    by_weight = raised(distance);
    by_power = splat(weight) * by_weight * logv(distance);  // logv is finite at 0
  }
};

struct PowerDistance : DistancePenalty<PowerDistance, PowerPenalty> {
  template <int V>
  struct State {
    PowerPenalty power_penalty;
  };

  template <class B>
  REGARD_INLINE auto& in_block(B& b) {
    return b.power_penalty;
  }

  static int32_t check(const regard_call& c) {
    return check_numbers(c.power_distance_weights, c.power_distance_weights_stride, c.power_distance_powers,
                         c.power_distance_powers_stride);
  }

  static bool used(const regard_call& c) { return c.power_distance_weights; }

  static constexpr bool simple = true;

  template <int V>
  static auto simply(const Block<V>& b, int64_t first, int v) {
    const int64_t* k_at = b.c.k_at + offset(b.c.k_at_batch, b.p) + first;
    return
        [k_at, penalty = b.power_penalty, relative = b.relative[v], base = b.base](vf s, int64_t n)
            __attribute__((always_inline)) { return penalty.subtract(s, position_distance(relative, k_at[n], base)); };
  }

  static bool wants_grad(const regard_gradients& g) { return g.dpower_distance_weights || g.dpower_distance_powers; }
  static bool multiplies_delta(const regard_gradients& g) { return wants_grad(g); }

  static void write_grad(const regard_gradients& g, int64_t head, const double* sum) {
    write_numbers(g.dpower_distance_weights, g.dpower_distance_powers, head, sum);
  }
};

}  // namespace regard
