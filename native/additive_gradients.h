// Backward of the additive similarity: what it is told, what its threads share, and what one of them holds.
#pragma once
#include "additive.h"
#include "few.h"

extern "C" {
typedef struct {
  regard_additive forward;  // norm as the forward left it
  regard_tensor dout;       // float, cotangent of out, 0 for rows that see nothing
  regard_tensor delta;      // float (batch, head, row): rowsum(dout · out) less the cotangent of lse
  regard_tensor da, dc, dv;  // float gradients, every element is written
  float* dw;                // (heads, dk), written
} regard_additive_gradients;
}

namespace regard {

constexpr int64_t kSlices = 16;  // items that are wanted, whatever the number of threads

struct Gradients {
  const regard_additive_gradients& g;
  const regard_additive& x;
  const regard_call& c;
  const Raised& keys;
  int64_t pairs, slices, blocks, width, wide;  // width: dk rounded up to 2; wide: dv to whole vectors
  float* da;  // [slice][batch element, head][block][width][kQueries], before w
  float* dw;  // [slice][batch element, head][width]

  int64_t tiles_of_slice() const { return (key_tiles(c) + slices - 1) / slices; }
  int64_t span() const { return tiles_of_slice() * kKeys; }
  int64_t line() const { return span() + W; }  // whole vectors from any key on
};

// Scratch of one thread.
struct Pull {
  Scratch forward;
  Prepared q;
  float *clean, *cleaned;     // a [width][kQueries] and c [kKeys][width] with 0 in rows that are not finite
  float *dout, *doutt;        // [kQueries][wide], [dv][kQueries]
  float *ds, *bend;           // [kKeys][kQueries]
  float *u, *e;               // one tile's da [width][kQueries] and dw [width][W]
  float *da, *dw;             // one block's
  float *dc, *dv;             // one slice's: [width][line], [span][wide]
  float* scale;               // [width] w, times f's factor
};

static int64_t lay(const Gradients& g, float* from, Pull& s) {
  int64_t used = 0;
  auto take = [&](int64_t count) {
    float* at = from + used;
    used += (count + 15) / 16 * 16;
    return at;
  };
  s.forward = forward_places(g.c, 1, take(forward_scratch(g.c, 1)));
  s.q = prepared_places(g.c, take(prepared_size(g.c)));
  s.clean = take(g.width * kQueries), s.cleaned = take(kKeys * g.width);
  s.dout = take(kQueries * g.wide), s.doutt = take(g.c.dv * kQueries);
  s.ds = take(kKeys * kQueries), s.bend = take(kKeys * kQueries);
  s.u = take(g.width * kQueries), s.e = take(g.width * W);
  s.da = take(g.width * kQueries), s.dw = take(g.width * W);
  s.dc = take(g.width * g.line()), s.dv = take(g.span() * g.wide);
  s.scale = take(g.width);
  return used;
}

REGARD_INLINE void zero(float* x, int64_t count) { __builtin_memset(x, 0, (size_t)count * sizeof(float)); }

}  // namespace regard
