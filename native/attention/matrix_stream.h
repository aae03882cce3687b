// Tiles of keys that no step changes, in bfloat16 on a matrix unit: while the vector units turn the scores of one block of 32 keys × 32
// queries into weights, the matrix unit multiplies the next block of scores, and the values of the tile before. Maxima are raised lazily: a
// row's weights may be up to 2^kSlack, so that o is rarely multiplied.
#pragma once
#include "attention/matrix_tile.h"

namespace regard {

constexpr int64_t kBlock = 32;  // keys of a block, its queries, and features of a block of o
constexpr int64_t kWaiting = 2;  // blocks of keys whose values are added at once
constexpr int64_t kPairs = kBlock / 2 * kBlock;  // of weights of a block
constexpr float kSlack = 8;     // by how much, in base 2, a score may exceed its row's maximum before this is raised

// A block of 32 × 32 sums: 32 rows of A times 32 columns of B, `steps` times 32 products each.
struct UnitJob {
  LeftParts a;
  const uint16_t* b;
  int64_t b_row, steps;
  float* sums;  // where they go, in rows of ld floats
  int64_t ld;
  bool add;  // to what stands there
};

// Weights of some blocks of keys whose values wait to be added to the o of 32 queries: a job for each block of features.
struct WaitingValues {
  LeftParts values;
  const uint16_t* weights;
  float* o;
  int64_t blocks, next, count;  // of keys; jobs

  UnitJob take() {
    const int64_t f = next++ * kBlock;
    return {{values.at + f * values.row, values.row, values.step, 0}, weights, 2 * kBlock, blocks, o + f * kBlock, kBlock, true};
  }
};

// What the blocks of queries of an item keep of a matrix unit from tile to tile.
struct MatrixStream {
  WaitingValues waiting{};
  int turn = 0;             // which of two buffers takes weights
  float* before = nullptr;  // where the sums that the unit's registers hold go
  int64_t before_ld = 0;

  // Tile X of step n of a job.
  template <int X>
  __attribute__((always_inline)) void multiply(const UnitJob& job, int64_t n) {
    const uint16_t *a = job.a.at + n * job.a.step, *b = job.b + n * kBlock / 2 * job.b_row;
    if (n) return Isa::multiply_tile<X>(a, job.a.row, b, job.b_row);
    Isa::begin_tile<X>(a, job.a.row, b, job.b_row, before, before_ld, job.add ? job.sums : nullptr, job.ld);
    if (X == 3) before = job.sums, before_ld = job.ld;
  }

  void step(const UnitJob& job, int64_t n) { multiply<0>(job, n), multiply<1>(job, n), multiply<2>(job, n), multiply<3>(job, n); }

  void store() {
    if (before) Isa::store_block<2, 2>(before, before_ld);
    before = nullptr;
  }

  // Adds all values that wait: o is then what the tiles so far make it.
  void finish() {
    while (waiting.next < waiting.count) {
      const UnitJob job = waiting.take();
      for (int64_t n = 0; n < job.steps; ++n) step(job, n);
    }
    store();
  }
};

// The jobs that the unit has while one block of scores becomes weights, a step at a time.
struct UnitPlan {
  explicit UnitPlan(MatrixStream& stream) : stream(stream) {}
  MatrixStream& stream;
  UnitJob jobs[16 + 1];
  int64_t count = 0, steps = 0, job = 0, step = 0, done = 0;

  void add(const UnitJob& more) { jobs[count++] = more, steps += more.steps; }

  // Tile X of the present step; after the last one, the next step is present.
  template <int X>
  __attribute__((always_inline)) void multiply() {
    stream.multiply<X>(jobs[job], step);
    if (X < 3) return;
    ++done;
    if (++step == jobs[job].steps) ++job, step = 0;
  }

  // Runs steps until `most` are done.
  void run(int64_t most) {
    while (done < most) multiply<0>(), multiply<1>(), multiply<2>(), multiply<3>();
  }
};

// 32 queries of a block: two vectors.
// with_lse: whether the weights are summed before they are rounded, too.
template <int V, bool with_lse>
struct StreamedRows {
  Block<V>& b;
  int vector;
  vf shift[2], limit[2], sum[2], unrounded[2];

  StreamedRows(Block<V>& b, int vector) : b(b), vector(vector), sum{vf{}, vf{}}, unrounded{vf{}, vf{}} { set_shift(); }

  void set_shift() {
    for (int v = 0; v < 2; ++v) {
      const vi empty = b.m[vector + v] == splat(-kInf);
      shift[v] = select(empty, vf{}, b.m[vector + v]), limit[v] = select(empty, splat(-kInf), splat(kSlack));
    }
  }

