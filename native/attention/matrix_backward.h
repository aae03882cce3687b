// The backward on a matrix unit: the five products of backward_block.h, of numbers as sums of bfloat16.
//
//   S = K Qᵀ and dP = V dOᵀ       rows of K and V, times pairs of features of Q and dO
//   dV += P dO and dK += dS Q      rows of weights, times pairs of queries
//   dQᵀ += Kᵀ dS                   K transposed once a tile, times pairs of keys
//
// Weights and gradients of scores have as many parts as the call's numbers: in bfloat16 they are rounded to it.
#pragma once
#include "attention/matrix_backward_stream.h"

namespace regard {

// Takes a product to memory, in rows of kQueries floats.
struct ProductInto {
  static constexpr int64_t stride = kQueries;
  float* at;

  float* place(int64_t row, int vector) const { return at + row * stride + vector * W; }
  const float* from(int64_t, int) const { return nullptr; }
  template <int C>
  void take(int64_t, int, int64_t) const {}
};

// A block of queries and a tile of keys, the keys [x.from, x.to) of it, with all steps: weights and gradients of
// scores, then their products.
template <int parts>
static void run_steps(const BackwardCall& w, const BackwardScratch& s, const Place& p, const Tile& t,
                      const BlockShare& x, GradientProducts<parts>& products, int64_t part) {
  const regard_call& c = w.c;
  const Scratch scratch{s.qt, x.p, nullptr, s.modifiers, nullptr, nullptr};
  Block<kVectors> b{c, scratch, p};
  b.factor = factor_of_scores<parts>(c, p.h);
  Interval::begin(b);
  begin_steps(b);
  Modifiers::load_tile(b, t);
  const KeyRange keys{x.from / kBlock * kBlock, whole_depth(x.to)};  // whole blocks that hold all keys that are seen
  const auto multiply = [&](const LeftParts& a, const RightParts& r, float* to, int64_t depth) {
    ProductInto into{to + keys.from * kQueries};
    Isa::multiply_blocks<parts, kVectors>(into, from_row(a, keys.from), r, whole_rows(x.to) - keys.from, depth);
  };
  multiply(products.tile.k, products.q.q, x.p, whole_depth(c.dk));
  multiply(products.tile.v, products.q.dout, x.ds, whole_depth(c.dv));
  for (int64_t n = x.from; n < x.to; ++n) {
    vf scores[kVectors];
    for (int v = 0; v < kVectors; ++v) scores[v] = Isa::product(load(x.p + n * kQueries + v * W), splat(b.factor));
    if (!Program::used(c)) apply_steps<kVectors>(b, t, n, scores, s.kept + n * kQueries);
    for (int v = 0; v < kVectors; ++v) store(x.p + n * kQueries + v * W, scores[v]);
  }
  if (Program::used(c)) run_program<kVectors>(b, t, x.p, x.from, x.to, s.kept);
  weigh_floats<parts>(b, t, x);
  if (w.scores)
    Modifiers::backward(b, t, ScoreGradients{w.g, x.ds, s.kept, x.from, x.to}, w.sums,
                        (part * w.elements + p.b) * c.heads + p.h);
  MatrixStream stream;
  const int64_t columns = whole_depth(p.rows) / kBlock;
  for (int64_t key = keys.from; key < keys.to; key += kBlock) {
    split_floats<parts>(x, products.weights, key);
    products.wait(key, 0, columns);
    products.finish(stream);
  }
  for (int64_t n = 0; n < columns; ++n) products.finish_queries(stream, n, keys.from, keys.to);
  stream.store_sums();
}

}  // namespace regard
