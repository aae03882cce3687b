// The entry point of facts. An item is some blocks of queries of one head; what its queries give to keys and cells is summed by the
// item alone, and the items' sums are added in order: no answer depends on the number of threads.
#include "facts.h"

using namespace regard;

namespace {

constexpr int64_t kItems = 32;  // that are wanted; where batch and heads give fewer, the queries of a head are split into parts

struct Ask {
  const regard_fact_args& a;
  int64_t heads, blocks, parts;  // of all batch elements; of a head
  float *received, *most, *map;  // sums of each part, where there is more than one; else the answers

  int64_t items() const { return heads * parts; }
  int64_t held() const { return (a.call.nk < kKept ? a.call.nk < kKeys ? kKeys : a.call.nk : kKept) * kQueries; }
  int64_t wide() const { return (a.top + W - 1) / W * W; }
  int64_t grain() const { return grain_of(a.call.nk, a.top); }
  // A tile that begins within a grain, or ends there, has one more than it would.
  int64_t grains() const { return a.top ? a.call.nk / grain() + 2 * (a.call.nk / kKeys + 2) : 0; }

  int64_t scratch() const {
    const regard_call& c = a.call;
    const int64_t k = in_place(c, c.k) ? 0 : kKeys * c.dk, bias = c.bias.data ? kKeys * kQueries : 0;
    return held() + kQueries * (c.dk + grains() + 2 * (W + wide())) + bias + k;
  }

  // Where a part begins, in queries.
  int64_t first(int64_t part) const {
    const int64_t row = blocks * part / parts * kQueries;
    return row < a.call.nq ? row : a.call.nq;
  }

  // The first cells of a part, and where its sums of them lie: it shares a row of cells with a part beside it, at most.
  Cells cells(int64_t head, int64_t part) const {
    const int64_t from = parts == 1 ? 0 : first(part) * a.map_rows / a.call.nq, place = parts == 1 ? 0 : from + part;
    return Cells{map + (head * rows_of_cells() + place) * a.map_cols, a.map_rows, a.map_cols, from};
  }

  int64_t rows_of_cells() const { return parts == 1 ? a.map_rows : a.map_rows + parts; }

  int64_t cell_rows(int64_t part) const {
    const int64_t from = cells(0, part).first;
    return parts == 1 ? a.map_rows : (first(part + 1) - 1) * a.map_rows / a.call.nq - from + 1;
  }

  Sums sums(int64_t head, int64_t part) const {
    const int64_t from = (head * parts + part) * a.call.nk;
    Sums s{a.received ? received + from : nullptr, a.most ? most + from : nullptr, {}};
    for (int64_t n = 0; n < a.call.nk; ++n) {
      if (s.received) s.received[n] = 0;
      if (s.most) s.most[n] = 0;
    }
    if (a.map) {
      s.cells = cells(head, part);
      for (int64_t n = 0; n < cell_rows(part) * a.map_cols; ++n) s.cells.to[n] = 0;
    }
    return s;
  }

  void run(int64_t item, float* at) const {
    const regard_call& c = a.call;
    // the last queries see most under a causal mask: heaviest first
    const int64_t part = parts - 1 - item / heads, head = item % heads;
    Desk d{};
    d.held = at, at += held();
    d.w.q = at, at += c.dk * kQueries;
    d.w.bias = at, at += c.bias.data ? kKeys * kQueries : 0;
    d.w.k = at, at += in_place(c, c.k) ? 0 : kKeys * c.dk;
    float *maxima = at, *scores = maxima + grains() * kQueries;
    d.leaders = Leaders{a.top, wide(), grain(), maxima, scores, (int32_t*)(scores + (W + wide()) * kQueries)};
    Place p = place_in_batch(c, head / c.heads);
    p.h = head % c.heads, p.row = first(part), p.rows = first(part + 1) - p.row;
    ask(a, d, sums(head, part), p);
  }
};

// The parts' sums of one head, added in order.
struct Join {
  const Ask& q;

  int64_t scratch() const { return 1; }

  void run(int64_t head, float*) const {
    const regard_fact_args& a = q.a;
    const int64_t nk = a.call.nk;
    for (int64_t n = 0; n < nk && q.parts > 1; ++n) {
      const int64_t from = head * q.parts * nk + n, to = head * nk + n;
      if (a.received) a.received[to] = 0;
      if (a.most) a.most[to] = 0;
      for (int64_t part = 0; part < q.parts; ++part) {
        if (a.received) a.received[to] += q.received[from + part * nk];
        if (a.most) a.most[to] = peak_of(splat(q.most[from + part * nk]), splat(a.most[to]))[0];
      }
    }
    for (int64_t row = 0; a.map && row < a.map_rows; ++row)
      for (int64_t col = 0; col < a.map_cols; ++col) a.map[(head * a.map_rows + row) * a.map_cols + col] = mean(head, row, col);
  }

  float mean(int64_t head, int64_t row, int64_t col) const {
    const int64_t rows = q.a.map_rows, nq = q.a.call.nq;
    float sum = 0;
    for (int64_t part = 0; part < q.parts; ++part) {
      const Cells m = q.cells(head, part);
      if (row >= m.first && row < m.first + q.cell_rows(part)) sum += m.to[(row - m.first) * m.cols + col];
    }
    return sum / (float)(cell_start(row + 1, rows, nq) - cell_start(row, rows, nq));
  }
};

}  // namespace

// 0, or 1 where memory ran out. There are queries and keys.
extern "C" __attribute__((visibility("default"))) int32_t regard_facts(const regard_fact_args* given, regard_parallel parallel) {
  const regard_fact_args& a = *given;
  const regard_call& c = a.call;
  Ask ask{a, elements(c) * c.heads, (c.nq + kQueries - 1) / kQueries, 1, a.received, a.most, a.map};
  // shapes alone decide, so that the bits do not depend on the number of threads
  const int64_t wanted = (kItems + ask.heads - 1) / ask.heads;
  ask.parts = wanted < ask.blocks ? wanted : ask.blocks;
  float* memory = nullptr;
  if (ask.parts > 1 && asks_keys(a)) {
    const int64_t keys = ask.items() * c.nk, map = ask.heads * ask.rows_of_cells() * a.map_cols;
    memory = (float*)malloc((size_t)((a.received ? keys : 0) + (a.most ? keys : 0) + (a.map ? map : 0)) * sizeof(float));
    if (!memory) return 1;
    ask.received = memory, ask.most = ask.received + (a.received ? keys : 0), ask.map = ask.most + (a.most ? keys : 0);
  }
  int32_t failed = share(ask, ask.items(), c.threads, parallel);
  if (!failed && (memory || a.map)) failed = share(Join{ask}, ask.heads, c.threads, parallel);
  free(memory);
  return failed;
}
