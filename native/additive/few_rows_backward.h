// Backward of sums over features (AdditiveFewRows, FeaturesFewRows) of few queries. An item is a (batch element, key
// head) and a part of its keys: it writes their dC and dV, and leaves its sums for dA and dw, which are added over the
// parts in order. See additive/backward.h for the sums.
#pragma once
#include "additive/few_features.h"
#include "additive/gradients.h"

namespace regard {

struct FewRowsBackwardCall {
  const regard_gradients& g;  // dq and dk are those of a and c
  const regard_additive& x;
  const regard_call& c;
  int64_t pairs, keys, parts, rows, width, learned, ldv;  // ldv: dv to whole vectors
  float *da, *dw;  // [pair][part][rows][width], before w; [pair][part][rows][learned][width]
  float* total_dw;

  float* da_of(int64_t item) const { return da + item * rows * width; }
  float* dw_of(int64_t item) const { return dw + item * rows * learned * width; }
};

// The rows of one item, and what they accumulate over its keys.
template <class Score>
struct FewRowsGradients {
  const FewRowsBackwardCall& all;
  FewRows f;
  Score score;
  float *dout, *values;  // [rows][ldv]; [W][ldv], those that cannot be read in place
  float* split_dout;     // [rows][ldv], dout as products() wants it for values of bfloat16
  float *weights, *ds;   // [rows][W] weights after dropout, -0 where hidden; gradients of scores
  float *dc, *da, *dw;   // [W][width]; of the item
  bool finite_dout = true;
  vu word[kMaxRows];
  RowStats<float> stats[kMaxRows];
  float delta[kMaxRows];

  static int64_t size(const FewRowsBackwardCall& all) {
    return all.rows * (2 * kChunk + 2 * all.ldv + 2 * W) + W * (all.ldv + all.width) + Score::size(all.x, all.rows);
  }

  FewRowsGradients(const FewRowsBackwardCall& g, const Place& p, int64_t item, float* at)
      : all(g), f(g.c), score(g.x, g.rows, at), da(g.da_of(item)), dw(g.dw_of(item)) {
    f.p = p;
    f.s = at + Score::size(g.x, g.rows);
    f.derivative = f.s + g.rows * kChunk;
    dout = f.derivative + g.rows * kChunk;
    weights = dout + g.rows * g.ldv;
    ds = weights + g.rows * W;
    values = ds + g.rows * W;
    dc = values + W * g.ldv;
    split_dout = dc + W * g.width;
  }

  void begin(int64_t r) {
    const regard_call& c = all.c;
    const Row& row = f.row[r];
    score.begin(f, r);
    delta[r] = row_delta(all.g, f.p, row.h, row.i, dout + r * all.ldv, all.ldv);
    finite_dout &= all_finite(dout + r * all.ldv, 1, all.ldv, all.ldv, 1);
    __builtin_memcpy(split_dout + r * all.ldv, dout + r * all.ldv, (size_t)all.ldv * sizeof(float));
    split_row(split_dout + r * all.ldv, c.dv);
    const float* row_stats = (const float*)row_ptr(c.row_stats, f.p, row.h, row.i, REGARD_F32);
    stats[r] = {row_stats[0], row_stats[c.row_stats.col]};
    if (c.threshold) word[r] = Dropout::row_word(f, row);
  }

  // Computes weights and gradients of scores for row r and keys [n, n + W): -0 and 0 where hidden.
  template <int dtype>
  void score_gradients(const Chunk& t, int64_t n, int64_t r, Run v) {
    const regard_call& c = all.c;
    vf x[1][W];
    keep_scores(f, t, n, r, score.find(r));
    products<1, dtype, Floats, true, StridedRows>(x, (dtype == REGARD_BF16 ? split_dout : dout) + r * all.ldv, c.dv, v,
                                                  t.count - n - 1, nullptr, 0);
    const vf s = load(f.s + r * kChunk + n);
    const vi hidden = s == splat(-kInf);
    const vf weight = stats[r].weight(s);
    vf dropped = weight, dp = sums(x[0]);
    if (c.threshold) {
      dropped = Dropout::apply(c, word[r], f.word[n / W], weight);
      dp = Dropout::apply(c, word[r], f.word[n / W], dp);
    }
    const vf found = weight * (dp - splat(delta[r])) * load(f.derivative + r * kChunk + n);
    store(weights + r * W, select(hidden, splat(-0.0f), dropped));
    store(ds + r * W, select(hidden, vf{}, found));
  }

