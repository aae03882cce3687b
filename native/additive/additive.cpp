// The entry points of the additive similarity, once for each instruction set.
#include "additive/backward.h"
#include "additive/few_rows_backward.h"
#include "attention/interval_rule.h"
#include "core/api.h"

using namespace regard;

namespace {

int64_t exponentials_size(const regard_call& c) {
  return elements(c) * c.key_heads * (c.nk * round_even(c.dk) + key_tiles(c)) + 16;
}

Exponentials exponentials_places(const regard_call& c, float* memory) {
  return Exponentials{memory, memory + elements(c) * c.key_heads * c.nk * round_even(c.dk)};
}

int32_t check(const regard_additive& x) {
  const int64_t dk = x.call.dk;
  if (x.activation < REGARD_TANH || x.activation > REGARD_LEAKY_RELU || (x.w_stride && x.w_stride < dk))
    return REGARD_BAD_ARGUMENT;
  if (dk && !x.w && !x.code) return REGARD_BAD_ARGUMENT;
  if (const int32_t wrong = FeatureProgram::check(x)) return wrong;
  return check_contiguous_call(x.call, REGARD_F32);
}

// The backward's members by the names that the modifiers read.
regard_gradients of_scores(const regard_additive_gradients& given) {
  constexpr size_t first = offsetof(regard_gradients, dout), size = sizeof(regard_gradients) - first;
  static_assert(offsetof(regard_additive_gradients, dw) - offsetof(regard_additive_gradients, dout) == size,
                "regard_additive_gradients has what regard_gradients has behind its call");
  regard_gradients g;
  g.call = given.forward.call;
  __builtin_memcpy((char*)&g + first, (const char*)&given + offsetof(regard_additive_gradients, dout), size);
  return g;
}

// A backward that reads out as floats.
int32_t check(const regard_additive& x, const regard_gradients& g, const float* dw) {
  const regard_call& c = g.call;
  if (const int32_t wrong = check(x)) return wrong;
  const bool right = fits(g.dout, REGARD_F32, c.batch, c.heads, c.nq, c.dv) &&
                     fits(g.dlse, REGARD_F32, c.batch, c.heads, c.nq, 1) &&
                     fits(g.dq, REGARD_F32, c.batch, c.heads, c.nq, c.dk) &&
                     fits(g.dk, REGARD_F32, c.batch, c.key_heads, c.nk, c.dk) &&
                     fits(g.dv, REGARD_F32, c.batch, c.key_heads, c.nk, c.dv) && Bias::right_gradient(g) &&
                     Program::right_gradients(g) && Modifiers::have_wanted(g);
  if (!right) return REGARD_BAD_ARGUMENT;
  if (c.out_dtype != REGARD_F32 || !c.row_stats.data || (c.dv && (!g.dout.data || !g.dv.data)))
    return REGARD_BAD_ARGUMENT;
  const bool sums = !x.code || x.parameter_count;
  return c.dk && (!g.dq.data || !g.dk.data || (sums && !dw)) ? REGARD_BAD_ARGUMENT : REGARD_DONE;
}

int32_t forward_blocks(const regard_additive& x, regard_parallel parallel) {
  const regard_call& c = x.call;
  const HeapMemory memory((size_t)exponentials_size(c) * sizeof(float));
  if (!memory.at) return 1;
  const Exponentials keys = exponentials_places(c, (float*)memory.at);
  const ComputeExponentials exponentials{x, keys};
  const AdditiveForward forward{x, keys};
  const int32_t failed = share(exponentials, exponentials.items(), c.threads, parallel);
  return failed ? failed : share(forward, forward.items(), c.threads, parallel);
}

int32_t forward(const regard_additive& x, regard_parallel parallel) {
  if (const int32_t wrong = check(x)) return wrong;
  if (!few_additive(x.call)) return forward_blocks(x, parallel);
  return x.code ? forward_few_rows<FeaturesFewRows>(x, parallel) : forward_few_rows<AdditiveFewRows>(x, parallel);
}

int32_t backward_blocks(const regard_additive_gradients& given, regard_parallel parallel) {
  const regard_additive& x = given.forward;
  const regard_gradients of = of_scores(given);
  const regard_call& c = x.call;
  Exponentials keys{};
  Gradients g{of, x, c, keys, Modifiers::sharing(of)};
  const int64_t heads = elements(c) * c.heads;
  g.sets = g.sharing.independent(c);
  g.blocks = (c.nq + kQueries - 1) / kQueries;
  g.width = round_even(c.dk);
  g.ldv = round_up(c.dv);
  g.slices = (kSlices + g.sets - 1) / g.sets;
  g.slices = g.sharing.keys ? 1 : g.slices < key_tiles(c) ? g.slices : key_tiles(c);
  int64_t doubles = 0;
  for (int n = 0; n < Modifiers::count; ++n) doubles += g.slices * heads * Modifiers::grad_size(of, n);
  const int64_t da = g.slices * heads * g.blocks * g.width * kQueries, dw = g.slices * heads * g.learned();
  const HeapMemory memory((size_t)(2 * doubles + exponentials_size(c) + da + dw) * sizeof(float));
  if (!memory.at) return 1;
  double* sums = (double*)memory.at;
  for (int n = 0; n < Modifiers::count; ++n) {
    g.sums[n] = sums;
    sums += g.slices * heads * Modifiers::grad_size(of, n);
  }
  keys = exponentials_places(c, (float*)sums);
  g.da = (float*)sums + exponentials_size(c);
  g.dw = g.da + da;
  zero((float*)memory.at, 2 * doubles);
  zero(g.dw, dw);
  const ComputeExponentials exponentials{x, keys};
  const AdditiveBackward backward{g};
  const AdditiveJoin join{g};
  int32_t failed = share(exponentials, exponentials.items(), c.threads, parallel);
  if (!failed) failed = share(backward, backward.items(), c.threads, parallel);
  if (!failed) failed = share(join, join.items(), c.threads, parallel);
  if (!failed) Modifiers::join_grads(of, g.sums, g.slices * elements(c));
  for (int64_t row = 0; row < g.learned() / (g.width ? g.width : 1) && !failed; ++row)
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t k = 0; k < c.dk; ++k) {
        const float* sums_of_slices = g.dw + h * g.learned() + row * g.width + k;
        double sum = 0;
        for (int64_t n = 0; n < g.slices * elements(c); ++n) sum += sums_of_slices[n * c.heads * g.learned()];
        given.dw[(row * c.heads + h) * c.dk + k] = (float)sum;
      }
  return failed;
}

