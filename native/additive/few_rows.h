// The additive similarity of few queries. Lanes are features. The exponentials of W keys are computed once for all
// rows, and not kept.
#pragma once
#include "additive/prepared.h"
#include "attention/decode.h"

namespace regard {

// The gradients of one row's scores of W keys, and where what follows from them is added.
struct ScoreShare {
  const float* ds;
  float *da, *dw;  // [width]; [learned][width]
  float* dc;       // [W][row]
  int64_t row;
};

// Whether a call's backward is computed here, unless modifiers learn: the backward of blocks, whose lanes are queries,
// is faster where lanes are well filled.
static bool few_additive_backward(const regard_call& c) {
  return !c.invariant && !masks_tiles(c) && few_rows(c) <= kMaxRows && 2 * c.nq <= 3 * W;
}

// Whether its forward is. A forward that writes row statistics is computed where its backward is, which computes the
// same scores again: the two kernels round scores differently, and weights of large scores would not sum to 1.
static bool few_additive(const regard_call& c) {
  return c.row_stats.data ? few_additive_backward(c) : !c.invariant && !masks_tiles(c) && few_rows(c) <= kMaxRows;
}

REGARD_INLINE int64_t round_pairs(int64_t n) { return (n + 2 * W - 1) / (2 * W) * (2 * W); }

// W keys of one head: in place, or copied, with features past dk 0.
struct FeatureRows {
  static constexpr int64_t kFurthest = INT32_MAX;  // numbers between rows in place: what Slots count to

  const regard_call& c;
  int64_t width;
  float* copied;                 // [W][width]
  const float* plain = nullptr;  // [W][row]
  int64_t row = 0;

  // Reads the keys at `rows`; `there` of W exist.
  void read_rows(const float* rows, int64_t there) {
    plain = rows;
    row = c.k.row;
    if (there >= W && c.k.col == 1 && width == c.dk && row <= kFurthest) return;
    for (int64_t m = 0; m < W; ++m)
      gather(copied + m * width, width, (const char*)(rows + (m < there ? m : there - 1) * c.k.row), c.k, REGARD_F32,
             c.dk, 1);
    plain = copied;
    row = width;
  }
};

// The same, and their exponentials.
struct KeyVector : FeatureRows {
  const regard_additive& x;
  float* exponentials;  // [W][width], of features past dk 1
  float max_abs = 0;

