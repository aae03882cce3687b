// Program: the modifiers of a score as a sequence of elementwise instructions, which are interpreted for a few keys at
// a time. Python makes it from a function that a person wrote: backends/native/programs/.
//
// An instruction reads and writes slots: numbers of some keys and of the block's queries (or of a row's query and W
// keys). Slot 0 begins with the natural scores. First come the instructions that no key changes (NUMBER, LOAD of what
// keys share), then those that follow from distances (by_distance.h), then the rest up to RESULT, then those of the
// derivatives by operands (LOAD_GRADIENT, GATHER_GRADIENT) and by the score, up to DERIVATIVE.
#pragma once
#include "steps/by_distance.h"
#include "steps/interpreter.h"
#include "steps/program_gradients.h"
#include "steps/softcap.h"

namespace regard {

struct Program : Modifier, ProgramGradients {
  // What a thread keeps of a program while it runs for some queries. memory: of the slots; tables: of the distances.
  struct Registers {
    Slots slots;
    ByDistance distances;
    float *memory, *tables;
  };

  template <int V>
  struct State {
    Registers* registers;
  };

  static bool used(const regard_call& c) { return c.program_code; }
  static constexpr bool keeps = true;

  using ProgramCode::check;
  using ProgramGradients::grad_size, ProgramGradients::kept_size, ProgramGradients::multiplies_delta,
      ProgramGradients::sharing;
  using ProgramGradients::wants_grad, ProgramGradients::write_grad;

  static constexpr int64_t kRegistersSize =
      (int64_t)(sizeof(Registers) / sizeof(float)) / 16 * 16 + 32;  // whole lines of the cache
  static constexpr int64_t kSlotsSize = REGARD_SLOTS * Interpreter::kSlotSize;
  static constexpr int64_t scratch_size = kRegistersSize + kSlotsSize + ByDistance::scratch_size;

  template <int V>
  static void begin(Block<V>& b, float* scratch) {
    b.registers = (Registers*)(((uintptr_t)scratch + 15) / 16 * 16);
    b.registers->memory = scratch + kRegistersSize;
    b.registers->tables = b.registers->memory + kSlotsSize;
  }

  // Places the slots, and runs what keys share, for V vectors of queries at a place.
  template <int V>
  static void load_shared(const regard_call& c, const Place& p, Registers& r) {
    Interpreter::place_slots(r.slots, r.memory, Interpreter::kSlotSize, V);
    const Instruction* body = Interpreter::run_shared<V>(c, p, r.slots, begin_of(c));
    r.distances = ByDistance::of(c, begin_of(c), body, end_of(c));
  }

  // For each tile, since the blocks of an item share scratch.
  template <int V>
  static void load_tile(const Block<V>& b, const Tile&) {
    load_shared<V>(b.c, b.p, *b.registers);
  }

  // Runs a program's body for `keys` keys whose natural scores are in slot 0. load: what an instruction loads; result:
  // takes scores in base 2; with_derivative: whether derivatives are wanted, by operands, each of which by_operand
  // takes from the slots of an instruction, and by the score, which `derivative` takes. result and derivative are
  // called for a key and a vector. Without derivatives nothing reads a result's slot: what the last instruction
  // computes goes to `result` at once.
  template <int V, class Load, class Result, class ByOperand, class Derivative>
  REGARD_INLINE void interpret(const regard_call& c, const Slots& s, const Instruction* x, int64_t keys,
                               bool with_derivative, const Load& load_of, const Result& result,
                               const ByOperand& by_operand, const Derivative& derivative) {
    const auto finish = [&](int64_t n, int v, vf y)
                            __attribute__((always_inline)) { result(n, v, bounded(y) * splat(kLog2e)); };
    for (;; ++x) {
      if (x->op == REGARD_DO_LOAD) {
        load_of(*x);
      } else if (x->op == REGARD_DO_RESULT) {
        // slot 0 stays as it is: the derivative reads it, and may be computed from it alone
        Interpreter::each_number<V>(s, x->a, keys, finish);
        if (!with_derivative) return;
      } else if (!with_derivative && x[1].op == REGARD_DO_RESULT && x[1].a == x->to) {
        return Interpreter::compute<V>(c, s, *x, keys, finish);
      } else if (x->op == REGARD_DO_DERIVATIVE) {
        return Interpreter::each_number<V>(s, x->a, keys, derivative);
      } else if (is_gradient(*x)) {
        by_operand(*x);
      } else {
        Interpreter::compute<V>(c, s, *x, keys);
      }
    }
  }

