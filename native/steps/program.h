// Program: the modifiers of a score as a sequence of elementwise instructions, which are interpreted for a few keys at
// a time. Python makes it from a function that a person wrote: backends/native/programs/.
//
// An instruction reads and writes slots: numbers of some keys and of the block's queries (or of a row's query and W
// keys). Slot 0 begins with the natural scores. First come the instructions that no key changes (NUMBER, LOAD of what
// keys share), then the rest up to RESULT, then those of the derivatives by operands (LOAD_GRADIENT, GATHER_GRADIENT)
// and by the score, up to DERIVATIVE.
#pragma once
#include "core/functions.h"
#include "steps/program_gradients.h"
#include "steps/softcap.h"

namespace regard {

constexpr int64_t kProgramKeys =
    8;  // keys at a time: an instruction is decoded once for them, and slots lie in the first-level cache

struct Program : Modifier, ProgramGradients {
  template <int V>
  struct State {
    Slots* slots;
    float* memory;
  };

  static bool used(const regard_call& c) { return c.program_code; }
  static constexpr bool keeps = true;

  using ProgramCode::check;
  using ProgramGradients::grad_size, ProgramGradients::kept_size, ProgramGradients::multiplies_delta,
      ProgramGradients::sharing;
  using ProgramGradients::wants_grad, ProgramGradients::write_grad;

  static constexpr int64_t kSlotSize = kProgramKeys * kQueries;
  static constexpr int64_t kSlotsSize =
      (int64_t)(sizeof(Slots) / sizeof(float)) / 16 * 16 + 32;  // whole lines of the cache
  static constexpr int64_t scratch_size = kSlotsSize + REGARD_SLOTS * kSlotSize;

  static void place_slots(Slots& s, float* memory, int64_t size, int V) {
    for (int n = 0; n < REGARD_SLOTS; ++n)
      s.at[n] = memory + n * size, s.key[n] = (int16_t)(V * W), s.vector[n] = (int16_t)W;
  }

  template <int V>
  static void begin(Block<V>& b, float* scratch) {
    b.slots = (Slots*)(((uintptr_t)scratch + 15) / 16 * 16), b.memory = scratch + kSlotsSize;
  }

  // Places the slots, and runs what keys share: for each tile, since the blocks of an item share scratch.
  template <int V>
  static void load_tile(const Block<V>& b, const Tile& t) {
    place_slots(*b.slots, b.memory, kSlotSize, V);
    for (const Instruction* x = begin_of(b.c); shared_by_keys(b.c, *x); ++x) {
      if (x->op == REGARD_DO_NUMBER) set_number(*b.slots, *x);
      else load_operand<V>(b, *x, t.j, 1);
    }
  }

  // The first instruction that keys do not share.
  static const Instruction* body_of(const regard_call& c) {
    const Instruction* x = begin_of(c);
    while (shared_by_keys(c, *x)) ++x;
    return x;
  }

  REGARD_INLINE void set_number(Slots& s, const Instruction& x) {
    s.key[x.to] = s.vector[x.to] = 0;
    store(s.at[x.to], (vf)splat_int(x.number));
  }

  // An element of an operand, of 32 bits of any meaning; of bool, a mask.
  REGARD_INLINE float one_of(const regard_tensor& t, int64_t n) {
    if (t.dtype == REGARD_BOOL) {
      const int32_t mask = -(int32_t)(((const uint8_t*)t.data)[n] & 1);
      float x;
      __builtin_memcpy(&x, &mask, 4);
      return x;
    }
    return load_one(t.data, n, known_dtype((int32_t)t.dtype) ? (int)t.dtype : (int)REGARD_F32);
  }

