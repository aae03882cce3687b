// Which keys each query sees where a call gives a rule: what the kernels read of it, written out. Documents are part of
// the intervals where the numbers of the keys never decrease; else the kernels compare the numbers.
#pragma once
#include <stdlib.h>

#include "attention/check_call.h"
#include "core/memory.h"

namespace regard {

REGARD_INLINE const regard_call& call_of(const regard_call& c) { return c; }
REGARD_INLINE const regard_call& call_of(const regard_gradients& g) { return g.call; }
REGARD_INLINE const regard_call& call_of(const regard_additive& x) { return x.call; }
REGARD_INLINE const regard_call& call_of(const regard_additive_gradients& g) { return g.forward.call; }
REGARD_INLINE const regard_call& call_of(const regard_fact_args& a) { return a.call; }

constexpr int64_t kFarthest = REGARD_FARTHEST;

static bool far(const regard_call& c) {
  return c.first < -kFarthest || c.first > kFarthest || c.last < -kFarthest || c.last > kFarthest;
}

// Whether the shifts of all batch elements may be added to such bounds.
static bool right_shifts(const regard_call& c) {
  return !c.shifts || each_element(c, c.shifts_batch, c.shifts_batch, [&](const Place& p) {
    const int64_t shift = c.shifts[offset(c.shifts_batch, p)];
    return shift >= -kFarthest / 2 && shift <= kFarthest / 2;
  });
}

static bool has_rule(const regard_call& c) {
  return c.bounds || c.key_counts || c.key_starts || c.query_counts || c.q_documents || c.k_documents;
}

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
static int32_t write_intervals(const regard_call& c, const Place& p, int64_t rows, int32_t* start, int32_t* stop,
                               bool& hides) {
  const int64_t keys = c.key_counts ? c.key_counts[offset(c.key_counts_batch, p)] : c.nk;
  const int64_t queries = c.query_counts ? c.query_counts[offset(c.query_counts_batch, p)] : c.nq;
  const int64_t least = c.key_starts ? c.key_starts[offset(c.key_starts_batch, p)] : 0;
  if (keys < 0 || keys > c.nk || least < 0 || least > c.nk || queries < 0 || queries > c.nq) return REGARD_BAD_INTERVAL;
  const int64_t* q = c.q_documents ? Documents::of_queries(c, p) : nullptr;
  const int64_t shift = c.shifts ? c.shifts[offset(c.shifts_batch, p)] : 0;
  int64_t from = 0, to = c.nk;
  for (int64_t i = 0; i < rows; ++i) {
    if (q && (i == 0 || q[i] != q[i - 1])) find_document(Documents::of_keys(c, p), c.nk, q[i], from, to);
    int64_t first = from > least ? from : least, last = to < keys ? to : keys;
    const int64_t low = c.first + shift + i, high = c.last + shift + i;
    if (c.bounds & REGARD_FIRST) first = low > first ? low : first;
    if (c.bounds & REGARD_LAST) last = high < last ? high : last;
    if (first >= last || i >= queries) first = last = 0;
    start[i] = (int32_t)first;
    stop[i] = (int32_t)last;
    hides |= first > 0 || last < c.nk;
  }
  return REGARD_DONE;
}

// run() with the intervals of a rule in c, for as long as run takes; a code where the rule is wrong.
template <class Run>
static int32_t with_table(regard_call& c, const regard_call& rule, const Run& run) {
  const int64_t rows = rule.bounds || rule.query_counts || rule.q_documents ? c.nq : 1;
  int64_t own[REGARD_BATCH_AXES], count;  // own: where batch elements along an axis may have other intervals
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) {
    own[n] = rule.shifts_batch[n] || rule.key_counts_batch[n] || rule.key_starts_batch[n] || rule.query_counts_batch[n];
    if (rule.q_documents) own[n] |= rule.q_documents_batch[n] || rule.k_documents_batch[n];
  }
  const regard_tensor table = lay_out(c, own, 1, rows, count);
  int32_t* memory = (int32_t*)malloc((size_t)(2 * count) * sizeof(int32_t));
  if (!memory) return REGARD_NO_MEMORY;
  int32_t failed = REGARD_DONE;
  bool hides = false;
  each_element(c, own, own, [&](const Place& p) {
    int32_t* start = memory + offset(table, p, 0);
    failed = write_intervals(rule, p, rows, start, start + count, hides);
    return failed == REGARD_DONE;
  });
  if (hides) {
    c.start = c.stop = table;
    c.start.size = c.stop.size = count;
    c.start.dtype = c.stop.dtype = REGARD_I32;
    c.start.data = memory;
    c.stop.data = memory + count;
  }
  if (!failed) failed = run();
  free(memory);
  return failed;
}

// run() with what the masks of tiles summarise in c, for as long as run takes.
template <class Run>
static int32_t with_summaries(regard_call& c, const Run& run) {
  if (!TileMasks::summarise(c)) return run();
  if (const int32_t wrong = TileMasks::check(c)) return wrong;
  const HeapMemory memory((size_t)TileMasks::summary_size(c));
  if (!memory.at) return REGARD_NO_MEMORY;
  TileMasks::summarise(c, (char*)memory.at);
  return run();
}

// Whether the numbers of some batch element's keys decrease.
static bool out_of_order(const regard_call& c) {
  return !each_element(c, c.k_documents_batch, c.k_documents_batch, [&](const Place& p) {
    const int64_t* k = Documents::of_keys(c, p);
    bool decreases = false;
    for (int64_t j = 1; j < c.nk; ++j) decreases |= k[j] < k[j - 1];
    return !decreases;
  });
}

// run(args) with the rule of the call in `args` written out, and its masks summarised, for as long as run takes; a code
// where the rule is wrong.
template <class Args, class Run>
static int32_t with_intervals(const Args& args, const Run& run) {
  const bool ruled = has_rule(call_of(args));
  if (!ruled && !TileMasks::summarise(call_of(args))) return run(args);
  Args written = args;
  regard_call& c = const_cast<regard_call&>(call_of(written));
  const bool tabled = c.start.data || c.stop.data;  // only documents may come with a table
  if (!right_sizes(c) || !both_or_none(c.q_documents, c.k_documents)) return REGARD_BAD_ARGUMENT;
  if (tabled && (c.bounds || c.shifts || c.key_counts || c.key_starts || c.query_counts)) return REGARD_BAD_ARGUMENT;
  if (far(c) || !right_shifts(c)) return REGARD_BAD_ARGUMENT;
  const auto with_rest = [&](const regard_call& rule) {
    return with_summaries(
        c, [&] { return ruled && !tabled ? with_table(c, rule, [&] { return run(written); }) : run(written); });
  };
  if (!c.q_documents) return with_rest(c);
  const bool compared = tabled || out_of_order(c);
  regard_call rule = c;
  regard_call& other = compared ? rule : c;  // documents are compared, or part of the intervals
  other.q_documents = other.k_documents = nullptr;
  return with_rest(rule);
}

}  // namespace regard