  void read(const float* rows, int64_t there) {
    read_rows(rows, there);
    max_abs = 0;
    for (int64_t m = 0; m < W; ++m) {
      const float one = regard::max_abs(plain + m * row, width);
      max_abs = one > max_abs ? one : max_abs;
    }
    if (!has_exponentials(x, max_abs)) return;
    const vf rate = splat(separable(x.activation).rate);
    for (int64_t m = 0; m < W; ++m)
      for (int64_t d = 0; d < width; d += W)
        store(exponentials + m * width + d, expv(load(plain + m * row + d) * rate));
  }
};

// A query's sum for each of the W keys, spread over lanes. Two keys at once: their divisions overlap.
REGARD_NOINLINE void unclamped_keys(vf (&sum)[W], const PreparedQueries& q, const KeyVector& keys) {
  constexpr int K = 2;
  for (int m = 0; m < W; m += K) {
    const float* c = keys.exponentials + m * keys.width;
    vf acc[K] = {};
    for (int64_t d = 0; d < keys.width; d += 2 * W) {
      const vf g = load(q.inverse + d), h = load(q.inverse + d + W), middle = load(q.middle + d / 2);
      const vf a = load(q.near + d), b = load(q.near + d + W);
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) {
        const vf s = g + a * load(c + i * keys.width + d), t = h + b * load(c + i * keys.width + d + W);
        acc[i] += (s + t) / (s * t) - middle;
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) sum[m + i] = acc[i];
  }
}

REGARD_NOINLINE void clamped_keys(vf (&sum)[W], const PreparedQueries& q, const KeyVector& keys) {
  const vf one = splat(1.0f), most = splat(0x1p60f), half = splat(0.5f);
  for (int m = 0; m < W; ++m) {
    const float* c = keys.exponentials + m * keys.width;
    vf acc = vf{};
    for (int64_t d = 0; d < keys.width; d += 2 * W) {
      const vf u = load(q.weight + d), v = load(q.weight + d + W);
      vf s = one + load(q.exponentials + d) * load(c + d), t = one + load(q.exponentials + d + W) * load(c + d + W);
      s = s < most ? s : most;
      t = t < most ? t : most;
      acc += (u * t + v * s) / (s * t) - half * (u + v);
    }
    sum[m] = acc;
  }
}

template <class F>
REGARD_NOINLINE void direct_keys(vf (&sum)[W], const PreparedQueries& q, const KeyVector& keys) {
  for (int m = 0; m < W; ++m) {
    const float* c = keys.plain + m * keys.row;
    vf acc = vf{};
    for (int64_t d = 0; d < keys.width; d += W)
      acc += load(q.plain + d) * F::value(load(q.a + d) + load(c + d), keys.x.slope);
    sum[m] = acc;
  }
}

// From C: with r = 1 / (1 + A C), f' = one · r (1 - r) and f = value · (r + constant).
REGARD_NOINLINE void gradients_by_exponentials(const PreparedQueries& q, const float* c, int64_t width, float one,
                                               float value, float constant, const ScoreShare& to) {
  for (int64_t d = 0; d < width; d += W) {
    const vf a = load(q.exponentials + d), w = load(q.plain + d) * splat(one);
    vf da = vf{}, dw = vf{};
#pragma GCC unroll 4
    for (int m = 0; m < W; ++m) {
      const vf r = splat(1.0f) / (splat(1.0f) + a * load(c + m * width + d)), ds = splat_any(to.ds + m),
               p = ds * (r - r * r);
      da += p;
      dw += ds * (r + splat(constant));
      float* dc = to.dc + m * to.row + d;
      store(dc, load(dc) + p * w);
    }
    store(to.da + d, load(to.da + d) + da * splat(one));
    store(to.dw + d, load(to.dw + d) + dw * splat(value));
  }
}

// From f and f' themselves.
template <class F>
REGARD_NOINLINE void gradients_direct(const PreparedQueries& q, const KeyVector& keys, const ScoreShare& to) {
  for (int m = 0; m < W; ++m) {
    const float* c = keys.plain + m * keys.row;
    const vf ds = splat_any(to.ds + m);
    for (int64_t d = 0; d < keys.width; d += W) {
      const vf z = finite_end(load(q.a + d)) + finite_end(load(c + d)), y = F::value(z, keys.x.slope);
      const vf p = ds * F::slope(z, y, keys.x.slope);
      store(to.da + d, load(to.da + d) + p);
      store(to.dw + d, load(to.dw + d) + ds * y);
      float* dc = to.dc + m * to.row + d;
      store(dc, load(dc) + p * load(q.plain + d));
    }
  }
}

// The scores of a chunk, of a similarity that reads W keys and finds the sums of one row after the other.
template <class Similarity>
static void score_by_row(Similarity& similarity, FewRows& f, const Chunk& t) {
  const regard_call& c = f.c;
  const float* rows = (const float*)row_ptr(c.k, f.p, f.key_head, t.j, REGARD_F32);
  open_chunk(f, t);
  for (int64_t n = 0; n < t.count; n += W) {
    similarity.read(rows + n * c.k.row, t.count - n);
    for (int64_t r = 0; r < f.rows; ++r) keep_scores(f, t, n, r, similarity.find(r));
  }
}

// The additive scores of few rows: a Score of FewRowsForward.
struct AdditiveFewRows {
  using Given = regard_additive;
  using Rows = StridedRows;
  const regard_additive& x;
  int64_t width;
  float* queries;  // [rows][3 width] each query prepared
  float* weights;  // [heads of the group][4 width] the weights prepared
  KeyVector keys;
  PreparedQueries row[kMaxRows];

