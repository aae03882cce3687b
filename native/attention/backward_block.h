// Backward: for each tile of keys, stream over blocks of queries and compute their weights again from each row's m and
// l.
//
//   P = exp(S - m) / l    dS = P ∘ (keep ∘ dO·Vᵀ - Delta)
//   dV = (P ∘ keep)ᵀ·dO    dQ = scale · dS·K    dK = scale · dSᵀ·Q
//
// In S and dO·Vᵀ lanes are queries, as in the forward, and S has the forward's bits: else the weights of a row would
// not sum to 1. Their results, tiles [key][query], are the operand A of the other three products, whose lanes are
// features: only Q and dO are transposed, once for each tile, or once for all where scratch holds them.
#pragma once
#include "attention/ahead.h"
#include "attention/training.h"

namespace regard {

constexpr int backward_rows_at_once(int vectors) { return vectors == 1 ? 8 : vectors == 2 ? 6 : kMR; }

// What one block of queries computes of one tile of keys.
struct BlockShare {
  int64_t from, to;  // keys of the tile
  float *p, *ds;     // [kTile][kQueries] weights, gradients of scores
  const float *shift, *inverse, *delta;
  bool mark;                     // hidden weights become -1
  bool plain;                    // no modifier or mask changes the scores
  const Ahead* ahead = nullptr;  // what is prefetched meanwhile
};

template <int M>
struct Keys {
  static constexpr int count = M;
};

// Calls body(Keys<M>, n) for M keys from n on at a time, then for the rest one by one.
template <int M, class Body>
REGARD_INLINE void by_rows(const BlockShare& x, const Body& body) {
  int64_t n = x.from;
  for (; n + M <= x.to; n += M) body(Keys<M>{}, n);
  for (; n < x.to; ++n) body(Keys<1>{}, n);
}

// A tile's keys as the product of scores reads them.
struct KeyRows {
  const float* first;
  int64_t row;
};

static KeyRows key_rows(const regard_call& c, const float* k, int64_t ldk, const Place& p, int64_t j) {
  if (!reads_pairs(c)) return {k, ldk};
  const int64_t at = offset(c.k, p, p.h / (c.heads / c.key_heads)) + j * c.k.row;
  return {(const float*)advance(c.k.data, at, c.dtype), c.k.row / 2};
}

template <int V, class Op, int M>
REGARD_INLINE void score_some(const Block<V>& b, const Tile& t, float* kept, const KeyRows& k, const BlockShare& x,
                              int64_t n) {
  vf acc[M][V];
  clear(acc);
  Isa::multiply_tiles<Op, M, V>(acc, k.first + n * k.row, k.row, 1, b.w.q, kQueries, Op::pairs ? b.c.dk / 2 : b.c.dk);
  if (Op::pairs)
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[i][v] *= splat(b.factor);
  if (x.plain) {
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(b.w.s + (n + i) * kQueries + v * W, acc[i][v]);
    return;
  }
  for (int i = 0; i < M; ++i) {
    apply_steps<V>(b, t, n + i, acc[i], kept ? kept + (n + i) * kQueries : nullptr);
    for (int v = 0; v < V; ++v) store(b.w.s + (n + i) * kQueries + v * W, acc[i][v]);
  }
}

// Scores of the tile's keys, in base 2, to b.w.s. kept: takes what the modifiers' backward reads, or null.
template <int V, class Op>
REGARD_NOINLINE void score_keys(const Block<V>& b, const Tile& t, float* kept, const KeyRows& k,
                                const BlockShare& given) {
  BlockShare x = given;
  x.plain |= Program::used(b.c);
  by_rows<backward_rows_at_once(V)>(x,
                                    [&](auto keys, int64_t n) { score_some<V, Op, keys.count>(b, t, kept, k, x, n); });
  if (Program::used(b.c)) run_program<V>(b, t, b.w.s, x.from, x.to, kept);
}

template <int V>
static void score_keys(const Block<V>& b, const Tile& t, const BackwardScratch& w, int64_t ldk, const BlockShare& x,
                       float* kept) {
  const KeyRows k = key_rows(b.c, w.k, ldk, b.p, t.j);
  if (reads_pairs(b.c)) return score_keys<V, Pairs>(b, t, kept, k, x);
  score_keys<V, Floats>(b, t, kept, k, x);
}

// Scores of M keys become weights; writes the gradients of the scores as the softmax takes them.
template <int V, int M>
REGARD_INLINE void weigh_some(const Block<V>& b, const Tile& t, const BackwardScratch& w, int64_t ld,
                              const BlockShare& x, int64_t n) {
  vf acc[M][V];
  clear(acc);
  Isa::multiply_tiles<Floats, M, V>(acc, w.v + n * ld, ld, 1, w.doutt, kQueries, b.c.dv);
  const int64_t* k_at = b.c.threshold ? b.c.k_at + offset(b.c.k_at_batch, b.p) + t.j + n : nullptr;
  const vf none = vf{};
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    vu word = (k_at ? Dropout::key_word(k_at[i]) : 0u) + vu{};
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* at = x.p + (n + i) * kQueries + v * W;
      vf s = load(at), dp = acc[i][v];
      const vf p = RowStats<vf>{load(x.shift + v * W), load(x.inverse + v * W)}.weight(s);
      vf dropped = p;
      if (k_at) {
        dropped = Dropout::apply(b.c, b.word[v], word, p);
        dp = Dropout::apply(b.c, b.word[v], word, dp);
      }
      vi hidden = s == splat(-kInf);
      store(at, hidden ? splat(x.mark ? -1.0f : 0.0f) : dropped);
      store(x.ds + (n + i) * kQueries + v * W, hidden ? none : p * (dp - load(x.delta + v * W)));
    }
  }
}

