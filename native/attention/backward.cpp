// The entry point of the backward pass: how the work is split, its memory, and its phases.
#include "attention/interval_rule.h"
#include "attention/shared_keys.h"
#include "attention/backward_parts.h"
#include "attention/backward_tiles.h"
#include "core/api.h"
#include "core/memory.h"

using namespace regard;

namespace {

// Lays out the scratch of one thread from `from` on; returns how many floats it takes.
int64_t carve_scratch(const BackwardCall& w, float* from, BackwardScratch& s) {
  const regard_call& c = w.c;
  const int64_t rows = (w.blocks + w.query_parts - 1) / w.query_parts * kQueries;
  int64_t used = 0;
  auto take = [&](float*& to, int64_t count) {
    to = from ? from + used : nullptr;
    used += (count + 15) / 16 * 16;
  };
  const int64_t parts = w.parts, held = parts ? held_tiles(c, parts) : 1;
  take(s.k, kTile * w.ldk);
  take(s.v, kTile * w.ldv);
  take(s.dk, held * kTile * (parts ? whole_depth(c.dk) : w.ldk));
  take(s.dv, held * kTile * (parts ? whole_depth(c.dv) : w.ldv));
  const int64_t queries = kQueries * (w.held ? w.held : kBlocksAtOnce);
  take(s.q, queries * w.ldk);
  take(s.dout, queries * w.ldv);
  take(s.qt, queries * c.dk);
  take(s.doutt, queries * c.dv);
  take(s.p, kBlocksAtOnce * kTile * kQueries);
  take(s.ds, kBlocksAtOnce * kTile * kQueries);
  take(s.modifiers, Modifiers::scratch_size(c));
  take(s.kept, Modifiers::kept_size(c));
  const int64_t group = c.heads / c.key_heads, blocks = group * rows / kQueries;
  take(s.dq, w.dq || parts ? 0 : group * rows * w.ldk);
  const int64_t dk = whole_depth(c.dk), dv = whole_depth(c.dv), wide = dk > dv ? dk : dv;
  const auto take_halves = [&](uint16_t*& to, int64_t count) {
    float* at;
    take(at, (parts * count + 1) / 2);
    to = (uint16_t*)at;
  };
  take(s.blocks, blocks * packed_size(c, parts));
  take(s.finite, parts ? blocks : 0);
  take(s.dqt, parts ? blocks * dk * kQueries : 0);
  take_halves(s.block_rows, kQueries * wide);
  take_halves(s.k_rows, held * kTile * dk);
  take_halves(s.v_rows, held * kTile * dv);
  take_halves(s.kt, held * kTile * dk);
  take_halves(s.split, 32 * dk);
  take_halves(s.p_parts, 2 * kBlock * held_queries(parts));
  take_halves(s.ds_parts, 2 * kBlock * held_queries(parts));
  take(s.ds_pairs, parts * kTile / 2 * held_queries(parts));
  take(s.spare, parts ? kQueries * w.ldk : 0);
  take(s.rows_dk, parts ? kTile * w.ldk : 0);
  take(s.rows_dv, parts ? kTile * w.ldv : 0);
  return used;
}

struct Phase {
  const BackwardCall& w;
  void (*body)(const BackwardCall&, const BackwardScratch&, int64_t);

  int64_t scratch() const {
    BackwardScratch s;
    return carve_scratch(w, nullptr, s);
  }

