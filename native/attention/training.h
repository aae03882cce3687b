// The backward pass: what its threads share, what one of them holds, and the products whose lanes are features.
#pragma once
#include "attention/decode.h"

namespace regard {

constexpr int64_t kBlocks = W == 16 ? 1 : 4;  // blocks of queries whose weights are held at once
constexpr int64_t kHeld = kBlocks * kQueries;
constexpr int kDown = W == 8 ? 6 : 4;    // rows, and vectors of features, of a product whose lanes are features
constexpr int kAcross = W == 16 ? 4 : 2;

constexpr int64_t kParts = 32;     // items that are wanted; where batch and heads give fewer, keys and queries are split
constexpr int64_t kLeast = 512;    // into parts of at least so many

struct Training {
  const regard_gradients& g;
  const regard_call& c;
  int64_t elements, blocks, tiles;              // batch elements, blocks of queries, tiles of keys
  bool anew;                                    // the forward added a score's products in another order than the one here
  int64_t classes, key_parts, query_parts;      // an item is one of each
  int64_t wide_k, wide_v;                       // from one row to the next: see lead
  bool scores, tied[REGARD_BATCH_AXES + 1];     // whether dS is wanted; the axes (and heads) that share a bias gradient
  // What the first phase finds for each (element, head, query): weights are exp2(s - shift) · inverse.
  float *shift, *inverse, *delta;
  Limits* limits;      // (element, head, block of queries)
  float *dq, *dk, *dv;  // sums of each part, where there is more than one; else 0
  double* sums[Modifiers::count];  // of the modifiers' gradients: (part, element, head, grad_size)
};

// Scratch of one thread.
struct Sweep {
  float *k, *v;        // [kTile][wide] a tile of keys, widened
  float *dk, *dv;      // [kTile][wide] its gradients
  float *q, *dout;     // [kHeld][wide] queries and cotangents, lanes are features
  float *qt, *doutt;   // [dk], [dv][kQueries], lanes are queries
  float *p, *ds;       // [kBlocks][kTile][kQueries]
  float *bias, *derivative;  // [kTile][kQueries]; derivative: of the modifiers
  float* dq;           // [heads of a group][queries of a part][wide_k], where keys are not split
};

// From one row to the next of what is held in scratch: not a power of two, whose rows would share a few lines of the cache.
REGARD_INLINE int64_t lead(int64_t n) { return round_up(n) + (round_up(n) % 128 == 0 ? 16 : 0); }
REGARD_INLINE int64_t cut(int64_t n, int64_t part, int64_t parts) { return n * part / parts; }

// One share of a sum of products: a row's elements, each times a vector of b.
struct Term {
  const float* a;
  int64_t rs, cs;
  const float* b;
  int64_t ldb, count;
  int64_t first, last;  // rows that it has a share in
  const float* marks;   // weights, like a, that are -1 where the element must not meet b; 0 for none
};

template <int M, int V>
REGARD_INLINE void add_rows(float* to, int64_t ld, const Term* terms, int64_t count, int64_t row, int64_t col) {
  vf acc[M][V];
  clear(acc);
  for (int64_t n = 0; n < count; ++n) {
    const Term& t = terms[n];
    if (t.marks || row + M <= t.first || row >= t.last) continue;
    Isa::multiply_tiles<Floats, M, V>(acc, t.a + row * t.rs, t.rs, t.cs, t.b + col, t.ldb, t.count);
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* at = to + (row + i) * ld + col + v * W;
      store(at, load(at) + acc[i][v]);
    }
}

template <int V>
REGARD_ALONE void add_panel(float* to, int64_t ld, const Term* terms, int64_t count, int64_t rows, int64_t col) {
  int64_t row = 0;
  for (; row + kDown <= rows; row += kDown) add_rows<kDown, V>(to, ld, terms, count, row, col);
  for (; row + 2 <= rows; row += 2) add_rows<2, V>(to, ld, terms, count, row, col);
  if (row < rows) add_rows<1, V>(to, ld, terms, count, row, col);
}

// The same for a term with marks: 0 · NaN is NaN, so what is marked is left out.
static void add_careful(float* to, int64_t ld, const Term& t, int64_t rows, int64_t cols) {
  for (int64_t row = t.first; row < (t.last < rows ? t.last : rows); ++row)
    for (int64_t col = 0; col < cols; col += W) {
      vf acc = vf{};
      for (int64_t k = 0; k < t.count; ++k) {
        const int64_t at = row * t.rs + k * t.cs;
        if (t.marks[at] != -1.0f) acc += splat(t.a[at]) * load(t.b + k * t.ldb + col);
      }
      store(to + row * ld + col, load(to + row * ld + col) + acc);
    }
}

// to[rows][cols] += sum over terms of a · b
static void add_product(float* to, int64_t ld, const Term* terms, int64_t count, int64_t rows, int64_t cols) {
  int64_t col = 0;
  for (; col + kAcross * W <= cols; col += kAcross * W) add_panel<kAcross>(to, ld, terms, count, rows, col);
  for (; col < cols; col += W) add_panel<1>(to, ld, terms, count, rows, col);
  for (int64_t n = 0; n < count; ++n)
    if (terms[n].marks) add_careful(to, ld, terms[n], rows, cols);
}

// rows × cols elements at src as floats in rows of `wide`, zeros after them.
template <int dtype>
static void widen_as(float* dst, int64_t wide, const char* src, int64_t row, int64_t col, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const char* line = src + r * row * size_of(dtype);
    int64_t n = 0;
    if (col == 1)
      for (; n + W <= cols; n += W) store(dst + r * wide + n, load_some(line, n, dtype));
    for (; n < cols; ++n) dst[r * wide + n] = load_one(line, n * col, dtype);
    for (; n < wide; ++n) dst[r * wide + n] = 0;
  }
}

static void widen_rows(float* dst, int64_t wide, const char* src, int dtype, int64_t row, int64_t col, int64_t rows, int64_t cols) {
  if (dtype == REGARD_F32) return widen_as<REGARD_F32>(dst, wide, src, row, col, rows, cols);
  if (dtype == REGARD_BF16) return widen_as<REGARD_BF16>(dst, wide, src, row, col, rows, cols);
  widen_as<REGARD_F16>(dst, wide, src, row, col, rows, cols);
}

// rows of `parts` sums, `apart` from each other and added in order, times scale, to a gradient.
static void write_rows(void* to, int dtype, int64_t row, int64_t col, const float* from, int64_t wide, int64_t parts, int64_t apart,
                       int64_t rows, int64_t cols, float scale) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < cols; n += W) {
      const float* at = from + r * wide + n;
      vf x = load(at);
      for (int64_t m = 1; m < parts; ++m) x += load(at + m * apart);
      x *= splat(scale);
      const int64_t place = r * row + n * col;
      if (dtype == REGARD_F32 && col == 1 && n + W <= cols) {
        store((float*)to + place, x);
        continue;
      }
      for (int64_t m = 0; m < W && n + m < cols; ++m) {
        if (dtype == REGARD_F32) ((float*)to)[place + m * col] = x[m];
        else ((uint16_t*)to)[place + m * col] = dtype == REGARD_BF16 ? float_to_bf16(x[m]) : float_to_fp16(x[m]);
      }
    }
}

}  // namespace regard
