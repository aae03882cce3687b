// The code of a program: its instructions, the slots that they read and write, and what is checked before any of them
// runs.
#pragma once
#include <stddef.h>

#include "steps/list.h"

namespace regard {

struct Instruction {  // a row of program_code: operation, slot that is written, slots that are read, a number
  int32_t op, to, a, b, c, number;
};

// Where slots lie, and how far the numbers of the next key and of the next vector are: 0 where they share one.
struct Slots {
  float* at[REGARD_SLOTS];
  int32_t key[REGARD_SLOTS];
  int16_t vector[REGARD_SLOTS];
};

// The n-th of neighbouring tensors of a struct; the first lies `first` bytes behind its beginning.
REGARD_INLINE const regard_tensor& nth_tensor(const void* of, size_t first, int64_t n) {
  return ((const regard_tensor*)((const char*)of + first))[n];
}

struct ProgramCode {
  static const regard_tensor& operand(const regard_call& c, int32_t which) {
    return nth_tensor(&c, offsetof(regard_call, program_0), which);
  }
  static const Instruction* begin_of(const regard_call& c) { return (const Instruction*)c.program_code; }
  static const Instruction* end_of(const regard_call& c) { return begin_of(c) + c.program_count; }

  // Whether an instruction gives the same for all keys.
  static bool shared_by_keys(const regard_call& c, const Instruction& x) {
    return x.op == REGARD_DO_NUMBER || (x.op == REGARD_DO_LOAD && operand(c, x.number).col == 0);
  }

  // Whether each instruction of a program is right; numbers stand before what differs by key, where alone they are
  // read.
  static bool right_instructions(const regard_call& c, const Instruction* begin, const Instruction* end) {
    bool shared = true;
    for (const Instruction* x = begin; x < end; ++x) {
      if (!right_instruction(c, *x) || (x->op == REGARD_DO_NUMBER && !shared)) return false;
      shared = shared && shared_by_keys(c, *x);
    }
    return true;
  }

  // Whether it takes the derivative of the result by an element of an operand: a is the slot of the derivative; of a
  // table, b is the slot of the index; c is 1 where the derivative may be far above 1.
  static bool is_gradient(const Instruction& x) {
    return x.op == REGARD_DO_LOAD_GRADIENT || x.op == REGARD_DO_GATHER_GRADIENT;
  }

  // Whether an instruction is known, and its slots and its operand are there.
  static bool right_instruction(const regard_call& c, const Instruction& x) {
    const auto slot = [](int32_t n) { return n >= 0 && n < REGARD_SLOTS; };
    if (x.op < 0 || x.op >= REGARD_DO_COUNT || !slot(x.to) || !slot(x.a) || !slot(x.b) || !slot(x.c)) return false;
    if (x.op != REGARD_DO_LOAD && x.op != REGARD_DO_GATHER && !is_gradient(x)) return true;
    if (x.number < 0 || x.number >= REGARD_PROGRAM_OPERANDS || !operand(c, x.number).data) return false;
    const regard_tensor& t = operand(c, x.number);
    const bool table = x.op == REGARD_DO_GATHER || x.op == REGARD_DO_GATHER_GRADIENT;
    if (t.dtype != REGARD_F32 && t.dtype != REGARD_I32 &&
        (table || (t.dtype != REGARD_BOOL && !known_dtype((int32_t)t.dtype))))
      return false;
    return table ? t.size >= 1 && t.size <= INT32_MAX : fits(t, t.dtype, c.batch, c.heads, c.nq, c.nk);
  }

  static int32_t check(const regard_call& c) {
    if (!c.program_code) return REGARD_DONE;
    if (!right_instructions(c, begin_of(c), end_of(c))) return REGARD_BAD_ARGUMENT;
    int results = 0, derivatives = 0;
    for (const Instruction* x = begin_of(c); x < end_of(c); ++x) {
      results += x->op == REGARD_DO_RESULT;
      derivatives += x->op == REGARD_DO_DERIVATIVE;
    }
    const bool closed = c.program_count > 0 && end_of(c)[-1].op == REGARD_DO_DERIVATIVE;
    return closed && results == 1 && derivatives == 1 ? REGARD_DONE : REGARD_BAD_ARGUMENT;
  }
};

}  // namespace regard
