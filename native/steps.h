// What happens to a score after the similarity and before the sum: soft cap, slopes, offsets, bias, mask, dropout.
#pragma once
#include "pack.h"

namespace regard {

#if defined(__aarch64__)
constexpr int kVectors = 4;  // vectors of queries in a block: with kRows, as many products as registers hold
#else
constexpr int kVectors = W == 16 ? 4 : 3;
#endif
constexpr int kRows = 4;  // keys, or features, a microkernel advances by
constexpr int64_t kQueries = kVectors * W;
constexpr int64_t kKeys = 128;
constexpr int64_t kGroup = W == 16 ? 4 : 8;  // blocks of queries, at most, that meet a tile of keys one after the other

// Scratch of one thread. All float; sizes in forward_scratch.
struct Scratch {
  float* q;     // [dk][kQueries], scaled, base 2
  float* s;     // [kKeys][kQueries] scores, then weights
  float* o;     // [dv][kQueries]
  float* bias;  // [kKeys][kQueries]
  float* k;     // [kKeys][dk] what cannot be read in place: half precision, or features that are not neighbours
  float* v;     // [kKeys][dv]
  float* pairs;  // [kKeys / 2][dv] of bfloat16, interleaved
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

// The first row of a head of batch element b, counted over all batch axes.
static Place place_in_batch(const regard_call& c, int64_t b) {
  Place p{};
  p.b = b;
  for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) p.at[n] = b % c.batch[n], b /= c.batch[n];
  return p;
}

// A block of at most `most` queries, from `row` on.
static Place place_at(const regard_call& c, int64_t b, int64_t head, int64_t row, int64_t most = kQueries) {
  Place p = place_in_batch(c, b);
  p.h = head, p.row = row;
  p.rows = c.nq - row < most ? c.nq - row : most;
  return p;
}

// The keys that some row of several sees, [lo, hi), and those that all of them see.
struct Limits {
  int64_t lo, hi, inner_lo, inner_hi;

  static Limits none(const regard_call& c) { return {c.nk, 0, 0, c.nk}; }

  void add(int64_t first, int64_t last) {
    if (first < last) lo = first < lo ? first : lo, hi = last > hi ? last : hi;
    inner_lo = first > inner_lo ? first : inner_lo;
    inner_hi = last < inner_hi ? last : inner_hi;
  }
};

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

// Dropout's words of a query, and of a key.
REGARD_INLINE uint32_t query_word(uint32_t head, int64_t at) { return mix((uint32_t)(head + fold(at) * 0xC2B2AE3Du)); }
REGARD_INLINE uint32_t key_word(int64_t at) { return fold(at) * 0x27D4EB2Fu; }

REGARD_INLINE vi stays(const regard_call& c, vu query, vu key) { return (mix(query + key) >> 8) >= c.threshold; }

// What a step of distance costs, base 2; rest: what rounding took, which long distances would multiply.
struct Slope {
  float most, rest;
};

REGARD_INLINE vf sloped(vf s, const Slope& slope, vf distance) {
  const vf away = (vf)((vi)distance & splat_int(0x7fffffff));
  s -= splat(slope.most) * away;
  return s - splat(slope.rest) * away;
}

REGARD_INLINE Slope slope_of(const regard_call& c, int64_t head) {
  const double slope = c.slopes ? c.slopes[c.slope_stride * head] * 1.4426950408889634 : 0;
  return {(float)slope, (float)(slope - (float)slope)};
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
  Slope slope;
  float factor;         // what the scores of pairs are multiplied by; floats have it in q
  const float* offsets;
  int64_t lo, hi, inner_lo, inner_hi;  // keys that some lane sees, and keys that every lane sees
  const int32_t* map;                  // this block's row of the tile map, or 0
};

struct Tile {
  int64_t j, count;      // keys
  bool edge;             // some lane does not see some key, by its interval
  const uint64_t* bits;  // some lane does not see some key, by the tile map
  const uint8_t* allowed;
};

// What a dot product is multiplied by on its way to the cap, or to base 2.
REGARD_INLINE float factor_of(const regard_call& c) { return c.cap != 0 ? c.scale / c.cap : c.scale * kLog2e; }

// The keys that each lane sees; one without a query sees none.
template <int V>
static void begin_lanes(Block<V>& b) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  const int32_t* start = c.start.data ? at<int32_t>(c.start, p, p.h) + p.row * c.start.row : nullptr;
  const int32_t* stop = c.stop.data ? at<int32_t>(c.stop, p, p.h) + p.row * c.stop.row : nullptr;
  for (int64_t n = 0; n < V * W; ++n) {
    const bool there = n < p.rows;
    b.first[n / W][n % W] = there && start ? start[n * c.start.row] : 0;
    b.last[n / W][n % W] = !there ? 0 : stop ? stop[n * c.stop.row] : (int32_t)c.nk;
  }
}

