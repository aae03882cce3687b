// Interpreter: what runs the instructions of a program, for scores (program.h) and for masks (mask_program.h).
#pragma once
#include "core/functions.h"
#include "core/rows.h"
#include "steps/program_code.h"

namespace regard {

constexpr int64_t kProgramKeys =
    8;  // keys at a time: an instruction is decoded once for them, and slots lie in the first-level cache

struct Interpreter : ProgramCode {
  static constexpr int64_t kSlotSize = kProgramKeys * kQueries;

  static void place_slots(Slots& s, float* memory, int64_t size, int V) {
    for (int n = 0; n < REGARD_SLOTS; ++n) {
      s.at[n] = memory + n * size;
      s.key[n] = V * W;
      s.vector[n] = (int16_t)W;
    }
  }

  REGARD_INLINE void set_number(Slots& s, const Instruction& x) {
    s.key[x.to] = s.vector[x.to] = 0;
    store(s.at[x.to], (vf)splat_int(x.number));
  }

  // An element of an operand, of 32 bits of any meaning; of bool, a mask.
  REGARD_INLINE float one_of(const regard_tensor& t, int64_t n) {
    if (t.dtype == REGARD_BOOL) {
      const int32_t mask = -(int32_t)(((const uint8_t*)t.data)[n] != 0);
      float x;
      __builtin_memcpy(&x, &mask, 4);
      return x;
    }
    return load_one(t.data, n, known_dtype((int32_t)t.dtype) ? (int)t.dtype : (int)REGARD_F32);
  }

  // Loads an operand for the queries of a place, and `keys` keys from j on.
  template <int V>
  REGARD_NOINLINE void load_operand(const regard_call& c, const Place& p, Slots& s, const Instruction& x, int64_t j,
                                    int64_t keys) {
    const regard_tensor& t = operand(c, x.number);
    float* to = s.at[x.to];
    const int64_t first = offset(t, p, p.h) + p.row * t.row + j * t.col;
    s.key[x.to] = t.col == 0 ? 0 : t.row == 0 ? W : V * W;
    s.vector[x.to] = (int16_t)(t.row == 0 ? 0 : W);
    if (t.row == 0) {
      for (int64_t n = 0; n < keys; ++n) {
        const float one = one_of(t, first + n * t.col);
        store(to + n * W, splat_any(&one));
      }
      return;
    }
    if (t.dtype != REGARD_BOOL) {
      const int dtype = t.dtype == REGARD_I32 ? (int)REGARD_F32 : (int)t.dtype;
      const void* from = advance(t.data, first, dtype);
      return pack_by<V>(to, V * W, from, dtype, t.row, t.col, p.rows, keys,
                        [](vf y) __attribute__((always_inline)) { return y; });
    }
    for (int64_t n = 0; n < keys; ++n)
      for (int64_t i = 0; i < V * W; ++i)
        to[n * V * W + i] = i < p.rows ? one_of(t, first + i * t.row + n * t.col) : 0.0f;
  }

  // In these, put(key, vector, number) takes each result.
  template <int V, class F, class Put>
  REGARD_INLINE void map1(const Slots& s, const Instruction& x, int64_t keys, const F& f, const Put& put) {
    const float* a = s.at[x.a];
    const int64_t a_key = s.key[x.a], a_vector = s.vector[x.a];
    for (int64_t n = 0; n < keys; ++n, a += a_key)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) put(n, v, f(load(a + v * a_vector)));
  }