  // Writes dV of keys [n, n + W), V vectors of features.
  template <int V>
  void write_dv_columns(const Chunk& t, int64_t n, float* row, int64_t d) {
    const regard_tensor& to = all.g.dv;
    for (int64_t m = 0; m < W && n + m < t.count; m += kMR) {
      vf acc[kMR][V];
      clear(acc);
      Isa::multiply_tiles<Floats, kMR, V>(acc, weights + m, 1, W, dout + d, all.ldv, f.rows);
      for (int64_t i = 0; i < kMR && n + m + i < t.count; ++i)
        for (int v = 0; v < V; ++v)
          store_some(row + (m + i) * to.row + (d + v * W) * to.col, to.col, all.c.dv - d - v * W, acc[i][v]);
    }
  }

  // The same where dout is not finite: 0 · NaN is NaN, so hidden pairs are skipped.
  void write_dv_visible(const Chunk& t, int64_t n, float* row) {
    const regard_tensor& to = all.g.dv;
    for (int64_t m = 0; m < W && n + m < t.count; ++m)
      for (int64_t d = 0; d < all.ldv; d += W) {
        vf sum = vf{};
        for (int64_t r = 0; r < f.rows; ++r) {
          const vf weight = splat_any(weights + r * W + m);
          if (((vi)weight)[0] != INT32_MIN) sum += weight * load(dout + r * all.ldv + d);
        }
        store_some(row + m * to.row + d * to.col, to.col, all.c.dv - d, sum);
      }
  }

  void add_dv(const Chunk& t, int64_t n) {
    float* row = (float*)row_ptr(all.g.dv, f.p, f.key_head, t.j + n, REGARD_F32);
    if (t.some && !finite_dout) return write_dv_visible(t, n, row);
    int64_t d = 0;
    for (; d + 2 * W <= all.ldv; d += 2 * W) write_dv_columns<2>(t, n, row, d);
    for (; d < all.ldv; d += W) write_dv_columns<1>(t, n, row, d);
  }

  void similarity_gradients(const Chunk& t, int64_t n) {
    const regard_tensor& to = all.g.dk;
    float* rows = (float*)row_ptr(to, f.p, f.key_head, t.j + n, REGARD_F32);
    const bool there = n + W <= t.count && to.col == 1 && all.width == all.c.dk;
    float* sum = there ? rows : dc;
    const int64_t row = there ? to.row : all.width;
    for (int64_t m = 0; m < W; ++m) zero(sum + m * row, all.width);
    for (int64_t r = 0; r < f.rows; ++r)
      score.add_gradients(r, {ds + r * W, da + r * all.width, dw + r * all.learned * all.width, sum, row});
    if (there) return;
    for (int64_t m = 0; m < W && n + m < t.count; ++m)
      for (int64_t d = 0; d < all.c.dk; d += W)
        store_some(rows + m * to.row + d * to.col, to.col, all.c.dk - d, load(dc + m * all.width + d));
  }

  template <int dtype>
  void gradients(const Chunk& t) {
    const regard_call& c = all.c;
    const float* rows = (const float*)row_ptr(c.k, f.p, f.key_head, t.j, REGARD_F32);
    const char* first = row_ptr(c.v, f.p, f.key_head, t.j, dtype);
    open_chunk(f, t);
    for (int64_t n = 0; n < t.count; n += W) {
      const Run v{first + n * c.v.row * size_of(dtype), c.v.row * size_of(dtype)};
      score.read(rows + n * c.k.row, t.count - n);
      for (int64_t m = 0; c.v.col != 1 && m < W && n + m < t.count; ++m)
        gather(values + m * all.ldv, all.ldv, v[m], c.v, dtype, c.dv, 1);
      for (int64_t r = 0; r < f.rows; ++r)
        if (c.v.col == 1) score_gradients<dtype>(t, n, r, v);
        else score_gradients<REGARD_F32>(t, n, r, {(const char*)values, all.ldv * (int64_t)sizeof(float)});
      add_dv(t, n);
      similarity_gradients(t, n);
    }
  }
};

template <class Score>
struct FewRowsBackward {
  const FewRowsBackwardCall& all;

  int64_t items() const { return all.pairs * all.parts; }
  int64_t scratch() const { return FewRowsGradients<Score>::size(all); }

