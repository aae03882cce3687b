// Forward: for a block of queries (the lanes) stream over blocks of keys; see micro.h for the product.
#pragma once
#include "args.h"
#include "micro.h"

namespace regard {

constexpr int kVectors = W == 16 ? 4 : W == 8 ? 3 : 4;  // vectors of queries in a block
constexpr int kRows = 4;                                 // keys, or features, a microkernel advances by
constexpr int64_t kQueries = kVectors * W;
constexpr int64_t kKeys = 128;

// Scratch of one thread. All float; sizes in forward_scratch.
struct Scratch {
  float* q;     // [dk][kQueries], scaled, base 2
  float* s;     // [kKeys][kQueries] scores, then weights
  float* o;     // [dv][kQueries]
  float* bias;  // [kKeys][kQueries]
  float* k;     // [kKeys][dk] converted, half precision only
  float* v;     // [kKeys][dv]
};

struct Place {  // where one work item lies
  int64_t at[REGARD_BATCH_AXES], b, h, row, rows;
};

REGARD_INLINE int64_t offset(const int64_t* strides, const Place& p) {
  int64_t sum = 0;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) sum += strides[n] * p.at[n];
  return sum;
}

REGARD_INLINE int64_t offset(const regard_tensor& t, const Place& p, int64_t head) {
  return offset(t.batch, p) + t.head * head;
}

template <class T>
REGARD_INLINE T* at(const regard_tensor& t, const Place& p, int64_t head) {
  return (T*)t.data + offset(t, p, head);
}

REGARD_INLINE float load_one(const void* p, int64_t n, int dtype) {
  if (dtype == REGARD_F32) return ((const float*)p)[n];
  uint16_t h = ((const uint16_t*)p)[n];
  return dtype == REGARD_BF16 ? bf16_to_float(h) : fp16_to_float(h);
}

REGARD_INLINE vf load_some(const void* p, int64_t n, int dtype) {
  if (dtype == REGARD_F32) return load((const float*)p + n);
  const uint16_t* h = (const uint16_t*)p + n;
  return dtype == REGARD_BF16 ? load_bf16(h) : load_fp16(h);
}

// rows × cols pairs of bfloat16 at src to dst[cols][ld], bits as they are.
template <int V>
static void pack_pairs(float* dst, int64_t ld, const uint16_t* src, int64_t row, int64_t rows, int64_t cols) {
  int64_t c = 0;
  for (; c + W <= cols; c += W)
    for (int v = 0; v < V; ++v) {
      vf r[W];
      for (int n = 0; n < W; ++n) r[n] = v * W + n < rows ? load((const float*)(src + (v * W + n) * row + 2 * c)) : vf{};
      transpose(r);
      for (int n = 0; n < W; ++n) store(dst + (c + n) * ld + v * W, r[n]);
    }
  for (; c < cols; ++c)
    for (int64_t i = 0; i < V * W; ++i) {
      uint32_t pair = 0;
      if (i < rows) __builtin_memcpy(&pair, src + i * row + 2 * c, 4);
      __builtin_memcpy(dst + c * ld + i, &pair, 4);
    }
}

// rows × cols elements at src (strides row, col) to dst[cols][ld] floats times factor: a transpose; missing lanes are 0.
template <int V>
static void pack(float* dst, int64_t ld, const void* src, int dtype, int64_t row, int64_t col, int64_t rows, int64_t cols,
                 float factor) {
  int64_t c = 0;
  if (col == 1)
    for (; c + W <= cols; c += W)
      for (int v = 0; v < V; ++v) {
        vf r[W];
        for (int n = 0; n < W; ++n) {
          int64_t i = v * W + n;
          r[n] = i < rows ? load_some(src, i * row + c, dtype) : vf{};
        }
        transpose(r);
        for (int n = 0; n < W; ++n) store(dst + (c + n) * ld + v * W, r[n] * splat(factor));
      }
  for (; c < cols; ++c)
    for (int64_t i = 0; i < V * W; ++i) dst[c * ld + i] = i < rows ? load_one(src, i * row + c * col, dtype) * factor : 0.0f;
}

// rows × cols elements of half precision to contiguous floats.
static void widen(float* dst, const void* src, int dtype, int64_t row, int64_t col, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
    if (col == 1)
      for (; c + W <= cols; c += W) store(dst + r * cols + c, load_some(src, r * row + c, dtype));
    for (; c < cols; ++c) dst[r * cols + c] = load_one(src, r * row + c * col, dtype);
  }
}

