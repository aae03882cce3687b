// Whether the matrix unit multiplies in a backward: what numbers it has parts for.
#pragma once
#include "attention/training.h"
#include "core/parts.h"

namespace regard {

// The parts of the numbers that a backward multiplies on the matrix unit, if all have them; else 0. Its scores then
// have the forward's bits.
static int64_t backward_parts(const regard_gradients& g) {
  return has_few_rows(g.call) || Modifiers::multiply_delta(g) ? 0 : matrix_parts(g.call);
}

// Whether `parts` bfloat16 cannot stand for some number of rows (count, width) at src: where several do, it is outside
// of these sizes; or it has more bits, as those of a cotangent that is a float may.
static bool unfit_rows(int64_t parts, const void* src, int dtype, int64_t row, int64_t col, int64_t count,
                       int64_t width, const Sizes& sizes) {
  const uint32_t low = parts == 1 ? 0xffff : parts == 2 ? 0xff : 0;
  SizeRange range;
  vu bits = vu{};
  each_vector(src, dtype, row, col, count, width, [&](vf x) __attribute__((always_inline)) {
    range.take(x);
    bits |= (vu)x;
  });
  return (parts > 1 && !range.within(sizes)) || Isa::lanes_set((vi)((bits & low) != 0u));
}

// The phase before all others, for a batch element and a head: its queries, the cotangents of its output, its keys and
// values.
static void find_unfit(const BackwardCall& w, const BackwardScratch&, int64_t item) {
  const regard_call& c = w.c;
  const int64_t head = item % c.heads, group = c.heads / c.key_heads;
  const Place p = place_at(c, item / c.heads, head, 0);
  float& found = w.unfit[item];
  const auto unfit = [&](const regard_tensor& t, int dtype, int64_t of, int64_t rows, int64_t width, Sizes sizes) {
    const void* first = advance(t.data, offset(t, p, of), dtype);
    return unfit_rows(w.parts, first, dtype, t.row, t.col, rows, width, sizes) ? 1.0f : 0.0f;
  };
  const Sizes sizes = Sizes::of_gradients(c.dtype);
  found = unfit(w.g.dout, dtype_of(w.g.dout), head, c.nq, c.dv, Sizes::of_gradients(dtype_of(w.g.dout)));
  if (w.parts == 1 || found != 0) return;
  Sizes of_queries = sizes;
  const float factor = __builtin_fabsf(dot_factor(c, head)), most = Sizes::of_scores(c.dtype).most;
  if (sizes.most * factor > most) of_queries.most = most / factor;
  found = unfit(c.q, c.dtype, head, c.nq, c.dk, of_queries);
  if (head % group) return;
  found += unfit(c.k, c.dtype, head / group, c.nk, c.dk, sizes);
  found += unfit(c.v, c.dtype, head / group, c.nk, c.dv, sizes);
}

}  // namespace regard
