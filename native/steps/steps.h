// Everything between the similarity and the sum: the modifiers of a score, the masks, dropout; and the state of a block
// of queries.
#pragma once
#include "abi/modifiers.h"
#include "core/dispatch.h"
#include "core/state.h"
#include "steps/bits.h"
#include "steps/documents.h"
#include "steps/dropout.h"
#include "steps/interval.h"
#include "steps/mask_program.h"
#include "steps/retained.h"
#include "steps/sink.h"

namespace regard {

// The masks of tiles, besides intervals, booleans and maps of tiles. To add one: its file in this folder, and its name
// here.
using TileMasks = MaskList<Documents, Retained, MaskProgram>;

// One block of queries while it streams over keys. Lanes are queries.
template <int V>
struct Block : Modifiers::State<V>, Interval::State<V>, Dropout::State<V> {
  Block(const regard_call& c, const Scratch& w, const Place& p)
      : Modifiers::State<V>{}, Interval::State<V>{}, Dropout::State<V>{}, c(c), w(w), p(p) {}

  const regard_call& c;
  const Scratch& w;
  Place p;
  SoftmaxState<vf> state[V];  // its o is w.o
  vf unrounded[V] = {};       // where l sums weights that were rounded: what it would be without, for lse
  bool rounded = false;       // whether it does
  bool unfit =
      false;  // whether a number of its queries, or of keys and values that they see, has no parts: see core/parts.h
  vi relative[V] = {};  // position of each lane relative to base
  int64_t base = 0;     // position of the first query
  int64_t o_row = kQueries,
          o_pair = 2 * W;  // of w.o: floats from feature to feature, and from two vectors to the next two
  float factor = 0;        // what the scores of pairs are multiplied by; floats have it in q
  int64_t lo = 0, hi = 0, inner_lo = 0, inner_hi = 0;  // keys that some lane sees, and keys that every lane sees
  const int32_t* map = nullptr;                        // this block's row of the tile map, or null

  // Where o has feature f of vector v.
  float* sums(int64_t f, int v) const { return w.o + f * o_row + v / 2 * o_pair + v % 2 * W; }
};

// Fills the positions of a block's queries, and the states of its modifiers and of dropout.
template <int V>
static void begin_steps(Block<V>& b) {
  const regard_call& c = b.c;
  if (c.q_at) {
    const int64_t* q_at = c.q_at + offset(c.q_at_batch, b.p) + b.p.row;
    b.base = q_at[0];
    for (int64_t n = 0; n < V * W; ++n) b.relative[n / W][n % W] = wrapping_sub(q_at[n < b.p.rows ? n : 0], b.base);
  }
  Modifiers::begin(b);
  if (c.threshold) Dropout::begin(b);
}

// Finds the bits of a tile: of its tile map, boolean bytes and masks together. bits: room for them.
static void load_bits(const regard_call& c, const Place& p, Tile& t, uint64_t* bits) {
  if (!t.allowed && !t.masks) return;
  if (t.allowed) Bits::pack(bits, t.allowed, c.allowed.row, c.allowed.col, p.rows, t.count);
  for (int64_t n = 0; !t.allowed && n < t.count; ++n) bits[n] = ~(uint64_t)0;
  for (int64_t n = 0; t.bits && n < t.count; ++n) bits[n] &= t.bits[n];
  TileMasks::hide(t.masks, bits, c, p, t.j, t.count);
  t.bits = bits;
}

// Whether the bits of a tile, where it has any, hide all its pairs.
static bool hides_all(const Tile& t) {
  uint64_t some = !t.bits;
  for (int64_t n = 0; t.bits && n < t.count; ++n) some |= t.bits[n];
  return !some;
}

// Cuts the keys [from, to) of a tile to those between the first and the last that some query sees, in whole steps.
static void cut_to_seen(const uint64_t* bits, int64_t step, int64_t& from, int64_t& to) {
  const auto hidden = [bits](int64_t n, int64_t end) {
    uint64_t some = 0;
    for (; n < end; ++n) some |= bits[n];
    return !some;
  };
  while (from < to && hidden(from, from + step < to ? from + step : to)) from += step;
  while (from < to) {
    const int64_t last = from + (to - from - 1) / step * step;
    if (!hidden(last, to)) return;
    to = last;
  }
  from = to;
}

// The same of a tile whose bits are loaded. Sums of the other keys stay as they are: those that go had weights of 0,
// and lie before and behind whole groups.
static void cut_to_seen(Tile& t) {
  if (!t.bits) return;
  int64_t from = 0, to = t.count;
  cut_to_seen(t.bits, kKeyStep, from, to);
  t.j += from;
  t.bits += from;
  t.count = to - from;
}

// Scores of one key for V vectors of queries: everything after the similarity, in base 2. kept: takes what the
// modifiers keep of the key for the backward, [modifier that keeps][kTile][kQueries] from the key on; null for none.
template <int V>
REGARD_INLINE void apply_steps(const Block<V>& b, const Tile& t, int64_t n, vf (&s)[V], float* kept = nullptr) {
  Modifiers::apply(b, t, n, s, kept);
  if (t.edge)
    for (int v = 0; v < V; ++v) s[v] = Interval::apply(s[v], t.j + n, b.first[v], b.last[v]);
  if (t.bits)
    for (int v = 0; v < V; ++v) s[v] = Bits::apply(s[v], t.bits[n] >> (v * W));
}

// The same for the keys [from, to) of a tile of a call with a program, which runs for several keys at a time. s, kept:
// [kTile][kQueries] of the tile; kept: takes the derivatives, or null; top: takes the maximum of itself and the scores.
template <int V>
static void run_program(const Block<V>& b, const Tile& t, float* s, int64_t from, int64_t to, float* kept,
                        vf (&top)[V]) {
  if (!t.edge && !t.bits) return Program::run<V>(b, t, s, from, to, kept, top);
  vf with_hidden[V] = {};
  Program::run<V>(b, t, s, from, to, kept, with_hidden);
  for (int64_t n = from; n < to; ++n)
    for (int v = 0; v < V; ++v) {
      float* at = s + n * kQueries + v * W;
      vf x = load(at);
      if (t.edge) x = Interval::apply(x, t.j + n, b.first[v], b.last[v]);
      if (t.bits) x = Bits::apply(x, t.bits[n] >> (v * W));
      store(at, x);
      top[v] = greater_of(x, top[v]);
    }
}

// The same for a backward, whose weights are relative to what the forward found.
template <int V>
static void run_program(const Block<V>& b, const Tile& t, float* s, int64_t from, int64_t to, float* kept) {
  vf top[V] = {};
  run_program<V>(b, t, s, from, to, kept, top);
}

// The same for one query and W keys; derivative: 1, which becomes the modifiers' derivative.
static vf apply_steps(const RowKeys& x, vf s, vf& derivative) {
  Modifiers::apply(x, s, derivative);
  vi visible = Interval::visible(x);
  if (x.f.c.allowed.data) visible &= Bits::visible(x);
  if (x.t.masks) visible &= TileMasks::visible(x.t.masks, x);
  return select(visible, s, splat(-kInf));
}

// The weight of one score, exp2(s - shift); its sum goes to `sum`, before dropout.
template <int V>
REGARD_INLINE vf weight(const Block<V>& b, int v, vf s, vf shift, vu key, vf& sum) {
  const vf p = exp2v(s - shift);
  sum += p;
  return b.c.threshold ? Dropout::apply(b.c, b.word[v], key, p) : p;
}

}  // namespace regard