#if defined(__AVX512BF16__)
// values (count, cols) of bfloat16 as dst[(count + 1) / 2][cols] pairs of neighbouring keys; a missing partner is 0.
static void interleave(float* dst, const uint16_t* src, int64_t row, int64_t col, int64_t count, int64_t cols) {
  for (int64_t n = 0; n < count; n += 2) {
    const uint16_t *a = src + n * row, *b = a + row;
    uint32_t* to = (uint32_t*)dst + n / 2 * cols;
    int64_t f = 0;
    bool alone = n + 1 == count;
    if (col == 1)
      for (; f + W <= cols; f += W) {
        vu low = __builtin_convertvector(*(const vh_any*)(a + f), vu);
        vu high = alone ? vu{} : __builtin_convertvector(*(const vh_any*)(b + f), vu);
        *(vu_any*)(to + f) = low | (high << 16);
      }
    for (; f < cols; ++f) to[f] = a[f * col] | (alone ? 0u : (uint32_t)b[f * col] << 16);
  }
}

REGARD_INLINE vf pair_of(vf first, vf second) {
  __m512i order;
  {
    alignas(64) uint16_t index[32];
    for (int n = 0; n < 16; ++n) index[2 * n] = (uint16_t)n, index[2 * n + 1] = (uint16_t)(16 + n);
    order = _mm512_load_si512(index);
  }
  return (vf)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
#else
static void interleave(float*, const uint16_t*, int64_t, int64_t, int64_t, int64_t) {}
REGARD_INLINE vf pair_of(vf first, vf) { return first; }
#endif

static bool all_finite_bf16(const uint16_t* x, int64_t row, int64_t col, int64_t count, int64_t cols) {
  for (int64_t n = 0; n < count; ++n)
    for (int64_t f = 0; f < cols; ++f)
      if ((x[n * row + f * col] & 0x7f80) == 0x7f80) return false;
  return true;
}

REGARD_INLINE vu mix(vu x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

REGARD_INLINE uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

REGARD_INLINE uint32_t fold(int64_t n) { return (uint32_t)(n ^ (n >> 32) * 0x165667B1); }

REGARD_INLINE uint32_t head_word(const regard_call& c, const Place& p) {
  uint32_t x = mix((uint32_t)(fold(p.b) * 0x9E3779B1u + (uint32_t)c.seed));
  return mix((uint32_t)(x + fold(p.h) * 0x85EBCA77u + (uint32_t)(c.seed >> 32)));
}

// The state of one block of queries while it streams over keys.
template <int V>
struct Block {
  const regard_call& c;
  const Scratch& w;
  Place p;
  vf m[V], l[V];        // running maximum (base 2) and sum
  vi first[V], last[V];  // the keys that each lane sees
  vi relative[V];        // position of each lane relative to base
  vu word[V];            // dropout's word of each query
  int64_t base;
  float slope, factor;  // factor: what the scores of pairs are multiplied by; floats have it in q
  const float* offsets;
};

struct Tile {
  int64_t j, count;      // keys
  bool edge;             // some lane does not see some key, by its interval
  const uint64_t* bits;  // some lane does not see some key, by the tile map
  const uint8_t* allowed;
};

// Scores of one key for V vectors of queries: everything after the similarity, in base 2.
template <int V, class Op>
REGARD_INLINE void steps(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V]) {
  const regard_call& c = b.c;
  if (Op::pairs)
    for (int v = 0; v < V; ++v) s[v] *= splat(b.factor);
  if (c.cap != 0)
    for (int v = 0; v < V; ++v) s[v] = splat(c.cap * kLog2e) * tanhv(s[v]);
  if (c.slopes) {
    int32_t ahead = (int32_t)(b.base - c.k_at[offset(c.k_at_batch, b.p) + t.j + n]);
    for (int v = 0; v < V; ++v) {
      vf distance = __builtin_convertvector(b.relative[v] + splat_int(ahead), vf);
      s[v] -= splat(b.slope) * (vf)((vi)distance & splat_int(0x7fffffff));
    }
  }
  if (b.offsets)
    for (int v = 0; v < V; ++v) s[v] += load(b.offsets + (b.p.row + v * W - (t.j + n) + c.nk - 1)) * splat(kLog2e);
  if (c.bias.data)
    for (int v = 0; v < V; ++v) s[v] += load(b.w.bias + n * kQueries + v * W);
  const vf hidden = splat(-kInf);
  if (t.edge) {
    vi key = splat_int((int32_t)(t.j + n));
    for (int v = 0; v < V; ++v) s[v] = (key >= b.first[v]) & (key < b.last[v]) ? s[v] : hidden;
  }
  if (t.bits) {
    vi bit;
    for (int k = 0; k < W; ++k) bit[k] = 1 << k;
    for (int v = 0; v < V; ++v) s[v] = (splat_int((int32_t)(t.bits[n] >> (v * W))) & bit) != 0 ? s[v] : hidden;
  }
}

template <int V, class Op, int M>
REGARD_INLINE void score_rows(const Block<V>& b, const Tile& t, const float* k, int64_t rs, int64_t cs, int64_t n, vf (&top)[V]) {
  vf acc[M][V];
  clear(acc);
  micro<Op, M, V>(acc, k + n * rs, rs, cs, b.w.q, kQueries, Op::pairs ? b.c.dk / 2 : b.c.dk);
  for (int i = 0; i < M; ++i) {
    steps<V, Op>(b, t, n + i, acc[i]);
    for (int v = 0; v < V; ++v) {
      top[v] = greater_of(acc[i][v], top[v]);
      store(b.w.s + (n + i) * kQueries + v * W, acc[i][v]);
    }
  }
}

template <int V, class Op>
static void score_tile(const Block<V>& b, const Tile& t, const float* k, int64_t rs, int64_t cs, vf (&top)[V]) {
  int64_t n = 0;
  for (; n + kRows <= t.count; n += kRows) score_rows<V, Op, kRows>(b, t, k, rs, cs, n, top);
  for (; n < t.count; ++n) score_rows<V, Op, 1>(b, t, k, rs, cs, n, top);
}

// The weight of one score, exp2(s - shift); its sum goes to `sum`, before dropout.
template <int V>
REGARD_INLINE vf weight(const Block<V>& b, int v, vf s, vf shift, vu key, vf& sum) {
  vf p = exp2v(s - shift);
  sum += p;
  if (b.c.threshold) p = (mix(b.word[v] + key) >> 8) >= b.c.threshold ? p * splat(b.c.keep) : splat(0.0f);
  return p;
}

// Scores become weights in place, their sums go to l. `pairs`: two keys' weights to a word. `mark`: hidden ones become -1.
template <int V, bool pairs>
static void weigh(Block<V>& b, const Tile& t, bool mark) {
  vf shift[V], sum[V];
  for (int v = 0; v < V; ++v) {
    shift[v] = b.m[v] == splat(-kInf) ? splat(0.0f) : b.m[v];
    sum[v] = vf{};
  }
  const int64_t* k_at = b.c.threshold ? b.c.k_at + offset(b.c.k_at_batch, b.p) + t.j : nullptr;
  for (int64_t n = 0; n < t.count; n += pairs ? 2 : 1) {
    const bool both = pairs && n + 1 < t.count;
    vu key = (k_at ? fold(k_at[n]) * 0x27D4EB2Fu : 0u) + vu{};
    vu next = (k_at && both ? fold(k_at[n + 1]) * 0x27D4EB2Fu : 0u) + vu{};
    for (int v = 0; v < V; ++v) {
      float* at = b.w.s + n * kQueries + v * W;
      vf s = load(at);
      vf p = weight<V>(b, v, s, shift[v], key, sum[v]);
      if (pairs) {
        vf second = both ? weight<V>(b, v, load(at + kQueries), shift[v], next, sum[v]) : vf{};
        store(b.w.s + n / 2 * kQueries + v * W, pair_of(p, second));
      } else {
        if (mark) p = s == splat(-kInf) ? splat(-1.0f) : p;
        store(at, p);
      }
    }
  }
  for (int v = 0; v < V; ++v) b.l[v] += sum[v];
}

template <int V, class Op, int M>
REGARD_INLINE void value_rows(const Block<V>& b, const Tile& t, const float* x, int64_t rs, int64_t cs, int64_t f, const vf (&alpha)[V]) {
  vf acc[M][V];
  clear(acc);
  micro<Op, M, V>(acc, x + f * rs, rs, cs, b.w.s, kQueries, Op::pairs ? (t.count + 1) / 2 : t.count);
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < V; ++v) {
      float* o = b.w.o + (f + i) * kQueries + v * W;
      store(o, load(o) * alpha[v] + acc[i][v]);
    }
}