  void run(int64_t item, float* memory) const {
    BackwardScratch s;
    carve_scratch(w, memory, s);
    body(w, s, item);
  }
};

int32_t run(const BackwardCall& w, decltype(Phase::body) body, int64_t items, regard_parallel parallel) {
  return share(Phase{w, body}, items, w.c.threads, parallel);
}

// Adds the sums of the parts of one block of queries, and of one tile of keys, in order.
void join_queries(const BackwardCall& w, const BackwardScratch&, int64_t item) {
  const regard_call& c = w.c;
  const int64_t pair = item / w.blocks;
  const Place p = place_at(c, pair / c.heads, pair % c.heads, item % w.blocks * kQueries);
  const regard_tensor& to = w.g.dq;
  write_rows((char*)to.data + size_of(w.g.call.dtype) * (offset(to, p, p.h) + p.row * to.row), w.g.call.dtype, to.row,
             to.col, w.dq + (pair * c.nq + p.row) * w.ldk, w.ldk, w.key_parts, w.elements * c.heads * c.nq * w.ldk,
             p.rows, c.dk, c.scale);
}

void join_keys(const BackwardCall& w, const BackwardScratch&, int64_t item) {
  const regard_call& c = w.c;
  const int64_t pair = item / w.tiles, j = item % w.tiles * kTile, count = c.nk - j < kTile ? c.nk - j : kTile;
  const Place p = place_at(c, pair / c.key_heads, 0, 0);
  const auto join = [&](const regard_tensor& to, const float* sums, int64_t ld, int64_t cols, float scale) {
    if (!to.data) return;
    char* first = (char*)to.data + size_of(w.g.call.dtype) * (offset(to, p, pair % c.key_heads) + j * to.row);
    const int64_t part_stride = w.elements * c.key_heads * c.nk * ld;
    sums += (pair * c.nk + j) * ld;
    write_rows(first, w.g.call.dtype, to.row, to.col, sums, ld, w.query_parts, part_stride, count, cols, scale);
  };
  join(w.g.dk, w.dk, w.ldk, c.dk, c.scale);
  join(w.g.dv, w.dv, w.ldv, c.dv, 1.0f);
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Splits the work into items: by shapes only, so that the bits do not depend on the number of threads.
void split(BackwardCall& w) {
  const regard_call& c = w.c;
  w.sharing = Modifiers::sharing(w.g);
  w.independent = w.sharing.independent(c);
  int64_t wanted = (kWantedItems + w.independent - 1) / w.independent;
  w.key_parts = w.sharing.keys ? 1 : least(wanted, (c.nk + kMinSplit - 1) / kMinSplit);
  wanted = (wanted + w.key_parts - 1) / w.key_parts;
  w.query_parts = w.sharing.queries ? 1 : least(wanted, (c.nq + kMinSplit - 1) / kMinSplit);
}

// The blocks of queries of a part of a pair, where they are few enough to be held, and are read for several tiles.
int64_t held_blocks(const BackwardCall& w) {
  const regard_call& c = w.c;
  const int64_t blocks = c.heads / c.key_heads * ((w.blocks + w.query_parts - 1) / w.query_parts);
  const int64_t floats = blocks * kQueries * (w.ldk + w.ldv + c.dk + c.dv);
  return w.tiles > w.key_parts && blocks <= kMostHeldBlocks && floats <= kHeldBlockFloats ? blocks : 0;
}

// Allocates the memory that threads share, in one piece; null if there is not enough.
void* reserve(BackwardCall& w) {
  const regard_call& c = w.c;
  const int64_t rows = w.elements * c.heads * w.blocks * kQueries,
                places = w.key_parts * w.query_parts * w.elements * c.heads;
  const int64_t queries = w.elements * c.heads * c.nq, keys = w.elements * c.key_heads * c.nk;
  const bool split_keys = w.key_parts > 1, split_queries = w.query_parts > 1;
  float* base = nullptr;
  void* memory = nullptr;
  for (int pass = 0; pass < 2; ++pass) {
    int64_t used = 0;
    auto take = [&](float*& to, int64_t count) {
      to = base && count ? base + used : nullptr;
      used += (count + 15) / 16 * 16;
    };
    take(w.shift, rows);
    take(w.inverse, rows);
    take(w.delta, rows);
    take(w.unfit, w.elements * c.heads);
    float *limits, *sums;
    take(limits, rows / kQueries * (int64_t)(sizeof(Limits) / sizeof(float)));
    w.limits = (Limits*)limits;
    for (int n = 0; n < Modifiers::count; ++n) {
      take(sums, places * Modifiers::grad_size(w.g, n) * 2);
      w.sums[n] = (double*)sums;
    }
    const int64_t zeroed = used;
    take(w.dq, split_keys && w.g.dq.data ? w.key_parts * queries * w.ldk : 0);
    take(w.dk, split_queries && w.g.dk.data ? w.query_parts * keys * w.ldk : 0);
    take(w.dv, split_queries && w.g.dv.data ? w.query_parts * keys * w.ldv : 0);
    if (pass) {
      __builtin_memset(base, 0, sizeof(float) * (size_t)zeroed);
    } else {
      memory = take_aligned((size_t)used * sizeof(float) + 64);
      if (!memory) return nullptr;
      base = (float*)memory;
    }
  }
  return memory;
}

int32_t check(const regard_gradients& g) {
  const regard_call& c = g.call;
  if (const int32_t wrong = check_contiguous_call(c, c.dtype)) return wrong;
  if (!known_dtype(dtype_of(g.dout)) || !known_dtype(g.call.dtype)) return REGARD_BAD_ARGUMENT;
  if (!c.row_stats.data || (c.dv && !g.dout.data)) return REGARD_BAD_ARGUMENT;
  const bool right = fits(g.dout, dtype_of(g.dout), c.batch, c.heads, c.nq, c.dv) &&
                     fits(g.dlse, REGARD_F32, c.batch, c.heads, c.nq, 1) &&
                     fits(g.dq, g.call.dtype, c.batch, c.heads, c.nq, c.dk) &&
                     fits(g.dk, g.call.dtype, c.batch, c.key_heads, c.nk, c.dk) &&
                     fits(g.dv, g.call.dtype, c.batch, c.key_heads, c.nk, c.dv) && Bias::right_gradient(g) &&
                     Program::right_gradients(g);
  if (!right) return REGARD_BAD_ARGUMENT;
  return Modifiers::have_wanted(g) ? REGARD_DONE : REGARD_BAD_ARGUMENT;
}

// Leaves the products to vectors if some number has no parts.
int32_t check_parts(BackwardCall& w, regard_parallel parallel) {
  const bool always = w.parts == 1 && dtype_of(w.g.dout) == REGARD_BF16;
  if (!w.parts || always) return 0;
  const int64_t items = w.elements * w.c.heads;
  const int32_t failed = run(w, find_unfit, items, parallel);
  for (int64_t n = 0; n < items; ++n)
    if (w.unfit[n] != 0) w.parts = 0;
  return failed;
}

int32_t backward(const regard_gradients& g, regard_parallel parallel) {
  const regard_call& c = g.call;
  if (const int32_t wrong = check(g)) return wrong;
  BackwardCall w{g, c};
  w.elements = elements(c);
  w.blocks = (c.nq + kQueries - 1) / kQueries;
  w.tiles = (c.nk + kTile - 1) / kTile;
  w.ldk = leading_dim(c.dk);
  w.ldv = leading_dim(c.dv);
  w.scores = g.dq.data || g.dk.data || Modifiers::wants_grad(g);
  w.parts = backward_parts(g);
  split(w);
  void* memory = reserve(w);
  if (!memory) return 1;
  int32_t failed = check_parts(w, parallel);
  // packed rows may be many enough for a matrix unit, which adds in another order
  const bool packed = packs_batch(c) || (packs_heads(c) && (Isa::kMatrixUnit || c.q.col != 1));
  w.recompute_stats = !w.parts && (has_few_rows(c) || packed || matrix_parts(c));
  w.held = w.parts ? 0 : held_blocks(w);
  const bool apart = w.key_parts > 1;  // several items read what is known of a query
  if (!failed && apart) failed = run(w, prepare, w.elements * c.heads * w.blocks, parallel);
  if (!failed) failed = run(w, run_item, w.independent * w.key_parts * w.query_parts, parallel);
  if (!failed && w.dq) failed = run(w, join_queries, w.elements * c.heads * w.blocks, parallel);
  if (!failed && (w.dk || w.dv)) failed = run(w, join_keys, w.elements * c.key_heads * w.tiles, parallel);
  if (!failed) Modifiers::join_grads(g, w.sums, w.key_parts * w.query_parts * w.elements);
  free_aligned(memory);
  return failed;
}

}  // namespace

REGARD_API int32_t regard_backward(const regard_gradients* given, regard_parallel parallel) {
  return with_intervals(*given, [parallel](const regard_gradients& g) { return backward(g, parallel); });
}
