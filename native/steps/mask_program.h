// MaskProgram: a mask as a program, which finds the bits of one tile at a time. Python makes it from a function that a
// person wrote, as it makes Program; its last instruction is RESULT, of a boolean. Its operands are those of programs
// that no modifier reads.
//
// A tile is first asked for the ranges of its whole numbers: where they decide the result, nothing is computed pair by
// pair, and a tile that is hidden costs no products.
#pragma once
#include "steps/by_distance.h"
#include "steps/mask_list.h"

namespace regard {

struct MaskProgram : ProgramCode, TileMask {
  static bool used(const regard_call& c) { return c.mask_code; }
  static const Instruction* begin_of(const regard_call& c) { return (const Instruction*)c.mask_code; }
  static const Instruction* end_of(const regard_call& c) { return begin_of(c) + c.mask_count; }

  static int32_t check(const regard_call& c) {
    if (!used(c)) return REGARD_DONE;
    if (c.mask_count < 1 || !right_instructions(c, begin_of(c), end_of(c))) return REGARD_BAD_ARGUMENT;
    for (const Instruction* x = begin_of(c); x < end_of(c); ++x) {
      const bool last = x + 1 == end_of(c), computes = x->op != REGARD_DO_DERIVATIVE && !is_gradient(*x);
      if (!computes || (x->op == REGARD_DO_RESULT) != last) return REGARD_BAD_ARGUMENT;
    }
    return REGARD_DONE;
  }

  // The numbers from least to most: of whole numbers; of a boolean, whose true is -1. Of floats nothing is known.
  struct Numbers {
    int64_t least = INT32_MIN, most = INT32_MAX;

    static Numbers truth(bool surely, bool surely_not) { return {surely_not ? 0 : -1, surely ? -1 : 0}; }
    bool one() const { return least == most; }
    bool truths() const { return least >= -1 && most <= 0; }
    Numbers joined(const Numbers& other) const {
      return {least < other.least ? least : other.least, most > other.most ? most : other.most};
    }
    // The same of a whole number of 32 bits: of what is beyond, nothing is known.
    Numbers bounded() const { return least < INT32_MIN || most > INT32_MAX ? Numbers{} : *this; }
    // Of an operation that is monotone in each of its arguments.
    template <class F>
    static Numbers corners(const Numbers& a, const Numbers& b, const F& f) {
      const int64_t x[4] = {f(a.least, b.least), f(a.least, b.most), f(a.most, b.least), f(a.most, b.most)};
      Numbers all{x[0], x[0]};
      for (int n = 1; n < 4; ++n) all = all.joined({x[n], x[n]});
      return all;
    }
  };

  // Of the elements that an instruction loads for the queries of a place and the keys [j, j + keys).
  static Numbers loaded(const regard_call& c, const Place& p, const Instruction& x, int64_t j, int64_t keys) {
    const regard_tensor& t = operand(c, x.number);
    const bool truth = t.dtype == REGARD_BOOL;
    if ((t.dtype != REGARD_I32 && !truth) || (t.row && t.col)) return truth ? Numbers{-1, 0} : Numbers{};
    const int64_t first = offset(t, p, p.h) + p.row * t.row + j * t.col, step = t.row + t.col;
    const int64_t count = t.row ? p.rows : t.col ? keys : 1;
    if (truth) {
      Numbers all{0, -1};
      for (int64_t n = 0; n < count; ++n) {
        const int64_t y = -(int64_t)(((const uint8_t*)t.data)[first + n * step] != 0);
        all = n ? all.joined({y, y}) : Numbers{y, y};
      }
      return all;
    }
    const int32_t* from = (const int32_t*)t.data + first;
    if (step == 1) {
      const Range r = range_of(from, count);
      return {r.least, r.most};
    }
    Numbers all{from[0], from[0]};
    for (int64_t n = 1; n < count; ++n) all = all.joined({from[n * step], from[n * step]});
    return all;
  }

  // Of what an operation on booleans gives.
  static Numbers logic(int32_t op, const Numbers& a, const Numbers& b) {
    if (op == REGARD_DO_AND) return Numbers::corners(a, b, [](int64_t p, int64_t q) { return p > q ? p : q; });
    if (op == REGARD_DO_OR) return Numbers::corners(a, b, [](int64_t p, int64_t q) { return p < q ? p : q; });
    return a.one() && b.one() ? Numbers::truth(a.least != b.least, a.least == b.least) : Numbers{-1, 0};
  }

  // Of the lowest bits of whole numbers, where b is 2^n - 1.
  static Numbers lowest_bits(const Numbers& a, const Numbers& b) {
    const int64_t most = b.most;
    if (!b.one() || most < 0 || (most & (most + 1))) return {};
    if (a.most - a.least <= most && (a.least & most) <= (a.most & most)) return {a.least & most, a.most & most};
    return {0, most};
  }

