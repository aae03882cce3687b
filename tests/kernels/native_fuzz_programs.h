// Random programs of scores and of masks.
#pragma once
#include "random_memory.h"

namespace {

enum class Programs {
  kAny,      // any instructions, on slots that hold anything
  kWritten,  // any instructions, on slots that were written
  kExact,    // of which every instruction set makes the same result: whole numbers and bits, in slots that were written
};

// One program while it is made, for a Case of native_fuzz.h.
template <class Call>
struct RandomProgram {
  Call& x;
  bool mask;
  Programs programs;
  bool exact = programs == Programs::kExact;
  std::vector<int32_t> code{};
  std::vector<int32_t> gathers{}, loads{};       // the operands of each
  int32_t slots = 1;                             // that are written; those of a mask begin at 1
  std::vector<int32_t> of_queries{}, of_keys{};  // those of `loads` that are positions

  void add(int32_t op, int32_t to, int32_t a, int32_t b, int32_t c, int32_t number) {
    for (int32_t part : {op, to, a, b, c, number}) code.push_back(part);
  }
  int32_t any() const { return (int32_t)x.r.between(mask ? 1 : 0, slots - 1); }

  // Operands of a mask are the last ones.
  int32_t place(int64_t n) const { return (int32_t)(mask ? REGARD_PROGRAM_OPERANDS - 1 - n : n); }
  regard_tensor& operand(int32_t which) const { return (&x.c.program_0)[which]; }

  void operands() {
    for (int64_t n = 0, count = x.r.between(0, 5); n < count; ++n) {
      const Kind any_kind[] = {kF32, kI32, kByte, kBF16}, exact_kind[] = {kI32, kI32, kByte, kByte};
      const Kind* kinds = exact ? exact_kind : any_kind;
      const int32_t which = place(n);
      if (x.r.chance(3)) {
        const int64_t size = x.r.between(1, 40);
        operand(which) = {x.make(kinds[n % 2], size), {}, 0, 0, 0, size, kDtypes[kinds[n % 2]]};
        gathers.push_back(which);
        continue;
      }
      const Kind kind = kinds[x.r.between(0, 3)];
      const int64_t rows = x.r.chance(2) ? 1 : x.c.nq, cols = x.r.chance(2) ? 1 : x.c.nk;
      regard_tensor& t = operand(which) = x.tensor(kind, x.c.heads, rows, cols, true);
      if (rows == 1) t.row = 0;
      if (cols == 1) t.col = 0;
      const bool counts = (rows == 1) != (cols == 1) && x.r.chance(2);
      const int64_t first = x.r.chance(9) ? INT32_MAX - 9 : x.r.between(-200, 200);
      if (kind == kI32)
        for (int64_t i = 0; i < t.size; ++i) {
          const int64_t position = first + (t.row ? i % x.c.nq : i % x.c.nk);  // past the end it begins anew
          ((int32_t*)t.data)[i] = (int32_t)(uint32_t)(counts ? position : x.r.between(-200, 200));
        }
      if (kind == kI32 && counts) (rows == 1 ? of_keys : of_queries).push_back(which);
      loads.push_back(which);
    }
  }

  void begin() {
    operands();
    for (int64_t n = x.r.between(1, 3); n > 0; --n)
      add(REGARD_DO_NUMBER, slots++, 0, 0, 0, (int32_t)(x.r.chance(2) ? x.r.between(-9, 200) : (int64_t)x.r.next()));
    add(REGARD_DO_NUMBER, slots++, 0, 0, 0, (int32_t)x.r.between(1, 70));
    if (!of_queries.empty() && !of_keys.empty() && !x.r.chance(3)) distances();
    for (int32_t which : loads) add(REGARD_DO_LOAD, slots++, 0, 0, 0, which);
  }

  // What follows from differences of positions: see native/steps/by_distance.h.
  void distances() {
    const int32_t number = slots - 1, query = slots++, key = slots++, first = slots;
    add(REGARD_DO_LOAD, query, 0, 0, 0, of_queries[0]);
    add(REGARD_DO_LOAD, key, 0, 0, 0, of_keys[0]);
    const int32_t ops[] = {REGARD_DO_INT_SUB, REGARD_DO_INT_LT, REGARD_DO_INT_LE, REGARD_DO_INT_EQ};
    for (int64_t n = x.r.between(1, 11); n > 0; --n) {
      const bool apart = slots == first || x.r.chance(3), turned = x.r.chance(2);
      const int32_t a = apart ? (turned ? key : query) : (int32_t)x.r.between(first, slots - 1);
      const int32_t b = apart ? (turned ? query : key) : x.r.chance(2) ? number : a;
      const int32_t op = apart ? ops[x.r.between(0, 3)] : (int32_t)x.r.between(REGARD_DO_INT_ADD, REGARD_DO_NOT);
      add(op, slots++, a, op == REGARD_DO_INT_DIV ? number : b, apart || x.r.chance(2) ? a : number, 0);
    }
  }

  // An instruction that computes; divisors are the last number, which is above 0.
  void compute(int32_t divisor) {
    const int32_t first = exact ? REGARD_DO_INT_ADD : REGARD_DO_WHERE,
                  last = exact ? REGARD_DO_NOT : REGARD_DO_COUNT - 1;
    const int32_t op = (int32_t)x.r.between(first, last);
    // a slot that keys share holds one number, of whichever of them was the last
    const int32_t to = slots < REGARD_SLOTS - 1 && (exact || !x.r.chance(3)) ? slots : any();
    if (!gathers.empty() && x.r.chance(6))
      add(REGARD_DO_GATHER, to, any(), 0, 0, gathers[(size_t)x.r.between(0, (int64_t)gathers.size() - 1)]);
    else add(op, to == divisor ? slots - 1 : to, any(), op == REGARD_DO_INT_DIV ? divisor : any(), any(), 0);
    slots += to == slots;
  }

