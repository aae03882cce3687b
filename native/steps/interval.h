// Intervals: each query sees the keys [start, stop). Causal masks, windows, lengths and documents are of this kind.
#pragma once
#include "core/check.h"
#include "core/rows.h"

namespace regard {

template <int V>
struct Block;

struct Interval {
  template <int V>
  struct State {
    vi first[V], last[V];  // the keys [first, last) that each lane's query sees
  };

  // Whether every interval that is not empty lies within the keys.
  static int32_t check(const regard_call& c) {
    if (!both_or_none(c.start.data, c.stop.data)) return REGARD_BAD_ARGUMENT;
    if (!c.start.data) return REGARD_DONE;
    const int64_t heads = distinct(c.heads, c.start.head | c.stop.head),
                  rows = distinct(c.nq, c.start.row | c.stop.row);
    const int32_t nk = (int32_t)c.nk;
    const bool right = each_element(c, c.start.batch, c.stop.batch, [&](const Place& p) {
      for (int64_t h = 0; h < heads; ++h) {
        const int32_t *start = at<int32_t>(c.start, p, h), *stop = at<int32_t>(c.stop, p, h);
        bool wrong = false;
        for (int64_t i = 0; i < rows; ++i) {
          const int32_t first = start[i * c.start.row], last = stop[i * c.stop.row];
          wrong |= (first < last) & ((first < 0) | (last > nk));
        }
        if (wrong) return false;
      }
      return true;
    });
    return right ? REGARD_DONE : REGARD_BAD_INTERVAL;
  }

  // The keys that some query of a block sees, and those that all of them see.
  static Limits limits(const regard_call& c, const Place& p) {
    if (!c.start.data) return {0, c.nk, 0, c.nk};
    const int32_t* start = at<int32_t>(c.start, p, p.h) + p.row * c.start.row;
    const int32_t* stop = at<int32_t>(c.stop, p, p.h) + p.row * c.stop.row;
    Limits limits = Limits::none(c);
    for (int64_t n = 0; n < p.rows; ++n) limits.add(start[n * c.start.row], stop[n * c.stop.row]);
    return limits;
  }

  // The keys that some query of the call sees, and those that all of them see.
  static Limits limits(const regard_call& c) {
    if (!c.start.data) return {0, c.nk, 0, c.nk};
    const int64_t heads = distinct(c.heads, c.start.head | c.stop.head),
                  rows = distinct(c.nq, c.start.row | c.stop.row);
    Limits limits = Limits::none(c);
    each_element(c, c.start.batch, c.stop.batch, [&](const Place& p) {
      for (int64_t h = 0; h < heads; ++h) {
        const int32_t *start = at<int32_t>(c.start, p, h), *stop = at<int32_t>(c.stop, p, h);
        for (int64_t i = 0; i < rows; ++i) limits.add(start[i * c.start.row], stop[i * c.stop.row]);
      }
      return true;
    });
    return limits;
  }

  // A lane without a query sees no key.
  template <int V>
  static void begin(Block<V>& b) {
    begin<V>(b, b.c, b.p);
  }

  template <int V>
  static void begin(State<V>& b, const regard_call& c, const Place& p) {
    const int32_t* start = c.start.data ? at<int32_t>(c.start, p, p.h) + p.row * c.start.row : nullptr;
    const int32_t* stop = c.stop.data ? at<int32_t>(c.stop, p, p.h) + p.row * c.stop.row : nullptr;
    for (int64_t n = 0; n < V * W; ++n) {
      const bool there = n < p.rows;
      b.first[n / W][n % W] = there && start ? start[n * c.start.row] : 0;
      b.last[n / W][n % W] = !there ? 0 : stop ? stop[n * c.stop.row] : (int32_t)c.nk;
    }
  }

  // A score, or -inf in the lanes whose query does not see the key.
  REGARD_INLINE vf apply(vf s, int64_t key, vi first, vi last) {
    vi k = splat_int((int32_t)key);
    return ((k >= first) & (k < last)) ? s : splat(-kInf);
  }

  // Which of W keys a row sees, of those that exist.
  REGARD_INLINE vi visible(const RowKeys& x) {
    const int64_t last = x.row.last < x.t.j + x.t.count ? x.row.last : x.t.j + x.t.count;
    const vi keys = splat_int((int32_t)x.key()) + lanes();
    return (keys >= splat_int((int32_t)x.row.first)) & (keys < splat_int((int32_t)last));
  }
};

}  // namespace regard
