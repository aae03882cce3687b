// The entry point of facts. An item is some blocks of queries of one head. It has its own sums for keys and cells, and
// the sums of the items are added in order, so that no result depends on the number of threads.
#include "attention/interval_rule.h"
#include "core/api.h"
#include "facts/facts.h"

using namespace regard;

namespace {

constexpr int64_t kItems = 32;  // where batch and heads give fewer items, the queries of a head are split into parts

struct FactCall {
  const regard_fact_args& a;
  int64_t heads, blocks, parts;  // heads of all batch elements; blocks and parts of a head
  Sums all;                      // of all items, one after the other

  int64_t items() const { return heads * parts; }
  int64_t kept() const {
    return (a.call.nk < kMaxKeptKeys ? a.call.nk < kKeys ? kKeys : a.call.nk : kMaxKeptKeys) * kQueries;
  }
  int64_t padded() const { return (a.top + W - 1) / W * W; }
  int64_t slots() const {
    return a.top ? (a.call.nk < kMaxKeptKeys ? a.call.nk : kMaxKeptKeys) / grain_of(a.call.nk, a.top) + 2 : 0;
  }

  int64_t scratch() const {
    const regard_call& c = a.call;
    const int64_t k = key_floats(c), modifiers = Modifiers::scratch_size(c);
    return kept() + kQueries * (c.dk + slots() + 2 * (W + padded()) + place_count(a)) + modifiers + k;
  }

  // The first query of a part.
  int64_t first(int64_t part) const {
    const int64_t row = blocks * part / parts * kQueries;
    return row < a.call.nq ? row : a.call.nq;
  }

  // Neighbouring parts share at most one row of cells.
  int64_t rows_of_cells() const { return a.map_rows + parts; }

  Cells cells(int64_t head, int64_t part) const {
    const int64_t from = first(part) * a.map_rows / a.call.nq, place = head * rows_of_cells() + from + part;
    return Cells{all.cells.to + place * a.map_cols, all.cells.queries + place, a.map_rows, a.map_cols, from};
  }

  int64_t cell_rows(int64_t part) const {
    return (first(part + 1) - 1) * a.map_rows / a.call.nq - first(part) * a.map_rows / a.call.nq + 1;
  }

  // The sums of one item, all 0.
  Sums sums(int64_t head, int64_t part) const {
    const int64_t item = head * parts + part, nk = a.call.nk;
    Sums s{all.received + item * nk, all.most + item * nk, all.readers + item * nk, all.reached + item * a.levels, {}};
    for (int64_t n = 0; a.received && n < nk; ++n) s.received[n] = 0;
    for (int64_t n = 0; a.most && n < nk; ++n) s.most[n] = 0;
    for (int64_t n = 0; a.readers && n < nk; ++n) s.readers[n] = 0;
    for (int64_t n = 0; n < a.levels; ++n) s.reached[n] = 0;
    if (!a.map) return s;
    s.cells = cells(head, part);
    for (int64_t n = 0; n < cell_rows(part) * a.map_cols; ++n) s.cells.to[n] = 0;
    for (int64_t n = 0; n < cell_rows(part); ++n) s.cells.queries[n] = 0;
    return s;
  }

  void run(int64_t item, float* memory) const {
    const regard_call& c = a.call;
    // the last queries see most keys under a causal mask: the longest items first
    const int64_t part = parts - 1 - item / heads, head = item % heads;
    auto take = [&memory](int64_t count) { return (memory += count) - count; };
    FactScratch d{};
    d.scores = take(kept());
    d.w.q = take(c.dk * kQueries);
    d.w.modifiers = take(Modifiers::scratch_size(c));
    d.top_keys =
        TopKeys{a.top, padded(), kKeys, slots(), take(slots() * kQueries), take((W + padded()) * kQueries), nullptr};
    d.top_keys.keys = (int32_t*)take((W + padded()) * kQueries);
    d.places.mass = take(a.groups * kQueries);
    d.places.distance = take(a.distance ? kQueries : 0);
    d.places.within = take(a.bands * kQueries);
    d.w.k = memory;
    Place p = place_in_batch(c, head / c.heads);
    p.h = head % c.heads;
    p.row = first(part);
    p.rows = first(part + 1) - p.row;
    part_facts(a, d, sums(head, part), p);
  }
};

// Adds the sums of the parts of one head in order.
struct Join {
  const FactCall& q;

  int64_t scratch() const { return 1; }