  template <int V, class F, class Put>
  REGARD_INLINE void map2(const Slots& s, const Instruction& x, int64_t keys, const F& f, const Put& put) {
    const float *a = s.at[x.a], *b = s.at[x.b];
    const int64_t a_key = s.key[x.a], a_vector = s.vector[x.a], b_key = s.key[x.b], b_vector = s.vector[x.b];
    for (int64_t n = 0; n < keys; ++n, a += a_key, b += b_key)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) put(n, v, f(load(a + v * a_vector), load(b + v * b_vector)));
  }

  template <int V, class Put>
  REGARD_INLINE void choose(const Slots& s, const Instruction& x, int64_t keys, const Put& put) {
    const float *a = s.at[x.a], *b = s.at[x.b], *c = s.at[x.c];
    const int64_t a_key = s.key[x.a], a_vector = s.vector[x.a], b_key = s.key[x.b], b_vector = s.vector[x.b];
    const int64_t c_key = s.key[x.c], c_vector = s.vector[x.c];
    for (int64_t n = 0; n < keys; ++n, a += a_key, b += b_key, c += c_key)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        put(n, v, select((vi)load(a + v * a_vector), load(b + v * b_vector), load(c + v * c_vector)));
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

  // Runs one instruction that computes; its results go to its slot.
  template <int V>
  REGARD_INLINE void compute(const regard_call& c, const Slots& s, const Instruction& x, int64_t keys) {
    float* to = s.at[x.to];
    compute<V>(c, s, x, keys,
               [to](int64_t n, int v, vf y) __attribute__((always_inline)) { store(to + (n * V + v) * W, y); });
  }

  // The same with results that put(key, vector, number) takes.
  template <int V, class Put>
  REGARD_INLINE void compute(const regard_call& c, const Slots& s, const Instruction& x, int64_t keys, const Put& put) {
#define REGARD_MAP1(name, value) \
  case REGARD_DO_##name:         \
    return map1<V>(s, x, keys, [&](vf a) __attribute__((always_inline)) { return (vf)(value); }, put);
#define REGARD_MAP2(name, value) \
  case REGARD_DO_##name:         \
    return map2<V>(s, x, keys, [](vf a, vf b) __attribute__((always_inline)) { return (vf)(value); }, put);
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
      REGARD_MAP2(ABS_SUB, absolute(a - b))
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
      case REGARD_DO_WHERE: return choose<V>(s, x, keys, put);
      default: return;  // those that read operands, which load() runs
    }
#undef REGARD_MAP1
#undef REGARD_MAP2
  }

  // Calls take(key, vector, numbers) for the numbers of a slot.
  template <int V, class Take>
  REGARD_INLINE void each_number(const Slots& s, int32_t slot, int64_t keys, const Take& take) {
    const float* at = s.at[slot];
    const int64_t key = s.key[slot], vector = s.vector[slot];
    for (int64_t n = 0; n < keys; ++n, at += key)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) take(n, v, load(at + v * vector));
  }

  REGARD_NOINLINE void load_row(const RowKeys& keys, Slots& s, const Instruction& x) {
    const regard_tensor& t = operand(keys.f.c, x.number);
    const int64_t first = offset(t, keys.f.p, keys.row.h) + keys.row.i * t.row + keys.key() * t.col;
    if (t.col == 1 && keys.valid() >= W && t.dtype != REGARD_BOOL)
      return store(s.at[x.to],
                   load_some(t.data, first, known_dtype((int32_t)t.dtype) ? (int)t.dtype : (int)REGARD_F32));
    for (int64_t n = 0; n < W; ++n) s.at[x.to][n] = one_of(t, first + (n < keys.valid() ? n * t.col : 0));
  }

  // Runs what keys share, and returns the instruction after it.
  template <int V>
  static const Instruction* run_shared(const regard_call& c, const Place& p, Slots& s, const Instruction* x) {
    for (; shared_by_keys(c, *x); ++x) {
      if (x->op == REGARD_DO_NUMBER) set_number(s, *x);
      else load_operand<V>(c, p, s, *x, 0, 1);
    }
    return x;
  }

  // The same for a row and W keys.
  static const Instruction* run_shared(const RowKeys& keys, Slots& s, const Instruction* x) {
    for (; shared_by_keys(keys.f.c, *x); ++x) {
      if (x->op == REGARD_DO_NUMBER) store(s.at[x->to], (vf)splat_int(x->number));
      else load_row(keys, s, *x);
    }
    return x;
  }
};

}  // namespace regard
