// Slopes (ALiBi): s - slope · |position of the query - position of the key|, or the distance between two points.
#pragma once
#include "steps/distance.h"

namespace regard {

struct Slopes : Modifier {
  template <int V>
  struct State {
    Base2Factor slope;
    vf point[REGARD_DIMS][V];  // coordinates of each lane's query
  };

  static int32_t check(const regard_call& c) {
    if (c.slopes_stride < 0 || c.slopes_stride > 1 || !both_or_none(c.points_of_q, c.points_of_k))
      return REGARD_BAD_ARGUMENT;
    return c.points_of_q && (c.dims < 0 || c.dims > REGARD_DIMS) ? REGARD_BAD_ARGUMENT : REGARD_DONE;
  }

  static bool used(const regard_call& c) { return c.slopes; }
  static bool compares_positions(const regard_call& c) { return !c.points_of_q; }

  static Base2Factor of(const regard_call& c, int64_t head) {
    return Base2Factor::of(c.slopes[c.slopes_stride * head]);
  }

  template <int V>
  static void begin(Block<V>& b, float*) {
    const regard_call& c = b.c;
    for (int64_t d = 0; c.points_of_q && d < c.dims; ++d)
      for (int64_t n = 0; n < V * W; ++n)
        b.point[d][n / W][n % W] = c.points_of_q[d * c.nq + b.p.row + (n < b.p.rows ? n : 0)];
    b.slope = of(c, b.p.h);
  }

  // The square of a distance with one more coordinate.
  REGARD_INLINE vf add_coordinate(vf square, vf x, vf y) {
    const vf difference = x - y;
    return square + difference * difference;
  }

  // How far the block's queries are from a key.
  template <int V>
  REGARD_INLINE void distances(const Block<V>& b, int64_t key, vf (&distance)[V]) {
    if (!b.c.points_of_k) return position_distances(b, key, distance);
    for (int v = 0; v < V; ++v) distance[v] = point_distance(b, key, v);
  }

  // How far the points of vector v of a block's queries are from that of a key.
  template <int V>
  REGARD_INLINE vf point_distance(const Block<V>& b, int64_t key, int v) {
    vf square = vf{};
    for (int64_t d = 0; d < b.c.dims; ++d)
      square = add_coordinate(square, b.point[d][v], splat(b.c.points_of_k[d * b.c.nk + key]));
    return sqrtv(square);
  }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], vf (&)[V]) {
    for (int v = 0; v < V; ++v) s[v] = simply(b, t.j, v)(s[v], n);
  }

  static constexpr bool simple = true;

  template <int V>
  static auto simply(const Block<V>& b, int64_t first, int v) {
    const int64_t* k_at = b.c.points_of_k ? nullptr : b.c.k_at + offset(b.c.k_at_batch, b.p) + first;
    return [&b, k_at, first, v, slope = b.slope, relative = b.relative[v], base = b.base](vf s, int64_t n)
               __attribute__((always_inline)) {
                 return k_at ? slope.subtract(s, position_distance(relative, k_at[n], base))
                             : slope.subtract_any(s, point_distance(b, first + n, v));
               };
  }

  // How far a row's query is from the points of W keys.
  REGARD_INLINE vf point_distances(const RowKeys& x) {
    const regard_call& c = x.f.c;
    vf square = vf{};
    for (int64_t d = 0; d < c.dims; ++d) {
      const vf key = floats(c.points_of_k, d * c.nk + x.key(), 1, x.valid(), REGARD_F32);
      square = add_coordinate(square, splat(c.points_of_q[d * c.nq + x.row.i]), key);
    }
    return sqrtv(square);
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf&) {
    const Base2Factor slope = of(x.f.c, x.row.h);
    s = x.f.c.points_of_k ? slope.subtract_any(s, point_distances(x)) : slope.subtract(s, position_distances(x));
  }

  static bool wants_grad(const regard_gradients& g) { return g.dslopes; }
  static int64_t grad_size(const regard_gradients& g) { return g.dslopes ? 1 : 0; }
  static bool multiplies_delta(const regard_gradients& g) { return wants_grad(g); }

  // -Σ dS · distance. The terms of a row nearly cancel, so only short sums are kept in float.
  template <int V>
  static double gradient(const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
    constexpr int64_t kShort = 4;
    double total = 0;
    for (int64_t first = from; first < to; first += kShort) {
      vf sum = vf{};
      for (int64_t n = first; n < first + kShort && n < to; ++n) {
        vf distance[V];
        distances(b, t.j + n, distance);
        for (int v = 0; v < V; ++v) sum -= gradient_term(load(ds + n * kQueries + v * W), distance[v]);
      }
      for (int n = 0; n < W; ++n) total += sum[n];
    }
    return total;
  }

  template <int V>
  static void backward(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* sum) {
    if (g.wanted.dslopes) *sum += gradient<V>(b, t, g.ds, g.from, g.to);
  }

  static void write_grad(const regard_gradients& g, int64_t head, const double* sum) { g.dslopes[head] = (float)*sum; }
};

}  // namespace regard