template <int V, class Op>
static void value_tile(const Block<V>& b, const Tile& t, const float* x, int64_t rs, int64_t cs, const vf (&alpha)[V]) {
  int64_t f = 0;
  for (; f + kRows <= b.c.dv; f += kRows) value_rows<V, Op, kRows>(b, t, x, rs, cs, f, alpha);
  for (; f < b.c.dv; ++f) value_rows<V, Op, 1>(b, t, x, rs, cs, f, alpha);
}

// The same where a value is not finite and some lane must not meet it: 0 · NaN is NaN, so what is marked is left out.
template <int V>
static void value_tile_careful(const Block<V>& b, const Tile& t, const float* x, int64_t rs, int64_t cs, const vf (&alpha)[V]) {
  for (int64_t f = 0; f < b.c.dv; ++f)
    for (int v = 0; v < V; ++v) {
      vf acc = vf{};
      for (int64_t n = 0; n < t.count; ++n) {
        vf p = load(b.w.s + n * kQueries + v * W);
        vf seen = acc + p * splat(x[f * rs + n * cs]);
        acc = p == splat(-1.0f) ? acc : seen;
      }
      float* o = b.w.o + f * kQueries + v * W;
      store(o, load(o) * alpha[v] + acc);
    }
}

REGARD_INLINE bool all_finite(const float* x, int64_t rs, int64_t cs, int64_t features, int64_t count) {
  float sum = 0;  // x - x is 0 for what is finite and NaN for what is not
  if (rs == 1) {
    vf total = vf{};
    for (int64_t n = 0; n < count; ++n) {
      const float* row = x + n * cs;
      int64_t f = 0;
      for (; f + W <= features; f += W) total += load(row + f) - load(row + f);
      for (; f < features; ++f) sum += row[f] - row[f];
    }
    for (int n = 0; n < W; ++n) sum += total[n];
  } else {
    for (int64_t n = 0; n < count; ++n)
      for (int64_t f = 0; f < features; ++f) sum += x[f * rs + n * cs] - x[f * rs + n * cs];
  }
  return sum == 0;
}

