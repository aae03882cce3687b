// FewRows rows against a chunk of keys: what they are, and every step between a similarity and its weights. Lanes of scores are keys.
#pragma once
#include "steps/steps.h"

namespace regard {

constexpr int64_t kFew = 64;    // rows (queries × heads of a group) at most
constexpr int64_t kChunk = 64;  // keys held at once
constexpr int kRowsAtOnce = 4;

// How many keys, or vectors of features, meet R rows at once: a power of two whose sums the registers hold.
constexpr int beside(int rows, int most) {
  int n = 1;
  while (2 * n <= most && 2 * n * rows <= (W == 16 ? 24 : 12)) n *= 2;
  return n;
}

REGARD_INLINE int64_t round_up(int64_t n) { return (n + W - 1) / W * W; }

struct Row {  // one query of one head
  int64_t h, i, first, last;
};

struct FewRows {
  explicit FewRows(const regard_call& call) : c(call) {}
  const regard_call& c;
  Place p;
  int64_t rows, key_head;
  float* s;             // [rows][kChunk] scores, then weights; a hidden key's weight is -0
  float* cap_slope = nullptr;  // [rows][kChunk] the soft cap's derivative, or 0 where nobody asks
  float* v;             // [kChunk][dv rounded up to W], values that cannot be read in place
  float* states;        // of each row m, l, o[dv rounded up to W]
  float alpha[kFew];    // what the state so far is multiplied by
  Row row[kFew];
  bool whole[kFew];     // every key of the chunk is seen and nothing is done to its score
  vf top[kFew];         // largest scores of the chunk
  vi at[kChunk / W];    // positions of the chunk's keys, relative to the first
  vu word[kChunk / W];  // dropout's words of the chunk's keys
};

struct Chunk {
  int64_t j, count;  // keys
  bool some;         // some row does not see some key
  bool more;         // another chunk follows
};

REGARD_INLINE int64_t state_size(const regard_call& c) { return round_up(c.dv) + 2; }

// W elements from n on, `step` apart; 0 for those past `valid`.
REGARD_INLINE vf floats(const void* p, int64_t n, int64_t step, int64_t valid, int dtype) {
  if (step == 1 && valid >= W) return load_some(p, n, dtype);
  float x[W];
  for (int m = 0; m < W; ++m) x[m] = m < valid ? load_one(p, n + m * step, dtype) : 0.0f;
  return load(x);
}

REGARD_INLINE vi flags(const uint8_t* p, int64_t step, int64_t valid) {
  typedef uint8_t bytes __attribute__((vector_size(W), aligned(1), may_alias));
  if (step == 1 && valid >= W) return __builtin_convertvector(*(const bytes*)p, vi) != 0;
  float x[W];
  for (int m = 0; m < W; ++m) x[m] = m < valid ? (float)p[m * step] : 0.0f;
  return load(x) != vf{};
}

// Which lanes meet where sums are spread over lanes. Blocks of `span` lanes keep the shuffles cheap: unpacking within 128 bits first,
// whole quarters last.
template <int step, bool second>
struct Folded {
  static constexpr int span = step <= 2 ? 4 : W;
  static constexpr int lane(int n) {
    return n / span * span + n % step + n % span / (2 * step) * step + (n & step ? W : 0) + (second ? span / 2 : 0);
  }
};

// a and b, whose sums are still spread over lanes, as one vector of half the spread.
template <int step>
REGARD_INLINE vf fold_lanes(vf a, vf b) {
  return shuffle<Folded<step, false>>(a, b) + shuffle<Folded<step, true>>(a, b);
}

// W vectors to the vector of their sums.
REGARD_INLINE vf sums(vf (&x)[W]) {
#pragma GCC unroll 8
  for (int n = 0; n < W / 2; ++n) x[n] = fold_lanes<1>(x[2 * n], x[2 * n + 1]);
#pragma GCC unroll 4
  for (int n = 0; n < W / 4; ++n) x[n] = fold_lanes<2>(x[2 * n], x[2 * n + 1]);
#if REGARD_W >= 8
#pragma GCC unroll 2
  for (int n = 0; n < W / 8; ++n) x[n] = fold_lanes<4>(x[2 * n], x[2 * n + 1]);
#endif
#if REGARD_W >= 16
  x[0] = fold_lanes<8>(x[0], x[1]);
#endif
  return x[0];
}

// How far a query is from keys [n, n + W) of the chunk, for the slopes.
static vf few_away(const FewRows& f, const Row& row, const Chunk& t, int64_t n) {
  const regard_call& c = f.c;
  if (!c.points_of_k) {
    const int32_t ahead = apart(c.q_at[offset(c.q_at_batch, f.p) + row.i], c.k_at[offset(c.k_at_batch, f.p) + t.j]);
    return absolute(__builtin_convertvector(apart(splat_int(ahead), f.at[n / W]), vf));
  }
  vf square = vf{};
  for (int64_t d = 0; d < c.dims; ++d)
    square = farther(square, splat(c.points_of_q[d * c.nq + row.i]), floats(c.points_of_k, d * c.nk + t.j + n, 1, t.count - n, REGARD_F32));
  return sqrtv(square);
}

// What is added for a query and W keys, `valid` of them real.
static vf few_offsets(const FewRows& f, const Row& row, int64_t key, int64_t valid) {
  const regard_call& c = f.c;
  const float* offsets = c.offsets + c.offsets_stride * row.h;
  if (!c.k_cell) return floats(offsets, row.i + c.nk - 1 - key, -1, valid, REGARD_F32);
  const int32_t *cells = c.k_cell + offset(c.k_cell_batch, f.p) + key, cell = c.q_cell[offset(c.q_cell_batch, f.p) + row.i];
  vf x;
  for (int m = 0; m < W; ++m) x[m] = offsets[cell - cells[m < valid ? m : 0]];
  return x;
}

// Everything after the similarity for keys [n, n + W) of the chunk and one row, in base 2; hidden ones become -inf.
static vf few_steps(const FewRows& f, const Row& row, const Chunk& t, int64_t n, vf s, vf& cap_slope) {
  const regard_call& c = f.c;
  const int64_t key = t.j + n, valid = t.count - n;
  const float cap = cap_of(c, row.h);
  if (c.cap != 0 && !c.cap_last) s = capped(s, cap, cap_slope);
  if (c.slopes) s = sloped(s, slope_of(c, row.h), few_away(f, row, t, n));
  if (c.offsets) s = plus_natural(s, few_offsets(f, row, key, valid));
  if (c.bias.data) {
    const int64_t first = offset(c.bias, f.p, row.h) + row.i * c.bias.row + key * c.bias.col;
    s = plus_natural(s, floats(c.bias.data, first, c.bias.col, valid, c.bias_dtype));
  }
  if (c.cap != 0 && c.cap_last) s = capped(s * splat(1 / (cap * kLog2e)), cap, cap_slope);
  const int64_t last = row.last < t.j + t.count ? row.last : t.j + t.count;
  const vi keys = splat_int((int32_t)key) + lanes();
  vi seen = (keys >= splat_int((int32_t)row.first)) & (keys < splat_int((int32_t)last));
  if (c.allowed.data) seen &= flags(at<uint8_t>(c.allowed, f.p, row.h) + row.i * c.allowed.row + key * c.allowed.col, c.allowed.col, valid);
  return select(seen, s, splat(-kInf));
}

REGARD_INLINE bool plain(const regard_call& c) { return c.cap == 0 && !c.slopes && !c.offsets && !c.bias.data && !c.allowed.data; }

// Before a chunk's scores are found.
REGARD_INLINE void open_chunk(FewRows& f, const Chunk& t) {
  for (int64_t r = 0; r < f.rows; ++r) {
    f.top[r] = splat(-kInf);
    f.whole[r] = plain(f.c) && f.row[r].first <= t.j && f.row[r].last >= t.j + t.count;
  }
}

// A row's scores of keys [n, n + W) of the chunk, as its similarity gave them.
REGARD_INLINE void keep_scores(FewRows& f, const Chunk& t, int64_t n, int64_t r, vf s) {
  vf cap_slope = splat(1.0f);
  if (!f.whole[r] || n + W > t.count) s = few_steps(f, f.row[r], t, n, s, cap_slope);
  store(f.s + r * kChunk + n, s);
  if (f.cap_slope) store(f.cap_slope + r * kChunk + n, cap_slope);
  f.top[r] = greater_of(s, f.top[r]);
}

// rows × cols elements to [rows][ld] floats, padded by zeros, times factor.
static void gather(float* dst, int64_t ld, const char* src, const regard_tensor& t, int dtype, int64_t rows, int64_t cols, float factor) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t d = 0; d < ld; d += W)
      store(dst + n * ld + d, floats(src, n * t.row + d * t.col, t.col, cols - d, dtype) * splat(factor));
}

// The first of W floats, `valid` of them real, `step` apart.
REGARD_INLINE void put_some(float* to, int64_t step, int64_t valid, vf x) {
  if (step == 1 && valid >= W) return store(to, x);
  for (int64_t n = 0; n < W && n < valid; ++n) to[n * step] = x[n];
}

// Where a row of a head begins.
REGARD_INLINE const char* row_of(const regard_tensor& t, const Place& p, int64_t head, int64_t row, int dtype) {
  return (const char*)moved(t.data, offset(t, p, head) + row * t.row, dtype);
}

}  // namespace regard
