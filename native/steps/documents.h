// Documents: a query sees the keys that have its number. Where the numbers of the keys never decrease, these are
// intervals (attention/interval_rule.h); else the numbers are compared here, in tiles that may hold an equal pair.
#pragma once
#include "steps/mask_list.h"

namespace regard {

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

struct Documents : TileMask {
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
    return range(c.q_ranges, p, row, row + rows, kQueries).cover(range(c.k_ranges, p, j, j + count, kKeys));
  }
  static Cover cover(const regard_call& c, const Place& p, int64_t j, int64_t count) {
    return cover(c, p, p.row, p.rows, j, count);
  }
  static Cover cover(const FewRows& f, int64_t j, int64_t count) { return cover(f.c, f.p, 0, f.c.nq, j, count); }

  // The ranges of blocks of queries and of tiles of keys.
  static bool summarises(const regard_call&) { return true; }
  static int64_t summary_size(const regard_call& c) {
    int64_t of_queries, of_keys;
    lay_out_ranges(c, of_queries, of_keys);
    return (of_queries + of_keys) * (int64_t)sizeof(DocumentRange);
  }
  static void summarise(regard_call& c, char* memory) {
    int64_t of_queries, of_keys;
    const Ranges ranges = lay_out_ranges(c, of_queries, of_keys);
    c.q_ranges = ranges.of_queries;
    c.k_ranges = ranges.of_keys;
    c.q_ranges.data = memory;
    c.k_ranges.data = (DocumentRange*)memory + of_queries;
    each_element(c, c.q_documents_batch, c.q_documents_batch, [&](const Place& p) {
      write_ranges(at<DocumentRange>(c.q_ranges, p, 0), Documents::of_queries(c, p), c.nq, kQueries);
      return true;
    });
    each_element(c, c.k_documents_batch, c.k_documents_batch, [&](const Place& p) {
      write_ranges(at<DocumentRange>(c.k_ranges, p, 0), Documents::of_keys(c, p), c.nk, kKeys);
      return true;
    });
  }

  // Clears the bits of a tile's pairs whose numbers differ.
  static void hide(uint64_t* bits, const regard_call& c, const Place& p, int64_t j, int64_t count) {
    typedef int64_t numbers __attribute__((vector_size(8 * W)));
    const int64_t *queries = of_queries(c, p) + p.row, *keys = of_keys(c, p) + j;
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
    const int64_t own = of_queries(x.f.c, x.f.p)[x.row.i], *keys = of_keys(x.f.c, x.f.p) + x.key();
    int32_t same[W];
    for (int64_t m = 0; m < W; ++m) same[m] = m < x.valid() && keys[m] == own ? -1 : 0;
    return *(const vi_any*)same;
  }

 private:
  struct Ranges {
    regard_tensor of_queries, of_keys;
  };

  static Ranges lay_out_ranges(const regard_call& c, int64_t& of_queries, int64_t& of_keys) {
    const regard_tensor queries = lay_out(c, c.q_documents_batch, 1, (c.nq + kQueries - 1) / kQueries, of_queries);
    return {queries, lay_out(c, c.k_documents_batch, 1, (c.nk + kKeys - 1) / kKeys, of_keys)};
  }
};

}  // namespace regard
