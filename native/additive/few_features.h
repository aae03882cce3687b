// Sums over features of a person's own function, of few queries. Lanes are features: the program runs for some of W
// keys and for up to kVectors vectors of a row's features at once.
#pragma once
#include "additive/features.h"
#include "additive/few_rows.h"

namespace regard {

// The scores of few rows by a program of features: a Score of FewRowsForward.
struct FeaturesFewRows {
  using Given = regard_additive;
  using Rows = StridedRows;
  const regard_additive& x;
  int64_t width;      // dk rounded up to W
  float* queries;     // [rows][width], 0 past dk
  float* parameters;  // [heads of the group][parameter][width], 0 past dk
  float* bounded;     // [W][width] finite_end() of keys, and of a query behind them
  FeatureRows keys;
  Slots several, one;  // of kVectors vectors, and of one
  float unit[kMaxRows];

  static int64_t width_of(const regard_call& c) { return round_up(c.dk); }
  // Rows of gradients that a query has besides its own.
  static int64_t learned(const regard_additive& x) { return x.parameter_count; }

  static const regard_call& call(const Given& x) { return x.call; }
  static int64_t size(const Given& x, int64_t rows) {
    const int64_t heads = x.call.heads / x.call.key_heads;
    return width_of(x.call) * (rows + heads * x.parameter_count + 2 * W + 1) + REGARD_SLOTS * FeatureProgram::kSlotSize;
  }
  FeaturesFewRows(const Given& given, int64_t rows, float* at)
      : x(given), width(width_of(given.call)), queries(at), keys{given.call, width, nullptr} {
    parameters = queries + rows * width;
    bounded = parameters + x.call.heads / x.call.key_heads * x.parameter_count * width;
    keys.copied = bounded + (W + 1) * width;
    float* const slots = keys.copied + W * width;
    FeatureProgram::place(x, several, slots, kVectors);
    FeatureProgram::place(x, one, slots, 1);
  }

  const float* query(int64_t r) const { return queries + r * width; }
  const float* parameters_of(int64_t r) const { return parameters + r / x.call.nq * x.parameter_count * width; }

  void begin(const FewRows& f, int64_t r) {
    const regard_call& c = x.call;
    unit[r] = score_unit(c, f.row[r].h);
    gather(queries + r * width, width, row_ptr(c.q, f.p, f.row[r].h, f.row[r].i, REGARD_F32), c.q, REGARD_F32, c.dk, 1);
    float* const to = parameters + r / c.nq * x.parameter_count * width;
    for (int64_t n = 0; r % c.nq == 0 && n < x.parameter_count; ++n) {
      zero(to + n * width, width);
      __builtin_memcpy(to + n * width, FeatureProgram::parameter(x, n, f.row[r].h), (size_t)c.dk * sizeof(float));
    }
  }

  void read(const float* rows, int64_t there) { keys.read_rows(rows, there); }

  // The similarity of row r and the W keys that were read.
  vf find(int64_t r) {
    vf sum[W];
    for (vf& one : sum) one = vf{};
    run({query(r), keys.plain, parameters_of(r), keys.row}, sum, nullptr);
    return sums(sum) * splat(unit[r]);
  }

  void score(FewRows& f, const Chunk& t) { score_by_row(*this, f, t); }

  // Adds what the W keys that were read give to the gradients of row r. The derivatives are those at finite_end().
  void add_gradients(int64_t r, const ScoreShare& to) {
    float* const a = bounded + W * width;
    for (int64_t d = 0; d < width; d += W) store(a + d, finite_end(load(query(r) + d)));
    for (int64_t m = 0; m < W; ++m)
      for (int64_t d = 0; d < width; d += W)
        store(bounded + m * width + d, finite_end(load(keys.plain + m * keys.row + d)));
    run({a, bounded, parameters_of(r), width}, nullptr, &to);
  }

 private:
  // A query, W keys `key_row` numbers apart, and the parameters of its head.
  struct Features {
    const float *a, *c, *parameters;
    int64_t key_row;
  };

  // Adds the scores of W keys to sum [W], each spread over lanes; or, where `to` is not null, gradients to it.
  void run(const Features& f, vf* sum, const ScoreShare* to) {
    int64_t d = 0;
    for (; d + kVectors * W <= width; d += kVectors * W) run_vectors<kVectors>(several, f, d, sum, to);
    for (; d < width; d += W) run_vectors<1>(one, f, d, sum, to);
  }

  template <int V>
  __attribute__((noinline)) void run_vectors(Slots& s, const Features& f, int64_t d, vf* sum,
                                             const ScoreShare* to) const {
    constexpr int64_t kAtOnce = FeatureProgram::kKeysAtOnce<V> < W ? FeatureProgram::kKeysAtOnce<V> : W;
    for (int64_t m = 0; m < W; m += kAtOnce)
      FeatureProgram::interpret<V>(
          x, s, kAtOnce, to, [&](const Instruction& i) { place(s, i, f, m, d); },
          [&](int64_t n, int v, vf y) {
            if (to) return;
            sum[m + n] += d + (v + 1) * W <= x.call.dk
                              ? y
                              : select(lanes() < splat_int((int32_t)(x.call.dk - d - v * W)), y, vf{});
          },
          [&](const Instruction& i) { add<V>(s, i, kAtOnce, m, d, *to); });
  }

  // Features from d on, of keys from m on. They are read where they lie: nothing is written to a slot that is loaded.
  void place(Slots& s, const Instruction& i, const Features& f, int64_t m, int64_t d) const {
    const bool key = i.number == FeatureProgram::kKey;
    const float* const at = i.number == FeatureProgram::kQuery ? f.a
                            : key ? f.c + m * f.key_row
                                  : f.parameters + (i.number - FeatureProgram::kParameters) * width;
    s.at[i.to] = const_cast<float*>(at) + d;
    s.key[i.to] = (int32_t)(key ? f.key_row : 0);
    s.vector[i.to] = (int16_t)W;
  }

  // Adds the gradients of the scores times the derivative in a slot, where they are not 0: 0 · inf is NaN.
  template <int V>
  void add(const Slots& s, const Instruction& i, int64_t count, int64_t m, int64_t d, const ScoreShare& to) const {
    const auto each = [&](const auto& take) {
      Interpreter::each_number<V>(s, i.a, count, [&](int64_t n, int v, vf y) {
        if (to.ds[m + n] != 0) take(n, v, splat(to.ds[m + n]) * y);
      });
    };
    if (i.number == FeatureProgram::kKey) {
      return each([&](int64_t n, int v, vf y) {
        float* const at = to.dc + (m + n) * to.row + d + v * W;
        store(at, load(at) + y);
      });
    }
    vf sum[V] = {};  // of these keys alone: a long sum of such sums rounds less
    each([&](int64_t, int v, vf y) { sum[v] += y; });
    float* const at =
        (i.number == FeatureProgram::kQuery ? to.da : to.dw + (i.number - FeatureProgram::kParameters) * width) + d;
    for (int v = 0; v < V; ++v) store(at + v * W, load(at + v * W) + sum[v]);
  }
};

}  // namespace regard
