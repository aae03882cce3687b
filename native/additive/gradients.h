// Backward of the additive similarity: its arguments, the memory that all threads share, and the scratch of one thread.
#pragma once
#include "additive/forward.h"
#include "attention/few_rows.h"

namespace regard {

constexpr int64_t kSlices = 16;  // items into which the work is split at least, whatever the number of threads

REGARD_INLINE void zero(float* x, int64_t count) {
  if (count) __builtin_memset(x, 0, (size_t)count * sizeof(float));  // memset takes no null, of whatever size
}

// Copies the cotangent of a row to `to`, padded by zeros, and returns delta, rowsum(dout · out) minus the cotangent of
// lse. Both are 0 for a row that sees no key.
static float row_delta(const regard_gradients& g, const Place& p, int64_t head, int64_t row, float* to, int64_t ldv) {
  const regard_call& c = g.call;
  const auto of = [&](const regard_tensor& t) { return (const float*)row_ptr(t, p, head, row, REGARD_F32); };
  if (of(c.row_stats)[c.row_stats.col] == 0) {
    zero(to, ldv);
    return 0.0f;
  }
  gather(to, ldv, (const char*)of(g.dout), g.dout, REGARD_F32, c.dv, 1);
  vf sum = vf{};
  for (int64_t d = 0; d < ldv; d += W)
    sum += load(to + d) * floats(of(c.out), d * c.out.col, c.out.col, c.dv - d, REGARD_F32);
  float delta = 0;
  for (int n = 0; n < W; ++n) delta += sum[n];
  return g.dlse.data ? delta - *of(g.dlse) : delta;
}

struct Gradients {
  const regard_gradients& g;  // dq and dk are those of a and c
  const regard_additive& x;
  const regard_call& c;
  const Exponentials& keys;
  GradientSharing sharing;                   // of the modifiers' gradients that are added in place
  int64_t sets, slices, blocks, width, ldv;  // sets: of (batch element, key head) pairs that share no gradient
                                             // width: dk rounded up to 2; ldv: dv to whole vectors
  float* da;                                 // [slice][batch element, head][block][width][kQueries], before w
  float* dw;                                 // [slice][batch element, head][learned()]
  double* sums[Modifiers::count];            // of the modifiers' gradients: [slice][batch element, head][grad_size]

  // Sums for what the features have besides a and c: w, or the parameters of a program.
  int64_t learned() const { return x.code ? x.parameter_count * width : width; }
  int64_t tiles_of_slice() const { return (key_tiles(c) + slices - 1) / slices; }
  int64_t span() const { return tiles_of_slice() * kKeys; }
  int64_t dc_stride() const { return span() + W; }  // whole vectors from any key on
};

// Scratch of one thread.
struct GradientScratch {
  Scratch forward;
  PreparedQueries q;
  float *bounded_a, *bounded_c;  // a [width][kQueries] and c [kKeys][width], finite_end()
  float *dout, *doutt;           // [kQueries][ldv], [dv][kQueries]
  float *ds, *kept;              // [kKeys][kQueries] gradients of the scores; what the modifiers keep of a tile
  float *tile_da, *tile_dw;      // one tile's da [width][kQueries] and dw [learned()][W]
  float *da, *dw;                // one block's
  float *dc, *dv;                // one slice's: [width][dc_stride], [span][ldv]
  float* scale;                  // [width] w, times f's factor
};

static int64_t carve_scratch(const Gradients& g, float* from, GradientScratch& s) {
  int64_t used = 0;
  auto take = [&](int64_t count) {
    float* at = from ? from + used : nullptr;
    used += (count + 15) / 16 * 16;
    return at;
  };
  float *const forward = take(forward_scratch(g.c, 1)), *const prepared = take(prepared_size(g.c) +
                                                                               FeatureProgram::scratch_size(g.x));
  if (from) {
    s.forward = forward_places(g.c, 1, forward);
    s.q = prepared_places(g.c, prepared);
  }
  s.bounded_a = take(g.width * kQueries);
  s.bounded_c = take(kKeys * g.width);
  s.dout = take(kQueries * g.ldv);
  s.doutt = take(g.c.dv * kQueries);
  s.ds = take(kKeys * kQueries);
  s.kept = take(Modifiers::kept_size(g.c));
  s.tile_da = take(g.width * kQueries);
  s.tile_dw = take(g.learned() * W);
  s.da = take(g.width * kQueries);
  s.dw = take(g.learned() * W);
  s.dc = take(g.width * g.dc_stride());
  s.dv = take(g.span() * g.ldv);
  s.scale = take(g.width);
  return used;
}

}  // namespace regard
