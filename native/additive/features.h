// A score of one's own that is a sum over features: s_ij = Σ_k f(a_ik, c_jk, parameters_k), f a program of elementwise
// instructions, which is interpreted a feature at a time for a few keys and the block's queries. Python makes it from a
// function that a person wrote: backends/native/programs/features.py.
//
// LOAD and LOAD_GRADIENT name what they read: 0 the query's feature, 1 the key's, 2 + n that of the n-th parameter. The
// number of RESULT, bits of a float, is what the result is multiplied by before it is added to the others.
#pragma once
#include "additive/prepared.h"
#include "attention/few_rows.h"
#include "steps/interpreter.h"

namespace regard {

struct FeatureProgram {
  enum { kQuery = 0, kKey = 1, kParameters = 2 };

  static bool used(const regard_additive& x) { return x.code; }
  static const Instruction* begin_of(const regard_additive& x) { return (const Instruction*)x.code; }
  static const Instruction* end_of(const regard_additive& x) { return begin_of(x) + x.code_count; }

  // A parameter of a head, a number for each feature.
  static const float* parameter(const regard_additive& x, int64_t which, int64_t head) {
    return x.parameters + (which * x.call.heads + head) * x.call.dk;
  }

  static bool reads(const Instruction& i) { return i.op == REGARD_DO_LOAD || i.op == REGARD_DO_LOAD_GRADIENT; }
  static bool writes(const Instruction& i) { return i.op >= REGARD_DO_WHERE; }

  static bool right_instruction(const regard_additive& x, const Instruction& i) {
    const auto slot = [](int32_t n) { return n >= 0 && n < REGARD_SLOTS; };
    if (i.op < 0 || i.op >= REGARD_DO_COUNT || !slot(i.to) || !slot(i.a) || !slot(i.b) || !slot(i.c)) return false;
    if (i.op == REGARD_DO_GATHER || i.op == REGARD_DO_GATHER_GRADIENT) return false;
    if (reads(i) && (i.number < 0 || i.number >= kParameters + x.parameter_count)) return false;
    // a slot that is loaded has a layout of its own, or lies in the queries
    for (const Instruction* other = begin_of(x); writes(i) && other < end_of(x); ++other)
      if ((other->op == REGARD_DO_LOAD || other->op == REGARD_DO_NUMBER) && other->to == i.to) return false;
    return true;
  }

  static int32_t check(const regard_additive& x) {
    if (!used(x)) return REGARD_DONE;
    if (x.code_count < 1 || x.parameter_count < 0 || (x.parameter_count && x.call.dk && !x.parameters))
      return REGARD_BAD_ARGUMENT;
    int results = 0, derivatives = 0;
    for (const Instruction* i = begin_of(x); i < end_of(x); ++i) {
      if (!right_instruction(x, *i)) return REGARD_BAD_ARGUMENT;
      results += i->op == REGARD_DO_RESULT;
      derivatives += i->op == REGARD_DO_DERIVATIVE;
    }
    const bool closed = end_of(x)[-1].op == REGARD_DO_DERIVATIVE;
    return closed && results == 1 && derivatives == 1 ? REGARD_DONE : REGARD_BAD_ARGUMENT;
  }

  // For more keys at a time than where a program runs once for a pair: here it runs once for each feature.
  static constexpr int64_t kSlotSize = 2 * Interpreter::kSlotSize;
  static constexpr int64_t kSlotsSize =
      (int64_t)(sizeof(Slots) / sizeof(float)) / 16 * 16 + 32;  // whole lines of the cache
  static int64_t scratch_size(const regard_additive& x) {
    return used(x) ? kSlotsSize + (REGARD_SLOTS + 1) * kSlotSize : 0;
  }

  static constexpr int64_t kFeaturesOfPart = 8;  // long sums are sums of such sums, which round less