  // Loads an operand for `keys` keys from j on.
  template <int V>
  REGARD_NOINLINE void load_operand(const Block<V>& b, const Instruction& x, int64_t j, int64_t keys) {
    const regard_tensor& t = operand(b.c, x.number);
    Slots& s = *b.slots;
    float* to = s.at[x.to];
    const int64_t first = offset(t, b.p, b.p.h) + b.p.row * t.row + j * t.col;
    s.key[x.to] = (int16_t)(t.col == 0 ? 0 : t.row == 0 ? W : V * W), s.vector[x.to] = (int16_t)(t.row == 0 ? 0 : W);
    if (t.row == 0) {
      for (int64_t n = 0; n < keys; ++n) {
        const float one = one_of(t, first + n * t.col);
        store(to + n * W, splat_any(&one));
      }
      return;
    }
    if (t.dtype == REGARD_F32 || t.dtype == REGARD_I32 || t.dtype != REGARD_BOOL) {
      const int dtype = t.dtype == REGARD_I32 ? (int)REGARD_F32 : (int)t.dtype;
      const void* from = advance(t.data, first, dtype);
      return pack_by<V>(to, V * W, from, dtype, t.row, t.col, b.p.rows, keys,
                        [](vf y) __attribute__((always_inline)) { return y; });
    }
    for (int64_t n = 0; n < keys; ++n)
      for (int64_t i = 0; i < V * W; ++i)
        to[n * V * W + i] = i < b.p.rows ? one_of(t, first + i * t.row + n * t.col) : 0.0f;
  }

  template <int V, class F>
  REGARD_INLINE void map1(const Slots& s, const Instruction& x, int64_t keys, const F& f) {
    float* to = s.at[x.to];
    const float* a = s.at[x.a];
    const int64_t a_key = s.key[x.a], a_vector = s.vector[x.a];
    for (int64_t n = 0; n < keys; ++n, to += V * W, a += a_key)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(to + v * W, f(load(a + v * a_vector)));
  }

  template <int V, class F>
  REGARD_INLINE void map2(const Slots& s, const Instruction& x, int64_t keys, const F& f) {
    float* to = s.at[x.to];
    const float *a = s.at[x.a], *b = s.at[x.b];
    const int64_t a_key = s.key[x.a], a_vector = s.vector[x.a], b_key = s.key[x.b], b_vector = s.vector[x.b];
    for (int64_t n = 0; n < keys; ++n, to += V * W, a += a_key, b += b_key)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(to + v * W, f(load(a + v * a_vector), load(b + v * b_vector)));
  }

  template <int V>
  REGARD_INLINE void choose(const Slots& s, const Instruction& x, int64_t keys) {
    float* to = s.at[x.to];
    const float *a = s.at[x.a], *b = s.at[x.b], *c = s.at[x.c];
    for (int64_t n = 0; n < keys; ++n, to += V * W, a += s.key[x.a], b += s.key[x.b], c += s.key[x.c])
      for (int v = 0; v < V; ++v)
        store(to + v * W,
              select((vi)load(a + v * s.vector[x.a]), load(b + v * s.vector[x.b]), load(c + v * s.vector[x.c])));
  }

  // An element of a table for each index. Python proves that they lie inside; nothing else may be read either.
  REGARD_INLINE vf gathered(const regard_tensor& t, vf index) {
    const int32_t last = (int32_t)t.size - 1;
    int32_t at[W];
    *(vi_any*)at = (vi)index;
    float x[W];
    for (int n = 0; n < W; ++n) x[n] = ((const float*)t.data)[at[n] < 0 ? 0 : at[n] > last ? last : at[n]];
    return load(x);
  }

