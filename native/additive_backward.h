// Backward of the additive similarity. An item is a (batch element, key head) and a slice of its keys, whose dC and dV are
// its own; what it gives dA and dw is added to that of the other slices in order.
//
// With ds_ij the gradient of a score and r = 1 / (1 + A C), f' is 4 r (1 - r) for tanh, r (1 - r) for the sigmoid:
//   da_ik = w_k Σ_j ds_ij f'   dc_jk = Σ_i ds_ij w_k f'   dw_k = Σ_ij ds_ij f.
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

// A tile's Σ_j ds r (1 - r) to u, Σ_ij ds r and `constant` to e, Σ_i ds r (1 - r) times `scale` to dc. ds [count up to whole vectors][kQueries];
// c [width][kKeys]: C. A division for each r: one for two of them takes more other operations than it saves.
template <int V>
REGARD_ALONE void pull_tile(const float* raised, const float* c, int64_t width, int64_t count, const float* ds, const float* constant,
                                                const float* scale, float* u, float* e, float* dc, int64_t line) {
  const vf one = splat(1.0f);
  for (int64_t k = 0; k < width; ++k) {
    vf da[V], a[V], dw = vf{};
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) da[v] = vf{}, a[v] = load(raised + k * kQueries + v * W);
    for (int64_t n = 0; n < count; n += W) {
      vf by_key[W], part = load(constant + n);
#pragma GCC unroll 2
      for (int m = 0; m < W; ++m) {
        const vf x = splat(c[k * kKeys + n + m]);
        vf sum = vf{};
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const vf r = one / (one + a[v] * x), dr = load(ds + (n + m) * kQueries + v * W) * r, p = dr - dr * r;
          part += dr;
          da[v] += p;
          sum = v ? sum + p : p;
        }
        by_key[m] = sum;
      }
      dw += part;
      float* to = dc + k * line + n;
      store(to, load(to) + splat(scale[k]) * sums(by_key));
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(u + k * kQueries + v * W, da[v]);
    store(e + k * W, dw);
  }
}

// The same from f and f' themselves. a, c: finite; c [count][width].
template <int V, class F>
REGARD_ALONE void pull_direct(const float* a, const float* c, int64_t width, int64_t count, const float* ds,
                                                  float slope, const float* scale, float* u, float* e, float* dc, int64_t line) {
  for (int64_t n = 0; n < count; n += W)
    for (int64_t k = 0; k < width; ++k) {
      vf by_key[W], dw = vf{};
      for (int m = 0; m < W; ++m) {
        const vf x = splat(c[(n + m < count ? n + m : count - 1) * width + k]);
        by_key[m] = vf{};
        for (int v = 0; v < V; ++v) {
          const vf z = load(a + k * kQueries + v * W) + x, y = F::value(z, slope), d = load(ds + (n + m) * kQueries + v * W);
          const vf p = d * F::slope(z, y, slope);
          dw += d * y;
          by_key[m] += p;
          float* to = u + k * kQueries + v * W;
          store(to, load(to) + p);
        }
      }
      store(e + k * W, load(e + k * W) + dw);
      float* to = dc + k * line + n;
      store(to, load(to) + splat(scale[k]) * sums(by_key));
    }
}

// One block of queries while it meets the tiles of a slice.
template <int V>
struct Puller {
  const Gradients& g;
  const Pull& s;
  Block<V>& b;
  int64_t from;       // the slice's first key
  vf shift[V], inverse[V], delta[V];  // weights are exp2(s - shift) · inverse
  vi fine[V];         // lanes with a query, all of it finite
  bool finite_dout;
};

// dst[lane] of one number a row, 0 where there is no row.
template <int V>
static void gather(vf (&dst)[V], const regard_tensor& t, const Place& p, int64_t col) {
  const float* from = at<float>(t, p, p.h) + p.row * t.row + col * t.col;
  for (int64_t n = 0; n < V * W; ++n) dst[n / W][n % W] = n < p.rows ? from[n * t.row] : 0;
}

