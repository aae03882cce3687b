// Queries and a tile of keys in a stream, in the backward on a matrix unit: while the vector units turn 32
// keys and 32 queries of scores and dP into weights and gradients of scores, the unit multiplies the next ones, and
// what is added to dK and dV of the keys before. While the unit works, one of two vector units can multiply: all of its
// products are then beside some of their work.
#pragma once
#include "attention/matrix_backward_weights.h"

namespace regard {

// Queries are read for each 32 keys of a tile, then for the next tile.
template <int parts>
using BackwardPlan = UnitPlan<parts, true>;

// The products of weights: dV += P dO and dK += dS Q of 32 keys, dQ^T += K^T dS of 32 queries, 32 features each.
template <int parts>
struct GradientProducts {
  const BackwardCall& w;
  const PackedQueries& q;
  const MatrixTile& tile;
  const WeightParts<parts>& weights;
  float *dq, *sums;  // dQ^T: [32 queries after the other][dk][32]; null where it isn't asked for. Room of a product
  // those that wait: of 32 keys, and 32 queries `first`, up to `last`; the next product, and how many there are
  int64_t key = 0, first = 0, last = 0, next = 0, count = 0;

  int64_t of_values() const { return w.g.dv.data ? whole_depth(w.c.dv) / kBlock : 0; }
  int64_t of_keys() const { return w.g.dk.data ? whole_depth(w.c.dk) / kBlock : 0; }

  // Lets the products of 32 keys wait.
  void wait(int64_t of_key, int64_t from, int64_t to) {
    key = of_key;
    first = from;
    last = to;
    next = 0;
    count = of_values() + of_keys();
  }

  UnitJob take() {
    const int64_t n = next++, f = n < of_values() ? n : n - of_values();
    const bool values = n < of_values();
    LeftParts left = WeightParts<parts>::rows(values ? weights.p : weights.ds, key);
    RightParts right = values ? q.dout_rows : q.q_rows;
    left.at += first * left.step;
    right.at += first * kBlock / 2 * right.row + f * right.column;
    return onto((values ? tile.dv : tile.dk) + MatrixTile::place(key, f), left, right, last - first);
  }

  // dQ^T of the n-th 32 queries, of the f-th 32 features, and keys [from, to), whole blocks.
  UnitJob of_queries(int64_t n, int64_t f, int64_t from, int64_t to) const {
    LeftParts left = tile.kt;
    RightParts right = weights.right(n);
    left.at += from / kBlock * left.step + f * kBlock * left.row;
    right.at += from / 2 * right.row;
    return onto(dq + (n * whole_depth(w.c.dk) + f * kBlock) * kBlock, left, right, (to - from) / kBlock);
  }

  // Numbers of several parts start a sum at 0: long sums have two levels.
  UnitJob onto(float* to, const LeftParts& left, const RightParts& right, int64_t depth) const {
    if (parts == 3) return {left, right, depth, sums, nullptr, to};
    return {left, right, depth, to, to, nullptr};
  }

  // Runs all that wait.
  void finish(MatrixStream& stream) {
    while (next < count) {
      BackwardPlan<parts> plan{stream};
      for (int64_t n = 0; n < BackwardPlan<parts>::kJobs && next < count; ++n) plan.add(take());
      plan.run();
    }
  }

  // Runs those of the n-th 32 queries and the keys [from, to).
  void finish_queries(MatrixStream& stream, int64_t n, int64_t from, int64_t to) const {
    if (!dq || from == to) return;
    for (int64_t f = 0; f < whole_depth(w.c.dk) / kBlock; ++f) {
      BackwardPlan<parts> plan{stream};
      plan.add(of_queries(n, f, from, to));
      plan.run();
    }
  }
};

// A block of 32 keys and 32 queries: the first of its keys, which 32 queries, and whether intervals hide some of its
// pairs.
struct WeightBlock {
  int64_t key, column;
  bool edge;
};

// The blocks of a tile that are seen, of one 32 keys after the other; and the keys of each 32 queries.
struct SeenBlocks {
  static constexpr int64_t kColumns = held_queries(1) / kBlock;
  WeightBlock list[kTile / kBlock * kColumns];
  int64_t count = 0;
  KeyRange of_column[kColumns];