  // Runs one instruction that computes.
  template <int V>
  REGARD_INLINE void compute(const regard_call& c, const Slots& s, const Instruction& x, int64_t keys) {
#define REGARD_MAP1(name, value) \
  case REGARD_DO_##name: return map1<V>(s, x, keys, [&](vf a) __attribute__((always_inline)) { return (vf)(value); });
#define REGARD_MAP2(name, value) \
  case REGARD_DO_##name:         \
    return map2<V>(s, x, keys, [](vf a, vf b) __attribute__((always_inline)) { return (vf)(value); });
    switch (x.op) {
      REGARD_MAP2(ADD, a + b)
      REGARD_MAP2(SUB, a - b)
      REGARD_MAP2(MUL, a * b)
      REGARD_MAP2(DIV, a / b)
      REGARD_MAP2(MUL_NONZERO, select(a == vf{}, a, a * b))
      REGARD_MAP2(DIV_NONZERO, select(a == vf{}, a, a / b))
      REGARD_MAP2(MIN, minimum(a, b))
      REGARD_MAP2(MAX, maximum(a, b))
      REGARD_MAP2(POW, each_lane(a, b, [](float p, float q) { return powf(p, q); }))
      REGARD_MAP2(REMAINDER, remainder_of(a, b))
      REGARD_MAP1(NEG, (vi)a ^ splat_int((int32_t)0x80000000))
      REGARD_MAP1(ABS, absolute(a))
      REGARD_MAP1(SIGN, sign(a))
      REGARD_MAP1(FLOOR, each_lane(a, [](float y) { return __builtin_floorf(y); }))
      REGARD_MAP1(CEIL, each_lane(a, [](float y) { return __builtin_ceilf(y); }))
      REGARD_MAP1(SQRT, sqrtv(a))
      REGARD_MAP1(EXP, exp_any(a))
      REGARD_MAP1(EXP2, exp2_any(a))
      REGARD_MAP1(LOG, log_any(a))
      REGARD_MAP1(TANH, tanhv(a))
      REGARD_MAP1(SIGMOID, sigmoid(a))
      REGARD_MAP1(LOG1P, each_lane(a, [](float y) { return log1pf(y); }))
      REGARD_MAP1(EXPM1, each_lane(a, [](float y) { return expm1f(y); }))
      REGARD_MAP1(ERF, each_lane(a, [](float y) { return erff(y); }))
      REGARD_MAP1(SIN, each_lane(a, [](float y) { return sinf(y); }))
      REGARD_MAP1(COS, each_lane(a, [](float y) { return cosf(y); }))
      REGARD_MAP2(LT, a < b)
      REGARD_MAP2(LE, a <= b)
      REGARD_MAP2(EQ, a == b)
      REGARD_MAP2(INT_ADD, (vu)a + (vu)b)
      REGARD_MAP2(INT_SUB, (vu)a - (vu)b)
      REGARD_MAP2(INT_MUL, (vu)a * (vu)b)
      REGARD_MAP2(INT_MIN, (vi)a < (vi)b ? (vi)a : (vi)b)
      REGARD_MAP2(INT_MAX, (vi)a > (vi)b ? (vi)a : (vi)b)
      REGARD_MAP2(INT_DIV, floor_divide((vi)a, (vi)b))
      REGARD_MAP1(INT_ABS, (vi)a < 0 ? (vi)(0u - (vu)a) : (vi)a)
      REGARD_MAP2(INT_LT, (vi)a < (vi)b)
      REGARD_MAP2(INT_LE, (vi)a <= (vi)b)
      REGARD_MAP2(INT_EQ, (vi)a == (vi)b)
      REGARD_MAP2(AND, (vi)a & (vi)b)
      REGARD_MAP2(OR, (vi)a | (vi)b)
      REGARD_MAP2(XOR, (vi)a ^ (vi)b)
      REGARD_MAP1(NOT, ~(vi)a)
      REGARD_MAP1(INT_TO_FLOAT, __builtin_convertvector((vi)a, vf))
      REGARD_MAP1(BOOL_TO_FLOAT, select((vi)a, splat(1.0f), vf{}))
      REGARD_MAP1(BOOL_TO_INT, (vi)a & splat_int(1))
      REGARD_MAP1(GATHER, gathered(operand(c, x.number), a))
      case REGARD_DO_WHERE: return choose<V>(s, x, keys);
    }
#undef REGARD_MAP1
#undef REGARD_MAP2
  }

  // Calls take(key, vector, numbers) for the numbers of a slot.
  template <int V, class Take>
  REGARD_INLINE void each_number(const Slots& s, int32_t slot, int64_t keys, const Take& take) {
    for (int64_t n = 0; n < keys; ++n)
      for (int v = 0; v < V; ++v) take(n, v, load(s.at[slot] + n * s.key[slot] + v * s.vector[slot]));
  }

  // Runs a program's body for `keys` keys whose natural scores are in slot 0. load: what an instruction loads; result:
  // takes scores in base 2; with_derivative: whether derivatives are wanted, by operands, each of which by_operand
  // takes from the slots of an instruction, and by the score, which `derivative` takes. result and derivative are
  // called for a key and a vector.
  template <int V, class Load, class Result, class ByOperand, class Derivative>
  REGARD_INLINE void interpret(const regard_call& c, const Slots& s, const Instruction* x, int64_t keys,
                               bool with_derivative, const Load& load_of, const Result& result,
                               const ByOperand& by_operand, const Derivative& derivative) {
    for (;; ++x) {
      if (x->op == REGARD_DO_LOAD) {
        load_of(*x);
      } else if (x->op == REGARD_DO_RESULT) {
        // slot 0 stays as it is: the derivative reads it, and may be computed from it alone
        each_number<V>(s, x->a, keys, [&](int64_t n, int v, vf y) { result(n, v, bounded(y) * splat(kLog2e)); });
        if (!with_derivative) return;
      } else if (x->op == REGARD_DO_DERIVATIVE) {
        return each_number<V>(s, x->a, keys, derivative);
      } else if (is_gradient(*x)) {
        by_operand(*x);
      } else {
        compute<V>(c, s, *x, keys);
      }
    }
  }

