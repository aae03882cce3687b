// One block of queries and one tile of keys: scores, weights, weighted values.
#pragma once
#include <type_traits>

#include "steps/steps.h"

namespace regard {

// The state's maxima become `top`, and its sums are multiplied by alpha, which is written, as o must be.
template <int V>
static void raise_state(Block<V>& b, const vf (&top)[V], vf (&alpha)[V]) {
  for (int v = 0; v < V; ++v) {
    alpha[v] = b.state[v].raise(top[v]);
    b.unrounded[v] *= alpha[v];
  }
}

// Rows of A that a microkernel takes at once: few vectors of queries leave registers for more.
constexpr int rows_at_once(int vectors) { return vectors == 1 || (W == 16 && vectors < 4) ? 2 * kMR : kMR; }

// s[n] = k[n] · q for whole groups of M keys, and the largest of them. factor: multiplies the products of pairs; first:
// where k lies in its tile.
template <int V, class Op, int M>
REGARD_NOINLINE void dot_rows(float* s, vf* top, const float* k, int64_t row, const float* q, int64_t width,
                              int64_t count, float factor, const Prefetch& next, int64_t first) {
  for (int64_t n = 0; n + M <= count; n += M, k += M * row, s += M * kQueries) {
    next.fetch_rows(first + n, first + n + M);
    vf acc[M][V];
    clear(acc);
    Isa::multiply_tiles<Op, M, V>(acc, k, row, 1, q, kQueries, width);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      vf most = top[v];
#pragma GCC unroll 32
      for (int i = 0; i < M; ++i) {
        if (Op::pairs) acc[i][v] *= splat(factor);
        most = greater_of(acc[i][v], most);
        store(s + i * kQueries + v * W, acc[i][v]);
      }
      top[v] = most;
    }
  }
}

// The same of outer products; k: panels of kQueries keys.
template <int V, class Op>
static void dot_panels(float* s, vf* top, const float* k, const float* q, int64_t width, int64_t count, float factor) {
  const Panels keys{k, width * kQueries, kQueries};
  Isa::outer_products<Op>(s, kQueries, keys, count, q, kQueries, V * W, width);
  for (int64_t n = 0; n < count; ++n, s += kQueries)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      vf x = load(s + v * W);
      if (Op::pairs) store(s + v * W, x *= splat(factor));
      top[v] = greater_of(x, top[v]);
    }
}

// Keys whose scores are computed at once, if there are so many.
constexpr int64_t keys_at_once(int vectors) { return Isa::kOuterProducts ? kQueries : rows_at_once(vectors); }

// The keys [from, to) of a tile that begins at key j, and their bits, or null: those of key `from` first.
struct SteppedKeys {
  int64_t j, from, to;
  const uint64_t* bits;
};

// The most frequent steps, of one vector of queries: no modifier or a simple one, intervals, bits. at: the scores of
// key `from`, in rows of ld; read: how one is loaded. Returns the largest of `most` and them.
template <int V, class One, bool edge, bool bits, class Read>
REGARD_INLINE vf step_vector(const Block<V>& b, int v, const SteppedKeys& keys, float* at, int64_t ld, vf most,
                             const Read& read) {
  const vi first = b.first[v], last = b.last[v];
  const auto modify = One::simply(b, keys.j, v);
  for (int64_t n = keys.from; n < keys.to; ++n, at += ld) {
    vf s = modify(read(at), n);
    if (edge) s = Interval::apply(s, keys.j + n, first, last);
    if (bits) s = Bits::apply(s, keys.bits[n - keys.from] >> (v * W));
    most = greater_of(s, most);
    store(at, s);
  }
  return most;
}

// f(edge, bits), as types.
template <class F>
static void with_hiding(bool edge, bool bits, const F& f) {
  using Yes = std::true_type;
  using No = std::false_type;
  if (edge && bits) return f(Yes(), Yes());
  if (edge) return f(Yes(), No());
  if (bits) return f(No(), Yes());
  f(No(), No());
}

// The same of all vectors, one after the other, so that nothing is loaded twice.
template <int V, class One, bool edge, bool bits>
REGARD_NOINLINE void step_simply(const Block<V>& b, const SteppedKeys& keys, vf* top) {
  const auto read = [](const float* at) __attribute__((always_inline)) { return load(at); };
  for (int v = 0; v < V; ++v)
    top[v] = step_vector<V, One, edge, bits>(b, v, keys, b.w.s + keys.from * kQueries + v * W, kQueries, top[v], read);
}

