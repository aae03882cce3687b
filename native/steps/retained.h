// Keys that are retained up to a position: a query sees a key while its position is below the key's number, `until`.
// The kernels find the bounds of these numbers for each tile of keys once per call. With the positions of a block's
// queries they tell which tiles are hidden and which are seen whole; in the others, numbers and positions are compared.
#pragma once
#include "steps/mask_list.h"

namespace regard {

struct Retained : TileMask {
  static constexpr bool compares_positions = true;

  static bool used(const regard_call& c) { return c.until.data; }

  static int32_t check(const regard_call& c) {
    if (!used(c)) return c.until.size || c.until_heads ? REGARD_BAD_ARGUMENT : REGARD_DONE;
    if (!c.q_at || c.until_heads < 1 || c.heads % c.until_heads) return REGARD_BAD_ARGUMENT;
    return fits(c.until, REGARD_I64, c.batch, c.until_heads, 1, c.nk) ? REGARD_DONE : REGARD_BAD_ARGUMENT;
  }

  // The least and the greatest of some numbers.
  struct Bounds {
    int64_t least = INT64_MAX, most = INT64_MIN;

    void add(const Bounds& other) {
      least = other.least < least ? other.least : least;
      most = other.most > most ? other.most : most;
    }

    static Bounds of(const int64_t* numbers, int64_t step, int64_t count) {
      Bounds all;
      for (int64_t n = 0; n < count; ++n) all.add({numbers[n * step], numbers[n * step]});
      return all;
    }
  };

  // Positions of a batch element's queries, from the first on.
  static const int64_t* positions(const regard_call& c, const Place& p) { return c.q_at + offset(c.q_at_batch, p); }

  // Which of the heads of `until` is that of a query head: neighbouring query heads share one.
  static int64_t head_of(const regard_call& c, int64_t head) { return head / (c.heads / c.until_heads); }

  // Of the queries at `rows` positions and the keys [j, j + count), for the query heads [head, head + heads).
  static Cover cover(const regard_call& c, const Place& p, const Bounds& queries, int64_t head, int64_t heads,
                     int64_t j, int64_t count) {
    Bounds keys;
    for (int64_t h = head_of(c, head); h <= head_of(c, head + heads - 1); ++h) keys.add(bounds(c, p, h, j, count));
    if (keys.most <= queries.least) return Cover::kNone;
    return keys.least > queries.most ? Cover::kAll : Cover::kSome;
  }
  static Cover cover(const regard_call& c, const Place& p, int64_t j, int64_t count) {
    return cover(c, p, Bounds::of(positions(c, p) + p.row, 1, p.rows), p.h, 1, j, count);
  }
  static Cover cover(const FewRows& f, int64_t j, int64_t count) {
    const int64_t group = f.c.heads / f.c.key_heads;
    return cover(f.c, f.p, Bounds::of(positions(f.c, f.p), 1, f.c.nq), f.key_head * group, group, j, count);
  }

  // The bounds of tiles of keys. One block of queries asks for each tile once: then they are found when asked for.
  static bool summarises(const regard_call& c) { return c.nq > kQueries; }
  static int64_t summary_size(const regard_call& c) {
    int64_t count;
    lay_out_bounds(c, count);
    return count * (int64_t)sizeof(Bounds);
  }
  static void summarise(regard_call& c, char* memory) {
    int64_t count;
    c.until_bounds = lay_out_bounds(c, count);
    c.until_bounds.data = memory;
    each_element(c, c.until.batch, c.until.batch, [&](const Place& p) {
      for (int64_t h = 0; h < distinct(c.until_heads, c.until.head); ++h)
        for (int64_t j = 0; j < c.nk; j += kKeys)
          at<Bounds>(c.until_bounds, p, h)[j / kKeys] =
              Bounds::of(numbers(c, p, h, j), c.until.col, c.nk - j < kKeys ? c.nk - j : kKeys);
      return true;
    });
  }

  // Clears the bits of the pairs of a tile whose query no longer sees the key.
  static void hide(uint64_t* bits, const regard_call& c, const Place& p, int64_t j, int64_t count) {
    typedef int64_t int64s __attribute__((vector_size(8 * W)));
    const int64_t *queries = positions(c, p) + p.row, *until = numbers(c, p, head_of(c, p.h), j);
    int64s own[kVectors];
    for (int64_t n = 0; n < kQueries; ++n) own[n / W][n % W] = queries[n < p.rows ? n : 0];
    for (int64_t n = 0; n < count; ++n) {
      const int64_t end = until[n * c.until.col];
      uint64_t seen = 0;
      for (int v = 0; v < kVectors; ++v)
        seen |= (uint64_t)Isa::lanes_set(__builtin_convertvector(own[v] < end, vi)) << (v * W);
      bits[n] &= seen;
    }
  }

  // Which of W keys a row sees.
  REGARD_INLINE vi visible(const RowKeys& x) {
    const regard_call& c = x.f.c;
    const int64_t own = positions(c, x.f.p)[x.row.i], *until = numbers(c, x.f.p, head_of(c, x.row.h), x.key());
    int32_t seen[W];
    for (int64_t m = 0; m < W; ++m) seen[m] = m < x.valid() && own < until[m * c.until.col] ? -1 : 0;
    return *(const vi_any*)seen;
  }

 private:
  // The numbers of a head of `until`, from key j on.
  static const int64_t* numbers(const regard_call& c, const Place& p, int64_t head, int64_t j) {
    return at<int64_t>(c.until, p, head) + j * c.until.col;
  }

  static regard_tensor lay_out_bounds(const regard_call& c, int64_t& count) {
    return lay_out(c, c.until.batch, distinct(c.until_heads, c.until.head), (c.nk + kKeys - 1) / kKeys, count);
  }

  // The bounds of the keys [j, j + count), or of a few more.
  static Bounds bounds(const regard_call& c, const Place& p, int64_t head, int64_t j, int64_t count) {
    if (!c.until_bounds.data) return Bounds::of(numbers(c, p, head, j), c.until.col, count);
    Bounds all;
    for (int64_t n = j / kKeys; n * kKeys < j + count; ++n) all.add(at<Bounds>(c.until_bounds, p, head)[n]);
    return all;
  }
};

}  // namespace regard
