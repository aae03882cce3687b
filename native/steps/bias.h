// Bias: s + bias[query][key], natural.
#pragma once
#include "steps/list.h"

namespace regard {

struct Bias : Modifier {
  template <int V>
  struct State {
    float* bias;  // [kKeys][kQueries], of a tile, bounded: see plus_bounded
  };

  static int32_t dtype(const regard_call& c) { return (int32_t)c.bias.dtype; }

  static int32_t check(const regard_call& c) {
    if (c.bias.data && !known_dtype(dtype(c))) return REGARD_BAD_ARGUMENT;
    return fits(c.bias, dtype(c), c.batch, c.heads, c.nq, c.nk) ? REGARD_DONE : REGARD_BAD_ARGUMENT;
  }

  static bool right_gradient(const regard_gradients& g) {
    const regard_call& c = g.call;
    return fits(g.dbias, g.dbias.row == 0 || g.dbias.col == 0 ? REGARD_F64 : REGARD_F32, c.batch, c.heads, c.nq, c.nk);
  }

  static bool used(const regard_call& c) { return c.bias.data; }

  static constexpr int64_t scratch_size = kKeys * kQueries;

  template <int V>
  static void begin(Block<V>& b, float* scratch) {
    b.bias = scratch;
  }

  // Transposes the bias of a tile to [key][query].
  template <int V>
  static void load_tile(const Block<V>& b, const Tile& t) {
    const regard_call& c = b.c;
    const int64_t from = offset(c.bias, b.p, b.p.h) + b.p.row * c.bias.row + t.j * c.bias.col;
    const void* bias = advance(c.bias.data, from, dtype(c));
    const auto map = [](vf x) __attribute__((always_inline)) { return bounded(x); };
    pack_by<V>(b.bias, kQueries, bias, dtype(c), c.bias.row, c.bias.col, b.p.rows, t.count, map);
  }

  // Prefetches the bias of the next tile of keys up to `last`: its rows are short, and the hardware prefetcher begins
  // anew at each.
  template <int V>
  REGARD_INLINE void fetch_next(const Block<V>& b, const Tile& t, int64_t last) {
    const regard_call& c = b.c;
    const int64_t next = t.j + t.count, count = last - next < kKeys ? last - next : kKeys;
    if (!c.bias.data || c.bias.col != 1 || c.bias.row == 0 || count <= 0) return;
    const int64_t from = offset(c.bias, b.p, b.p.h) + b.p.row * c.bias.row + next;
    const int64_t size = size_of(dtype(c));
    const Prefetch rows{(const char*)advance(c.bias.data, from, dtype(c)), c.bias.row * size, count * size, b.p.rows};
    rows.fetch_rows(0, b.p.rows);
  }

  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile&, int64_t n, vf (&s)[V], vf (&)[V]) {
    for (int v = 0; v < V; ++v) s[v] = plus_natural(s[v], load(b.bias + n * kQueries + v * W));
  }

  static constexpr bool simple = true;

  template <int V>
  static auto simply(const Block<V>& b, int64_t, int v) {
    const float* bias = b.bias + v * W;
    return [bias](vf s, int64_t n)
               __attribute__((always_inline)) { return plus_bounded(s, load(bias + n * kQueries)); };
  }

  REGARD_INLINE void apply(const RowKeys& x, vf& s, vf&) {
    const regard_tensor& bias = x.f.c.bias;
    const int64_t first = offset(bias, x.f.p, x.row.h) + x.row.i * bias.row + x.key() * bias.col;
    s = plus_natural(s, floats(bias.data, first, bias.col, x.valid(), dtype(x.f.c)));
  }

  static bool wants_grad(const regard_gradients& g) { return g.dbias.data; }

  static GradientSharing sharing(const regard_gradients& g) {
    return g.dbias.data ? GradientSharing::of(g.dbias) : GradientSharing{};
  }

  template <int V>
  static void backward(const Block<V>& b, const Tile& t, const ScoreGradients& g, double*) {
    const regard_tensor& to = g.wanted.dbias;
    if (!to.data) return;
    if (to.row == 0 || to.col == 0) add_shared<V>(to, b, t, g.ds, g.from, g.to);
    else add<V>(to, b, t, g.ds, g.from, g.to);
  }

  // To a bias that all queries or all keys share: few numbers, in double, each the sum of many.
  template <int V>
  static void add_shared(const regard_tensor& x, const Block<V>& b, const Tile& t, const float* ds, int64_t from,
                         int64_t to) {
    double* bias = at<double>(x, b.p, b.p.h) + b.p.row * x.row + t.j * x.col;
    vf by_query[V];
    for (int v = 0; v < V; ++v) by_query[v] = vf{};
    for (int64_t n = from; n < to; ++n) {
      vf sum = vf{};
      for (int v = 0; v < V; ++v) {
        const vf g = load(ds + n * kQueries + v * W);
        sum += g;
        by_query[v] += g;
      }
      for (int m = 0; m < W && x.row == 0; ++m) bias[n * x.col] += sum[m];
    }
    for (int64_t i = 0; i < b.p.rows && x.row != 0; ++i) bias[i * x.row] += by_query[i / W][i % W];
  }

  // To a bias of a number a pair. Where its keys are neighbours, W × W numbers are transposed at a time.
  template <int V>
  static void add(const regard_tensor& x, const Block<V>& b, const Tile& t, const float* ds, int64_t from, int64_t to) {
    float* bias = at<float>(x, b.p, b.p.h) + b.p.row * x.row + t.j * x.col;
    for (int v = 0; v < V; ++v) {
      const int64_t rows = b.p.rows - v * W < W ? b.p.rows - v * W : W;
      int64_t n = from;
      if (x.col == 1)
        for (; n + W <= to; n += W) {
          vf r[W];
          for (int m = 0; m < W; ++m) r[m] = load(ds + (n + m) * kQueries + v * W);
          transpose(r);
          for (int64_t i = 0; i < rows; ++i) {
            float* line = bias + (v * W + i) * x.row + n;
            store(line, load(line) + r[i]);
          }
        }
      for (; n < to; ++n)
        for (int64_t i = 0; i < rows; ++i) bias[(v * W + i) * x.row + n * x.col] += ds[n * kQueries + v * W + i];
    }
  }
};

}  // namespace regard
