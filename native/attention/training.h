// The backward pass: its arguments, the memory that all threads share, the scratch of one thread, and the products
// whose lanes are features.
#pragma once
#include "attention/decode.h"

namespace regard {

constexpr int64_t kBlocksAtOnce = W == 16 ? 1 : 4;  // blocks of queries whose weights are held at once
constexpr int64_t kQueriesAtOnce = kBlocksAtOnce * kQueries;
// Rows of A, and vectors of features of B, in a product whose lanes are features.
constexpr int kGradMR = W != 8 ? 4 : Isa::kManyRegisters ? 8 : 6;
constexpr int kGradNR = W == 16 ? 4 : 2;

// Floats of the queries of a pair, and of their cotangents, at most, that a thread holds from tile to tile.
constexpr int64_t kHeldBlockFloats = 1 << 17;
constexpr int64_t kMostHeldBlocks = 64;  // blocks

constexpr int64_t kWantedItems = 32;  // where batch and heads give fewer items, keys and queries are split into parts
constexpr int64_t kMinSplit = 512;    // keys, or queries, of a part at least

struct BackwardCall {
  const regard_gradients& g;
  const regard_call& c;
  int64_t elements, blocks, tiles;  // batch elements, blocks of queries, tiles of keys
  bool recompute_stats;             // the forward added the products of a score in another order than this backward
  GradientSharing sharing;          // of the modifiers' gradients that are added in place
  int64_t independent;              // sets of (batch element, key head) pairs that share no gradient
  int64_t key_parts, query_parts;   // an item is one of `independent`, a part of the keys, a part of the queries
  int64_t held;                     // blocks of queries that a thread holds from tile to tile; 0: they are read again
  int64_t ldk, ldv;                 // leading dimensions of rows in scratch
  bool scores;                      // whether dS is computed
  int64_t parts;                    // of the numbers that a matrix unit multiplies; 0: vectors multiply
  float *shift, *inverse,
      *delta;           // (element, head, query), from the first phase: weights are exp2(s - shift) · inverse
  float* unfit;         // (element, head): not 0 where a number has no parts
  Limits* limits;       // (element, head, block of queries)
  float *dq, *dk, *dv;  // the sums of each part, where there is more than one; else null
  double* sums[Modifiers::count];  // of the modifiers' gradients: (part, element, head, grad_size)
};

// Scratch of one thread.
struct BackwardScratch {
  float *k, *v;    // [kTile][ld] a tile of keys and values, as floats
  float *dk, *dv;  // [kTile][ld] its gradients; of a matrix unit, of all tiles that are held, see MatrixTile
  // of each block that is held: [kQueries][ld] queries and cotangents, whose lanes are features; [dk], [dv][kQueries],
  // whose lanes are queries
  float *q, *dout, *qt, *doutt;
  float *p, *ds;            // [kBlocksAtOnce][kTile][kQueries] weights after dropout, gradients of scores
  float *modifiers, *kept;  // what the modifiers load of a tile; what they keep of it for their backward
  float* dq;                // [heads of a group][queries of a part][ldk], where keys are not split
  // where a matrix unit multiplies: blocks of queries as its operands, whether each is finite, and their dQ^T,
  // [32 queries after the other][dk][32], of all heads of a group; rows of a block as they are packed; the keys and
  // values of the tiles that are held, and their keys transposed in blocks of 32; room for transposing; weights after
  // dropout and gradients of scores, see WeightParts, and the latter in pairs of keys; [kQueries][ldk] of one block;
  // [kTile][ld] of one tile
  float *blocks, *finite, *dqt;
  uint16_t *block_rows, *k_rows, *v_rows, *kt, *split, *p_parts, *ds_parts;
  float *ds_pairs, *spare, *rows_dk, *rows_dv;

