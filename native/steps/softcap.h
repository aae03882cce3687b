// The soft cap, cap · tanh(s / cap): before all other modifiers (Gemma), or after them.
#pragma once
#include "steps/list.h"

namespace regard {

// product = ds · derivative, of the keys [from, to) of a tile; `product` may be either of them. A hidden pair has a
// gradient of 0, and any derivative.
template <int V>
REGARD_NOINLINE void multiply_derivatives(float* product, const float* ds, const float* derivative, int64_t from,
                                          int64_t to) {
  for (int64_t n = from * kQueries; n < to * kQueries; n += kQueries)
    for (int64_t v = n; v < n + V * W; v += W) {
      const vf x = load(ds + v);
      store(product + v, select(x == vf{}, x, x * load(derivative + v)));
    }
}

// Own: which of the two it is: used(c), where its state keeps the cap of a head, in_block(b), and the function
// capped(s, cap, derivative), whose derivative is that of tanh.
template <class Own>
struct AnySoftCap : Modifier {
  static bool differs_by_head(const regard_call& c) { return c.caps; }
  static constexpr bool keeps = true, simple = true;

  REGARD_INLINE float of(const regard_call& c, int64_t head) { return c.caps ? c.caps[c.caps_stride * head] : c.cap; }

  template <int V>
  static void begin(Block<V>& b, float*) {
    Own::in_block(b) = of(b.c, b.p.h);
  }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile&, int64_t, vf (&s)[V], vf (&kept)[V]) {
    for (int v = 0; v < V; ++v) s[v] = Own::capped(s[v], Own::in_block(b), kept[v]);
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf& derivative) {
    vf own;
    s = Own::capped(s, of(x.f.c, x.row.h), own);
    derivative *= own;
  }

  template <int V>
  static auto simply(const Block<V>& b, int64_t, int) {
    const float cap = Own::in_block(b);
    return [cap](vf s, int64_t) __attribute__((always_inline)) {
      vf derivative;
      return Own::capped(s, cap, derivative);
    };
  }

  template <int V>
  static void backward(const Block<V>&, const Tile&, const ScoreGradients& g, double*) {
    multiply_derivatives<V>(g.ds, g.ds, g.kept, g.from, g.to);
  }
};

struct SoftCap : AnySoftCap<SoftCap> {
  template <int V>
  struct State {
    float cap;
  };

  static int32_t check(const regard_call& c) {
    return c.caps_stride < 0 || c.caps_stride > 1 ? REGARD_BAD_ARGUMENT : REGARD_DONE;
  }

  static bool used(const regard_call& c) { return c.cap != 0 && !c.cap_last; }

  template <class B>
  REGARD_INLINE auto& in_block(B& b) {
    return b.cap;
  }

  // s: a score divided by the cap. The result is in base 2.
  REGARD_INLINE vf capped(vf s, float cap, vf& derivative) {
    const vf y = tanhv(s);
    derivative = splat(1.0f) - y * y;
    return splat(cap * kLog2e) * y;
  }
};

// The factor that turns a dot product into a score divided by the cap, into a natural score where a program reads it
// (steps/program.h), or else into a score in base 2.
REGARD_INLINE float dot_factor(const regard_call& c, int64_t head) {
  if (c.program_code) return c.scale;
  return SoftCap::used(c) ? c.scale / SoftCap::of(c, head) : c.scale * kLog2e;
}

struct LastSoftCap : AnySoftCap<LastSoftCap> {
  template <int V>
  struct State {
    float last_cap;
  };

  static bool used(const regard_call& c) { return c.cap != 0 && c.cap_last; }

  template <class B>
  REGARD_INLINE auto& in_block(B& b) {
    return b.last_cap;
  }

  // s: in base 2.
  REGARD_INLINE vf capped(vf s, float cap, vf& derivative) {
    return SoftCap::capped(s * splat(1 / (cap * kLog2e)), cap, derivative);
  }
};

}  // namespace regard
