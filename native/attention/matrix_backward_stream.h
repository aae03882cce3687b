// A block of queries and a tile of keys in a stream, in the backward on a matrix unit: while the vector units turn 32
// keys and 32 queries of scores and dP into weights and gradients of scores, the unit multiplies the next ones, and
// what is added to dK and dV of the keys before. While the unit works, one of two vector units can multiply: all of its
// products are then beside some of their work.
#pragma once
#include "attention/matrix_backward_weights.h"

namespace regard {

// A block of queries is read for each 32 keys of a tile, then for the next tile.
template <int parts>
using BackwardPlan = UnitPlan<parts, true>;

// The products of weights: dV += P dO and dK += dS Q of 32 keys, dQ^T += K^T dS of 32 queries, 32 features each.
template <int parts>
struct GradientProducts {
  const BackwardCall& w;
  const PackedBlock& q;
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

// The blocks of 32 keys and 32 queries that are seen, of one 32 keys after the other; and the keys of each 32 queries.
struct SeenBlocks {
  WeightBlock list[kTile / kBlock * kVectors / 2];
  int64_t count = 0;
  KeyRange of_column[(kVectors + 1) / 2];

  SeenBlocks(const BackwardCall& w, Block<kVectors>& b, const Tile& t, const KeyRange& range) {
    const Limits& all = w.limits[(b.p.b * w.c.heads + b.p.h) * w.blocks + b.p.row / kQueries];
    const bool whole = t.j + range.from >= all.inner_lo && t.j + range.to <= all.inner_hi;
    Limits seen[(kVectors + 1) / 2];
    if (!whole) Interval::begin(b);
    const int64_t columns = b.p.rows / kBlock;
    for (int64_t column = 0; column < columns; ++column) {
      Place rows = b.p;
      rows.row += column * kBlock;
      rows.rows = kBlock;
      seen[column] = whole ? all : Interval::limits(w.c, rows);
    }
    for (int64_t n = range.from; n < range.to; n += kBlock)
      for (int64_t column = 0; column < columns; ++column) {
        const Limits& of = seen[column];
        const int64_t key = t.j + n;
        if (key >= of.hi || key + kBlock <= of.lo) continue;
        list[count++] = {n, (int)column, key < of.inner_lo || key + kBlock > of.inner_hi};
        KeyRange& keys = of_column[column];
        if (keys.from == keys.to) keys.from = n;
        keys.to = n + kBlock;
      }
  }

  // Where the blocks of the keys of block n end.
  int64_t end(int64_t n) const {
    const int64_t key = list[n].key;
    while (n < count && list[n].key == key) ++n;
    return n;
  }
};

// Streams whole blocks of keys.
template <int parts>
static void stream_block(const BackwardCall& w, Block<kVectors>& b, const Tile& t, const BlockShare& x,
                         GradientProducts<parts>& products, const KeyRange& range) {
  const int64_t dk = whole_depth(b.c.dk), dv = whole_depth(b.c.dv);
  const PackedBlock& q = products.q;
  const SeenBlocks seen(w, b, t, range);
  MatrixStream stream;
  const auto place = [](float* of, int64_t block) { return of + block % 2 * kBlock * kBlock; };
  const auto add_scores = [&](BackwardPlan<parts>& plan, int64_t block) {
    if (block >= seen.count) return;
    const auto rows = [&](LeftParts left) { return from_row(left, seen.list[block].key); };
    const auto column = [&](RightParts right) {
      right.at += seen.list[block].column * right.column;
      return right;
    };
    plan.add({rows(products.tile.k), column(q.q), dk / kBlock, place(x.p, block), nullptr, nullptr});
    plan.add({rows(products.tile.v), column(q.dout), dv / kBlock, place(x.ds, block), nullptr, nullptr});
  };
  BackwardPlan<parts> first{stream};
  add_scores(first, 0);
  first.run();
  for (int64_t block = 0, end = 0, begin = 0; block < seen.count; ++block) {
    if (block == end) {
      begin = block;
      end = seen.end(block);
    }
    const WeightBlock& of = seen.list[block];
    BackwardPlan<parts> plan{stream};
    add_scores(plan, block + 1);
    const int64_t waiting = products.count - products.next, room = BackwardPlan<parts>::kJobs - plan.count;
    const int64_t share = (waiting + end - block - 1) / (end - block);
    for (int64_t n = 0; n < share && n < room; ++n) plan.add(products.take());
    float *s = place(x.p, block), *dp = place(x.ds, block);
    if (stream.before == dp) stream.store_sums();  // the unit's registers hold it still
    if (of.edge) hide_pairs(b, t, of, s, dp);
    WeighedBlock<parts> work(x, products.weights, s, dp, b.factor, of.key, 2 * of.column);
    plan.run(work, kBlock / 2);
    if (block + 1 < end) continue;
    products.finish(stream);
    products.wait(of.key, seen.list[begin].column, of.column + 1);
  }
  products.finish(stream);
  for (int64_t n = 0; n < b.p.rows / kBlock; ++n)
    products.finish_queries(stream, n, seen.of_column[n].from, seen.of_column[n].to);
  stream.store_sums();
}

}  // namespace regard