template <int V>
static void open_pull(Puller<V>& z) {
  const Gradients& g = z.g;
  const Pull& s = z.s;
  const Place& p = z.b.p;
  const regard_tensor& t = g.g.dout;
  const float* dout = at<float>(t, p, p.h) + p.row * t.row;
  zero(s.dout, kQueries * g.wide), zero(s.da, g.width * kQueries), zero(s.dw, g.width * W);
  for (int64_t i = 0; i < p.rows; ++i)
    for (int64_t f = 0; f < g.c.dv; ++f) s.dout[i * g.wide + f] = dout[i * t.row + f * t.col];
  z.finite_dout = all_finite(s.dout, 1, g.wide, g.wide, p.rows);
  pack<V>(s.doutt, kQueries, s.dout, REGARD_F32, g.wide, 1, p.rows, g.c.dv, 1.0f);
  gather(z.shift, g.c.norm, p, 0), gather(z.inverse, g.c.norm, p, 1), gather(z.delta, g.g.delta, p, 0);
  const int64_t rows = p.rows;
  for (int v = 0; v < V; ++v) z.fine[v] = lanes() + splat_int(v * W) < splat_int((int32_t)rows);
  for (int64_t k = 0; k < g.c.dk; ++k)
    for (int v = 0; v < V; ++v) {
      const vf a = load(s.q.a + k * kQueries + v * W);
      z.fine[v] = z.fine[v] & (a - a == vf{});
    }
  for (int64_t k = 0; k < g.width; ++k)
    for (int v = 0; v < V; ++v)
      store(s.clean + k * kQueries + v * W, k < g.c.dk ? select(z.fine[v], load(s.q.a + k * kQueries + v * W), vf{}) : vf{});
}

// Scores of M keys become weights, -1 where hidden, and gradients of scores as the similarity gave them.
template <int V, int M>
REGARD_INLINE void pull_scores(Puller<V>& z, const Tile& t, const float* x, int64_t row, int64_t n) {
  const regard_call& c = z.g.c;
  vf acc[M][V];
  clear(acc);
  micro<Floats, M, V>(acc, x + n * row, row, 1, z.s.doutt, kQueries, c.dv);
  const int64_t* k_at = c.threshold ? c.k_at + offset(c.k_at_batch, z.b.p) + t.j + n : nullptr;
  for (int i = 0; i < M; ++i) {
    const vu key = (k_at ? key_word(k_at[i]) : 0u) + vu{};
    for (int v = 0; v < V; ++v) {
      const int64_t at = (n + i) * kQueries + v * W;
      const vf s = load(z.b.w.s + at), p = exp2v(s - z.shift[v]) * z.inverse[v];
      vf kept = p, dp = acc[i][v];
      if (k_at) {
        const vi stay = stays(c, z.b.word[v], key);
        kept = select(stay, p * splat(c.keep), vf{});
        dp = select(stay, dp * splat(c.keep), vf{});
      }
      const vi hidden = s == splat(-kInf);
      vf ds = select(hidden, vf{}, p * (dp - z.delta[v]));
      if (c.cap != 0) ds = select(hidden, vf{}, ds * load(z.s.bend + at));
      ds = select(z.fine[v], ds, vf{});
      store(z.b.w.s + at, select(hidden, splat(-1.0f), kept));
      store(z.s.ds + at, ds);
    }
  }
}

template <int V>
REGARD_ALONE void pull_tile_scores(Puller<V>& z, const Tile& t, const float* x, int64_t row) {
  int64_t n = 0;
  for (; n + kRows <= t.count; n += kRows) pull_scores<V, kRows>(z, t, x, row, n);
  for (; n < t.count; ++n) pull_scores<V, 1>(z, t, x, row, n);
}

// dv of M keys and V vectors of features.
template <int M, int V>
REGARD_INLINE void pull_values(float* dv, int64_t wide, const float* p, const float* dout, int64_t rows) {
  vf acc[M][V];
  clear(acc);
  micro<Floats, M, V>(acc, p, kQueries, 1, dout, wide, rows);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(dv + i * wide + v * W, load(dv + i * wide + v * W) + acc[i][v]);
}

template <int V>
REGARD_ALONE void pull_value_columns(float* dv, int64_t wide, const float* p, const float* dout, int64_t rows,
                                                         int64_t count) {
  int64_t n = 0;
  for (; n + kRows <= count; n += kRows) pull_values<kRows, V>(dv + n * wide, wide, p + n * kQueries, dout, rows);
  for (; n < count; ++n) pull_values<1, V>(dv + n * wide, wide, p + n * kQueries, dout, rows);
}