template <int V>
REGARD_NOINLINE void weigh_keys(const Block<V>& b, const Tile& t, const BackwardScratch& w, int64_t ld,
                                const BlockShare& x) {
  int64_t step = 0;
  by_rows<backward_rows_at_once(V)>(x, [&](auto keys, int64_t n) {
    if (x.ahead) x.ahead->fetch_step(step++);
    weigh_some<V, keys.count>(b, t, w, ld, x, n);
  });
}

// Fills a block of queries.
template <int V>
static void open_block(Block<V>& b) {
  Interval::begin(b);
  begin_steps(b);
  b.factor = dot_factor(b.c, b.p.h);
}

// Packs the q of a block.
template <int V>
static void pack_queries(const Block<V>& b, const BackwardScratch& w) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  const char* q = (const char*)c.q.data + size_of(c.dtype) * (offset(c.q, p, p.h) + p.row * c.q.row);
  if (reads_pairs(c)) return pack_pairs<V>(w.qt, kQueries, (const uint16_t*)q, c.q.row, p.rows, c.dk / 2);
  pack<V>(w.qt, kQueries, q, c.dtype, c.q.row, c.q.col, p.rows, c.dk, b.factor);
}

// Finds which keys of a tile a block of queries sees; returns false if it sees none.
static bool visit(const BackwardCall& w, const Place& p, int64_t j, int64_t count, uint64_t* bits, Tile& t,
                  BlockShare& x) {
  const regard_call& c = w.c;
  const Limits& limits = w.limits[(p.b * c.heads + p.h) * w.blocks + p.row / kQueries];
  t = Tile{j, count, p.rows % W != 0, nullptr, nullptr, 0, {}, {}};
  x.from = limits.lo > j ? limits.lo - j : 0;
  x.to = limits.hi < j + count ? limits.hi - j : count;
  if (x.from >= x.to) return false;
  // whole groups of rows of the products that follow
  x.from = x.from / kGradMR * kGradMR;
  x.to = (x.to + kGradMR - 1) / kGradMR * kGradMR;
  x.to = x.to < count ? x.to : count;
  t.edge |= j + x.from < limits.inner_lo || j + x.to > limits.inner_hi;
  if (c.tiles.data) {
    int32_t which = at<int32_t>(c.tiles, p, p.h)[p.row / kQueries * c.tiles.row + j / kKeys * c.tiles.col];
    if (which == -1) return false;
    if (which >= 0) t.bits = Bits::words(c, which) + j % kKeys;
  }
  if (!TileMasks::find(c, p, j, count, t.masks)) return false;
  if (c.allowed.data) t.allowed = at<uint8_t>(c.allowed, p, p.h) + p.row * c.allowed.row + j * c.allowed.col;
  load_bits(c, p, t, bits);
  if (t.bits) cut_to_seen(t.bits, kGradMR, x.from, x.to);
  if (x.from >= x.to) return false;
  x.plain = !Modifiers::used(c) && !t.edge && !t.bits;
  return true;
}

// One block of queries against one tile of keys: weights, gradients of scores, and what these add to dQ and the
// modifiers' gradients. held: scratch holds its queries and cotangents with lanes of queries too.
template <int V>
static void run_block(const BackwardCall& w, const BackwardScratch& s, Place p, const Tile& t, const BlockShare& x,
                      bool held, float* dq, int64_t part) {
  const regard_call& c = w.c;
  const Scratch scratch{s.qt, x.p, nullptr, s.modifiers, nullptr, nullptr};
  Block<V> b{c, scratch, p};
  open_block<V>(b);
  Modifiers::load_tile(b, t);
  if (!held) {
    pack_queries<V>(b, s);
    pack<V>(s.doutt, kQueries, s.dout, REGARD_F32, w.ldv, 1, p.rows, c.dv, 1.0f);
  }
  score_keys<V>(b, t, s, w.ldk, x, s.kept);
  weigh_keys<V>(b, t, s, w.ldv, x);
  if (!w.scores) return;
  Modifiers::backward(b, t, ScoreGradients{w.g, x.ds, s.kept, x.from, x.to}, w.sums,
                      (part * w.elements + p.b) * c.heads + p.h);
  if (!dq) return;
  const int64_t first = x.from * kQueries;
  Term term{x.ds + first,  1, kQueries, s.k + x.from * w.ldk,          w.ldk,
            x.to - x.from, 0, p.rows,   x.mark ? x.p + first : nullptr};
  add_product(dq, w.ldk, &term, 1, p.rows, round_up(c.dk));
}

}  // namespace regard