  SeenBlocks(const BackwardCall& w, const Place& p, int64_t j, int64_t keys) {
    const int64_t columns = p.rows / kBlock, end = whole_depth(keys);
    Limits seen[kColumns];
    for (int64_t column = 0; column < columns; ++column) {
      const Place rows = queries(p, column);
      const Limits& all = w.limits[(p.b * w.c.heads + p.h) * w.blocks + rows.row / kQueries];
      seen[column] = j >= all.inner_lo && j + end <= all.inner_hi ? all : Interval::limits(w.c, rows);
    }
    for (int64_t n = 0; n < end; n += kBlock)
      for (int64_t column = 0; column < columns; ++column) {
        const Limits& of = seen[column];
        const int64_t key = j + n;
        if (key >= of.hi || key + kBlock <= of.lo) continue;
        list[count++] = {n, column, key < of.inner_lo || key + kBlock > of.inner_hi};
        KeyRange& range = of_column[column];
        if (range.from == range.to) range.from = n;
        range.to = n + kBlock;
      }
  }

  // The n-th 32 queries.
  static Place queries(Place p, int64_t column) {
    p.row += column * kBlock;
    p.rows = kBlock;
    return p;
  }

  // Where the blocks end that have the keys of block n, and queries without a gap.
  int64_t end(int64_t n) const {
    const WeightBlock& first = list[n];
    int64_t of = 0;
    while (n + of < count && list[n + of].key == first.key && list[n + of].column == first.column + of) ++of;
    return n + of;
  }
};

// Streams the queries against a tile of keys.
template <int parts>
static void stream_tile(const BackwardCall& w, const BackwardScratch& s, const StreamedQueries& of,
                        GradientProducts<parts>& products) {
  const int64_t dk = whole_depth(w.c.dk), dv = whole_depth(w.c.dv);
  const MatrixTile& tile = products.tile;
  const SeenBlocks seen(w, of.p, tile.j, tile.count);
  MatrixStream stream;
  const auto place = [](float* at, int64_t block) { return at + block % 2 * kBlock * kBlock; };
  const auto add_scores = [&](BackwardPlan<parts>& plan, int64_t block) {
    if (block >= seen.count) return;
    const auto rows = [&](LeftParts left) { return from_row(left, seen.list[block].key); };
    const auto column = [&](RightParts right) {
      right.at += seen.list[block].column * right.column;
      return right;
    };
    plan.add({rows(tile.k), column(products.q.q), dk / kBlock, place(s.p, block), nullptr, nullptr});
    plan.add({rows(tile.v), column(products.q.dout), dv / kBlock, place(s.ds, block), nullptr, nullptr});
  };
  BackwardPlan<parts> first{stream};
  add_scores(first, 0);
  first.run();
  for (int64_t block = 0, end = 0, begin = 0; block < seen.count; ++block) {
    if (block == end) {
      begin = block;
      end = seen.end(block);
    }
    const WeightBlock& at = seen.list[block];
    BackwardPlan<parts> plan{stream};
    add_scores(plan, block + 1);
    const int64_t waiting = products.count - products.next, room = BackwardPlan<parts>::kJobs - plan.count;
    const int64_t share = (waiting + end - block - 1) / (end - block);
    for (int64_t n = 0; n < share && n < room; ++n) plan.add(products.take());
    float *scores = place(s.p, block), *dp = place(s.ds, block);
    if (stream.before == dp) stream.store_sums();  // the unit's registers hold it still
    if (at.edge) hide_pairs(w.c, SeenBlocks::queries(of.p, at.column), tile.j + at.key, scores, dp);
    WeighedBlock<parts> work(of, products.weights, scores, dp, at.key, (int)(2 * at.column));
    plan.run(work, kBlock / 2);
    if (block + 1 < end) continue;
    products.finish(stream);
    products.wait(at.key, seen.list[begin].column, at.column + 1);
  }
  products.finish(stream);
  for (int64_t n = 0; n < of.p.rows / kBlock; ++n)
    products.finish_queries(stream, n, seen.of_column[n].from, seen.of_column[n].to);
  stream.store_sums();
}

}  // namespace regard
