// What the matrix unit multiplies while the vector units compute: sums of 32 × 32, of scores or of values times weights, a step at a time.
#pragma once
#include "attention/matrix_tile.h"

namespace regard {

constexpr int64_t kBlock = 32;  // keys of a block, its queries, and features of a block of o
constexpr int64_t kWaiting = 2;  // blocks of keys whose values are added at once
constexpr int64_t kPairs = kBlock / 2 * kBlock;  // of weights of a block

// A block of 32 × 32 sums, or some of the products of parts that it sums: of 32 rows of A and 32 columns of B, `depth` times 32 each.
struct UnitJob {
  LeftParts a;
  RightParts b;
  int64_t depth;
  float* sums;               // where they go: 32 × 32 floats, as all others here
  const float* from;         // what they begin with; null for 0
  float* total;              // what they are added to, once they are in `sums`; or null
  const MatrixChain* chain;  // which products of parts: the plan fills it
  bool begins;               // else the sums go on with those of the job before
};

// Weights of some blocks of keys whose values wait to be added to the o of 32 queries: a product for each block of features.
struct WaitingValues {
  LeftParts values;
  RightParts weights;
  float* o;
  float* sums;  // for a product that vectors add to o; null: it begins with o
  int64_t blocks, next, count;  // of keys; products

  UnitJob take() {
    const int64_t f = next++ * kBlock;
    float* to = o + f * kBlock;
    const LeftParts rows{values.at + f * values.row, values.row, values.step, values.part};
    if (sums) return {rows, weights, blocks, sums, nullptr, to, nullptr, true};
    return {rows, weights, blocks, to, to, nullptr, nullptr, true};
  }
};

// What the blocks of queries of an item keep of a matrix unit from tile to tile.
struct MatrixStream {
  WaitingValues waiting{};
  int turn = 0;                               // which of two buffers takes weights
  float *before = nullptr, *total = nullptr;  // where the sums that the unit's registers hold go, and what they are then added to
  const float* stored = nullptr;              // sums that are to be added
  float* added = nullptr;                     // to these; or null

  // The sums of a job begin in registers, those of the job before are in memory.
  template <bool totals>
  __attribute__((always_inline)) void begun(const UnitJob& job) {
    if (totals) stored = before, added = total, total = job.total;
    before = job.sums;
  }

  // Adds sums that were stored to their total.
  void add() {
    if (!added) return;
    for (int64_t n = 0; n < kBlock * kBlock; n += W) store(added + n, load(added + n) + load(stored + n));
    added = nullptr;
  }

  void store_sums() {
    add();
    if (before) Isa::store_block<2, 2>(before, kBlock);
    stored = before, added = total, before = total = nullptr;
    add();
  }

  // Adds all values that wait: o is then what the tiles so far make it.
  template <int parts>
  void finish();
};

// What the unit multiplies while one block of scores becomes weights, a step at a time: one product of parts, of 32 columns of A.
template <int parts>
struct UnitPlan {
  using Terms = MatrixTerms<parts>;
  explicit UnitPlan(MatrixStream& stream) : stream(stream) {}
  MatrixStream& stream;
  UnitJob jobs[(16 + 1) * Terms::kChains];
  int64_t products = 0, count = 0, steps = 0, done = 0;  // sums; jobs; steps of all of them; those that were multiplied
  const UnitJob* job = jobs;
  int64_t k = 0, term = 0;  // of the present step

  void add(UnitJob more) {
    for (const MatrixChain& chain : Terms::kChain) {
      more.chain = &chain, more.begins = &chain == Terms::kChain;
      jobs[count++] = more, steps += chain.count * more.depth;
    }
    ++products;
  }

  // Tile X of the present step; after the last one, the next step is present.
  template <int X>
  __attribute__((always_inline)) void multiply() {
    const uint16_t *a = job->a.at + k * job->a.step, *b = job->b.at + k * kBlock / 2 * job->b.row;
    const bool first = !k && (parts == 1 || (!term && job->begins));
    Loads loads = Loads::kBoth;
    if constexpr (parts > 1) {
      const MatrixTerm& of = job->chain->terms[term];
      a += of.a * job->a.part, b += of.b * job->b.part, loads = of.loads;
    }
    if (first) Isa::begin_tile<X>(a, job->a.row, b, job->b.row, stream.before, kBlock, job->from, kBlock);
    else if (loads == Loads::kBoth) Isa::multiply_tile<X>(a, job->a.row, b, job->b.row);
    else if (loads == Loads::kLeft) Isa::multiply_tile<X, true, false>(a, job->a.row, b, job->b.row);
    else Isa::multiply_tile<X, false, true>(a, job->a.row, b, job->b.row);
    if (X < 3) return;
    ++done;
    if (first) stream.begun<parts == 3>(*job);
    else if (parts == 3 && stream.added) stream.add();
    if (parts > 1 && ++term < job->chain->count) return;
    term = 0;
    if (++k == job->depth) ++job, k = 0;
  }

  // The same for the upper two tiles, and for the lower ones.
  __attribute__((always_inline)) void upper() { multiply<0>(), multiply<1>(); }
  __attribute__((always_inline)) void lower() { multiply<2>(), multiply<3>(); }

  // Runs steps until `most` are done.
  void run(int64_t most) {
    while (done < most) upper(), lower();
  }

  // Runs halves of steps until `most` are done.
  __attribute__((always_inline)) void run_halves(int64_t most) {
    for (; halves < most; ++halves)
      if (halves % 2) lower();
      else upper();
  }
  int64_t halves = 0;
};

template <int parts>
void MatrixStream::finish() {
  while (waiting.next < waiting.count) {
    UnitPlan<parts> plan{*this};
    plan.add(waiting.take());
    plan.run(plan.steps);
  }
  store_sums();
}

}  // namespace regard