  // The gradients of keys that no row sees are 0.
  void clear_keys(const Place& p, int64_t head, int64_t from, int64_t to) const {
    const regard_tensor &dc = all.g.dk, &dv = all.g.dv;
    for (int64_t key = from; key < to; ++key) {
      for (int64_t d = 0; d < all.c.dk; ++d) ((float*)row_ptr(dc, p, head, key, REGARD_F32))[d * dc.col] = 0;
      for (int64_t d = 0; d < all.c.dv; ++d) ((float*)row_ptr(dv, p, head, key, REGARD_F32))[d * dv.col] = 0;
    }
  }

  void run(int64_t item, float* memory) const {
    const regard_call& c = all.c;
    const int64_t pair = item / all.parts, head = pair % c.key_heads, from = item % all.parts * all.keys;
    const int64_t to = from + all.keys < c.nk ? from + all.keys : c.nk;
    FewRowsGradients<Score> gradients(all, place_in_batch(c, pair / c.key_heads), item, memory);
    zero(gradients.da, all.rows * all.width);
    zero(gradients.dw, all.rows * all.learned * all.width);
    const Limits limits = begin_rows(gradients.f, head);
    for (int64_t r = 0; r < all.rows; ++r) gradients.begin(r);
    const int64_t lo = limits.lo < from ? from : limits.lo < to ? limits.lo : to;
    const int64_t hi = limits.hi < lo ? lo : limits.hi < to ? limits.hi : to;
    clear_keys(gradients.f.p, head, from, lo);
    clear_keys(gradients.f.p, head, hi, to);
    const auto add = [&](const Chunk& t) {
      if (c.dtype == REGARD_F32) gradients.template gradients<REGARD_F32>(t);
      else if (c.dtype == REGARD_BF16) gradients.template gradients<REGARD_BF16>(t);
      else gradients.template gradients<REGARD_F16>(t);
    };
    each_chunk(gradients.f, limits, from, to, add,
               [&](int64_t first, int64_t last) { clear_keys(gradients.f.p, head, first, last); });
  }

  // Adds the parts' sums for da and dw in order. total: [learned][width] doubles.
  void join(double* total) const {
    const regard_call& c = all.c;
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t n = 0; n < all.learned * all.width; ++n) total[n] = 0;
      for (int64_t b = 0; b < all.pairs / c.key_heads; ++b)
        for (int64_t i = 0; i < c.nq; ++i) join_row(place_in_batch(c, b), h, i, total);
      for (int64_t n = 0; n < all.learned; ++n)
        for (int64_t d = 0; d < c.dk; ++d) all.total_dw[(n * c.heads + h) * c.dk + d] = (float)total[n * all.width + d];
    }
  }

  void join_row(const Place& p, int64_t h, int64_t i, double* total) const {
    const regard_call& c = all.c;
    const int64_t group = c.heads / c.key_heads, first = (p.b * c.key_heads + h / group) * all.parts;
    const int64_t row = h % group * c.nq + i, count = all.learned * all.width;
    float* da = (float*)row_ptr(all.g.dq, p, h, i, REGARD_F32);
    for (int64_t d = 0; d < c.dk; ++d) {
      float sum = 0;
      for (int64_t part = 0; part < all.parts; ++part) sum += all.da_of(first + part)[row * all.width + d];
      da[d * all.g.dq.col] = weight_of(all.x, h, d) * sum;
    }
    for (int64_t part = 0; part < all.parts; ++part)
      for (int64_t n = 0; n < count; ++n) total[n] += all.dw_of(first + part)[row * count + n];
  }
};

template <class Score>
static int32_t backward_few_rows(const regard_additive& x, const regard_gradients& g, float* total_dw,
                                 regard_parallel parallel) {
  const regard_call& c = x.call;
  const int64_t pairs = elements(c) * c.key_heads, keys = part_keys(pairs * c.nk), parts = (c.nk + keys - 1) / keys;
  const int64_t width = Score::width_of(c), learned = Score::learned(x), rows = few_rows(c);
  const int64_t totals = learned * width, size = pairs * parts * rows * width;
  const Workspace memory((size_t)(2 * totals + (1 + learned) * size + 1) * sizeof(float));
  if (!memory.at) return 1;
  float *const da = (float*)memory.at + 2 * totals, *const dw = da + size;
  const FewRowsBackwardCall all{g, x, c, pairs, keys, parts, rows, width, learned, round_up(c.dv), da, dw, total_dw};
  const FewRowsBackward<Score> backward{all};
  const int32_t failed = share(backward, backward.items(), c.threads, parallel);
  if (!failed) backward.join((double*)memory.at);
  return failed;
}

}  // namespace regard