// bool bytes [row][key] of a tile to bits [key] of rows.
static void bits_of(uint64_t* bits, const uint8_t* allowed, int64_t row, int64_t col, int64_t rows, int64_t keys) {
  for (int64_t n = 0; n < keys; ++n) bits[n] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* line = allowed + r * row;
    if (col == 1)
      for (int64_t n = 0; n < keys; ++n) bits[n] |= (uint64_t)(line[n] & 1) << r;
    else
      for (int64_t n = 0; n < keys; ++n) bits[n] |= (uint64_t)(line[n * col] & 1) << r;
  }
}

template <int V, class Op>
static void run_tile(Block<V>& b, Tile& t, const void* keys, const void* values) {
  const regard_call& c = b.c;
  const float *k, *x = nullptr;
  int64_t k_row = c.k.row, k_col = c.k.col, v_row = c.v.row, v_col = c.v.col;
  const uint16_t* half = (const uint16_t*)values + t.j * v_row;
  if (Op::pairs) {
    k = (const float*)((const uint16_t*)keys + t.j * k_row);
    k_row /= 2;
  } else if (c.dtype == REGARD_F32) {
    k = (const float*)keys + t.j * k_row;
    x = (const float*)values + t.j * v_row;
  } else {
    widen(b.w.k, (const uint16_t*)keys + t.j * k_row, c.dtype, k_row, k_col, t.count, c.dk);
    k = b.w.k, k_row = c.dk, k_col = 1;
  }
  if (c.bias.data) {
    int size = c.bias_dtype == REGARD_F32 ? 4 : 2;
    const char* bias = (const char*)c.bias.data + size * (offset(c.bias, b.p, b.p.h) + b.p.row * c.bias.row + t.j * c.bias.col);
    pack<V>(b.w.bias, kQueries, bias, c.bias_dtype, c.bias.row, c.bias.col, b.p.rows, t.count, kLog2e);
  }
  uint64_t bits[kKeys];
  if (t.allowed) {
    bits_of(bits, t.allowed, c.allowed.row, c.allowed.col, b.p.rows, t.count);
    t.bits = bits;
  }
  vf top[V], alpha[V];
  for (int v = 0; v < V; ++v) top[v] = b.m[v];
  score_tile<V, Op>(b, t, k, k_row, k_col, top);
  for (int v = 0; v < V; ++v) {
    vf shift = top[v] == splat(-kInf) ? splat(0.0f) : top[v];
    alpha[v] = exp2v(b.m[v] - shift);
    b.l[v] = b.l[v] * alpha[v];
    b.m[v] = top[v];
  }
  const bool some = t.edge || t.bits;
  if (Op::pairs && !(some && !all_finite_bf16(half, v_row, v_col, t.count, c.dv))) {
    weigh<V, true>(b, t, false);
    interleave(b.w.v, half, v_row, v_col, t.count, c.dv);
    value_tile<V, Op>(b, t, b.w.v, 1, c.dv, alpha);
    return;
  }
  if (c.dtype != REGARD_F32) {
    widen(b.w.v, half, c.dtype, v_row, v_col, t.count, c.dv);
    x = b.w.v, v_row = c.dv, v_col = 1;
  }
  bool careful = some && !all_finite(x, v_col, v_row, c.dv, t.count);
  weigh<V, false>(b, t, careful);
  if (careful)
    value_tile_careful<V>(b, t, x, v_col, v_row, alpha);
  else
    value_tile<V, Floats>(b, t, x, v_col, v_row, alpha);
}

