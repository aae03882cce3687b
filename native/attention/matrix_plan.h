// What the matrix unit multiplies while the vector units compute: sums of 32 × 32, of scores or of values times
// weights, a step at a time.
#pragma once
#include <utility>

#include "attention/matrix_tile.h"

namespace regard {

constexpr int64_t kBlock = 32;                   // keys of a block, its queries, and features of a block of o
constexpr int64_t kWaiting = 2;                  // blocks of keys whose values are added at once
constexpr int64_t kPairs = kBlock / 2 * kBlock;  // of weights of a block
constexpr int64_t kVectorsOfBlock = kBlock * kBlock / W;

// A block of 32 × 32 sums: of 32 rows of A and 32 columns of B, `depth` times 32 each.
struct UnitJob {
  LeftParts a;
  RightParts b;
  int64_t depth;
  float* sums;        // where they go: 32 × 32 floats, as all others here
  const float* from;  // what they begin with; null for 0
  float* total;       // what they are added to, once they are in `sums`; or null
};

// Weights of some blocks of keys whose values wait to be added to the o of 32 queries: a product for each block of
// features.
struct WaitingValues {
  LeftParts values;
  RightParts weights;
  float* o;
  float* sums;                  // for a product that vectors add to o; null: it begins with o
  int64_t blocks, next, count;  // of keys; products

  UnitJob take() {
    const int64_t f = next++ * kBlock;
    float* to = o + f * kBlock;
    const LeftParts rows{values.at + f * values.row, values.row, values.step, values.part};
    if (sums) return {rows, weights, blocks, sums, nullptr, to};
    return {rows, weights, blocks, to, to, nullptr};
  }
};

// What the blocks of queries of an item keep of a matrix unit from tile to tile.
struct MatrixStream {
  WaitingValues waiting{};
  int turn = 0;  // which of two buffers takes weights
  float *before = nullptr,
        *total = nullptr;         // where the sums that the unit's registers hold go, and what they are then added to
  const float* stored = nullptr;  // sums that are to be added
  float* added = nullptr;         // to these; or null

  // The sums of a job begin in registers, those of the job before are in memory.
  template <bool totals>
  __attribute__((always_inline)) void begun(const UnitJob& job) {
    if (totals) {
      stored = before;
      added = total;
      total = job.total;
    }
    before = job.sums;
  }

  // Adds sums that were stored to their total: vectors [from, to) of them.
  void add(int64_t from, int64_t to) {
    for (int64_t n = from * W; n < to * W; n += W) store(added + n, load(added + n) + load(stored + n));
  }
  void add() {
    if (added) add(0, kVectorsOfBlock);
    added = nullptr;
  }

  void store_sums() {
    add();
    if (before) Isa::store_block<2, 2>(before, kBlock);
    stored = before;
    added = total;
    before = total = nullptr;
    add();
  }

  // Adds all values that wait: o is then what the tiles so far make it.
  template <int parts>
  void finish();
};

// What the unit multiplies while one block of scores becomes weights, a step at a time: the terms of one chain, of 32
// columns of A. What the vector units do meanwhile stands between the products of a step, without branches but for
// those of a job's first step: the processor's window holds few instructions of either kind at once. passing: whether
// right operands are used a few times, then not for long: they then leave the first-level cache to other things.
template <int parts, bool passing = false>
struct UnitPlan {
  using Terms = MatrixTerms<parts>;
  explicit UnitPlan(MatrixStream& stream) : stream(stream) {}
  MatrixStream& stream;
  static constexpr int64_t kJobs = 17;
  UnitJob jobs[kJobs];
  int64_t count = 0, products = 0;  // products: of 32 columns, of all jobs

  void add(const UnitJob& job) {
    jobs[count++] = job;
    for (const MatrixChain& chain : Terms::kChain) products += chain.count * job.depth;
  }