  static const regard_call& call(const Given& x) { return x.call; }
  static int64_t width_of(const regard_call& c) { return round_pairs(c.dk); }
  static int64_t learned(const Given&) { return 1; }  // rows of features whose gradients are sums: w
  static int64_t size(const Given& x, int64_t rows) {
    const int64_t width = width_of(x.call), heads = x.call.heads / x.call.key_heads;
    return width * (3 * rows + 4 * heads + 2 * W);
  }
  AdditiveFewRows(const Given& given, int64_t rows, float* at)
      : x(given),
        width(width_of(given.call)),
        queries(at),
        weights(at + 3 * rows * width),
        keys{{given.call, width, nullptr}, given, nullptr} {
    keys.copied = weights + 4 * (x.call.heads / x.call.key_heads) * width;
    keys.exponentials = keys.copied + W * width;
  }

  void begin(const FewRows& f, int64_t r) {
    const regard_call& c = x.call;
    PreparedQueries& q = row[r];
    if (r % c.nq == 0) {
      weight_places(q, width, weights + r / c.nq * 4 * width);
      prepare_weights(x, q, f.row[r].h, width, W);
    } else {
      q = row[r - 1];
    }
    query_places(q, width, queries + 3 * r * width);
    gather(q.a, width, row_ptr(c.q, f.p, f.row[r].h, f.row[r].i, REGARD_F32), c.q, REGARD_F32, c.dk, 1);
    q.max_abs = max_abs(q.a, width);
    if (!has_exponentials(x, q.max_abs)) return;
    const vf rate = splat(separable(x.activation).rate);
    for (int64_t d = 0; d < width; d += W) {
      // with A = 0 past dk, what is added there equals the middle that is subtracted
      const vf there = select(lanes() + splat_int((int32_t)d) < splat_int((int32_t)c.dk), splat(1.0f), vf{});
      const vf exponentials = expv(load(q.a + d) * rate) * there;
      store(q.exponentials + d, exponentials);
      store(q.near + d, exponentials * load(q.inverse + d));
    }
  }

  void read(const float* rows, int64_t there) { keys.read(rows, there); }

  Method method(int64_t r) const { return method_of(x, row[r], keys.max_abs); }

  // The similarity of row r and the W keys that were read.
  vf find(int64_t r) const {
    const PreparedQueries& q = row[r];
    const Method by = method(r);
    vf sum[W];
    if (by == kUnclamped) unclamped_keys(sum, q, keys);
    else if (by == kClamped) clamped_keys(sum, q, keys);
    else if (x.activation == REGARD_TANH) direct_keys<TanhOf>(sum, q, keys);
    else if (x.activation == REGARD_SIGMOID) direct_keys<SigmoidOf>(sum, q, keys);
    else direct_keys<LeakyReluOf>(sum, q, keys);
    const Units units = units_of(x, q, by);
    return sums(sum) * splat(units.scale) + splat(units.base);
  }

  void score(FewRows& f, const Chunk& t) { score_by_row(*this, f, t); }

  // Adds what the W keys that were read give to the gradients of row r.
  void add_gradients(int64_t r, const ScoreShare& to) const {
    const PreparedQueries& q = row[r];
    const Separable form = separable(x.activation);
    if (method(r) != kDirect)
      gradients_by_exponentials(q, keys.exponentials, width, x.activation == REGARD_TANH ? 4 : 1, form.factor,
                                (form.middle - form.factor / 2) / form.factor, to);
    else if (x.activation == REGARD_TANH) gradients_direct<TanhOf>(q, keys, to);
    else if (x.activation == REGARD_SIGMOID) gradients_direct<SigmoidOf>(q, keys, to);
    else gradients_direct<LeakyReluOf>(q, keys, to);
  }
};

}  // namespace regard
