// Documents: a query sees the keys that have its number. Where the numbers of the keys never decrease, these are
// intervals (attention/interval_rule.h); else the numbers are compared here, in tiles that may hold an equal pair.
#pragma once
#include "core/check.h"
#include "core/rows.h"

namespace regard {

// Whether no pair, some pairs or all pairs of a tile are visible.
enum class Cover { kNone, kSome, kAll };

// Bounds of the numbers of some tokens, and a signature: of each number, one bit of 64 that its hash chooses.
struct DocumentRange {
  int64_t least = INT64_MAX, most = INT64_MIN;
  uint64_t signature = 0;

  void add(int64_t number) {
    least = number < least ? number : least;
    most = number > most ? number : most;
    signature |= (uint64_t)1 << ((uint64_t)number * 0x9E3779B97F4A7C15u >> 58);
  }

  void add(const DocumentRange& other) {
    least = other.least < least ? other.least : least;
    most = other.most > most ? other.most : most;
    signature |= other.signature;
  }

  // Of the pairs of these tokens and others.
  Cover cover(const DocumentRange& other) const {
    if (least > other.most || most < other.least || !(signature & other.signature)) return Cover::kNone;
    return least == most && other.least == other.most ? Cover::kAll : Cover::kSome;
  }
};

struct Documents {
  // Whether numbers are compared: a call that has only intervals keeps no numbers.
  static bool used(const regard_call& c) { return c.q_documents; }

  static const int64_t* of_queries(const regard_call& c, const Place& p) {
    return c.q_documents + offset(c.q_documents_batch, p);
  }
  static const int64_t* of_keys(const regard_call& c, const Place& p) {
    // NOLINTNEXTLINE(clang-analyzer-core.NullPointerArithm): asked for where `used`, and there both are
    return c.k_documents + offset(c.k_documents_batch, p);
  }

  // The range of each `size` tokens of `count`.
  static void write_ranges(DocumentRange* to, const int64_t* numbers, int64_t count, int64_t size) {
    for (int64_t n = 0; n < count; ++n) {
      if (n % size == 0) to[n / size] = {};
      to[n / size].add(numbers[n]);
    }
  }

  // The range of the tokens [from, to), or of a few more, from those of each `size` tokens.
  static DocumentRange range(const regard_tensor& ranges, const Place& p, int64_t from, int64_t to, int64_t size) {
    const DocumentRange* each = at<DocumentRange>(ranges, p, 0);
    DocumentRange all = each[from / size];
    for (int64_t n = from / size + 1; n * size < to; ++n) all.add(each[n]);
    return all;
  }

  // Of the queries [row, row + rows) and the keys [j, j + count).
  static Cover cover(const regard_call& c, const Place& p, int64_t row, int64_t rows, int64_t j, int64_t count) {
    if (!used(c)) return Cover::kAll;
    return range(c.q_ranges, p, row, row + rows, kQueries).cover(range(c.k_ranges, p, j, j + count, kKeys));
  }

  // Clears the bits of a tile's pairs whose numbers differ. keys: the numbers of `count` keys.
  static void hide(uint64_t* bits, const regard_call& c, const Place& p, const int64_t* keys, int64_t count) {
    typedef int64_t numbers __attribute__((vector_size(8 * W)));
    const int64_t* queries = of_queries(c, p) + p.row;
    numbers own[kVectors];
    for (int64_t n = 0; n < kQueries; ++n) own[n / W][n % W] = queries[n < p.rows ? n : 0];
    uint64_t same = 0;
    for (int64_t n = 0; n < count; ++n) {
      if (n == 0 || keys[n] != keys[n - 1]) {
        same = 0;
        for (int v = 0; v < kVectors; ++v)
          same |= (uint64_t)Isa::lanes_set(__builtin_convertvector(own[v] == keys[n], vi)) << (v * W);
      }
      bits[n] &= same;
    }
  }

  // Which of W keys have a row's number.
  REGARD_INLINE vi visible(const RowKeys& x) {
    const int64_t own = of_queries(x.f.c, x.f.p)[x.row.i];
    int32_t same[W];
    for (int64_t m = 0; m < W; ++m) same[m] = m < x.valid() && x.t.documents[x.n + m] == own ? -1 : 0;
    return *(const vi_any*)same;
  }
};

}  // namespace regard
