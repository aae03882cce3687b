// Backward of the additive similarity of few queries. An item is a (batch element, key head) and a part of its keys, whose dC and dV
// are its own; what it gives dA and dw is added to that of the other parts in order. See additive_backward.h for the sums.
#pragma once
#include "additive/few_rows.h"
#include "additive/gradients.h"

namespace regard {

struct FewGradients {
  const regard_additive_gradients& g;
  const regard_additive& x;
  const regard_call& c;
  int64_t pairs, keys, parts, rows, width, wide;  // wide: dv to whole vectors
  float *da, *dw;                                 // [pair][part][rows][width], before w

  float* share_of(float* all, int64_t item) const { return all + item * rows * width; }
};

// Keys [0, W) of a row: what the gradients of their scores give.
struct FewSlopes {
  const float* ds;
  float *da, *dw;  // [width], added to
  float* dc;       // [W][row], added to
  int64_t row;
};

// From C: with r = 1 / (1 + A C), f' = one · r (1 - r) and f = value · (r + constant).
REGARD_ALONE void gradients_by_exponentials(const Prepared& q, const float* c, int64_t width, float one, float value, float constant, const FewSlopes& to) {
  for (int64_t d = 0; d < width; d += W) {
    const vf a = load(q.exponentials + d), w = load(q.plain + d) * splat(one);
    vf da = vf{}, dw = vf{};
#pragma GCC unroll 4
    for (int m = 0; m < W; ++m) {
      const vf r = splat(1.0f) / (splat(1.0f) + a * load(c + m * width + d)), ds = splat_any(to.ds + m), p = ds * (r - r * r);
      da += p;
      dw += ds * (r + splat(constant));
      float* dc = to.dc + m * to.row + d;
      store(dc, load(dc) + p * w);
    }
    store(to.da + d, load(to.da + d) + da * splat(one));
    store(to.dw + d, load(to.dw + d) + dw * splat(value));
  }
}

// From f and f' themselves; a row of keys that is not finite gives nothing.
template <class F>
REGARD_ALONE void pull_plain(const Prepared& q, const FewKeys& keys, const FewSlopes& to) {
  for (int m = 0; m < W; ++m) {
    const float* c = keys.plain + m * keys.row;
    if (!(reach(c, keys.width) < kInf)) continue;
    const vf ds = splat_any(to.ds + m);
    for (int64_t d = 0; d < keys.width; d += W) {
      const vf z = load(q.a + d) + load(c + d), y = F::value(z, keys.x.slope), p = ds * F::slope(z, y, keys.x.slope);
      store(to.da + d, load(to.da + d) + p);
      store(to.dw + d, load(to.dw + d) + ds * y);
      float* dc = to.dc + m * to.row + d;
      store(dc, load(dc) + p * load(q.plain + d));
    }
  }
}

// One item's rows while they meet its keys.
struct FewPull {
  const FewGradients& all;
  FewRows f;
  AdditiveFew score;
  float *dout, *values;      // [rows][wide]; [W][wide], those that cannot be read in place
  float *kept, *ds;          // [rows][W]
  float *dc, *da, *dw;       // [W][width]; of the item
  bool finite_dout = true;
  vu word[kFew];
  float shift[kFew], inverse[kFew], delta[kFew];

  static int64_t size(const FewGradients& all) {
    return all.rows * (2 * kChunk + all.wide + 2 * W) + W * (all.wide + all.width) + AdditiveFew::size(all.x, all.rows);
  }

  FewPull(const FewGradients& g, const Place& p, int64_t item, float* at)
      : all(g), f(g.c), score(g.x, g.rows, at), da(g.share_of(g.da, item)), dw(g.share_of(g.dw, item)) {
    f.p = p;
    f.s = at + AdditiveFew::size(g.x, g.rows), f.derivative = f.s + g.rows * kChunk;
    dout = f.derivative + g.rows * kChunk, kept = dout + g.rows * g.wide, ds = kept + g.rows * W;
    values = ds + g.rows * W, dc = values + W * g.wide;
  }

  void begin(int64_t r) {
    const regard_call& c = all.c;
    const Row& row = f.row[r];
    score.begin(f, r);
    delta[r] = row_delta(all.g, f.p, row.h, row.i, dout + r * all.wide, all.wide);
    finite_dout &= all_finite(dout + r * all.wide, 1, all.wide, all.wide, 1);
    const float* row_stats = (const float*)row_of(c.row_stats, f.p, row.h, row.i, REGARD_F32);
    shift[r] = row_stats[0], inverse[r] = row_stats[c.row_stats.col];
    if (c.threshold) word[r] = Dropout::row_word(f, row);
  }