  // The slots of `vectors` at once, in `memory`, and the numbers in them, which no feature changes.
  static void place(const regard_additive& x, Slots& s, float* memory, int vectors) {
    Interpreter::place_slots(s, memory, kSlotSize, vectors);
    for (const Instruction* i = begin_of(x); i < end_of(x); ++i)
      if (i->op == REGARD_DO_NUMBER) Interpreter::set_number(s, *i);
  }

  // The same for a block of queries.
  template <int V>
  static Slots& place(const regard_additive& x, float* scratch) {
    Slots& s = *(Slots*)(((uintptr_t)scratch + 15) / 16 * 16);
    place(x, s, scratch + kSlotsSize, V);
    return s;
  }

  // One feature of a block's queries, [kQueries], and of some keys, `key_row` numbers apart.
  struct Feature {
    float* a;
    const float* c;
    int64_t key_row, keys, k, head;
  };

  REGARD_INLINE void load_feature(const regard_additive& x, Slots& s, const Instruction& i, const Feature& f) {
    s.key[i.to] = 0;
    s.vector[i.to] = 0;
    if (i.number == kQuery) {
      s.at[i.to] = f.a;
      s.vector[i.to] = W;  // in place: nothing else is written there
    } else if (i.number == kKey) {
      s.key[i.to] = W;
      for (int64_t n = 0; n < f.keys; ++n) store(s.at[i.to] + n * W, splat(f.c[n * f.key_row]));
    } else {
      store(s.at[i.to], splat(parameter(x, i.number - kParameters, f.head)[f.k]));
    }
  }

  // Runs the program for some keys and V vectors: of queries, for one feature, or of features. load: runs an
  // instruction LOAD; result: takes what is added to the score of a key, and of a vector; by_operand, where
  // with_derivatives: takes an instruction LOAD_GRADIENT, whose slot a is the derivative.
  template <int V, class Load, class Result, class ByOperand>
  REGARD_INLINE void interpret(const regard_additive& x, Slots& s, int64_t keys, bool with_derivatives,
                               const Load& load, const Result& result, const ByOperand& by_operand) {
    vf factor = vf{};
    const auto add = [&](int64_t n, int v, vf y) __attribute__((always_inline)) { result(n, v, y * factor); };
    for (const Instruction* i = begin_of(x);; ++i) {
      if (i->op == REGARD_DO_NUMBER) continue;
      if (i->op == REGARD_DO_LOAD) {
        load(*i);
      } else if (i->op == REGARD_DO_RESULT) {
        if (with_derivatives) continue;
        factor = (vf)splat_int(i->number);
        return Interpreter::each_number<V>(s, i->a, keys, add);
      } else if (!with_derivatives && writes(*i) && i[1].op == REGARD_DO_RESULT && i[1].a == i->to) {
        factor = (vf)splat_int(i[1].number);
        return Interpreter::compute<V>(x.call, s, *i, keys, add);
      } else if (i->op == REGARD_DO_LOAD_GRADIENT) {
        by_operand(*i);
      } else if (i->op == REGARD_DO_DERIVATIVE) {
        return;
      } else {
        Interpreter::compute<V>(x.call, s, *i, keys);
      }
    }
  }

  // Keys whose numbers fit into a slot: more where the queries are few.
  template <int V>
  static constexpr int64_t kKeysAtOnce = kSlotSize / (V * W);