  // Whether some row has seen nothing.
  bool some_empty() const { return Isa::lanes_set((b.m[vector] == splat(-kInf)) | (b.m[vector + 1] == splat(-kInf))); }

  // The largest of a block's scores, in base 2.
  vf largest(const float* s, int v) const {
    vf top = splat(-kInf);
    for (int64_t n = 0; n < kBlock; ++n) top = greater_of(load(s + n * kBlock + v * W), top);
    return Isa::product(top, splat(b.factor));
  }

  // Rows that have seen nothing take the maxima of these scores.
  __attribute__((noinline)) void begin(const float* s) {
    for (int v = 0; v < 2; ++v) {
      vf& m = b.m[vector + v];
      m = select(m == splat(-kInf), greater_of(largest(s, v), m), m);
    }
    set_shift();
  }

  // What weigh keeps in registers.
  struct Weights {
    const float* s;
    float* p;
    vf unit, shift[2], sum[2], unrounded[2], most[2];

    // Scores of two keys become a row of pairs.
    __attribute__((always_inline)) void pair() {
      const vf ones = (vf)splat_int(0x3f803f80);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const vf a = Isa::product(load(s + v * W), unit) - shift[v], z = Isa::product(load(s + kBlock + v * W), unit) - shift[v];
        most[v] = greater_of(a, most[v]), most[v] = greater_of(z, most[v]);
        const vf pairs = cut_pair(Isa::exp2_to_cut(a), Isa::exp2_to_cut(z));
        sum[v] = Isa::multiply_add_pairs(sum[v], pairs, ones);
        if (with_lse) unrounded[v] += Isa::exp2_quick(a) + Isa::exp2_quick(z);
        store(p + v * W, pairs);
      }
      s += 2 * kBlock, p += kBlock;
    }
  };

  // Scores of a block become weights, in pairs, while the unit works: tile after tile, one or two between two pairs of keys. Returns whether
  // some score is so large that a maximum must be raised; most: how far scores are above the maxima.
  __attribute__((always_inline)) bool weigh(const float* s, float* p, UnitPlan& plan, vf (&most)[2]) {
    constexpr int64_t kKeysOfStep = 8;
    const vf low = splat(-kInf);
    Weights w{s, p, splat(b.factor), {shift[0], shift[1]}, {vf{}, vf{}}, {vf{}, vf{}}, {low, low}};
    for (int64_t n = kKeysOfStep; n <= kBlock; n += kKeysOfStep) {
      const int64_t most_done = n * plan.steps / kBlock;
      if (most_done > plan.done + 2) plan.run(most_done - 2);
      if (most_done == plan.done + 2) {
        plan.multiply<0>(), plan.multiply<1>(), w.pair(), plan.multiply<2>(), plan.multiply<3>(), w.pair();
        plan.multiply<0>(), plan.multiply<1>(), w.pair(), plan.multiply<2>(), plan.multiply<3>(), w.pair();
      } else if (most_done == plan.done + 1) {
        plan.multiply<0>(), w.pair(), plan.multiply<1>(), w.pair(), plan.multiply<2>(), w.pair(), plan.multiply<3>(), w.pair();
      } else {
        w.pair(), w.pair(), w.pair(), w.pair();
      }
    }
    most[0] = w.most[0], most[1] = w.most[1];
    if (Isa::lanes_set((most[0] > limit[0]) | (most[1] > limit[1]))) return true;
    for (int v = 0; v < 2; ++v) sum[v] += w.sum[v], unrounded[v] += w.unrounded[v];
    return false;
  }

  // Raises the maxima of rows whose scores s exceed them by more than kSlack, by `most`: by whole numbers, so that rounded weights are
  // multiplied by a power of two, as near as the maximum is rounded; to the largest score itself where numbers are so large that whole ones
  // are lost in rounding. weights: pairs that were computed and do not wait yet. No values may wait.
  __attribute__((noinline)) void raise(const float* s, const vf (&most)[2], float* weights, int64_t pairs) {
    const vf whole = splat(0x1p20f);
    vf alpha[2];
    for (int v = 0; v < 2; ++v) {
      vf& m = b.m[vector + v];
      const vi near = (absolute(shift[v]) < whole) & (most[v] < whole);
      const vf raised = select(near, shift[v] + ceiling(most[v]), largest(s, v)), top = select(most[v] > limit[v], raised, m);
      const vf above = select(top == splat(-kInf), vf{}, top);
      alpha[v] = exp2v(m - above);
      m = top, b.l[vector + v] *= alpha[v], b.unrounded[vector + v] *= alpha[v];
      sum[v] *= alpha[v], unrounded[v] *= alpha[v];
    }
    set_shift();
    for (int64_t f = 0; f < b.c.dv; ++f)
      for (int v = 0; v < 2; ++v) {
        float* o = b.sums(f, vector + v);
        store(o, load(o) * alpha[v]);
      }
    for (int64_t n = 0; n < pairs / W; ++n) {
      float* p = weights + n * W;
      const vu pair = (vu)load(p);
      store(p, Isa::pair_of((vf)(pair << 16) * alpha[n % 2], (vf)(pair & 0xffff0000u) * alpha[n % 2]));
    }
  }
};