  // Scores of row r and keys [n, n + W) become weights and gradients of scores; hidden ones are -0 and 0.
  template <int dtype>
  void score_gradients(const Chunk& t, int64_t n, int64_t r, const char* const (&v)[W]) {
    const regard_call& c = all.c;
    vf x[1][W];
    keep_scores(f, t, n, r, score.find(r));
    products<1, dtype>(x, dout + r * all.wide, c.dv, v, 0);
    const vf s = load(f.s + r * kChunk + n);
    const vi hidden = s == splat(-kInf);
    vf p = exp2v(s - splat(shift[r])) * splat(inverse[r]), dp = sums(x[0]), left = p;
    if (c.threshold) {
      left = Dropout::apply(c, word[r], f.word[n / W], p);
      dp = Dropout::apply(c, word[r], f.word[n / W], dp);
    }
    const vf found = p * (dp - splat(delta[r])) * load(f.derivative + r * kChunk + n);
    store(kept + r * W, select(hidden, splat(-0.0f), left));
    store(ds + r * W, select(hidden, vf{}, found));
  }

  // Weights to dV of keys [n, n + W), V vectors of features.
  template <int V>
  void pull_columns(const Chunk& t, int64_t n, float* row, int64_t d) {
    const regard_tensor& to = all.g.dv;
    for (int64_t m = 0; m < W && n + m < t.count; m += kRows) {
      vf acc[kRows][V];
      clear(acc);
      Isa::multiply_tiles<Floats, kRows, V>(acc, kept + m, 1, W, dout + d, all.wide, f.rows);
      for (int64_t i = 0; i < kRows && n + m + i < t.count; ++i)
        for (int v = 0; v < V; ++v) put_some(row + (m + i) * to.row + (d + v * W) * to.col, to.col, all.c.dv - d - v * W, acc[i][v]);
    }
  }

  // 0 · NaN is NaN: what is hidden meets no cotangent that is not finite.
  void pull_carefully(const Chunk& t, int64_t n, float* row) {
    const regard_tensor& to = all.g.dv;
    for (int64_t m = 0; m < W && n + m < t.count; ++m)
      for (int64_t d = 0; d < all.wide; d += W) {
        vf sum = vf{};
        for (int64_t r = 0; r < f.rows; ++r) {
          const vf p = splat_any(kept + r * W + m);
          if (((vi)p)[0] != INT32_MIN) sum += p * load(dout + r * all.wide + d);
        }
        put_some(row + m * to.row + d * to.col, to.col, all.c.dv - d, sum);
      }
  }

  void pull_values(const Chunk& t, int64_t n) {
    float* row = (float*)row_of(all.g.dv, f.p, f.key_head, t.j + n, REGARD_F32);
    if (t.some && !finite_dout) return pull_carefully(t, n, row);
    int64_t d = 0;
    for (; d + 2 * W <= all.wide; d += 2 * W) pull_columns<2>(t, n, row, d);
    for (; d < all.wide; d += W) pull_columns<1>(t, n, row, d);
  }

  void similarity_gradients(const Chunk& t, int64_t n) {
    const regard_tensor& to = all.g.dc;
    const int activation = all.x.activation;
    const Separable form = separable(activation);
    float* rows = (float*)row_of(to, f.p, f.key_head, t.j + n, REGARD_F32);
    const bool there = n + W <= t.count && to.col == 1 && all.width == all.c.dk;
    float* sum = there ? rows : dc;
    const int64_t row = there ? to.row : all.width;
    for (int64_t m = 0; m < W; ++m) zero(sum + m * row, all.width);
    for (int64_t r = 0; r < f.rows; ++r) {
      const Prepared& q = score.row[r];
      if (!(q.reach < kInf)) continue;
      const FewSlopes slopes{ds + r * W, da + r * all.width, dw + r * all.width, sum, row};
      if (score.way(r) != kDirectWay)
        gradients_by_exponentials(q, score.keys.exponentials, all.width, activation == REGARD_TANH ? 4 : 1, form.factor,
                    (form.middle - form.factor / 2) / form.factor, slopes);
      else if (activation == REGARD_TANH) pull_plain<TanhOf>(q, score.keys, slopes);
      else if (activation == REGARD_SIGMOID) pull_plain<SigmoidOf>(q, score.keys, slopes);
      else pull_plain<LeakyReluOf>(q, score.keys, slopes);
    }
    if (there) return;
    for (int64_t m = 0; m < W && n + m < t.count; ++m)
      for (int64_t d = 0; d < all.c.dk; d += W) put_some(rows + m * to.row + d * to.col, to.col, all.c.dk - d, load(dc + m * all.width + d));
  }

