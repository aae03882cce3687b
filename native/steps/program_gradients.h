// The gradients of a program's operands: the sum of dS times the derivative of the result by each element that was
// read.
//
// A number for each head, or for all of them, and the elements of a table have sums in double for each item of work.
// What queries, keys or pairs have numbers of is added in place, as the gradient of a bias is.
#pragma once
#include "steps/bias.h"
#include "steps/program_code.h"
#include "steps/softcap.h"
#include "steps/sums_by_distance.h"

namespace regard {

struct ProgramGradients : ProgramCode {
  static constexpr int64_t kTileSize = kTile * kQueries;
  static constexpr int64_t kMostSums =
      1 << 22;  // doubles; the gradients of larger tables are added in place, by one item of work

  static const regard_tensor& nth(const regard_gradients& g, int64_t n) {
    return nth_tensor(&g, offsetof(regard_gradients, dprogram_0), n);
  }

  static const regard_tensor& gradient(const regard_gradients& g, const Instruction& x) { return nth(g, x.number); }

  // Calls body(instruction) for each that takes a derivative by an operand.
  template <class Body>
  static void each_gradient(const regard_call& c, const Body& body) {
    for (const Instruction* x = begin_of(c); c.program_code && x < end_of(c); ++x)
      if (is_gradient(*x)) body(*x);
  }

  // The same for those that are wanted.
  template <class Body>
  static void each_wanted(const regard_gradients& g, const Body& body) {
    each_gradient(g.call, [&](const Instruction& x) {
      if (gradient(g, x).data) body(x);
    });
  }

  // What is kept of a tile: the derivative by the score; then, for each derivative by an operand, its numbers, and
  // indices of a table.
  static int64_t kept_size(const regard_call& c) {
    int64_t size = kTileSize;
    each_gradient(c, [&](const Instruction&) { size += 2 * kTileSize; });
    return size;
  }

  static bool wants_grad(const regard_gradients& g) {
    bool wanted = false;
    for (int n = 0; n < REGARD_PROGRAM_OPERANDS; ++n) wanted |= nth(g, n).data != nullptr;
    return wanted;
  }

  static bool multiplies_delta(const regard_gradients& g) {
    bool far = false;
    each_wanted(g, [&](const Instruction& x) { far |= x.c != 0; });
    return far;
  }

  // Doubles of the sums that one instruction adds to, for a head; 0 where it adds to the gradient itself.
  static int64_t sums_of(const regard_gradients& g, const Instruction& x) {
    const regard_call& c = g.call;
    int64_t elements = 1;
    for (int n = 0; n < REGARD_BATCH_AXES; ++n) elements *= c.batch[n];
    if (x.op == REGARD_DO_GATHER_GRADIENT) {
      const int64_t places = c.heads * (elements < 32 ? 32 : elements), size = operand(c, x.number).size;
      return size <= kMostSums / places ? size : 0;
    }
    const regard_tensor& to = gradient(g, x);
    bool one = to.row == 0 && to.col == 0;
    for (int n = 0; n < REGARD_BATCH_AXES; ++n) one &= to.batch[n] == 0;
    return one ? 1 : 0;
  }

  static int64_t grad_size(const regard_gradients& g) {
    int64_t size = 0;
    each_wanted(g, [&](const Instruction& x) { size += sums_of(g, x); });
    return size;
  }

  static GradientSharing sharing(const regard_gradients& g) {
    GradientSharing all{};
    each_wanted(g, [&](const Instruction& x) {
      if (sums_of(g, x) == 0)
        all |= x.op == REGARD_DO_GATHER_GRADIENT ? GradientSharing::of({}) : GradientSharing::of(gradient(g, x));
    });
    return all;
  }