template <int V>
static void finish(Block<V>& b) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  vf scale[V];
  float* lse = c.lse.data ? at<float>(c.lse, p, p.h) + p.row * c.lse.row : nullptr;
  for (int v = 0; v < V; ++v) {
    vi empty = b.l[v] == splat(0.0f);
    scale[v] = empty ? splat(0.0f) : splat(1.0f) / b.l[v];
    for (int n = 0; n < W && lse; ++n)
      if (v * W + n < p.rows)
        lse[(v * W + n) * c.lse.row] = b.l[v][n] == 0 ? -kInf : b.m[v][n] * kLn2 + __builtin_logf(b.l[v][n]);
  }
  char* out = (char*)c.out.data;
  int64_t base = offset(c.out, p, p.h) + p.row * c.out.row;
  for (int v = 0; v < V; ++v) {
    int64_t f = 0;
    int64_t rows = p.rows - v * W < W ? p.rows - v * W : W;
    for (; f < c.dv; f += W) {
      vf r[W];
      int64_t features = c.dv - f < W ? c.dv - f : W;
      for (int n = 0; n < W; ++n) r[n] = n < features ? load(b.w.o + (f + n) * kQueries + v * W) * scale[v] : vf{};
      transpose(r);
      for (int64_t i = 0; i < rows; ++i) {
        int64_t to = base + (v * W + i) * c.out.row + f * c.out.col;
        if (c.out_dtype == REGARD_F32 && c.out.col == 1 && features == W) {
          store((float*)out + to, r[i]);
          continue;
        }
        for (int64_t n = 0; n < features; ++n) {
          float x = r[i][n];
          if (c.out_dtype == REGARD_F32) ((float*)out)[to + n * c.out.col] = x;
          else ((uint16_t*)out)[to + n * c.out.col] = c.out_dtype == REGARD_BF16 ? float_to_bf16(x) : float_to_fp16(x);
        }
      }
    }
  }
}

