// Few queries, many keys: lanes along features and keys. The queries of a group share each row of K and V; keys are split
// into parts of a fixed size, whose states are merged in order, so the bits do not depend on the number of threads.
#pragma once
#include "forward.h"

namespace regard {

constexpr int64_t kFew = 16;      // fewer rows (queries × heads of a group) than this come here
constexpr int64_t kPart = 1024;   // keys of a part
constexpr int64_t kChunk = 64;    // keys held at once

struct Decode {
  float* q;      // [rows][width], scaled, base 2; width is dk rounded up to W, padded by zeros
  float* s;      // [rows][kChunk]
  float* k;      // [kChunk][width], what cannot be read in place
  float* v;      // [kChunk][dv]
};

REGARD_INLINE int64_t round_up(int64_t n) { return (n + W - 1) / W * W; }

static int64_t few_rows(const regard_call& c) { return c.heads / c.key_heads * c.nq; }

static int64_t decode_scratch(const regard_call& c) {
  return few_rows(c) * (round_up(c.dk) + kChunk) + kChunk * (round_up(c.dk) + c.dv) + 4 * W;
}

// The state of one part: for each row m, l, and o[dv].
static int64_t part_size(const regard_call& c) { return few_rows(c) * (c.dv + 2); }

// a and b, sums still spread over lanes, as one: lanes without the bit `step` hold those of a, lanes with it those of b.
template <int step>
REGARD_INLINE vf fold_lanes(vf a, vf b) {
  vi own, other;
  for (int n = 0; n < W; ++n) {
    own[n] = n & step ? W + n : n;
    other[n] = n & step ? W + (n ^ step) : n ^ step;
  }
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
}

// W vectors to the vector of their sums.
REGARD_INLINE vf sums(vf x[W]) {
  for (int n = 0; n < W / 2; ++n) x[n] = fold_lanes<1>(x[2 * n], x[2 * n + 1]);
  for (int n = 0; n < W / 4; ++n) x[n] = fold_lanes<2>(x[2 * n], x[2 * n + 1]);
#if REGARD_W >= 8
  for (int n = 0; n < W / 8; ++n) x[n] = fold_lanes<4>(x[2 * n], x[2 * n + 1]);
#endif
#if REGARD_W >= 16
  x[0] = fold_lanes<8>(x[0], x[1]);
#endif
  return x[0];
}

struct Row {  // one query of one head
  int64_t h, i, first, last;
};

struct Few {
  const regard_call& c;
  const Decode& w;
  Place p;
  Row row[kFew];
  int64_t rows, key_head;
};

// Keys [n, n + W) of the chunk at j, against one row: products summed over features.
template <int dtype>
static vf products(const Few& f, int64_t r, const char* keys, int64_t stride, int64_t n, int64_t count) {
  const int64_t whole = f.c.dk / W * W, width = round_up(f.c.dk);
  const int size = dtype == REGARD_F32 ? 4 : 2;
  const float* q = f.w.q + r * width;
  vf x[W];
#pragma GCC unroll 4
  for (int m = 0; m < W; ++m) {
    const char* k = keys + (n + m < count ? n + m : count - 1) * stride * size;
    vf a = vf{}, b = vf{};
    int64_t d = 0;
    for (; d + 2 * W <= whole; d += 2 * W) {
      a += load(q + d) * load_some(k, d, dtype);
      b += load(q + d + W) * load_some(k, d + W, dtype);
    }
    for (; d < whole; d += W) a += load(q + d) * load_some(k, d, dtype);
    for (; d < f.c.dk; ++d) a[d - whole] += q[d] * load_one(k, d, dtype);
    x[m] = a + b;
  }
  return sums(x);
}

// Everything after the similarity for W keys of one row, in base 2; hidden ones become -inf.
static vf few_steps(const Few& f, const Row& row, int64_t j, int64_t valid, vf s) {
  const regard_call& c = f.c;
  if (c.cap != 0) s = splat(c.cap * kLog2e) * tanhv(s);
  for (int n = 0; n < W; ++n) {
    const int64_t key = j + n;
    bool seen = n < valid && key >= row.first && key < row.last;
    float extra = 0;
    if (seen && c.slopes) {
      float away = (float)(c.q_at[offset(c.q_at_batch, f.p) + row.i] - c.k_at[offset(c.k_at_batch, f.p) + key]);
      extra -= c.slopes[c.slope_stride * row.h] * (away < 0 ? -away : away);
    }
    if (seen && c.offsets) extra += c.offsets[c.offset_stride * row.h + row.i - key + c.nk - 1];
    if (seen && c.bias.data)
      extra += load_one(c.bias.data, offset(c.bias, f.p, row.h) + row.i * c.bias.row + key * c.bias.col, c.bias_dtype);
    if (seen && c.allowed.data) seen = at<uint8_t>(c.allowed, f.p, row.h)[row.i * c.allowed.row + key * c.allowed.col];
    s[n] = seen ? s[n] + extra * kLog2e : -kInf;
  }
  return s;
}

REGARD_INLINE bool plain(const regard_call& c) { return c.cap == 0 && !c.slopes && !c.offsets && !c.bias.data && !c.allowed.data; }

template <int dtype>
static float score_chunk(const Few& f, int64_t r, const char* keys, int64_t stride, int64_t j, int64_t count) {
  const Row& row = f.row[r];
  vf top = splat(-kInf);
  const bool whole = plain(f.c) && row.first <= j && j + count <= row.last;
  for (int64_t n = 0; n < count; n += W) {
    vf s = products<dtype>(f, r, keys, stride, n, count);
    if (!whole || n + W > count) s = few_steps(f, row, j + n, count - n, s);
    store(f.w.s + r * kChunk + n, s);
    top = greater_of(s, top);
  }
  float m = -kInf;
  for (int n = 0; n < W; ++n) m = top[n] > m ? top[n] : m;
  return m;
}

// Scores of one row become weights; returns their sum. Hidden ones become -1 where `mark`.
static float weigh_row(const Few& f, int64_t r, int64_t j, int64_t count, float shift, bool mark) {
  const regard_call& c = f.c;
  vf sum = vf{};
  uint32_t word = 0;
  if (c.threshold) {
    Place p = f.p;
    p.h = f.row[r].h;
    word = mix(head_word(c, p) + fold(c.q_at[offset(c.q_at_batch, p) + f.row[r].i]) * 0xC2B2AE3Du);
  }
  for (int64_t n = 0; n < count; n += W) {
    float* at = f.w.s + r * kChunk + n;
    vf s = load(at), p = exp2v(s - splat(shift));
    sum += p;
    if (c.threshold)
      for (int m = 0; m < W; ++m)
        if (n + m < count) {
          uint32_t bits = mix(word + fold(c.k_at[offset(c.k_at_batch, f.p) + j + n + m]) * 0x27D4EB2Fu);
          p[m] = (bits >> 8) >= c.threshold ? p[m] * c.keep : 0.0f;
        }
    store(at, mark ? (s == splat(-kInf) ? splat(-1.0f) : p) : p);
  }
  float total = 0;
  for (int n = 0; n < W; ++n) total += sum[n];
  return total;
}

template <int M, int V>
REGARD_INLINE void add_values(const Few& f, float* part, const float* alpha, const float* v, int64_t v_row, int64_t r, int64_t d,
                              int64_t count) {
  vf acc[M][V];
  clear(acc);
  micro<Floats, M, V>(acc, f.w.s + r * kChunk, kChunk, 1, v + d, v_row, count);
  for (int i = 0; i < M; ++i)
    for (int n = 0; n < V; ++n) {
      float* o = part + (r + i) * (f.c.dv + 2) + 2 + d + n * W;
      store(o, load(o) * splat(alpha[r + i]) + acc[i][n]);
    }
}

template <int M>
static void add_rows(const Few& f, float* part, const float* alpha, const float* v, int64_t v_row, int64_t r, int64_t count) {
  int64_t d = 0;
  for (; d + 4 * W <= f.c.dv; d += 4 * W) add_values<M, 4>(f, part, alpha, v, v_row, r, d, count);
  for (; d + W <= f.c.dv; d += W) add_values<M, 1>(f, part, alpha, v, v_row, r, d, count);
  for (; d < f.c.dv; ++d)
    for (int i = 0; i < M; ++i) {
      float sum = 0;
      for (int64_t n = 0; n < count; ++n) sum += f.w.s[(r + i) * kChunk + n] * v[n * v_row + d];
      float* o = part + (r + i) * (f.c.dv + 2) + 2 + d;
      *o = *o * alpha[r + i] + sum;
    }
}

static void add_rows_careful(const Few& f, float* part, const float* alpha, const float* v, int64_t v_row, int64_t count) {
  for (int64_t r = 0; r < f.rows; ++r)
    for (int64_t d = 0; d < f.c.dv; ++d) {
      float sum = 0;
      for (int64_t n = 0; n < count; ++n)
        if (f.w.s[r * kChunk + n] != -1.0f) sum += f.w.s[r * kChunk + n] * v[n * v_row + d];
      float* o = part + r * (f.c.dv + 2) + 2 + d;
      *o = *o * alpha[r] + sum;
    }
}

template <int dtype>
static void run_chunk(const Few& f, float* part, const char* keys, const char* values, int64_t j, int64_t count) {
  const regard_call& c = f.c;
  const int size = dtype == REGARD_F32 ? 4 : 2;
  const char* k = keys + j * c.k.row * size;
  float top[kFew], alpha[kFew];
  bool some = c.allowed.data;
  if (c.k.col == 1) {
    for (int64_t r = 0; r < f.rows; ++r) top[r] = score_chunk<dtype>(f, r, k, c.k.row, j, count);
  } else {
    for (int64_t n = 0; n < count; ++n)
      for (int64_t d = 0; d < c.dk; ++d) f.w.k[n * c.dk + d] = load_one(k, n * c.k.row + d * c.k.col, dtype);
    for (int64_t r = 0; r < f.rows; ++r) top[r] = score_chunk<REGARD_F32>(f, r, (const char*)f.w.k, c.dk, j, count);
  }
  for (int64_t r = 0; r < f.rows; ++r) some |= f.row[r].first > j || f.row[r].last < j + count;
  const float* v = (const float*)(values + j * c.v.row * size);
  int64_t v_row = c.v.row;
  if (dtype != REGARD_F32 || c.v.col != 1) {
    const char* from = values + j * c.v.row * size;
    if (dtype != REGARD_F32) widen(f.w.v, from, dtype, c.v.row, c.v.col, count, c.dv);
    else
      for (int64_t n = 0; n < count; ++n)
        for (int64_t d = 0; d < c.dv; ++d) f.w.v[n * c.dv + d] = load_one(from, n * c.v.row + d * c.v.col, dtype);
    v = f.w.v, v_row = c.dv;
  }
  const bool careful = some && !all_finite(v, 1, v_row, c.dv, count);
  for (int64_t r = 0; r < f.rows; ++r) {
    float* state = part + r * (c.dv + 2);
    float m = top[r] > state[0] ? top[r] : state[0], shift = m == -kInf ? 0 : m;
    vf x = exp2v(splat(state[0] - shift));
    alpha[r] = x[0];
    state[0] = m;
    state[1] = state[1] * alpha[r] + weigh_row(f, r, j, count, shift, careful);
  }
  if (careful) return add_rows_careful(f, part, alpha, v, v_row, count);
  int64_t r = 0;
  for (; r + 4 <= f.rows; r += 4) add_rows<4>(f, part, alpha, v, v_row, r, count);
  for (; r < f.rows; ++r) add_rows<1>(f, part, alpha, v, v_row, r, count);
}

// One part of the keys of one (batch element, key head): its state.
static void run_part(const regard_call& c, const Decode& w, Place p, int64_t key_head, int64_t number, float* part) {
  Few f{c, w, p};
  const int64_t group = c.heads / c.key_heads, width = round_up(c.dk);
  const int size = c.dtype == REGARD_F32 ? 4 : 2;
  const float to_base_2 = c.cap != 0 ? c.scale / c.cap : c.scale * kLog2e;
  f.rows = few_rows(c), f.key_head = key_head;
  int64_t lo = c.nk, hi = 0;
  for (int64_t r = 0; r < f.rows; ++r) {
    Row& row = f.row[r];
    row.h = key_head * group + r / c.nq, row.i = r % c.nq, row.first = 0, row.last = c.nk;
    if (c.start.data) {
      row.first = at<int32_t>(c.start, p, row.h)[row.i * c.start.row];
      row.last = at<int32_t>(c.stop, p, row.h)[row.i * c.stop.row];
    }
    if (row.first < row.last) lo = row.first < lo ? row.first : lo, hi = row.last > hi ? row.last : hi;
    const char* q = (const char*)c.q.data + size * (offset(c.q, p, row.h) + row.i * c.q.row);
    for (int64_t d = 0; d < width; ++d) w.q[r * width + d] = d < c.dk ? load_one(q, d * c.q.col, c.dtype) * to_base_2 : 0.0f;
    float* state = part + r * (c.dv + 2);
    state[0] = -kInf;
    for (int64_t d = 0; d < c.dv + 1; ++d) state[1 + d] = 0;
  }
  const char* keys = (const char*)c.k.data + size * offset(c.k, p, key_head);
  const char* values = (const char*)c.v.data + size * offset(c.v, p, key_head);
  int64_t from = number * kPart, to = from + kPart < c.nk ? from + kPart : c.nk;
  from = from > lo ? from : lo / W * W > number * kPart ? lo / W * W : number * kPart;
  to = to < hi ? to : hi;
  for (int64_t j = from; j < to; j += kChunk) {
    int64_t count = to - j < kChunk ? to - j : kChunk;
    if (c.dtype == REGARD_F32) run_chunk<REGARD_F32>(f, part, keys, values, j, count);
    else if (c.dtype == REGARD_BF16) run_chunk<REGARD_BF16>(f, part, keys, values, j, count);
    else run_chunk<REGARD_F16>(f, part, keys, values, j, count);
  }
}

// The parts of one (batch element, key head), merged in order, to out and lse.
static void merge_parts(const regard_call& c, const Place& p, int64_t key_head, const float* parts, int64_t count) {
  const int64_t group = c.heads / c.key_heads, size = part_size(c);
  for (int64_t r = 0; r < few_rows(c); ++r) {
    const int64_t h = key_head * group + r / c.nq, i = r % c.nq;
    const float* row = parts + r * (c.dv + 2);
    float m = -kInf, l = 0;
    for (int64_t n = 0; n < count; ++n) m = row[n * size] > m ? row[n * size] : m;
    const float shift = m == -kInf ? 0 : m;
    for (int64_t n = 0; n < count; ++n) l += row[n * size + 1] * __builtin_exp2f(row[n * size] - shift);
    if (c.lse.data) at<float>(c.lse, p, h)[i * c.lse.row] = l == 0 ? -kInf : m * kLn2 + __builtin_logf(l);
    const int64_t to = offset(c.out, p, h) + i * c.out.row;
    for (int64_t d = 0; d < c.dv; ++d) {
      float o = 0;
      for (int64_t n = 0; n < count; ++n) o += row[n * size + 2 + d] * __builtin_exp2f(row[n * size] - shift);
      o = l == 0 ? 0 : o / l;
      if (c.out_dtype == REGARD_F32) ((float*)c.out.data)[to + d * c.out.col] = o;
      else ((uint16_t*)c.out.data)[to + d * c.out.col] = c.out_dtype == REGARD_BF16 ? float_to_bf16(o) : float_to_fp16(o);
    }
  }
}

}  // namespace regard
