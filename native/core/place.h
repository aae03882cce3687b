// Where the queries and keys of a block lie in a call, and what a thread keeps of them in scratch.
#pragma once
#include "core/pack.h"

namespace regard {

constexpr int kVectors = Isa::kBlockVectors;
constexpr int kMR = 4;  // rows of A (keys, or features) that a microkernel takes at once
constexpr int64_t kQueries = kVectors * W;
constexpr int64_t kKeys = REGARD_TILE;  // keys of a tile, and of a tile of a tile map
// Where a block begins to read keys: so that pairs, groups of kMR keys and what a matrix unit sums over are whole.
constexpr int64_t kKeyStep = Isa::kMatrixUnit ? 32 : Isa::kOuterProducts ? kQueries : kMR;
constexpr int64_t kTile = 128;  // keys of a tile of the backward; divides kKeys
// Blocks of queries, at most, that use a tile of keys one after the other.
constexpr int64_t kGroup = Isa::kMatrixUnit ? 16 : W == 16 ? 4 : 8;
// Tiles of keys and values that are held at once, of numbers of so many parts.
constexpr int64_t tiles_at_once(int64_t parts) { return parts == 1 ? 8 : parts ? 4 : 1; }
// Floats of q and o of those blocks, at most. Processors with a matrix unit have 2 MB of second-level cache.
constexpr int64_t kGroupFloats = Isa::kMatrixUnit ? 1 << 19 : 1 << 15;
// The same where keys and values are int8: more blocks share what it takes to widen a tile. Measured with 32 heads of
// 128 features on 8 key heads, 8,192 keys and 128 to 2,048 queries: 4 to 9 % faster.
constexpr int64_t kGroupFloatsInt8 = Isa::kMatrixUnit ? kGroupFloats : 3 * kGroupFloats;

// Prefetches to the second-level cache. Always inlined: GCC takes a function that only prefetches for one without
// effect, and drops its calls.
REGARD_INLINE void fetch(const char* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
}

// Rows of the next tile, or of results, prefetched a few at a time between the products of this one: the hardware
// prefetcher does not go that far.
struct Prefetch {
  const char* first;
  int64_t step, bytes, rows;  // bytes from row to row, bytes of a row, how many rows (0: none to prefetch)

  __attribute__((always_inline)) void fetch_rows(int64_t from, int64_t to) const {
    for (int64_t n = from; n < to && n < rows; ++n) fetch(first + n * step, bytes);
  }
  // The share of the rows that belongs to [from, to) of `whole` steps.
  __attribute__((always_inline)) void fetch_share(int64_t from, int64_t to, int64_t whole) const {
    if (rows) fetch_rows(from * rows / whole, to * rows / whole);
  }
};

// What the next item reads, where it is short: nothing of that is in the caches.
struct NextItem {
  Prefetch keys, values, queries;
};

// Scratch of one thread. All float; sizes in forward_scratch.
struct Scratch {
  float* q;          // [dk][kQueries], scaled, base 2
  float* s;          // [kKeys][kQueries] scores, then weights
  float* o;          // [dv][kQueries]
  float* modifiers;  // what the modifiers load of a tile
  float* k;          // [kKeys][dk] what cannot be read in place: half precision, or features that are not neighbours;
                     // of outer products panels of all keys, [kKeys / kQueries][dk][kQueries], before that
  float* v;          // [kKeys][dv]
  float* pairs;      // [kKeys / 2][dv] of bfloat16, interleaved
  // where a matrix unit multiplies: of queries [part][kQueries][dk], of keys [part][kKeys][dk], of values
  // [part][dv][kKeys] and before they are transposed [part][32][dv], of weights [part][kKeys / 2][kQueries] pairs; dk
  // and dv rounded up
  uint16_t *q_parts, *k_parts, *v_parts, *v_split;
  float* p_parts;
  struct MatrixStream* stream;  // of the blocks of an item
  NextItem next;
  char *k_rows,
      *v_rows;  // [kKeys][dk], [kKeys][dv] of the call's dtype: rows that lie in several pages, one behind the other
};

struct Place {  // where one work item lies: batch element, head, the first query and how many
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

// Batch elements, over all batch axes.
static int64_t elements(const regard_call& c) {
  int64_t product = 1;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) product *= c.batch[n];
  return product;
}

// The first row of a head of batch element b, counted over all batch axes.
static Place place_in_batch(const regard_call& c, int64_t b) {
  Place p{};
  p.b = b;
  for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) {
    p.at[n] = b % c.batch[n];
    b /= c.batch[n];
  }
  return p;
}