// Everything after the similarity for the keys [from, to) of a tile.
template <int V>
REGARD_NOINLINE void step_rows(const Block<V>& b, const Tile& t, int64_t from, int64_t to, vf (&top)[V]) {
  if (Program::used(b.c)) return run_program<V>(b, t, b.w.s, from, to, nullptr, top);
  const SteppedKeys keys{t.j, from, to, t.bits ? t.bits + from : nullptr};
  const bool simple = Modifiers::simply(b.c, [&](auto one) {
    with_hiding(t.edge, t.bits, [&](auto edge, auto bits) {
      step_simply<V, decltype(one), decltype(edge)::value, decltype(bits)::value>(b, keys, top);
    });
  });
  if (simple) return;
  for (int64_t n = from; n < to; ++n) {
    vf s[V];
    for (int v = 0; v < V; ++v) s[v] = load(b.w.s + n * kQueries + v * W);
    apply_steps<V>(b, t, n, s);
    for (int v = 0; v < V; ++v) {
      top[v] = greater_of(s[v], top[v]);
      store(b.w.s + n * kQueries + v * W, s[v]);
    }
  }
}

// Products of the keys [from, to) of a tile, and their maxima.
template <int V, class Op>
static void dot_keys(const Block<V>& b, const Tile& t, const float* k, int64_t row, int64_t from, int64_t to,
                     vf (&top)[V]) {
  const int64_t width = Op::pairs ? b.c.dk / 2 : b.c.dk;
  if constexpr (Isa::kOuterProducts) {
    t.keys.fetch_rows(from, to);
    return dot_panels<V, Op>(b.w.s + from * kQueries, top, k + from * row, b.w.q, width, to - from, b.factor);
  }
  constexpr int M = rows_at_once(V);
  const int64_t whole = from + (to - from) / M * M, some = from + (to - from) / kMR * kMR;
  const auto score = [&](auto dot, int64_t n, int64_t end) {
    if (n < end) dot(b.w.s + n * kQueries, top, k + n * row, row, b.w.q, width, end - n, b.factor, t.keys, n);
  };
  score(dot_rows<V, Op, M>, from, whole);
  if (M != kMR) score(dot_rows<V, Op, kMR>, whole, some);
  score(dot_rows<V, Op, 1>, some, to);
}

template <int V, class Op>
static void score_keys(const Block<V>& b, const Tile& t, const float* k, int64_t row, int64_t from, int64_t to,
                       bool stepped, vf (&top)[V]) {
  vf raw[V];
  for (int v = 0; v < V; ++v) raw[v] = top[v];
  dot_keys<V, Op>(b, t, k, row, from, to, raw);
  if (stepped) return step_rows<V>(b, t, from, to, top);
  for (int v = 0; v < V; ++v) top[v] = raw[v];
}

// Scores of a tile; top: takes the maximum of itself and them. Where only intervals hide, only the keys at the edges
// are masked.
template <int V, class Op>
static void score_tile(const Block<V>& b, const Tile& t, const float* k, int64_t row, vf (&top)[V]) {
  constexpr int64_t M = keys_at_once(V);
  if (Modifiers::used(b.c) || t.bits) return score_keys<V, Op>(b, t, k, row, 0, t.count, true, top);
  int64_t from = 0, to = t.count;
  if (t.edge) {
    from = b.inner_lo > t.j ? (b.inner_lo - t.j + M - 1) / M * M : 0;
    from = from < t.count ? from : t.count;
    to = b.inner_hi < t.j + t.count ? (b.inner_hi > t.j ? (b.inner_hi - t.j) / M * M : 0) : t.count;
    to = to > from ? to : from;
  }
  if (from > 0) score_keys<V, Op>(b, t, k, row, 0, from, true, top);
  if (to > from) score_keys<V, Op>(b, t, k, row, from, to, false, top);
  if (t.count > to) score_keys<V, Op>(b, t, k, row, to, t.count, true, top);
}

// Scores become weights in place, and their sums are added to l; without dropout and marks. One vector of queries after
// the other, so that everything stays in registers.
template <int V, bool pairs>
REGARD_NOINLINE void weigh_plain(float* s, SoftmaxState<vf>* state, int64_t count) {
  for (int v = 0; v < V; ++v) {
    const vf shift = state[v].shift();
    vf sum = vf{}, other = vf{};
    const float* from = s + v * W;
    float* to = s + v * W;
    int64_t n = 0;
    for (; n + 2 <= count; n += 2, from += 2 * kQueries) {
      vf p = exp2v(load(from) - shift), next = exp2v(load(from + kQueries) - shift);
      sum += p;
      other += next;
      store(to, pairs ? Isa::pair_of(p, next) : p);
      if (!pairs) store(to + kQueries, next);
      to += pairs ? kQueries : 2 * kQueries;
    }
    if (n < count) {
      vf p = exp2v(load(from) - shift);
      sum += p;
      store(to, pairs ? Isa::pair_of(p, vf{}) : p);
    }
    state[v].l += sum + other;
  }
}