// The backward of blocks of a call whose forward was that of few rows. The two round scores differently, and weights of
// large scores would not sum to 1: the forward of blocks runs first, for what their backward reads.
int32_t backward_blocks_of_few_rows(regard_additive_gradients given, regard_parallel parallel) {
  regard_call& c = given.forward.call;
  const int64_t rows = elements(c) * c.heads * c.nq;
  const HeapMemory memory((size_t)(rows * (c.dv + 2)) * sizeof(float));
  if (!memory.at) return 1;
  c.lse = {};
  c.out = without_gaps(memory.at, c.batch, c.heads, c.nq, c.dv);
  c.row_stats = without_gaps((float*)memory.at + rows * c.dv, c.batch, c.heads, c.nq, 2);
  const int32_t failed = forward_blocks(given.forward, parallel);
  return failed ? failed : backward_blocks(given, parallel);
}

int32_t backward(const regard_additive_gradients& given, regard_parallel parallel) {
  const regard_additive& x = given.forward;
  const regard_gradients of = of_scores(given);
  if (const int32_t wrong = check(x, of, given.dw)) return wrong;
  if (!few_additive_backward(x.call)) return backward_blocks(given, parallel);
  if (Modifiers::wants_grad(of)) return backward_blocks_of_few_rows(given, parallel);
  return x.code ? backward_few_rows<FeaturesFewRows>(x, of, given.dw, parallel)
                : backward_few_rows<AdditiveFewRows>(x, of, given.dw, parallel);
}

}  // namespace

REGARD_API int32_t regard_additive_forward(const regard_additive* given, regard_parallel parallel) {
  return with_intervals(*given, [parallel](const regard_additive& x) { return forward(x, parallel); });
}

REGARD_API int32_t regard_additive_backward(const regard_additive_gradients* given, regard_parallel parallel) {
  return with_intervals(*given, [parallel](const regard_additive_gradients& g) { return backward(g, parallel); });
}