  // Turns the natural scores of `count` keys from j on and of V vectors of queries, rows `ld` floats apart, into scores
  // in base 2. kept: takes what the backward reads of them, see ProgramGradients::kept_size, or null. top: takes the
  // maximum of itself and them. between: is called after each kAtOnce keys.
  template <int V, class Between>
  REGARD_NOINLINE void run(const regard_call& c, const Place& p, const Registers& r, float* scores, int64_t ld,
                           int64_t j, int64_t count, float* kept, vf (&top)[V], const Between& between) {
    vf most[V];  // in registers
    for (int v = 0; v < V; ++v) most[v] = top[v];
    for (int64_t done = 0, keys; done < count; done += keys) {
      keys = count - done < kTile ? count - done : kTile;
      float* to = kept ? kept + done * kQueries : nullptr;
      run_keys<V>(c, p, r, scores + done * ld, ld, j + done, keys, to, most, between);
    }
    for (int v = 0; v < V; ++v) top[v] = most[v];
  }

  // The same of kTile keys or fewer.
  template <int V, class Between>
  REGARD_INLINE void run_keys(const regard_call& c, const Place& p, const Registers& r, float* scores, int64_t ld,
                              int64_t j, int64_t count, float* kept, vf (&top)[V], const Between& between) {
    constexpr int64_t kAtOnce = Interpreter::kSlotSize / (V * W);
    const ByDistance& distances = r.distances;
    Slots slots = r.slots;
    const Instruction* body = distances.run(c, p, slots, r.tables, V * W, j, count);
    const bool in_place = ld == V * W && !kept;  // a derivative reads slot 0 behind the result
    for (int64_t done = 0, keys; done < count; done += keys) {
      keys = count - done < kAtOnce ? count - done : kAtOnce;
      float *row = scores + done * ld, *place = kept ? kept + done * kQueries : nullptr, *next = place;
      if (body == distances.end) distances.point(slots, r.tables, count, done);
      if (in_place) slots.at[0] = row;
      for (int64_t n = 0; !in_place && n < keys; ++n)
        for (int v = 0; v < V; ++v) store(slots.at[0] + (n * V + v) * W, load(row + n * ld + v * W));
      const auto keep = [&](float* at, int32_t slot) {
        Interpreter::each_number<V>(slots, slot, keys,
                                    [&](int64_t n, int v, vf y) { store(at + n * kQueries + v * W, y); });
      };
      interpret<V>(
          c, slots, body, keys, kept,
          [&](const Instruction& x) { Interpreter::load_operand<V>(c, p, slots, x, j + done, keys); },
          [&](int64_t n, int v, vf y) __attribute__((always_inline)) {
            store(row + n * ld + v * W, y);
            top[v] = greater_of(y, top[v]);
          },
          [&](const Instruction& x) {
            keep(next += kTileSize, x.a);
            next += kTileSize;
            if (x.op == REGARD_DO_GATHER_GRADIENT) keep(next, x.b);
          },
          [&](int64_t n, int v, vf y) { store(place + n * kQueries + v * W, y); });
      between();
    }
  }

  // The same of the keys [from, to) of a tile, whose scores and what is kept of them are [key][kQueries].
  template <int V>
  static void run(const Block<V>& b, const Tile& t, float* scores, int64_t from, int64_t to, float* kept,
                  vf (&top)[V]) {
    run<V>(b.c, b.p, *b.registers, scores + from * kQueries, kQueries, t.j + from, to - from,
           kept ? kept + from * kQueries : nullptr, top, [] {});
  }

  // One key, for callers that have one at a time and no backward: slower.
  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], vf (&)[V]) {
    float scores[V * W];
    vf top[V] = {};
    for (int v = 0; v < V; ++v) store(scores + v * W, s[v]);
    Tile one = t;
    one.j = t.j + n;
    run<V>(b, one, scores, 0, 1, nullptr, top);
    for (int v = 0; v < V; ++v) s[v] = load(scores + v * W);
  }

  REGARD_NOINLINE void apply(const RowKeys& keys, vf& s, vf& derivative) {
    const regard_call& c = keys.f.c;
    alignas(64) float memory[REGARD_SLOTS * W];
    Slots slots;
    Interpreter::place_slots(slots, memory, W, 1);
    store(slots.at[0], s);
    const Instruction* body = Interpreter::run_shared(keys, slots, begin_of(c));
    interpret<1>(
        c, slots, body, 1, keys.f.derivative, [&](const Instruction& x) { Interpreter::load_row(keys, slots, x); },
        [&](int64_t, int, vf y) { s = y; }, [](const Instruction&) {}, [&](int64_t, int, vf y) { derivative *= y; });
  }

  template <int V>
  static void backward(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* sum) {
    add<V>(b, t, g, sum);
    multiply_derivatives<V>(g.ds, g.ds, g.kept, g.from, g.to);
  }
};

}  // namespace regard
