// How far apart the positions of queries and keys are, for the modifiers that ask; and what those have in common that
// subtract a penalty.
#pragma once
#include "steps/list.h"

namespace regard {

// |position of the query - position of the key|, of queries at `relative` to base and a key.
REGARD_INLINE vf position_distance(vi relative, int64_t at, int64_t base) {
  return absolute(__builtin_convertvector(wrapping_sub(relative, splat_int(wrapping_sub(at, base))), vf));
}

// The same of a block's queries and one key.
template <int V>
REGARD_INLINE void position_distances(const Block<V>& b, int64_t key, vf (&distance)[V]) {
  const int64_t at = b.c.k_at[offset(b.c.k_at_batch, b.p) + key];
  for (int v = 0; v < V; ++v) distance[v] = position_distance(b.relative[v], at, b.base);
}

// The same of a row's query and W keys.
REGARD_INLINE vf position_distances(const RowKeys& x) {
  const regard_call& c = x.f.c;
  const int32_t ahead =
      wrapping_sub(c.q_at[offset(c.q_at_batch, x.f.p) + x.row.i], c.k_at[offset(c.k_at_batch, x.f.p) + x.t.j]);
  return absolute(__builtin_convertvector(wrapping_sub(splat_int(ahead), x.f.at[x.n / W]), vf));
}

// A factor of natural numbers as a factor of numbers in base 2: the sum of two floats, since large products multiply
// the rounding error of one.
struct Base2Factor {
  float high, low;

  static Base2Factor of(float natural) {
    const double factor = natural * 1.4426950408889634;
    return {(float)factor, (float)(factor - (float)factor)};
  }

  // s - factor · x, of a finite x
  __attribute__((always_inline)) vf subtract(vf s, vf x) const {
    s -= splat(high) * x;
    return s - splat(low) * x;
  }

  // The same of any x: the low part, of either sign, would make NaN of the infinity that the high part gives.
  __attribute__((always_inline)) vf subtract_any(vf s, vf x) const {
    const vf y = s - splat(high) * x;
    return select(is_finite(y), y - splat(low) * x, y);
  }
};

// A modifier that subtracts a function of the distance of positions and of two numbers of the head.
// Own: the modifier: in_block(b), where its state keeps the penalty of the block's head; used, wants_grad, write_grad.
// Penalty: of(call, head); subtract(s, distance), s in base 2; derivatives(distance, by_first, by_second), those of the
// natural penalty by its two numbers.
template <class Own, class Penalty>
struct DistancePenalty : Modifier {
  static bool compares_positions(const regard_call&) { return true; }

  // Whether two operands of a number for each head, or one for all, are both there or both missing.
  static int32_t check_numbers(const float* first, int64_t first_stride, const float* second, int64_t second_stride) {
    const bool strides = first_stride >= 0 && first_stride <= 1 && second_stride >= 0 && second_stride <= 1;
    return strides && both_or_none(first, second) ? REGARD_DONE : REGARD_BAD_ARGUMENT;
  }

  template <int V>
  static void begin(Block<V>& b, float*) {
    Own::in_block(b) = Penalty::of(b.c, b.p.h);
  }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], vf (&)[V]) {
    vf distance[V];
    position_distances(b, t.j + n, distance);
    for (int v = 0; v < V; ++v) s[v] = Own::in_block(b).subtract(s[v], distance[v]);
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf&) {
    s = Penalty::of(x.f.c, x.row.h).subtract(s, position_distances(x));
  }

  static int64_t grad_size(const regard_gradients& g) { return Own::wants_grad(g) ? 2 : 0; }

  // To sum[0] and sum[1] -Σ dS · the derivative by each number. The terms of a row nearly cancel, so only short sums
  // are kept in float.
  template <int V>
  static void backward(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* sum) {
    if (!Own::wants_grad(g.wanted)) return;
    constexpr int64_t kShort = 4;
    const Penalty penalty = Own::in_block(b);
    for (int64_t first = g.from; first < g.to; first += kShort) {
      vf sum_first = vf{}, sum_second = vf{};
      for (int64_t n = first; n < first + kShort && n < g.to; ++n) {
        vf distance[V];
        position_distances(b, t.j + n, distance);
        for (int v = 0; v < V; ++v) {
          const vf ds = load(g.ds + n * kQueries + v * W);
          vf by_first, by_second;
          penalty.derivatives(distance[v], by_first, by_second);
          sum_first -= ds * by_first;
          sum_second -= ds * by_second;
        }
      }
      for (int n = 0; n < W; ++n) {
        sum[0] += sum_first[n];
        sum[1] += sum_second[n];
      }
    }
  }

  static void write_numbers(float* first, float* second, int64_t head, const double* sum) {
    if (first) first[head] = (float)sum[0];
    if (second) second[head] = (float)sum[1];
  }
};

}  // namespace regard