// A tile that is streamed: its keys and values from the block's first on, and how many blocks of keys.
struct StreamedTile {
  LeftParts keys, values;
  int64_t blocks;
};

// Streams the queries [W vector, W vector + 32) of a block over some tiles.
template <int V, bool with_lse>
static void stream_rows(Block<V>& b, int vector, const StreamedTile* tiles, int64_t count) {
  const regard_call& c = b.c;
  MatrixStream& stream = *b.w.stream;
  const int64_t depth = whole_depth(c.dk);
  const uint16_t* q = (const uint16_t*)(b.w.q + vector * W * depth / 2);
  float* scores[2] = {b.w.s, b.w.s + kBlock * kBlock};
  int turn = 0;  // which of them is next
  const auto score_job = [&](const StreamedTile& tile, int64_t i) {
    LeftParts keys = tile.keys;
    keys.at += i * kBlock * keys.row;
    return UnitJob{keys, q, 2 * kBlock, depth / kBlock, scores[turn], kBlock, false};
  };
  UnitPlan first{stream};
  first.add(score_job(tiles[0], 0));
  first.run(first.steps);
  stream.store();
  StreamedRows<V, with_lse> rows(b, vector);
  for (int64_t n = 0; n < count; ++n)
    for (int64_t i = 0; i < tiles[n].blocks; ++i) {
      const float* s = scores[turn];
      turn ^= 1;
      if (rows.some_empty()) rows.begin(s);
      UnitPlan plan{stream};
      if (i + 1 < tiles[n].blocks) plan.add(score_job(tiles[n], i + 1));
      else if (n + 1 < count) plan.add(score_job(tiles[n + 1], 0));
      const int64_t at = i % kWaiting, waiting = stream.waiting.count - stream.waiting.next;
      const int64_t left = i - at + kWaiting < tiles[n].blocks ? kWaiting - at : tiles[n].blocks - i;
      for (int64_t share = (waiting + left - 1) / left; share; --share) plan.add(stream.waiting.take());
      float *weights = b.w.p_parts + stream.turn * kWaiting * kPairs, *p = weights + at * kPairs;
      vf most[2];
      const bool large = rows.weigh(s, p, plan, most);
      if (large || plan.count < 2) stream.store();
      if (large) {
        stream.finish();
        rows.raise(s, most, weights, at * kPairs);
        UnitPlan none{stream};
        rows.weigh(s, p, none, most);
      }
      if (left > 1) continue;
      LeftParts values = tiles[n].values;
      values.at += (i - at) * values.step;
      stream.waiting = {values, (const uint16_t*)weights, b.sums(0, vector), at + 1, 0, c.dv / kBlock};
      stream.turn ^= 1;
    }
  for (int v = 0; v < 2; ++v) b.l[vector + v] += rows.sum[v], b.unrounded[vector + v] += rows.unrounded[v];
}

// The keys [lo, hi) of a tile that may be streamed: whole blocks which every query sees, and no step changes.
template <int V, class Op>
static Limits streamed_keys(const Block<V>& b, const Tile& t) {
  const regard_call& c = b.c;
  const bool whole = V % 2 == 0 && c.dv % kBlock == 0 && c.dv <= 16 * kBlock;
  if (Op::parts != 1 || !whole || !unchanged(b, t)) return {};
  int64_t lo = t.j, hi = t.j + t.count;
  if (t.edge) lo = b.inner_lo > lo ? b.inner_lo : lo, hi = b.inner_hi < hi ? b.inner_hi : hi;
  lo = t.j + (lo - t.j + kBlock - 1) / kBlock * kBlock;
  return {lo, hi > lo ? lo + (hi - lo) / kBlock * kBlock : lo, 0, 0};
}

template <int V>
static void stream_tiles(Block<V>& b, const StreamedTile* tiles, int64_t count) {
  const auto stream = b.c.lse.data || b.c.row_stats.data ? stream_rows<V, true> : stream_rows<V, false>;
  for (int vector = 0; count && vector < V; vector += 2) stream(b, vector, tiles, count);
}

}  // namespace regard
