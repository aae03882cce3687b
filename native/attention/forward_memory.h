// The memory of a thread that computes a forward: how much, and what lies where.
#pragma once
#include "core/parts.h"
#include "steps/steps.h"

namespace regard {

// Floats that hold `width` numbers of each key of a tile, in the call's dtype, where they may lie in several pages.
static int64_t rows_scratch(const regard_call& c, int64_t width) {
  return c.block_table ? kKeys * width * size_of(c.dtype) / 4 : 0;
}

// The memory that a forward takes of `at`, piece by piece; only counted where that is null.
struct ForwardMemory {
  float* at;
  int64_t floats = 0;

  float* take(int64_t count) {
    float* piece = at ? at + floats : nullptr;
    floats += round_up(count);
    return piece;
  }
  uint16_t* take_halves(int64_t count) { return (uint16_t*)take((count + 1) / 2); }
};

static Scratch take_scratch(const regard_call& c, int64_t group, ForwardMemory& memory) {
  const int64_t parts = matrix_parts(c), dk = whole_depth(c.dk), dv = whole_depth(c.dv);
  Scratch w{};
  w.s = memory.take(kKeys * kQueries);
  w.q = memory.take(group * query_floats(c) * kQueries);
  w.o = memory.take(group * c.dv * kQueries);
  w.modifiers = memory.take(Modifiers::scratch_size(c));
  w.k = memory.take(key_floats(c));
  w.v = memory.take(in_place(c, c.v) ? 0 : kKeys * c.dv);
  w.pairs = memory.take(c.dtype == REGARD_BF16 && !parts ? kKeys / 2 * c.dv : 0);
  const int64_t held = tiles_at_once(parts) * parts * kKeys;
  w.q_parts = memory.take_halves(parts * kQueries * dk);
  w.k_parts = memory.take_halves(held * dk);
  w.v_parts = memory.take_halves(held * dv);
  w.v_split = memory.take_halves(parts * 32 * dv);
  w.p_parts = memory.take(parts * kKeys / 2 * kQueries);
  w.k_rows = (char*)memory.take(rows_scratch(c, c.dk));
  w.v_rows = (char*)memory.take(rows_scratch(c, c.dv));
  return w;
}

static int64_t forward_scratch(const regard_call& c, int64_t group) {
  ForwardMemory memory{nullptr};
  take_scratch(c, group, memory);
  return memory.floats;
}

static Scratch forward_places(const regard_call& c, int64_t group, float* at) {
  ForwardMemory memory{at};
  return take_scratch(c, group, memory);
}

}  // namespace regard
