// Forward: for a block of queries (the lanes) stream over blocks of keys; see micro.h for the product.
#pragma once
#include "steps.h"

namespace regard {

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