  // Turns natural scores of the keys [from, to) of a tile, [key][kQueries], into scores in base 2. kept: takes what the
  // backward reads, see ProgramGradients::kept_size, or null.
  template <int V>
  REGARD_NOINLINE void run(const Block<V>& b, const Tile& t, float* scores, int64_t from, int64_t to, float* kept) {
    const Instruction* body = body_of(b.c);
    for (int64_t j = from, keys; j < to; j += keys) {
      keys = to - j < kProgramKeys ? to - j : kProgramKeys;
      float *row = scores + j * kQueries, *place = kept ? kept + j * kQueries : nullptr, *next = place;
      for (int64_t n = 0; n < keys; ++n)
        for (int v = 0; v < V; ++v) store(b.slots->at[0] + (n * V + v) * W, load(row + n * kQueries + v * W));
      const auto keep = [&](float* at, int32_t slot) {
        each_number<V>(*b.slots, slot, keys, [&](int64_t n, int v, vf y) { store(at + n * kQueries + v * W, y); });
      };
      interpret<V>(
          b.c, *b.slots, body, keys, kept, [&](const Instruction& x) { load_operand<V>(b, x, t.j + j, keys); },
          [&](int64_t n, int v, vf y) { store(row + n * kQueries + v * W, y); },
          [&](const Instruction& x) {
            keep(next += kTileSize, x.a), next += kTileSize;
            if (x.op == REGARD_DO_GATHER_GRADIENT) keep(next, x.b);
          },
          [&](int64_t n, int v, vf y) { store(place + n * kQueries + v * W, y); });
    }
  }

  // One key, for callers that have one at a time and no backward: slower.
  template <int V>
  REGARD_INLINE void apply(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], vf (&)[V]) {
    float scores[V * W];
    for (int v = 0; v < V; ++v) store(scores + v * W, s[v]);
    Tile one = t;
    one.j = t.j + n;
    run<V>(b, one, scores, 0, 1, nullptr);
    for (int v = 0; v < V; ++v) s[v] = load(scores + v * W);
  }

  REGARD_NOINLINE void load_row(const RowKeys& keys, Slots& s, const Instruction& x) {
    const regard_tensor& t = operand(keys.f.c, x.number);
    const int64_t first = offset(t, keys.f.p, keys.row.h) + keys.row.i * t.row + keys.key() * t.col;
    if (t.col == 1 && keys.valid() >= W && t.dtype != REGARD_BOOL)
      return store(s.at[x.to],
                   load_some(t.data, first, known_dtype((int32_t)t.dtype) ? (int)t.dtype : (int)REGARD_F32));
    for (int64_t n = 0; n < W; ++n) s.at[x.to][n] = one_of(t, first + (n < keys.valid() ? n * t.col : 0));
  }

  REGARD_NOINLINE void apply(const RowKeys& keys, vf& s, vf& derivative) {
    const regard_call& c = keys.f.c;
    alignas(64) float memory[REGARD_SLOTS * W];
    Slots slots;
    place_slots(slots, memory, W, 1);
    store(slots.at[0], s);
    const Instruction* body = begin_of(c);
    for (; shared_by_keys(c, *body); ++body) {
      if (body->op == REGARD_DO_NUMBER) store(slots.at[body->to], (vf)splat_int(body->number));
      else load_row(keys, slots, *body);
    }
    interpret<1>(
        c, slots, body, 1, keys.f.derivative, [&](const Instruction& x) { load_row(keys, slots, x); },
        [&](int64_t, int, vf y) { s = y; }, [](const Instruction&) {}, [&](int64_t, int, vf y) { derivative *= y; });
  }

  template <int V>
  static void backward(const Block<V>& b, const Tile& t, const ScoreGradients& g, double* sum) {
    add<V>(b, t, g, sum);
    SoftCap::multiply<V>(g.ds, g.ds, g.kept, g.from, g.to);
  }
};

}  // namespace regard