  // Runs all jobs, and `pairs` times work.half<0>(), work.half<1>() in equal shares between their products.
  template <class Work>
  __attribute__((always_inline)) void run(Work& work, int64_t pairs) {
    int64_t done = 0, paired = 0;
    for (const UnitJob* job = jobs; job < jobs + count; ++job) {
      const auto step = [&](auto chain, auto begins, int64_t k) __attribute__((always_inline)) {
        constexpr int kMost = most_beside(chain);
        done += Terms::kChain[chain].count;
        int64_t due = done * pairs / products - paired;
        paired += due;
        for (; due > kMost; --due) whole_pair(work);
        run_step<chain, begins, kMost>(*job, k, work, due);
      };
      step(Index<0>(), Index<1>(), 0);
      for (int64_t k = 1; k < job->depth; ++k) step(Index<0>(), Index<0>(), k);
      if constexpr (Terms::kChains > 1)
        for (int64_t k = 0; k < job->depth; ++k) step(Index<1>(), Index<0>(), k);
    }
    for (; paired < pairs; ++paired) whole_pair(work);
  }

  void run() {
    Nothing nothing;
    run(nothing, 0);
  }

 private:
  struct Nothing {
    template <int>
    void half() {}
  };
  template <int n>
  using Index = std::integral_constant<int, n>;

  // How many pairs take about as long as a step of a chain.
  static constexpr int most_beside(int chain) { return parts == 3 ? (chain ? 1 : 3) : 4; }

  template <class Work>
  static __attribute__((always_inline)) void whole_pair(Work& work) {
    work.template half<0>();
    work.template half<1>();
  }

  // A step with `due` pairs, of at most `pairs`.
  template <int chain, int begins, int pairs, class Work>
  __attribute__((always_inline)) void run_step(const UnitJob& job, int64_t k, Work& work, int64_t due) {
    if constexpr (pairs > 0)
      if (due < pairs) return run_step<chain, begins, pairs - 1>(job, k, work, due);
    constexpr int tiles = 4 * (int)Terms::kChain[chain].count;
    multiply_tiles<chain, begins, pairs>(job, k, work, std::make_integer_sequence<int, tiles>());
    if (begins && parts == 3) stream.added = nullptr;
  }

  template <int chain, int begins, int pairs, class Work, int... tiles>
  __attribute__((always_inline)) void multiply_tiles(const UnitJob& job, int64_t k, Work& work,
                                                     std::integer_sequence<int, tiles...>) {
    const uint16_t *a = job.a.at + k * job.a.step, *b = job.b.at + k * kBlock / 2 * job.b.row;
    (multiply_tile<chain, begins, tiles, sizeof...(tiles), pairs>(job, a, b, work), ...);
  }

  // Tile `tile` of the `tiles` of a step, and its share of the pairs; in the first step of a job also of what is added
  // to a total.
  template <int chain, bool begins, int tile, int tiles, int pairs, class Work>
  __attribute__((always_inline)) void multiply_tile(const UnitJob& job, const uint16_t* a, const uint16_t* b,
                                                    Work& work) {
    constexpr MatrixTerm term = Terms::kChain[chain].terms[tile / 4];
    constexpr int X = tile % 4, stored = 6;  // by then the sums are in memory
    a += term.a * job.a.part;
    b += term.b * job.b.part;
    if constexpr (begins && tile < 4)
      Isa::begin_tile<X, passing>(a, job.a.row, b, job.b.row, stream.before, kBlock, job.from, kBlock);
    else
      Isa::multiply_tile<X, term.loads != Loads::kRight, term.loads != Loads::kLeft, passing>(a, job.a.row, b,
                                                                                              job.b.row);
    beside<2 * pairs * tile / tiles, 2 * pairs*(tile + 1) / tiles>(work);
    if (begins && tile == 3) stream.begun<parts == 3>(job);
    if constexpr (begins && parts == 3 && tile >= stored) {
      constexpr int64_t share = tile - stored, shares = tiles - stored;
      if (stream.added) stream.add(kVectorsOfBlock * share / shares, kVectorsOfBlock * (share + 1) / shares);
    }
  }

  // Halves of pairs [from, to).
  template <int from, int to, class Work>
  static __attribute__((always_inline)) void beside(Work& work) {
    if constexpr (from < to) {
      work.template half<from % 2>();
      beside<from + 1, to>(work);
    }
  }
};

template <int parts>
void MatrixStream::finish() {
  while (waiting.next < waiting.count) {
    UnitPlan<parts> plan{*this};
    plan.add(waiting.take());
    plan.run();
  }
  store_sums();
}

}  // namespace regard
