// ByDistance: the instructions of a program whose numbers differ by i - j alone, where positions count up by one. They
// run once for each distance of some queries and keys, and not for each pair: 64 queries and 128 keys have 8,192 pairs
// and 191 distances.
//
// These instructions come first among those that differ by key: LOAD of the keys' positions, a difference or comparison
// of a query's and a key's position, and what is computed of such results and of what all pairs of a head share. Their
// slots hold nothing else, so that a program computes the same without this.
#pragma once
#include "steps/interpreter.h"

namespace regard {

struct ByDistance {
  static constexpr int kMost = 16;                    // slots that they may write to
  static constexpr int64_t kSize = kTile + kQueries;  // numbers of a table
  static constexpr int64_t scratch_size = kMost * kSize;
  static constexpr int64_t kLeastKeys = 8;  // fewer are computed as pairs

  const Instruction *begin, *end;  // equal where there are none
  uint64_t key_slots;              // with positions of keys
  int32_t count, slot[kMost];      // that are written to; each has a table, of kSize numbers

  enum Kind : uint8_t { kPair, kShared, kQuery, kKey, kDistance };  // what the numbers of a slot belong to

  static Kind loaded(const regard_call& c, const Instruction& x) {
    if (x.op == REGARD_DO_NUMBER) return kShared;
    const regard_tensor& t = ProgramCode::operand(c, x.number);
    if (t.row == 0 && t.col == 0) return kShared;
    if (t.dtype != REGARD_I32) return kPair;
    return t.row == 1 && t.col == 0 ? kQuery : t.row == 0 && t.col == 1 ? kKey : kPair;
  }

  // Whether an instruction reads the positions of queries and of keys.
  static bool reads_positions(const Instruction& x, const Kind* kind) {
    const Kind a = kind[x.a], b = kind[x.b];
    return (a == kQuery && b == kKey) || (a == kKey && b == kQuery);
  }

  // Of an instruction that computes: whether its numbers are of distances.
  static bool of_distance(const Instruction& x, const Kind* kind) {
    if (reads_positions(x, kind))
      return x.op == REGARD_DO_INT_SUB || x.op == REGARD_DO_INT_LT || x.op == REGARD_DO_INT_LE ||
             x.op == REGARD_DO_INT_EQ;
    const Kind read[3] = {kind[x.a], kind[x.b], kind[x.c]};
    bool shared = true, distance = false;
    for (Kind one : read) {
      shared &= one == kShared || one == kDistance;
      distance |= one == kDistance;
    }
    return shared && distance;
  }

  static bool computes(const Instruction& x) { return x.op >= REGARD_DO_WHERE || x.op == REGARD_DO_GATHER; }

  // Those of a program from `first` to before `last`; `body`: its first instruction that keys do not share.
  static ByDistance of(const regard_call& c, const Instruction* first, const Instruction* body,
                       const Instruction* last) {
    const ByDistance none{body, body, 0, 0, {}};
    ByDistance found = none;
    Kind kind[REGARD_SLOTS] = {};
    for (const Instruction* x = first; x < body; ++x) kind[x->to] = loaded(c, *x);
    for (const Instruction* x = body; x < last; ++x) {
      const Kind before = kind[x->to];
      if (x->op == REGARD_DO_LOAD && before == kPair && loaded(c, *x) == kKey) {
        kind[x->to] = kKey;
        continue;
      }
      if (!computes(*x) || !of_distance(*x, kind) || x->to == 0 || (before != kPair && before != kDistance)) break;
      if (before != kDistance) {
        if (found.count == kMost) return none;
        found.slot[found.count++] = x->to;
      }
      kind[x->to] = kDistance;
      found.end = x + 1;
    }
    for (const Instruction* x = body; x < found.end; ++x)
      if (x->op == REGARD_DO_LOAD) found.key_slots |= (uint64_t)1 << x->to;
    return found.stand_alone(kind, last) ? found : none;
  }