template <int V, class Op>
static void run_block(const regard_call& c, const Scratch& w, const Place& p) {
  Block<V> b{c, w, p};
  int64_t lo = 0, hi = c.nk, inner_lo = 0, inner_hi = c.nk;
  if (c.start.data) {
    const int32_t* start = at<int32_t>(c.start, p, p.h) + p.row * c.start.row;
    const int32_t* stop = at<int32_t>(c.stop, p, p.h) + p.row * c.stop.row;
    lo = c.nk, hi = 0;
    for (int64_t n = 0; n < V * W; ++n) {
      int32_t a = 0, z = 0;
      if (n < p.rows) {
        a = start[n * c.start.row], z = stop[n * c.stop.row];
        if (a < z) lo = a < lo ? a : lo, hi = z > hi ? z : hi;
        inner_lo = a > inner_lo ? a : inner_lo;
        inner_hi = z < inner_hi ? z : inner_hi;
      }
      b.first[n / W][n % W] = a, b.last[n / W][n % W] = z;
    }
  }
  const float to_base_2 = c.cap != 0 ? c.scale / c.cap : c.scale * kLog2e;
  int size = c.dtype == REGARD_F32 ? 4 : 2;
  const char* q = (const char*)c.q.data + size * (offset(c.q, p, p.h) + p.row * c.q.row);
  b.factor = to_base_2;
  if (Op::pairs)
    pack_pairs<V>(w.q, kQueries, (const uint16_t*)q, c.q.row, p.rows, c.dk / 2);
  else
    pack<V>(w.q, kQueries, q, c.dtype, c.q.row, c.q.col, p.rows, c.dk, to_base_2);
  for (int64_t n = 0; n < c.dv * kQueries; n += W) store(w.o + n, vf{});
  for (int v = 0; v < V; ++v) b.m[v] = splat(-kInf), b.l[v] = vf{};
  if (c.slopes || c.threshold) {
    const int64_t* q_at = c.q_at + offset(c.q_at_batch, p) + p.row;
    b.base = q_at[0];
    uint32_t seed = head_word(c, p);
    for (int64_t n = 0; n < V * W; ++n) {
      int64_t i = q_at[n < p.rows ? n : 0];
      b.relative[n / W][n % W] = (int32_t)(i - b.base);
      b.word[n / W][n % W] = mix(seed + fold(i) * 0xC2B2AE3Du);
    }
  }
  b.slope = c.slopes ? c.slopes[c.slope_stride * p.h] * kLog2e : 0;
  b.offsets = c.offsets ? c.offsets + c.offset_stride * p.h : nullptr;
  int64_t key_head = p.h / (c.heads / c.key_heads);
  const char* keys = (const char*)c.k.data + size * offset(c.k, p, key_head);
  const char* values = (const char*)c.v.data + size * offset(c.v, p, key_head);
  const int32_t* map = c.tiles.data ? at<int32_t>(c.tiles, p, p.h) + p.row / kQueries * c.tiles.row : nullptr;
  const uint8_t* allowed = c.allowed.data ? at<uint8_t>(c.allowed, p, p.h) + p.row * c.allowed.row : nullptr;
  for (int64_t j = map ? lo / kKeys * kKeys : lo; j < hi; j += kKeys) {
    Tile t{j, hi - j < kKeys ? hi - j : kKeys, false, nullptr, allowed ? allowed + j * c.allowed.col : nullptr};
    t.edge = c.start.data && (j < inner_lo || j + t.count > inner_hi);
    if (map) {
      int32_t which = map[j / kKeys * c.tiles.col];
      if (which == -1) continue;
      if (which >= 0) t.bits = c.bits + which * kKeys;
    }
    run_tile<V, Op>(b, t, keys, values);
  }
  finish<V>(b);
}

template <class Op>
static void run_rows(const regard_call& c, const Scratch& w, const Place& p) {
  switch ((p.rows + W - 1) / W) {
    case 1: return run_block<1, Op>(c, w, p);
    case 2: return run_block<2, Op>(c, w, p);
    case 3: return run_block<3, Op>(c, w, p);
    default: return run_block<kVectors, Op>(c, w, p);
  }
}

static void run_item(const regard_call& c, const Scratch& w, const Place& p) {
#if defined(__AVX512BF16__)
  if (c.dtype == REGARD_BF16 && c.dk % 2 == 0 && c.q.col == 1 && c.k.col == 1 && c.k.row % 2 == 0) return run_rows<Pairs>(c, w, p);
#endif
  run_rows<Floats>(c, w, p);
}

static int64_t forward_scratch(const regard_call& c) {
  int64_t half = c.dtype == REGARD_F32 ? 0 : kKeys * (c.dk + c.dv);
  return (c.dk + c.dv + 2 * kKeys) * kQueries + half + 4 * W;
}

static Scratch forward_places(const regard_call& c, float* at) {
  Scratch w;
  w.q = at, at += c.dk * kQueries;
  w.s = at, at += kKeys * kQueries;
  w.o = at, at += c.dv * kQueries;
  w.bias = at, at += kKeys * kQueries;
  w.k = at, at += c.dtype == REGARD_F32 ? 0 : kKeys * c.dk;
  w.v = at;
  return w;
}

}  // namespace regard