// Weights of a tile, hidden ones -1, to dv. 0 · NaN is NaN: what is hidden meets no cotangent that is not finite.
template <int V>
static void pull_tile_values(const Puller<V>& z, const Tile& t) {
  const int64_t wide = z.g.wide, rows = z.b.p.rows;
  float *s = z.b.w.s, *dv = z.s.dv + (t.j - z.from) * wide;
  if (!z.finite_dout) {
    for (int64_t n = 0; n < t.count; ++n)
      for (int64_t f = 0; f < wide; f += W)
        for (int64_t i = 0; i < rows; ++i) {
          const float p = s[n * kQueries + i];
          if (p != -1.0f) store(dv + n * wide + f, load(dv + n * wide + f) + splat(p) * load(z.s.dout + i * wide + f));
        }
    return;
  }
  if (t.edge || t.bits)
    for (int64_t n = 0; n < t.count; ++n)
      for (int v = 0; v < V; ++v) {
        const vf p = load(s + n * kQueries + v * W);
        store(s + n * kQueries + v * W, p == splat(-1.0f) ? vf{} : p);
      }
  int64_t f = 0;
  for (; f + 2 * W <= wide; f += 2 * W) pull_value_columns<2>(dv + f, wide, s, z.s.dout + f, rows, t.count);
  for (; f < wide; f += W) pull_value_columns<1>(dv + f, wide, s, z.s.dout + f, rows, t.count);
}

// Keys of a tile as they are, rows that are not finite 0, and so is what their scores' gradients would give.
template <int V>
static void clean_keys(const Puller<V>& z, const Tile& t, const float* c) {
  const regard_call& call = z.g.c;
  for (int64_t n = 0; n < t.count; ++n) {
    float* row = z.s.cleaned + n * z.g.width;
    bool fine = true;
    for (int64_t k = 0; k < z.g.width; ++k) {
      row[k] = k < call.dk ? c[n * call.k.row + k * call.k.col] : 0;
      fine &= row[k] - row[k] == 0;
    }
    if (fine) continue;
    zero(row, z.g.width), zero(z.s.ds + n * kQueries, kQueries);
  }
}

template <int V>
static void pull_similarity(Puller<V>& z, const Tile& t) {
  const Gradients& g = z.g;
  const Pull& s = z.s;
  const regard_call& c = g.c;
  const int64_t pair = pair_of_block(c, z.b.p), width = g.width, line = g.line();
  const Way way = way_of(g.x, s.q, g.keys.reach + pair * key_tiles(c), t.j);
  const float* raised = g.keys.c + (pair * c.nk + t.j) * width;
  float *dc = s.dc + (t.j - z.from), one = 1, value = 1;
  float constant[kKeys];  // f = value (r + a constant): its share of W keys, added where they are, so that digits cancel early
  for (int64_t n = t.count; n % W != 0; ++n) zero(s.ds + n * kQueries, kQueries);
  if (way == kDirectWay) {
    clean_keys(z, t, at<float>(c.k, z.b.p, pair % c.key_heads) + t.j * c.k.row);
  } else {
    const Separable form = separable(g.x.activation);
    one = g.x.activation == REGARD_TANH ? 4 : 1, value = form.factor;
    for (int64_t n = 0; n < t.count; n += W) {
      vf sum = vf{};
      for (int64_t m = n; m < n + W; ++m)
        for (int v = 0; v < V; ++v) sum += load(s.ds + m * kQueries + v * W);
      store(constant + n, sum * splat((form.middle - form.factor / 2) / form.factor));
    }
  }
  zero(s.u, width * kQueries), zero(s.e, width * W);
  float* scale = s.scale;
  for (int64_t k = 0; k < width; ++k) scale[k] = s.q.plain[k] * one;
  if (way != kDirectWay)
    for (int64_t n = 0; n < t.count; n += W)
      pack<1>(s.cleaned + n, kKeys, raised + n * width, REGARD_F32, width, 1, t.count - n < W ? t.count - n : W, width, 1.0f);
  if (way != kDirectWay) pull_tile<V>(s.q.raised, s.cleaned, width, t.count, s.ds, constant, scale, s.u, s.e, dc, line);
  else if (g.x.activation == REGARD_TANH) pull_direct<V, TanhOf>(s.clean, s.cleaned, width, t.count, s.ds, 0, scale, s.u, s.e, dc, line);
  else if (g.x.activation == REGARD_SIGMOID)
    pull_direct<V, SigmoidOf>(s.clean, s.cleaned, width, t.count, s.ds, 0, scale, s.u, s.e, dc, line);
  else pull_direct<V, LeakyReluOf>(s.clean, s.cleaned, width, t.count, s.ds, g.x.slope, scale, s.u, s.e, dc, line);
  for (int64_t n = 0; n < width * kQueries; n += W) store(s.da + n, load(s.da + n) + load(s.u + n) * splat(one));
  for (int64_t n = 0; n < width * W; n += W) store(s.dw + n, load(s.dw + n) + load(s.e + n) * splat(value));
}