  // Whether each gradient that is wanted has room for what is added, and an instruction that adds to it.
  static bool right_gradients(const regard_gradients& g) {
    const regard_call& c = g.call;
    bool right = true, taken[REGARD_PROGRAM_OPERANDS] = {};
    each_wanted(g, [&](const Instruction& x) {
      const regard_tensor& to = gradient(g, x);
      taken[x.number] = true;
      if (x.op == REGARD_DO_GATHER_GRADIENT) right &= to.dtype == REGARD_F64 && to.size >= operand(c, x.number).size;
      else right &= fits(to, to.row == 0 || to.col == 0 ? REGARD_F64 : REGARD_F32, c.batch, c.heads, c.nq, c.nk);
    });
    for (int n = 0; n < REGARD_PROGRAM_OPERANDS; ++n) right &= taken[n] || !nth(g, n).data;
    return right;
  }

  // Adds what one tile gives. sum: grad_size doubles.
  template <int V>
  static void add(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* sum) {
    float* kept = g.kept + kTileSize;
    each_gradient(b.c, [&](const Instruction& x) {
      float* terms = kept;
      const int32_t* index = (const int32_t*)(kept + kTileSize);
      kept += 2 * kTileSize;
      const regard_tensor& to = gradient(g.wanted, x);
      if (!to.data) return;
      multiply_derivatives<V>(terms, g.ds, terms, g.from, g.to);
      const int64_t size = sums_of(g.wanted, x);
      if (x.op == REGARD_DO_GATHER_GRADIENT)
        add_by_index<V>(size ? sum : (double*)to.data, operand(b.c, x.number).size, b.p.rows, terms, index, g.from,
                        g.to);
      else if (size) *sum += total<V>(terms, g.from, g.to);
      else if (to.row == 0 || to.col == 0) Bias::add_shared<V>(to, b, t, terms, g.from, g.to);
      else Bias::add<V>(to, b, t, terms, g.from, g.to);
      sum += size;
    });
  }

  // The terms of a row nearly cancel, so only short sums are kept in float.
  template <int V>
  static double total(const float* terms, int64_t from, int64_t to) {
    constexpr int64_t kShort = 4;
    double total = 0;
    for (int64_t first = from; first < to; first += kShort) {
      vf sum = vf{};
      for (int64_t n = first; n < first + kShort && n < to; ++n)
        for (int v = 0; v < V; ++v) sum += load(terms + n * kQueries + v * W);
      for (int n = 0; n < W; ++n) total += sum[n];
    }
    return total;
  }

  // Python proves that indices lie inside; nothing else may be written either.
  template <int V>
  static void add_by_index(double* table, int64_t size, int64_t rows, const float* terms, const int32_t* index,
                           int64_t from, int64_t to) {
    const auto add = [&](int32_t at, float term) {
      if (at >= 0 && at < size) table[at] += term;
    };
    if (rows == V * W && follows_from_distance(index, rows, from, to)) {
      float sums[kDistances] = {};
      add_by_distance<V>(sums, terms, from, to);
      for (int64_t n = to - 1; n > from; --n) add(index[n * kQueries], sums[to - 1 - n]);
      for (int64_t i = 0; i < rows; ++i) add(index[from * kQueries + i], sums[to - 1 - from + i]);
      return;
    }
    for (int64_t n = from; n < to; ++n)
      for (int64_t i = n * kQueries; i < n * kQueries + rows; ++i) add(index[i], terms[i]);
  }

  // Whether all pairs of a tile whose places differ by the same have the same index.
  static bool follows_from_distance(const int32_t* index, int64_t rows, int64_t from, int64_t to) {
    for (int64_t n = from; n + 1 < to; ++n) {
      const int32_t *here = index + n * kQueries, *next = here + kQueries + 1;
      int32_t other = 0;
      for (int64_t i = 0; i + 1 < rows; ++i) other |= here[i] ^ next[i];
      if (other) return false;
    }
    return true;
  }

  // Adds the sums of a head to the gradients.
  static void write_grad(const regard_gradients& g, int64_t head, const double* sum) {
    each_wanted(g, [&](const Instruction& x) {
      const int64_t size = sums_of(g, x), first = x.op == REGARD_DO_GATHER_GRADIENT ? 0 : head * gradient(g, x).head;
      for (int64_t n = 0; n < size; ++n) ((double*)gradient(g, x).data)[first + n] += sum[n];
      sum += size;
    });
  }
};

}  // namespace regard