// `width` floats for each of the rows of each head, without gaps. batch: how many there are along each of its axes.
static regard_tensor without_gaps(void* data, const int64_t* batch, int64_t heads, int64_t rows, int64_t width) {
  regard_tensor t{};
  t.data = data;
  t.col = 1;
  t.row = width;
  t.head = rows * width;
  int64_t step = heads * t.head;
  for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) {
    t.batch[n] = step;
    step *= batch[n];
  }
  return t;
}

// A block of at most `most` queries, from `row` on.
static Place place_at(const regard_call& c, int64_t b, int64_t head, int64_t row, int64_t most = kQueries) {
  Place p = place_in_batch(c, b);
  p.h = head;
  p.row = row;
  p.rows = c.nq - row < most ? c.nq - row : most;
  return p;
}

// The keys [lo, hi) that at least one of several rows sees, and the keys [inner_lo, inner_hi) that all of them see.
struct Limits {
  int64_t lo, hi, inner_lo, inner_hi;

  static Limits none(const regard_call& c) { return {c.nk, 0, 0, c.nk}; }

  void add(int64_t first, int64_t last) {
    if (first < last) {
      lo = first < lo ? first : lo;
      hi = last > hi ? last : hi;
    }
    inner_lo = first > inner_lo ? first : inner_lo;
    inner_hi = last < inner_hi ? last : inner_hi;
  }
};

// Of the numbers of a call or an operand.
REGARD_INLINE int dtype_of(const regard_tensor& t) { return (int)t.dtype; }
REGARD_INLINE constexpr int64_t size_of(int dtype) { return dtype == REGARD_F32 ? 4 : dtype == REGARD_I8 ? 1 : 2; }

static const void* advance(const void* p, int64_t n, int dtype) { return (const char*)p + n * size_of(dtype); }

// Whether rows of K (of V) can be read in place: as floats whose features are neighbours.
static bool in_place(const regard_call& c, const regard_tensor& t) {
  return c.dtype == REGARD_F32 && dtype_of(t) != REGARD_I8 && t.col == 1;
}

// `rows` rows of a head of a tensor, from `row` on; none where there is no tensor, or its features are no neighbours.
static Prefetch prefetch_rows(const regard_tensor& t, int dtype, const Place& p, int64_t head, int64_t row,
                              int64_t rows, int64_t features) {
  if (!t.data || t.col != 1) return {};
  const void* first = advance(t.data, offset(t, p, head) + row * t.row, dtype);
  const int64_t size = size_of(dtype);
  return {(const char*)first, size * t.row, size * features, rows};
}

// Floats of Scratch::k.
[[maybe_unused]] static int64_t key_floats(const regard_call& c) {
  if (Isa::kOuterProducts) return kKeys * c.dk * (c.k_scales.data ? 2 : 1);
  return in_place(c, c.k) ? 0 : kKeys * c.dk;
}

// The compiler moves no read of memory across this.
REGARD_INLINE void keep_order() { __asm__ volatile("" ::: "memory"); }

// A tile's rows of keys (of values), `first` and those behind it, where prefetching was measured to pay: they are read
// in place, do not fit in the second-level cache, and are long, or read by one block only (`alone`).
static Prefetch prefetch_of(const regard_call& c, const regard_tensor& t, const void* first, int64_t features,
                            int64_t rows, bool alone) {
  const int64_t bytes = features * 4;
  const bool pays = in_place(c, t) && c.nk * bytes > 1 << 19 && (alone || bytes > 256);
  return {(const char*)first, t.row * 4, bytes, pays ? rows : 0};
}

struct Tile {
  int64_t j, count;        // keys
  bool edge;               // the intervals hide some pair
  const uint64_t* bits;    // of each key, one bit a query, where bits hide some pair; else null
  const uint8_t* allowed;  // the boolean bytes of the tile, or null
  uint32_t masks;          // those of TileMasks that hide some pair
  Prefetch keys, values, results;
};

}  // namespace regard
