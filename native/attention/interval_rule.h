// Which keys each query sees where a call gives a rule instead of a table: the rule written out as the table that the kernels read.
#pragma once
#include <stdlib.h>

#include "attention/check_call.h"

namespace regard {

REGARD_INLINE const regard_call& call_of(const regard_call& c) { return c; }
REGARD_INLINE const regard_call& call_of(const regard_gradients& g) { return g.call; }
REGARD_INLINE const regard_call& call_of(const regard_additive& x) { return x.call; }
REGARD_INLINE const regard_call& call_of(const regard_additive_gradients& g) { return g.forward.call; }
REGARD_INLINE const regard_call& call_of(const regard_fact_args& a) { return a.call; }

static bool has_rule(const regard_call& c) { return c.bounds || c.key_counts || c.query_counts || c.q_documents || c.k_documents; }

// The keys [from, to) of a document, where the documents of keys are in order.
static void find_document(const int64_t* k, int64_t nk, int64_t document, int64_t& from, int64_t& to) {
  const auto first = [&](auto before) {  // the first key for which `before` no longer holds
    int64_t low = 0, high = nk;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (before(k[middle])) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  from = first([&](int64_t id) { return id < document; });
  to = first([&](int64_t id) { return id <= document; });
}

// The intervals of one batch element, and whether they hide any key. `rows` is 1 where all queries see the same keys.
static int32_t write_intervals(const regard_call& c, const Place& p, int64_t rows, int32_t* start, int32_t* stop, bool& hides) {
  const int64_t keys = c.key_counts ? c.key_counts[offset(c.key_counts_batch, p)] : c.nk;
  const int64_t queries = c.query_counts ? c.query_counts[offset(c.query_counts_batch, p)] : c.nq;
  if (keys < 0 || keys > c.nk || queries < 0 || queries > c.nq) return REGARD_BAD_INTERVAL;
  const int64_t* q = c.q_documents ? c.q_documents + offset(c.q_documents_batch, p) : nullptr;
  const int64_t* k = c.q_documents ? c.k_documents + offset(c.k_documents_batch, p) : nullptr;
  bool decreases = false;
  for (int64_t j = 1; k && j < c.nk; ++j) decreases |= k[j] < k[j - 1];
  if (decreases) return REGARD_UNSORTED;
  int64_t from = 0, to = c.nk;
  for (int64_t i = 0; i < rows; ++i) {
    if (q && (i == 0 || q[i] != q[i - 1])) find_document(k, c.nk, q[i], from, to);
    int64_t first = from, last = to < keys ? to : keys;
    if (c.bounds & REGARD_FIRST) first = c.first + i > first ? c.first + i : first;
    if (c.bounds & REGARD_LAST) last = c.last + i < last ? c.last + i : last;
    if (first >= last || i >= queries) first = last = 0;
    start[i] = (int32_t)first, stop[i] = (int32_t)last;
    hides |= first > 0 || last < c.nk;
  }
  return REGARD_DONE;
}

// run(args) with the rule of the call in `args` written out, for as long as run takes; a code where the rule is wrong.
template <class Args, class Run>
static int32_t with_intervals(const Args& args, const Run& run) {
  if (!has_rule(call_of(args))) return run(args);
  Args written = args;
  regard_call& c = const_cast<regard_call&>(call_of(written));
  constexpr int64_t kFarthest = (int64_t)1 << 62;  // so that adding a query's number does not overflow
  if (!right_sizes(c) || c.start.data || c.stop.data || !both_or_none(c.q_documents, c.k_documents)) return REGARD_BAD_ARGUMENT;
  if (c.first < -kFarthest || c.first > kFarthest || c.last < -kFarthest || c.last > kFarthest) return REGARD_BAD_ARGUMENT;
  const int64_t rows = c.bounds || c.query_counts || c.q_documents ? c.nq : 1;
  regard_tensor table{};
  table.row = rows > 1;
  int64_t size[REGARD_BATCH_AXES], count = 1;  // elements whose intervals may differ
  for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) {
    const bool own = c.key_counts_batch[n] || c.query_counts_batch[n] || c.q_documents_batch[n] || c.k_documents_batch[n];
    size[n] = own ? c.batch[n] : 1;
    table.batch[n] = own ? count * rows : 0;
    count *= size[n];
  }
  int32_t* memory = (int32_t*)malloc((size_t)(2 * count * rows) * sizeof(int32_t));
  if (!memory) return REGARD_NO_MEMORY;
  int32_t failed = REGARD_DONE;
  bool hides = false;
  for (int64_t element = 0; element < count && !failed; ++element) {
    Place p{};
    int64_t rest = element;
    for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) p.at[n] = rest % size[n], rest /= size[n];
    int32_t* start = memory + element * rows;
    failed = write_intervals(c, p, rows, start, start + count * rows, hides);
  }
  if (hides) {
    c.start = c.stop = table;
    c.start.data = memory, c.stop.data = memory + count * rows;
  }
  if (!failed) failed = run(written);
  free(memory);
  return failed;
}

}  // namespace regard