  void run(int64_t head, float*) const {
    const regard_fact_args& a = q.a;
    const int64_t nk = a.call.nk;
    add(a.received, q.all.received, head, nk);
    add(a.readers, q.all.readers, head, nk);
    add(a.reached, q.all.reached, head, a.levels);
    for (int64_t n = 0; a.most && n < nk; ++n) {
      vf most = vf{};
      for (int64_t part = 0; part < q.parts; ++part)
        most = max_or_nan(splat(q.all.most[(head * q.parts + part) * nk + n]), most);
      a.most[head * nk + n] = most[0];
    }
    for (int64_t row = 0; a.map && row < a.map_rows; ++row)
      mean(head, row, a.map + (head * a.map_rows + row) * a.map_cols);
  }

  template <class T>
  void add(T* to, const T* from, int64_t head, int64_t count) const {
    for (int64_t n = 0; to && n < count; ++n) {
      T sum = 0;
      for (int64_t part = 0; part < q.parts; ++part) sum += from[(head * q.parts + part) * count + n];
      to[head * count + n] = sum;
    }
  }

  void mean(int64_t head, int64_t row, float* to) const {
    const int64_t cols = q.a.map_cols;
    int64_t queries = 0;
    for (int64_t col = 0; col < cols; ++col) to[col] = 0;
    for (int64_t part = 0; part < q.parts; ++part) {
      const Cells m = q.cells(head, part);
      if (row < m.first || row >= m.first + q.cell_rows(part)) continue;
      queries += m.queries[row - m.first];
      for (int64_t col = 0; col < cols; ++col) to[col] += m.to[(row - m.first) * cols + col];
    }
    for (int64_t col = 0; queries && col < cols; ++col) to[col] /= (float)queries;
  }
};

bool right_counts(const regard_fact_args& a) {
  const regard_call& c = a.call;
  const double heads = (double)elements(c) * (double)c.heads;
  if (a.top < 0 || a.top > REGARD_TOP || a.groups < 0 || a.groups > REGARD_SETS || a.bands < 0 || a.bands > REGARD_SETS)
    return false;
  if (a.levels < 0 || heads * kItems * (double)a.levels >= 0x1p58) return false;
  if (!a.map) return true;
  if (a.map_rows < 1 || a.map_rows > c.nq || a.map_cols < 1 || a.map_cols > c.nk) return false;
  return heads * ((double)a.map_rows + kItems) * (double)a.map_cols < 0x1p58;
}

int32_t check(const regard_fact_args& a) {
  const regard_call& c = a.call;
  if (const int32_t wrong = check_contiguous_call(c, c.dtype)) return wrong;
  if (!right_counts(a) || !both_or_none(a.max_score, a.max_key)) return REGARD_BAD_ARGUMENT;
  if (a.top && (!a.top_weights || !a.top_keys || !a.top_rest)) return REGARD_BAD_ARGUMENT;
  if ((a.groups && (!a.group || !a.mass)) || (a.bands && (!a.band || !a.within))) return REGARD_BAD_ARGUMENT;
  if ((a.levels && (!a.level || !a.reached)) || ((a.distance || a.bands) && (!a.q_at || !a.k_at)))
    return REGARD_BAD_ARGUMENT;
  return a.groups && range_of(a.group, elements(c) * c.nk).most >= a.groups ? REGARD_BAD_GROUP : REGARD_DONE;
}

int32_t compute_facts(const regard_fact_args& a, regard_parallel parallel) {
  const regard_call& c = a.call;
  if (const int32_t wrong = check(a)) return wrong;
  FactCall facts{a, elements(c) * c.heads, (c.nq + kQueries - 1) / kQueries, 1, {}};
  // by shapes only, so that the bits do not depend on the number of threads
  const int64_t wanted = (kItems + facts.heads - 1) / facts.heads;
  facts.parts = wanted < facts.blocks ? wanted : facts.blocks;
  const int64_t keys = facts.items() * c.nk, cells = a.map ? facts.heads * facts.rows_of_cells() : 0;
  const int64_t readers = a.readers ? keys : 0, received = a.received ? keys : 0, most = a.most ? keys : 0;
  const int64_t whole = readers + facts.items() * a.levels + cells, real = received + most + cells * a.map_cols;
  void* memory = malloc((size_t)whole * sizeof(int64_t) + (size_t)real * sizeof(float) + 1);
  if (!memory) return 1;
  Sums& all = facts.all;
  all.readers = (int64_t*)memory;
  all.reached = all.readers + readers;
  all.cells.queries = all.reached + facts.items() * a.levels;
  all.received = (float*)(all.cells.queries + cells);
  all.most = all.received + received;
  all.cells.to = all.most + most;
  int32_t failed = share(facts, facts.items(), c.threads, parallel);
  if (!failed) failed = share(Join{facts}, facts.heads, c.threads, parallel);
  free(memory);
  return failed;
}

}  // namespace

REGARD_API int32_t regard_facts(const regard_fact_args* given, regard_parallel parallel) {
  return with_intervals(*given, [parallel](const regard_fact_args& a) { return compute_facts(a, parallel); });
}