// Of a block's queries.
static Limits limits_of(const regard_call& c, const Place& p) {
  if (!c.start.data) return {0, c.nk, 0, c.nk};
  const int32_t* start = at<int32_t>(c.start, p, p.h) + p.row * c.start.row;
  const int32_t* stop = at<int32_t>(c.stop, p, p.h) + p.row * c.stop.row;
  Limits limits = Limits::none(c);
  for (int64_t n = 0; n < p.rows; ++n) limits.add(start[n * c.start.row], stop[n * c.stop.row]);
  return limits;
}

// What the steps need to know of a block's queries.
template <int V>
static void begin_steps(Block<V>& b) {
  const regard_call& c = b.c;
  const Place& p = b.p;
  if (c.slopes || c.threshold) {
    const int64_t* q_at = c.q_at + offset(c.q_at_batch, p) + p.row;
    b.base = q_at[0];
    const uint32_t seed = head_word(c, p);
    for (int64_t n = 0; n < V * W; ++n) {
      const int64_t i = q_at[n < p.rows ? n : 0];
      b.relative[n / W][n % W] = (int32_t)(i - b.base);
      b.word[n / W][n % W] = query_word(seed, i);
    }
  }
  b.slope = slope_of(c, p.h);
  b.offsets = c.offsets ? c.offsets + c.offset_stride * p.h : nullptr;
}

// The bias of a tile, transposed, in base 2.
template <int V>
static void bring_bias(const Block<V>& b, const Tile& t) {
  const regard_call& c = b.c;
  if (!c.bias.data) return;
  const int64_t from = offset(c.bias, b.p, b.p.h) + b.p.row * c.bias.row + t.j * c.bias.col;
  const void* bias = (const char*)c.bias.data + from * (c.bias_dtype == REGARD_F32 ? 4 : 2);
  pack<V>(b.w.bias, kQueries, bias, c.bias_dtype, c.bias.row, c.bias.col, b.p.rows, t.count, kLog2e);
}

// A score, or -inf for the lanes that do not see the key.
REGARD_INLINE vf within(vf s, int64_t key, vi first, vi last) {
  vi k = splat_int((int32_t)key);
  return (k >= first) & (k < last) ? s : splat(-kInf);
}

REGARD_INLINE vf where_set(vf s, uint64_t word) {
  vi bit;
  for (int k = 0; k < W; ++k) bit[k] = 1 << k;
  return (splat_int((int32_t)word) & bit) != 0 ? s : splat(-kInf);
}

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
    for (int v = 0; v < V; ++v) s[v] = sloped(s[v], b.slope, __builtin_convertvector(b.relative[v] + splat_int(ahead), vf));
  }
  if (b.offsets)
    for (int v = 0; v < V; ++v) s[v] += load(b.offsets + (b.p.row + v * W - (t.j + n) + c.nk - 1)) * splat(kLog2e);
  if (c.bias.data)
    for (int v = 0; v < V; ++v) s[v] += load(b.w.bias + n * kQueries + v * W);
  if (t.edge)
    for (int v = 0; v < V; ++v) s[v] = within(s[v], t.j + n, b.first[v], b.last[v]);
  if (t.bits)
    for (int v = 0; v < V; ++v) s[v] = where_set(s[v], t.bits[n] >> (v * W));
}

// The weight of one score, exp2(s - shift); its sum goes to `sum`, before dropout.
template <int V>
REGARD_INLINE vf weight(const Block<V>& b, int v, vf s, vf shift, vu key, vf& sum) {
  vf p = exp2v(s - shift);
  sum += p;
  if (b.c.threshold) p = select(stays(b.c, b.word[v], key), p * splat(b.c.keep), vf{});
  return p;
}

}  // namespace regard