  // Whether what comes after them writes to none of their slots, and reads no position that they load.
  bool stand_alone(Kind* kind, const Instruction* last) const {
    for (const Instruction* x = end; x < last; ++x) {
      if (x->op == REGARD_DO_LOAD && kind[x->to] == kKey) kind[x->to] = kPair;
      if ((x->op == REGARD_DO_LOAD || computes(*x)) && kind[x->to] != kPair) return false;
      if (kind[x->a] == kKey || kind[x->b] == kKey || kind[x->c] == kKey) return false;
    }
    return true;
  }

  static bool counts_up(const int32_t* at, int64_t count) {
    uint32_t wrong = 0;
    for (int64_t n = 0; n < count; ++n) wrong |= (uint32_t)at[n] - (uint32_t)at[0] - (uint32_t)n;
    return !wrong && at[count - 1] >= at[0];  // from the largest number they went on at the least one
  }

  // Runs them for `queries` lanes of queries and the keys [j, j + keys), at most kTile, and returns the instruction
  // that comes next: `end`, or `begin` where all are to be run for pairs: few keys, positions that do not count up by
  // one.
  const Instruction* run(const regard_call& c, const Place& p, const Slots& of_pairs, float* tables, int64_t queries,
                         int64_t j, int64_t keys) const {
    return begin != end && keys >= kLeastKeys && fill(c, p, of_pairs, tables, queries, j, keys) ? end : begin;
  }

  // Number m of a table is that of a query and a key whose places differ by m - (keys - 1). False where some positions
  // do not count up by one.
  __attribute__((noinline)) bool fill(const regard_call& c, const Place& p, const Slots& of_pairs, float* tables,
                                      int64_t queries, int64_t j, int64_t keys) const {
    Slots s = of_pairs;
    for (int32_t n = 0; n < count; ++n) {
      s.at[slot[n]] = tables + n * kSize;
      s.key[slot[n]] = s.vector[slot[n]] = (int16_t)W;
    }
    const int32_t* keys_at[REGARD_SLOTS];
    const int64_t vectors = (queries + keys - 1 + W - 1) / W, rows = p.rows < queries ? p.rows : queries;
    for (const Instruction* x = begin; x < end; ++x) {
      if (x->op == REGARD_DO_LOAD) {
        const regard_tensor& t = ProgramCode::operand(c, x->number);
        keys_at[x->to] = (const int32_t*)t.data + offset(t, p, p.h) + j;
        if (!counts_up(keys_at[x->to], keys)) return false;
        continue;
      }
      const bool from_key = key_slots >> x->a & 1, from_query = key_slots >> x->b & 1;
      if (!from_key && !from_query) {
        Interpreter::compute<1>(c, s, *x, vectors);
        continue;
      }
      // counted from the key: it is at 0, and the query as far from it as they are apart
      const int32_t query = from_key ? x->b : x->a, key = from_key ? x->a : x->b;
      int32_t rows_at[kQueries];
      __builtin_memcpy(rows_at, of_pairs.at[query], rows * sizeof(int32_t));
      const int64_t least = (int64_t)rows_at[0] - keys_at[key][0] - (keys - 1);  // the distance of number 0
      if (!counts_up(rows_at, rows) || least < INT32_MIN || least + kSize > INT32_MAX) return false;
      float apart[kSize], zero[W] = {};
      for (int64_t v = 0; v < vectors; ++v) store(apart + v * W, (vf)(lanes() + (int32_t)(least + v * W)));
      s.at[query] = apart;
      s.key[query] = s.vector[query] = (int16_t)W;
      s.at[key] = zero;
      s.key[key] = s.vector[key] = 0;
      Interpreter::compute<1>(c, s, *x, vectors);
    }
    return true;
  }

  // Lets slots be read from the tables of `keys` keys, for those from the n-th on.
  void point(Slots& s, float* tables, int64_t keys, int64_t n) const {
    for (int32_t m = 0; m < count; ++m) {
      s.at[slot[m]] = tables + m * kSize + keys - 1 - n;
      s.key[slot[m]] = -1;
      s.vector[slot[m]] = (int16_t)W;
    }
  }
};

}  // namespace regard