  void compute_some() {
    int32_t divisor = 0;
    for (size_t n = 0; n < code.size(); n += 6)
      if (code[n] == REGARD_DO_NUMBER) divisor = code[n + 1];
    // a slot for whatever another instruction would write to the divisor's
    if (programs == Programs::kWritten) add(REGARD_DO_MAX, slots, any(), any(), 0, 0);
    slots += !exact;
    for (int64_t n = x.r.between(0, 12); n > 0; --n) compute(divisor);
  }

  const int32_t* finished(int64_t& count) const {
    count = (int64_t)code.size() / 6;
    int32_t* to = (int32_t*)x.make(kI32, (int64_t)code.size());
    memcpy(to, code.data(), code.size() * sizeof(int32_t));
    return to;
  }
};

template <class Call>
void mask_program(Call& x, Programs programs) {
  RandomProgram<Call> p{x, true, programs};
  p.begin();
  p.compute_some();
  const int32_t result = p.exact ? p.slots : p.any();
  if (p.exact) p.add(REGARD_DO_INT_LT, result, p.any(), p.any(), 0, 0);
  p.add(REGARD_DO_RESULT, 0, result, 0, 0, 0);
  x.c.mask_code = p.finished(x.c.mask_count);
}

// A program takes the place of all other steps.
template <class Call>
void score_program(Call& x, Programs programs) {
  regard_call& c = x.c;
  c.cap = 0;
  c.cap_last = 0;
  c.caps = c.temperatures = c.slopes = c.points_of_q = c.points_of_k = nullptr;
  c.log_distance_weights = c.log_distance_rates = c.power_distance_weights = c.power_distance_powers = nullptr;
  c.offsets = nullptr;
  c.offsets_count = 0;
  c.q_cell = c.k_cell = nullptr;
  c.bias = {};
  c.dims = 0;
  RandomProgram<Call> p{x, false, programs};
  p.begin();
  p.compute_some();
  p.add(REGARD_DO_RESULT, 0, p.any(), 0, 0, 0);
  p.compute_some();
  for (int32_t which : p.loads)
    if (x.r.chance(2)) p.add(REGARD_DO_LOAD_GRADIENT, 0, p.any(), 0, x.r.chance(2), which);
  for (int32_t which : p.gathers)
    if (x.r.chance(2)) p.add(REGARD_DO_GATHER_GRADIENT, 0, p.any(), p.any(), x.r.chance(2), which);
  p.add(REGARD_DO_DERIVATIVE, 0, p.any(), 0, 0, 0);
  c.program_code = p.finished(c.program_count);
}

// A program takes the place of w · f of an additive score. What is loaded or a number is written by nothing else.
template <class Call>
void feature_program(Call& x) {
  regard_additive& to = x.x.forward;
  to.parameter_count = x.r.between(0, 3);
  to.parameters = (float*)x.make(kF32, to.parameter_count * x.c.heads * x.c.dk);
  RandomProgram<Call> p{x, true, Programs::kWritten};
  for (int64_t n = x.r.between(0, 2); n > 0; --n) p.add(REGARD_DO_NUMBER, p.slots++, 0, 0, 0, (int32_t)x.r.next());
  for (int32_t which = 0; which < 2 + to.parameter_count; ++which)
    if (which < 1 || !x.r.chance(4)) p.add(REGARD_DO_LOAD, p.slots++, 0, 0, 0, which);
  const auto compute_some = [&] {
    for (int64_t n = x.r.between(0, 9); n > 0; --n) {
      const int32_t op = (int32_t)x.r.between(REGARD_DO_WHERE, REGARD_DO_COUNT - 1);
      p.add(op == REGARD_DO_INT_DIV ? REGARD_DO_INT_ADD : op, p.slots, p.any(), p.any(), p.any(), 0);
      ++p.slots;
    }
  };
  compute_some();
  p.add(REGARD_DO_RESULT, 0, p.any(), 0, 0, (int32_t)x.r.next());
  compute_some();
  for (int32_t which = 0; which < 2 + to.parameter_count; ++which)
    if (x.r.chance(2)) p.add(REGARD_DO_LOAD_GRADIENT, 0, p.any(), 0, 0, which);
  p.add(REGARD_DO_DERIVATIVE, 0, p.any(), 0, 0, 0);
  to.code = p.finished(to.code_count);
}

// Room for the gradients of a program's operands, of some of them.
template <class Call>
void gradients_of_program(Call& x) {
  for (int64_t n = 0; n < x.c.program_count; ++n) {
    const int32_t* one = x.c.program_code + 6 * n;
    const bool table = one[0] == REGARD_DO_GATHER_GRADIENT;
    if ((!table && one[0] != REGARD_DO_LOAD_GRADIENT) || x.r.chance(4)) continue;
    const regard_tensor& t = (&x.c.program_0)[one[5]];
    const bool shared = table || t.row == 0 || t.col == 0;
    regard_tensor& to = (&x.g.dprogram_0)[one[5]] = t;
    to.data = x.make(shared ? kF64 : kF32, t.size);
    to.dtype = shared ? REGARD_F64 : REGARD_F32;
  }
}

}  // namespace