template <int V>
static void pull_block(const Gradients& g, const Pull& s, const Place& p, int64_t slice) {
  const regard_call& c = g.c;
  Block<V> b{c, s.forward, p};
  begin_state(b);
  const int64_t from = slice * g.span(), to = from + g.span();
  b.lo = b.lo > from ? b.lo : from;
  b.hi = b.hi < to ? b.hi : to;
  Prepared q = s.q;
  prepare_block<V>(g.x, q, p);
  Pull mine = s;
  mine.q = q;
  Puller<V> z{g, mine, b, from};
  open_pull(z);
  each_tile(b, [&](Tile& t, Source& x) {
    vf top[V];
    for (int v = 0; v < V; ++v) top[v] = vf{};
    additive_tile(b, t, g.x, q, g.keys, top, c.cap != 0 ? s.bend : nullptr);
    bring_values(c, b.w, x);
    pull_tile_scores(z, t, x.v + (t.j - x.j) * x.v_row, x.v_row);
    pull_tile_values(z, t);
    pull_similarity(z, t);
  });
  const int64_t head = p.b * c.heads + p.h, heads = elements(c) * c.heads, all = g.width * kQueries;
  __builtin_memcpy(g.da + ((slice * heads + head) * g.blocks + p.row / kQueries) * all, s.da, (size_t)all * sizeof(float));
  float* dw = g.dw + (slice * heads + head) * g.width;
  for (int64_t k = 0; k < g.width; ++k) {
    float sum = 0;
    for (int n = 0; n < W; ++n) sum += s.dw[k * W + n];
    dw[k] += sum;
  }
}

struct AdditiveBackward {
  const Gradients& g;

  int64_t items() const { return g.pairs * g.slices; }
  int64_t scratch() const {
    Pull s;
    return lay(g, nullptr, s);
  }

  void run(int64_t item, float* memory) const {
    const regard_call& c = g.c;
    const int64_t pair = item / g.slices, slice = item % g.slices, from = slice * g.span(), head = pair % c.key_heads;
    Pull s;
    lay(g, memory, s);
    zero(s.dc, g.width * g.line()), zero(s.dv, g.span() * g.wide);
    const Place there = place_in_batch(c, pair / c.key_heads);
    const int64_t group = c.heads / c.key_heads;
    for (int64_t h = head * group; h < (head + 1) * group; ++h)
      for (int64_t row = 0; row < c.nq; row += kQueries) {
        const Place p = place_at(c, there.b, h, row);
        switch ((p.rows + W - 1) / W) {
          case 1: pull_block<1>(g, s, p, slice); break;
          case 2: pull_block<2>(g, s, p, slice); break;
          case 3: pull_block<3>(g, s, p, slice); break;
          default: pull_block<kVectors>(g, s, p, slice);
        }
      }
    float *dc = at<float>(g.g.dc, there, head), *dv = at<float>(g.g.dv, there, head);
    for (int64_t n = 0; n < g.span() && from + n < c.nk; ++n) {
      for (int64_t k = 0; k < c.dk; ++k) dc[(from + n) * g.g.dc.row + k * g.g.dc.col] = s.dc[k * g.line() + n];
      for (int64_t f = 0; f < c.dv; ++f) dv[(from + n) * g.g.dv.row + f * g.g.dv.col] = s.dv[n * g.wide + f];
    }
  }
};

// The slices' shares of da, added in order.
struct AdditiveJoin {
  const Gradients& g;

  int64_t items() const { return elements(g.c) * g.c.heads * g.blocks; }
  int64_t scratch() const { return W; }

  void run(int64_t item, float*) const {
    const regard_call& c = g.c;
    const int64_t head = item / g.blocks, all = g.width * kQueries;
    const Place p = place_at(c, head / c.heads, head % c.heads, item % g.blocks * kQueries);
    const float* w = g.x.w + p.h * g.x.w_stride;
    float* to = at<float>(g.g.da, p, p.h) + p.row * g.g.da.row;
    for (int64_t k = 0; k < c.dk; ++k)
      for (int64_t i = 0; i < p.rows; ++i) {
        float sum = 0;
        for (int64_t slice = 0; slice < g.slices; ++slice) sum += g.da[(slice * items() + item) * all + k * kQueries + i];
        to[i * g.g.da.row + k * g.g.da.col] = w[k] * sum;
      }
  }
};

}  // namespace regard