  template <int dtype>
  void pull(const Chunk& t) {
    const regard_call& c = all.c;
    const float* rows = (const float*)row_of(c.k, f.p, f.key_head, t.j, REGARD_F32);
    const char* first = row_of(c.v, f.p, f.key_head, t.j, dtype);
    open_chunk(f, t);
    for (int64_t n = 0; n < t.count; n += W) {
      const char* v[W];
      for (int64_t m = 0; m < W; ++m) v[m] = first + (n + m < t.count ? n + m : t.count - 1) * c.v.row * size_of(dtype);
      score.keys.bring(rows + n * c.k.row, t.count - n);
      for (int64_t m = 0; c.v.col != 1 && m < W; ++m) {
        gather(values + m * all.wide, all.wide, v[m], c.v, dtype, 1, c.dv, 1);
        v[m] = (const char*)(values + m * all.wide);
      }
      for (int64_t r = 0; r < f.rows; ++r)
        if (c.v.col == 1) score_gradients<dtype>(t, n, r, v);
        else score_gradients<REGARD_F32>(t, n, r, v);
      pull_values(t, n);
      similarity_gradients(t, n);
    }
  }
};

struct AdditiveFewBackward {
  const FewGradients& all;

  int64_t items() const { return all.pairs * all.parts; }
  int64_t scratch() const { return FewPull::size(all); }

  // Keys that no row sees get 0.
  void clear_keys(const Place& p, int64_t head, int64_t from, int64_t to) const {
    const regard_tensor &dc = all.g.dc, &dv = all.g.dv;
    for (int64_t key = from; key < to; ++key) {
      for (int64_t d = 0; d < all.c.dk; ++d) ((float*)row_of(dc, p, head, key, REGARD_F32))[d * dc.col] = 0;
      for (int64_t d = 0; d < all.c.dv; ++d) ((float*)row_of(dv, p, head, key, REGARD_F32))[d * dv.col] = 0;
    }
  }

  void run(int64_t item, float* memory) const {
    const regard_call& c = all.c;
    const int64_t pair = item / all.parts, head = pair % c.key_heads, from = item % all.parts * all.keys;
    const int64_t to = from + all.keys < c.nk ? from + all.keys : c.nk;
    FewPull pull(all, place_in_batch(c, pair / c.key_heads), item, memory);
    zero(pull.da, all.rows * all.width), zero(pull.dw, all.rows * all.width);
    const Limits limits = begin_rows(pull.f, head);
    for (int64_t r = 0; r < all.rows; ++r) pull.begin(r);
    const int64_t lo = limits.lo < from ? from : limits.lo < to ? limits.lo : to, hi = limits.hi < lo ? lo : limits.hi < to ? limits.hi : to;
    clear_keys(pull.f.p, head, from, lo), clear_keys(pull.f.p, head, hi, to);
    each_chunk(pull.f, limits, from, to, [&](const Chunk& t) {
      if (c.dtype == REGARD_F32) pull.pull<REGARD_F32>(t);
      else if (c.dtype == REGARD_BF16) pull.pull<REGARD_BF16>(t);
      else pull.pull<REGARD_F16>(t);
    });
  }

  // The parts' shares of da and dw, in order. total: [width] doubles.
  void join(double* total) const {
    const regard_call& c = all.c;
    const int64_t group = c.heads / c.key_heads;
    for (int64_t h = 0; h < c.heads; ++h) {
      const float* w = all.x.w + h * all.x.w_stride;
      for (int64_t d = 0; d < c.dk; ++d) total[d] = 0;
      for (int64_t b = 0; b < all.pairs / c.key_heads; ++b) {
        const Place p = place_in_batch(c, b);
        for (int64_t i = 0; i < c.nq; ++i) {
          float* da = (float*)row_of(all.g.da, p, h, i, REGARD_F32);
          const int64_t first = (b * c.key_heads + h / group) * all.parts, row = (h % group * c.nq + i) * all.width;
          for (int64_t d = 0; d < c.dk; ++d) {
            float sum = 0;
            for (int64_t part = 0; part < all.parts; ++part) {
              sum += all.share_of(all.da, first + part)[row + d], total[d] += all.share_of(all.dw, first + part)[row + d];
            }
            da[d * all.g.da.col] = w[d] * sum;
          }
        }
      }
      for (int64_t d = 0; d < c.dk; ++d) all.g.dw[h * c.dk + d] = (float)total[d];
    }
  }
};

static int32_t backward_few_rows(const regard_additive_gradients& given, regard_parallel parallel) {
  const regard_additive& x = given.forward;
  const regard_call& c = x.call;
  const int64_t pairs = elements(c) * c.key_heads, keys = part_keys(c, pairs), parts = (c.nk + keys - 1) / keys;
  FewGradients all{given, x, c, pairs, keys, parts, few_rows(c), round_pairs(c.dk), round_up(c.dv), nullptr, nullptr};
  const int64_t size = pairs * parts * all.rows * all.width;
  const Workspace memory((size_t)(all.width * 2 + 2 * size + 1) * sizeof(float));
  if (!memory.at) return 1;
  all.da = (float*)memory.at + 2 * all.width, all.dw = all.da + size;
  const AdditiveFewBackward backward{all};
  const int32_t failed = share(backward, backward.items(), c.threads, parallel);
  if (!failed) backward.join((double*)memory.at);
  return failed;
}

}  // namespace regard
