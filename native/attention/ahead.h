// What the backward prefetches while it multiplies: rows of results, which stores would wait for, and rows that are
// read next. Those of a model's layout lie far apart, where the hardware prefetcher does not go.
#pragma once
#include "core/place.h"

namespace regard {

// Rows of several tensors, some of each at a step.
struct Ahead {
  static constexpr int kMost = 8;
  Prefetch rows[kMost];
  int64_t at_once[kMost];  // rows of a step
  int count = 0;

  void add(const Prefetch& more) {
    if (more.rows > 0 && count < kMost) rows[count++] = more;
  }

  // The n-th of `shares` equal shares, to be fetched in `steps` steps.
  Ahead share(int64_t n, int64_t shares, int64_t steps) const {
    Ahead own = *this;
    for (int m = 0; m < count; ++m) {
      const int64_t from = rows[m].rows * n / shares, to = rows[m].rows * (n + 1) / shares;
      own.rows[m].first += from * rows[m].step;
      own.rows[m].rows = to - from;
      own.at_once[m] = (to - from + steps - 1) / steps;
    }
    return own;
  }

  __attribute__((always_inline)) void fetch_step(int64_t n) const {
    for (int m = 0; m < count; ++m) rows[m].fetch_rows(n * at_once[m], (n + 1) * at_once[m]);
  }
};

}  // namespace regard
