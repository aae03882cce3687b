// The temperature: s / t, before all modifiers that add to the score.
#pragma once
#include "steps/list.h"

namespace regard {

struct Temperature : Modifier {
  template <int V>
  struct State {
    float inverse_temperature;
  };

  static int32_t check(const regard_call& c) {
    return c.temperatures_stride < 0 || c.temperatures_stride > 1 ? REGARD_BAD_ARGUMENT : REGARD_DONE;
  }

  static bool used(const regard_call& c) { return c.temperatures; }
  static constexpr bool keeps = true;  // the score after it

  REGARD_INLINE float inverse(const regard_call& c, int64_t head) {
    return 1 / c.temperatures[c.temperatures_stride * head];
  }

  template <int V>
  static void begin(Block<V>& b, float*) {
    b.inverse_temperature = inverse(b.c, b.p.h);
  }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile&, int64_t, vf (&s)[V], vf (&kept)[V]) {
    for (int v = 0; v < V; ++v) kept[v] = s[v] *= splat(b.inverse_temperature);
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf& derivative) {
    const vf factor = splat(inverse(x.f.c, x.row.h));
    s *= factor;
    derivative *= factor;
  }

  static constexpr bool simple = true;

  template <int V>
  static auto simply(const Block<V>& b, int64_t, int) {
    const vf factor = splat(b.inverse_temperature);
    return [factor](vf s, int64_t) __attribute__((always_inline)) { return s * factor; };
  }

  static bool wants_grad(const regard_gradients& g) { return g.dtemperatures; }
  static int64_t grad_size(const regard_gradients& g) { return g.dtemperatures ? 1 : 0; }
  static bool multiplies_delta(const regard_gradients& g) { return wants_grad(g); }

  // -Σ dS · s / t, of the natural scores s after it. The terms of a row nearly cancel, so only short sums are kept in
  // float.
  template <int V>
  static double gradient(const Block<V>& b, const ScoreGradients& g) {
    constexpr int64_t kShort = 4;
    double total = 0;
    for (int64_t first = g.from; first < g.to; first += kShort) {
      vf sum = vf{};
      for (int64_t n = first; n < first + kShort && n < g.to; ++n)
        for (int64_t v = n * kQueries; v < n * kQueries + V * W; v += W)
          sum -= gradient_term(load(g.ds + v), load(g.kept + v));
      for (int n = 0; n < W; ++n) total += sum[n];
    }
    return total * b.inverse_temperature / kLog2e;
  }

  template <int V>
  static void backward(const Block<V>& b, const Tile&, const ScoreGradients& g, double* sum) {
    if (g.wanted.dtemperatures) *sum += gradient<V>(b, g);
    const vf factor = splat(b.inverse_temperature);
    for (int64_t n = g.from * kQueries; n < g.to * kQueries; n += kQueries)
      for (int64_t v = n; v < n + V * W; v += W) store(g.ds + v, load(g.ds + v) * factor);
  }

  static void write_grad(const regard_gradients& g, int64_t head, const double* sum) {
    g.dtemperatures[head] = (float)*sum;
  }
};

}  // namespace regard