  // Of what an instruction computes of numbers in these ranges.
  static Numbers computed(const Instruction& x, const Numbers& a, const Numbers& b, const Numbers& c) {
    switch (x.op) {
      case REGARD_DO_INT_ADD: return {a.least + b.least, a.most + b.most};
      case REGARD_DO_INT_SUB: return {a.least - b.most, a.most - b.least};
      case REGARD_DO_INT_MUL: return Numbers::corners(a, b, [](int64_t p, int64_t q) { return p * q; });
      case REGARD_DO_INT_MIN: return Numbers::corners(a, b, [](int64_t p, int64_t q) { return p < q ? p : q; });
      case REGARD_DO_INT_MAX: return Numbers::corners(a, b, [](int64_t p, int64_t q) { return p > q ? p : q; });
      case REGARD_DO_INT_DIV:
        if (b.least <= 0 && b.most >= 0) return {};
        return Numbers::corners(
            a, b, [](int64_t p, int64_t q) { return p / q - ((p % q != 0 && (p < 0) != (q < 0)) ? 1 : 0); });
      case REGARD_DO_INT_ABS: {
        const int64_t most = -a.least > a.most ? -a.least : a.most;
        return {a.least > 0 ? a.least : a.most < 0 ? -a.most : 0, most};
      }
      case REGARD_DO_INT_LT: return Numbers::truth(a.most < b.least, a.least >= b.most);
      case REGARD_DO_INT_LE: return Numbers::truth(a.most <= b.least, a.least > b.most);
      case REGARD_DO_INT_EQ:
        return Numbers::truth(a.one() && b.one() && a.least == b.least, a.most < b.least || b.most < a.least);
      case REGARD_DO_LT:
      case REGARD_DO_LE:
      case REGARD_DO_EQ: return {-1, 0};
      case REGARD_DO_AND: return a.truths() && b.truths() ? logic(x.op, a, b) : lowest_bits(a, b);
      case REGARD_DO_OR:
      case REGARD_DO_XOR: return a.truths() && b.truths() ? logic(x.op, a, b) : Numbers{};
      case REGARD_DO_NOT: return {-1 - a.most, -1 - a.least};
      case REGARD_DO_WHERE: return a.one() ? (a.least ? b : c) : b.joined(c);
      case REGARD_DO_BOOL_TO_INT: return {-a.most, -a.least};
      default: return {};
    }
  }

  using TileMask::cover;  // of few rows

  // Of the queries of a place and the keys [j, j + count).
  static Cover cover(const regard_call& c, const Place& p, int64_t j, int64_t count) {
    Numbers slots[REGARD_SLOTS];
    for (const Instruction* x = begin_of(c);; ++x) {
      if (x->op == REGARD_DO_RESULT) {
        const Numbers& seen = slots[x->a];
        return !seen.one() ? Cover::kSome : seen.least ? Cover::kAll : Cover::kNone;
      }
      slots[x->to] = x->op == REGARD_DO_NUMBER ? Numbers{x->number, x->number}
                     : x->op == REGARD_DO_LOAD ? loaded(c, p, *x, j, count)
                                               : computed(*x, slots[x->a], slots[x->b], slots[x->c]).bounded();
    }
  }

  // Clears the bits of a tile's hidden pairs: of the queries of a place and the keys [j, j + count).
  REGARD_NOINLINE void hide(uint64_t* bits, const regard_call& c, const Place& p, int64_t j, int64_t count) {
    alignas(64) float memory[REGARD_SLOTS * Interpreter::kSlotSize], tables[ByDistance::scratch_size];
    Slots shared;
    Interpreter::place_slots(shared, memory, Interpreter::kSlotSize, kVectors);
    const Instruction* body = Interpreter::run_shared<kVectors>(c, p, shared, begin_of(c));
    const ByDistance distances = ByDistance::of(c, begin_of(c), body, end_of(c));
    for (int64_t done = 0, keys; done < count; done += keys) {
      keys = count - done < kTile ? count - done : kTile;
      hide_keys(bits + done, c, p, shared, distances, tables, j + done, keys);
    }
  }

  // The same of kTile keys or fewer.
  static void hide_keys(uint64_t* bits, const regard_call& c, const Place& p, const Slots& shared,
                        const ByDistance& distances, float* tables, int64_t j, int64_t count) {
    Slots s = shared;
    const Instruction* body = distances.run(c, p, s, tables, kQueries, j, count);
    for (int64_t n = 0, keys; n < count; n += keys) {
      keys = count - n < kProgramKeys ? count - n : kProgramKeys;
      if (body == distances.end) distances.point(s, tables, count, n);
      const Instruction* x = body;
      for (; x->op != REGARD_DO_RESULT; ++x) {
        if (x->op == REGARD_DO_LOAD) Interpreter::load_operand<kVectors>(c, p, s, *x, j + n, keys);
        else Interpreter::compute<kVectors>(c, s, *x, keys);
      }
      uint64_t seen[kProgramKeys] = {};
      Interpreter::each_number<kVectors>(
          s, x->a, keys, [&](int64_t m, int v, vf y) { seen[m] |= (uint64_t)Isa::lanes_set((vi)y) << (v * W); });
      for (int64_t m = 0; m < keys; ++m) bits[n + m] &= seen[m];
    }
  }

  // Which of W keys a row sees.
  REGARD_NOINLINE vi visible(const RowKeys& keys) {
    const regard_call& c = keys.f.c;
    alignas(64) float memory[REGARD_SLOTS * W];
    Slots s;
    Interpreter::place_slots(s, memory, W, 1);
    const Instruction* x = Interpreter::run_shared(keys, s, begin_of(c));
    for (; x->op != REGARD_DO_RESULT; ++x) {
      if (x->op == REGARD_DO_LOAD) Interpreter::load_row(keys, s, *x);
      else Interpreter::compute<1>(c, s, *x, 1);
    }
    return (vi)load(s.at[x->a]) < 0;  // as lanes_set reads it
  }
};

// Whether a mask is known a tile at a time, or a program: kernels for blocks of queries read both.
static bool masks_tiles(const regard_call& c) { return c.tiles.data || MaskProgram::used(c); }

}  // namespace regard