// The same with dropout and marks. pairs: the weights of two keys in one word; mark: hidden weights become -1.
template <int V, bool pairs>
REGARD_NOINLINE void weigh(Block<V>& b, const Tile& t, bool mark) {
  if (!mark && !b.c.threshold) return weigh_plain<V, pairs>(b.w.s, b.state, t.count);
  vf shift[V], sum[V], other[V];  // the sums of keys 2n and 2n + 1, as in weigh_plain
  for (int v = 0; v < V; ++v) {
    shift[v] = b.state[v].shift();
    sum[v] = other[v] = vf{};
  }
  const int64_t* k_at = b.c.threshold ? b.c.k_at + offset(b.c.k_at_batch, b.p) + t.j : nullptr;
  for (int64_t n = 0; n < t.count; n += pairs ? 2 : 1) {
    const bool both = pairs && n + 1 < t.count;
    vu key = (k_at ? Dropout::key_word(k_at[n]) : 0u) + vu{};
    vu next = (k_at && both ? Dropout::key_word(k_at[n + 1]) : 0u) + vu{};
    for (int v = 0; v < V; ++v) {
      float* at = b.w.s + n * kQueries + v * W;
      vf s = load(at);
      vf p = weight<V>(b, v, s, shift[v], key, !pairs && n % 2 ? other[v] : sum[v]);
      if (pairs) {
        vf second = both ? weight<V>(b, v, load(at + kQueries), shift[v], next, other[v]) : vf{};
        store(b.w.s + n / 2 * kQueries + v * W, Isa::pair_of(p, second));
      } else {
        if (mark) p = s == splat(-kInf) ? splat(-1.0f) : p;
        store(at, p);
      }
    }
  }
  for (int v = 0; v < V; ++v) b.state[v].l += sum[v] + other[v];
}

// o = o · alpha + Σ value · weight for features [f, last), in whole groups of M. A tile's sum starts at 0: long sums
// have two levels.
template <int V, class Op, int M>
REGARD_NOINLINE void value_rows(const Block<V>& b, const Tile& t, const vf* alpha, const float* x, int64_t row,
                                int64_t f, int64_t last) {
  const int64_t count = Op::pairs ? (t.count + 1) / 2 : t.count;
  const float* s = b.w.s;
  float* o = b.w.o + f * kQueries;
  for (; f + M <= last; f += M, o += M * kQueries) {
    t.values.fetch_share(f, f + M, b.c.dv);
    t.results.fetch_share(f, f + M, b.c.dv);
    vf acc[M][V];
    clear(acc);
    Isa::multiply_tiles<Op, M, V>(acc, x + f, 1, row, s, kQueries, count);
#pragma GCC unroll 32
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) merge_values(o + i * kQueries + v * W, alpha[v], acc[i][v]);
  }
}

// The same of outer products, for all features.
template <int V, class Op>
static void value_panels(const Block<V>& b, const Tile& t, const float* x, int64_t row, const vf* alpha) {
  constexpr int64_t kFeatures = 64;
  alignas(64) float sums[kFeatures * kQueries];
  for (int64_t f = 0; f < b.c.dv; f += kFeatures) {
    const int64_t some = b.c.dv - f < kFeatures ? b.c.dv - f : kFeatures;
    t.values.fetch_share(f, f + some, b.c.dv);
    t.results.fetch_share(f, f + some, b.c.dv);
    Isa::outer_products<Op>(sums, kQueries, {x + f, kQueries, row}, some, b.w.s, kQueries, V * W,
                            Op::pairs ? (t.count + 1) / 2 : t.count);
    for (int64_t i = 0; i < some; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) merge_values(b.sums(f + i, v), alpha[v], load(sums + i * kQueries + v * W));
  }
}

template <int V, class Op>
static void value_tile(const Block<V>& b, const Tile& t, const float* x, int64_t row, const vf* alpha) {
  if constexpr (Isa::kOuterProducts) return value_panels<V, Op>(b, t, x, row, alpha);
  constexpr int M = rows_at_once(V);
  const int64_t dv = b.c.dv, whole = dv / M * M, some = dv / kMR * kMR;
  value_rows<V, Op, M>(b, t, alpha, x, row, 0, whole);
  if (whole < some) value_rows<V, Op, kMR>(b, t, alpha, x, row, whole, some);
  if (some < dv) value_rows<V, Op, 1>(b, t, alpha, x, row, some, dv);
}

// The same where a value is not finite and hidden from some query: 0 · NaN is NaN, so weights of -1 are skipped. Bit
// for bit that of floats elsewhere.
template <int V>
REGARD_NOINLINE void value_tile_careful(const Block<V>& b, const Tile& t, const float* x, int64_t row,
                                        const vf* alpha) {
  for (int64_t f = 0; f < b.c.dv; ++f)
    for (int v = 0; v < V; ++v) {
      vf acc = vf{};
      for (int64_t n = 0; n < t.count; ++n) {
        vf p = load(b.w.s + n * kQueries + v * W);
        vf sum = acc + p * splat(x[f + n * row]);
        acc = p == splat(-1.0f) ? acc : sum;
      }
      merge_values(b.sums(f, v), alpha[v], acc);
    }
}

}  // namespace regard