  // With the rows of the n-th block.
  BackwardScratch of_block(const BackwardCall& w, int64_t n) const {
    BackwardScratch own = *this;
    own.q += n * kQueries * w.ldk;
    own.dout += n * kQueries * w.ldv;
    own.qt += n * kQueries * w.c.dk;
    own.doutt += n * kQueries * w.c.dv;
    return own;
  }
};

// The leading dimension of rows of n floats in scratch: not a power of two, since such rows map to few sets of the
// cache.
REGARD_INLINE int64_t leading_dim(int64_t n) { return round_up(n) + (round_up(n) % 128 == 0 ? 16 : 0); }
// Where a part of n things begins.
REGARD_INLINE int64_t cut(int64_t n, int64_t part, int64_t parts) { return n * part / parts; }

// One term of a sum of products: A (rows × count) times b (count × columns).
struct Term {
  const float* a;
  int64_t rs, cs;
  const float* b;
  int64_t ldb, count;
  int64_t first, last;  // the rows of A that are not all 0
  const float* marks;   // weights, laid out like a: -1 where the element is to be skipped; null for none
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
REGARD_NOINLINE void add_panel(float* to, int64_t ld, const Term* terms, int64_t count, int64_t rows, int64_t col) {
  int64_t row = 0;
  for (; row + kGradMR <= rows; row += kGradMR) add_rows<kGradMR, V>(to, ld, terms, count, row, col);
  for (; row + 2 <= rows; row += 2) add_rows<2, V>(to, ld, terms, count, row, col);
  if (row < rows) add_rows<1, V>(to, ld, terms, count, row, col);
}

// The same for a term with marks: 0 · NaN is NaN, so marked elements are skipped.
static void add_visible(float* to, int64_t ld, const Term& t, int64_t rows, int64_t cols) {
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

// to[rows][cols] += Σ over terms of A b
static void add_product(float* to, int64_t ld, const Term* terms, int64_t count, int64_t rows, int64_t cols) {
  int64_t col = 0;
  for (; col + kGradNR * W <= cols; col += kGradNR * W) add_panel<kGradNR>(to, ld, terms, count, rows, col);
  if (kGradNR > 2 && col + 2 * W <= cols) {
    add_panel<2>(to, ld, terms, count, rows, col);
    col += 2 * W;
  }
  for (; col < cols; col += W) add_panel<1>(to, ld, terms, count, rows, col);
  for (int64_t n = 0; n < count; ++n)
    if (terms[n].marks) add_visible(to, ld, terms[n], rows, cols);
}

// Converts rows × cols elements at src to floats in rows of `ld`, padded by zeros.
template <int dtype>
static void widen_as(float* dst, int64_t ld, const char* src, int64_t row, int64_t col, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const char* line = src + r * row * size_of(dtype);
    int64_t n = 0;
    if (col == 1)
      for (; n + W <= cols; n += W) store(dst + r * ld + n, load_some(line, n, dtype));
    for (; n < cols; ++n) dst[r * ld + n] = load_one(line, n * col, dtype);
    for (; n < ld; ++n) dst[r * ld + n] = 0;
  }
}

static void widen_rows(float* dst, int64_t ld, const char* src, int dtype, int64_t row, int64_t col, int64_t rows,
                       int64_t cols) {
  if (dtype == REGARD_F32) return widen_as<REGARD_F32>(dst, ld, src, row, col, rows, cols);
  if (dtype == REGARD_BF16) return widen_as<REGARD_BF16>(dst, ld, src, row, col, rows, cols);
  widen_as<REGARD_F16>(dst, ld, src, row, col, rows, cols);
}

// Adds the rows of `parts` sums, part_stride floats apart, in order, and writes them times scale to a gradient.
template <int dtype>
static void write_as(char* to, int64_t row, int64_t col, const float* from, int64_t ld, int64_t parts,
                     int64_t part_stride, int64_t rows, int64_t cols, float scale) {
  const int64_t whole = col == 1 ? cols / W * W : 0;
  for (int64_t r = 0; r < rows; ++r, from += ld, to += size_of(dtype) * row) {
    const auto value = [&](int64_t n) {
      vf x = load(from + n);
      for (int64_t m = 1; m < parts; ++m) x += load(from + n + m * part_stride);
      return x * splat(scale);
    };
    for (int64_t n = 0; n < whole; n += W) store_some(to + size_of(dtype) * n, dtype, 1, W, value(n));
    for (int64_t n = whole; n < cols; n += W)
      store_some(to + size_of(dtype) * n * col, dtype, col, cols - n < W ? cols - n : W, value(n));
  }
}

static void write_rows(void* to, int dtype, int64_t row, int64_t col, const float* from, int64_t ld, int64_t parts,
                       int64_t part_stride, int64_t rows, int64_t cols, float scale) {
  const auto write = dtype == REGARD_F32    ? write_as<REGARD_F32>
                     : dtype == REGARD_BF16 ? write_as<REGARD_BF16>
                                            : write_as<REGARD_F16>;
  write((char*)to, row, col, from, ld, parts, part_stride, rows, cols, scale);
}

}  // namespace regard
