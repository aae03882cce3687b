// The clamp: scores between two numbers, before all modifiers that add to them.
#pragma once
#include "steps/softcap.h"

namespace regard {

struct Clamp : Modifier {
  template <int V>
  struct State {};

  static bool used(const regard_call& c) { return c.clamp_low < c.clamp_high; }
  static bool differs_by_head(const regard_call&) { return false; }
  static constexpr bool keeps = true;

  // derivative: 1 between the bounds, both included, else 0. NaN stays.
  REGARD_INLINE vf clamped(vf s, vf low, vf high, vf& derivative) {
    const vf above = select(s < low, low, s), found = select(above > high, high, above);
    derivative = select(found == s, splat(1.0f), vf{});
    return found;
  }

  // A bound in base 2, as scores are.
  REGARD_INLINE vf bound(float natural) { return splat(natural * kLog2e); }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile&, int64_t, vf (&s)[V], vf (&kept)[V]) {
    const vf low = bound(b.c.clamp_low), high = bound(b.c.clamp_high);
    for (int v = 0; v < V; ++v) s[v] = clamped(s[v], low, high, kept[v]);
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf& derivative) {
    vf own;
    s = clamped(s, bound(x.f.c.clamp_low), bound(x.f.c.clamp_high), own);
    derivative *= own;
  }

  static constexpr bool simple = true;

  template <int V>
  static auto simply(const Block<V>& b, int64_t, int) {
    const vf low = bound(b.c.clamp_low), high = bound(b.c.clamp_high);
    return [low, high](vf s, int64_t) __attribute__((always_inline)) {
      vf derivative;
      return clamped(s, low, high, derivative);
    };
  }

  template <int V>
  static void backward(const Block<V>&, const Tile&, const ScoreGradients& g, double*) {
    multiply_derivatives<V>(g.ds, g.ds, g.kept, g.from, g.to);
  }
};

}  // namespace regard
