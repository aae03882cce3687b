// Few queries, many keys. The queries of a group share each row of K and V; keys are split into parts, whose states are
// merged in order by whoever finishes the last, so the bits do not depend on the number of threads.
#pragma once
#include "few_values.h"

namespace regard {

static int64_t few_rows(const regard_call& c) { return c.heads / c.key_heads * c.nq; }

// Whether a call goes this way: with more queries, the lanes of a block of them are well filled. Half precision is widened here for
// every few rows, and there once for all heads of a group.
static bool few(const regard_call& c) {
  constexpr int64_t kMost = 8, kMostOfHalf = 5 * W / 8 < kMost ? 5 * W / 8 : kMost;
  return !c.invariant && few_rows(c) <= kFew && c.nq <= (c.dtype == REGARD_F32 || c.heads == c.key_heads ? kMost : kMostOfHalf) && !c.tiles.data;
}

// Keys of a part: short enough for many threads, long enough to be worth a merge. Shapes alone decide.
static int64_t part_keys(const regard_call& c, int64_t pairs) {
  const int64_t even = (pairs * c.nk / 128 + kChunk - 1) / kChunk * kChunk;
  return even < 256 ? 256 : even > 2048 ? 2048 : even;
}

static int64_t part_size(const regard_call& c) { return few_rows(c) * state_size(c); }

static int64_t decode_scratch(const regard_call& c) {
  const int64_t k = c.k.col == 1 ? 0 : kChunk * round_up(c.dk), v = c.v.col == 1 ? 0 : kChunk * round_up(c.dv);
  return few_rows(c) * (round_up(c.dk) + kChunk) + k + v;
}

static void decode_places(Few& f, float* at) {
  f.rows = few_rows(f.c);
  f.q = at, at += f.rows * round_up(f.c.dk);
  f.s = at, at += f.rows * kChunk;
  f.k = at, at += f.c.k.col == 1 ? 0 : kChunk * round_up(f.c.dk);
  f.v = at;
}

// rows × cols elements to [rows][ld] floats, padded by zeros, times factor.
static void gather(float* dst, int64_t ld, const char* src, const regard_tensor& t, int dtype, int64_t rows, int64_t cols, float factor) {
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t d = 0; d < ld; d += W)
      store(dst + n * ld + d, floats(src, n * t.row + d * t.col, t.col, cols - d, dtype) * splat(factor));
}

// Where the keys of a chunk stand, for the steps that ask.
static void place_keys(Few& f, const Chunk& t) {
  if (!f.c.k_at) return;
  const int64_t* k_at = f.c.k_at + offset(f.c.k_at_batch, f.p) + t.j;
  for (int64_t n = 0; n < t.count; ++n) {
    f.at[n / W][n % W] = (int32_t)(k_at[n] - k_at[0]);
    f.word[n / W][n % W] = key_word(k_at[n]);
  }
}

template <int dtype>
static void run_chunk(Few& f, const Chunk& t, const char* keys, const char* values) {
  const regard_call& c = f.c;
  const char *k = keys + t.j * c.k.row * size_of(dtype), *v = values + t.j * c.v.row * size_of(dtype);
  place_keys(f, t);
  if (c.k.col == 1) {
    score_chunk<dtype>(f, t, k, c.k.row);
  } else {
    gather(f.k, round_up(c.dk), k, c.k, dtype, t.count, c.dk, 1);
    score_chunk<REGARD_F32>(f, t, (const char*)f.k, round_up(c.dk));
  }
  for (int64_t r = 0; r < f.rows; ++r) {
    float* state = f.states + r * state_size(c);
    float m = state[0];
    for (int n = 0; n < W; ++n) m = f.top[r][n] > m ? f.top[r][n] : m;
    const float shift = m == -kInf ? 0 : m;
    f.alpha[r] = exp2v(splat(state[0] - shift))[0];
    state[0] = m;
    state[1] = state[1] * f.alpha[r] + weigh_row(f, t, r, shift);
  }
  if (c.v.col == 1) return add_chunk<dtype>(f, t, v, c.v.row);
  gather(f.v, round_up(c.dv), v, c.v, dtype, t.count, c.dv, 1);
  add_chunk<REGARD_F32>(f, t, (const char*)f.v, round_up(c.dv));
}