  // The sums of a tile's keys, c[count] `key_row` apart, their features `key_col`, to scores [key][kQueries].
  template <int V>
  REGARD_NOINLINE void sum_tile(const regard_additive& x, const PreparedQueries& q, int64_t head, const float* c,
                                int64_t key_row, int64_t key_col, int64_t count, float* scores) {
    Slots& s = place<V>(x, q.slots);
    float* part = q.slots + scratch_size(x) - kSlotSize;  // [key][V · W] the sum of some features
    for (int64_t j = 0, keys; j < count; j += keys) {
      keys = count - j < kKeysAtOnce<V> ? count - j : kKeysAtOnce<V>;
      float* row = scores + j * kQueries;
      for (int64_t n = 0; n < keys; ++n)
        for (int v = 0; v < V; ++v) {
          store(row + n * kQueries + v * W, vf{});
          store(part + (n * V + v) * W, vf{});
        }
      for (int64_t k = 0; k < x.call.dk; ++k) {
        const Feature f{q.a + k * kQueries, c + j * key_row + k * key_col, key_row, keys, k, head};
        interpret<V>(
            x, s, keys, false, [&](const Instruction& i) { load_feature(x, s, i, f); },
            [&](int64_t n, int v, vf y) {
              float* to = part + (n * V + v) * W;
              store(to, load(to) + y);
            },
            [](const Instruction&) {});
        if ((k + 1) % kFeaturesOfPart == 0 || k + 1 == x.call.dk) move_sums<V>(part, row, keys);
      }
    }
  }

  // Adds sums to the scores of some keys, and begins them anew.
  template <int V>
  static void move_sums(float* part, float* row, int64_t keys) {
    for (int64_t n = 0; n < keys; ++n)
      for (int v = 0; v < V; ++v) {
        float *to = row + n * kQueries + v * W, *from = part + (n * V + v) * W;
        store(to, load(to) + load(from));
        store(from, vf{});
      }
  }

  // What a tile adds to the gradients: of a [width][kQueries], of c [width][dc_row] and of the parameters,
  // [parameter][width][W]. a, c, ds: as in tile_gradients_direct.
  struct TileSums {
    float *da, *dc, *dparameters;
    int64_t dc_row, width;
  };

  template <int V>
  REGARD_NOINLINE void gradients(const regard_additive& x, float* slots, int64_t head, float* a, const float* c,
                                 int64_t count, const float* ds, const TileSums& to) {
    Slots& s = place<V>(x, slots);
    for (int64_t j = 0, keys; j < count; j += keys) {
      keys = count - j < kKeysAtOnce<V> ? count - j : kKeysAtOnce<V>;
      for (int64_t k = 0; k < x.call.dk; ++k) {
        const Feature f{a + k * kQueries, c + j * to.width + k, to.width, keys, k, head};
        interpret<V>(
            x, s, keys, true, [&](const Instruction& i) { load_feature(x, s, i, f); }, [](int64_t, int, vf) {},
            [&](const Instruction& i) { add<V>(s, i, f, ds + j * kQueries, j, to); });
      }
    }
  }

  // Adds the gradients of the scores times the derivative in a slot, where they are not 0: 0 · inf is NaN.
  template <int V>
  REGARD_INLINE void add(const Slots& s, const Instruction& i, const Feature& f, const float* ds, int64_t j,
                         const TileSums& to) {
    const auto each = [&](const auto& take) {
      Interpreter::each_number<V>(s, i.a, f.keys, [&](int64_t n, int v, vf y) {
        const vf d = load(ds + n * kQueries + v * W);
        take(n, v, select(d == vf{}, d, d * y));
      });
    };
    if (i.number == kQuery) {
      float* at = to.da + f.k * kQueries;
      each([&](int64_t, int v, vf y) { store(at + v * W, load(at + v * W) + y); });
    } else if (i.number == kKey) {
      vf by_key[kKeysAtOnce<V> + W];
      for (vf& one : by_key) one = vf{};
      each([&](int64_t n, int, vf y) { by_key[n] += y; });
      float* at = to.dc + f.k * to.dc_row + j;
      for (int64_t n = 0; n < f.keys; n += W) {
        vf some[W];
        for (int m = 0; m < W; ++m) some[m] = by_key[n + m];
        store(at + n, load(at + n) + sums(some));
      }
    } else {
      float* at = to.dparameters + ((i.number - kParameters) * to.width + f.k) * W;
      vf sum = vf{};
      each([&](int64_t, int, vf y) { sum += y; });
      store(at, load(at) + sum);
    }
  }
};

}  // namespace regard