// The rows of one (batch element, key head): which queries they are, what they see, and their empty states.
static void begin_rows(Few& f, int64_t key_head) {
  const regard_call& c = f.c;
  const int64_t width = round_up(c.dk);
  for (int64_t r = 0; r < f.rows; ++r) {
    Row& row = f.row[r];
    row.h = key_head * (c.heads / c.key_heads) + r / c.nq, row.i = r % c.nq, row.first = 0, row.last = c.nk;
    if (c.start.data) {
      row.first = at<int32_t>(c.start, f.p, row.h)[row.i * c.start.row];
      row.last = at<int32_t>(c.stop, f.p, row.h)[row.i * c.stop.row];
    }
    const char* q = (const char*)c.q.data + size_of(c.dtype) * (offset(c.q, f.p, row.h) + row.i * c.q.row);
    gather(f.q + r * width, width, q, c.q, c.dtype, 1, c.dk, factor_of(c, row.h));
    float* state = f.states + r * state_size(c);
    for (int64_t d = 0; d < state_size(c); ++d) state[d] = d == 0 ? -kInf : 0;
  }
}

// Keys [from, to) of one (batch element, key head): their state.
static void run_part(Few& f, int64_t key_head, int64_t from, int64_t to) {
  const regard_call& c = f.c;
  begin_rows(f, key_head);
  Limits limits = Limits::none(c);
  for (int64_t r = 0; r < f.rows; ++r) limits.add(f.row[r].first, f.row[r].last);
  const char* keys = (const char*)c.k.data + size_of(c.dtype) * offset(c.k, f.p, key_head);
  const char* values = (const char*)c.v.data + size_of(c.dtype) * offset(c.v, f.p, key_head);
  from = from > limits.lo ? from : limits.lo;
  to = to < limits.hi ? to : limits.hi;
  for (int64_t j = from; j < to; j += kChunk) {
    Chunk t{j, to - j < kChunk ? to - j : kChunk, false, j + 2 * kChunk <= to};
    t.some = c.allowed.data || limits.inner_lo > j || limits.inner_hi < j + t.count;
    if (c.dtype == REGARD_F32) run_chunk<REGARD_F32>(f, t, keys, values);
    else if (c.dtype == REGARD_BF16) run_chunk<REGARD_BF16>(f, t, keys, values);
    else run_chunk<REGARD_F16>(f, t, keys, values);
  }
}

// The states of a row, `step` apart, merged in order, and its sink: out and lse.
static void merge_row(const regard_call& c, const Place& p, int64_t h, int64_t i, float* states, int64_t step, int64_t count) {
  const float sink = c.sink.data ? *at<float>(c.sink, p, h) * kLog2e : -kInf;
  float m = sink;
  for (int64_t n = 0; n < count; ++n) m = states[n * step] > m ? states[n * step] : m;
  const float shift = m == -kInf ? 0 : m;
  float l = exp2v(splat(sink - shift))[0];
  for (int64_t n = 0; n < count; ++n) {
    float* state = states + n * step;
    state[0] = exp2v(splat(state[0] - shift))[0];  // from here on what o is multiplied by
    l += state[1] * state[0];
  }
  if (c.lse.data) at<float>(c.lse, p, h)[i * c.lse.row] = l == 0 ? -kInf : m * kLn2 + __builtin_logf(l);
  if (c.norm.data) {
    float* norm = at<float>(c.norm, p, h) + i * c.norm.row;
    norm[0] = l == 0 ? 0 : m, norm[c.norm.col] = l == 0 ? 0 : 1 / l;
  }
  const int64_t to = offset(c.out, p, h) + i * c.out.row;
  for (int64_t d = 0; d < c.dv; d += W) {
    vf o = vf{};
    for (int64_t n = 0; n < count; ++n) o += load(states + n * step + 2 + d) * splat(states[n * step]);
    o = l == 0 ? vf{} : o / splat(l);
    put(c, to + d * c.out.col, c.dv - d < W ? c.dv - d : W, o);
  }
}

// The parts of one (batch element, key head), merged.
static void merge_parts(const regard_call& c, const Place& p, int64_t key_head, float* parts, int64_t count) {
  for (int64_t r = 0; r < few_rows(c); ++r)
    merge_row(c, p, key_head * (c.heads / c.key_heads) + r / c.nq, r % c.nq, parts + r * state_size(c), part_size(c), count);
}

}  // namespace regard
