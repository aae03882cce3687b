// Few queries, many keys (split-KV decoding). The queries of a group share each row of K and V; keys are split into
// parts, whose states are merged in order by the thread that finishes the last part, so the bits do not depend on the
// number of threads.
#pragma once
#include "attention/few_rows_dots.h"
#include "attention/few_rows_values.h"
#include "core/work.h"

namespace regard {

static int64_t few_rows(const regard_call& c) { return c.heads / c.key_heads * c.nq; }

// Whether a call is computed here: with more queries, the lanes of a block are well filled, and blocks alone read a map
// of tiles. Half precision is widened here for every few rows, in a block once for all heads of a group.
static bool has_few_rows(const regard_call& c) {
  constexpr int64_t kMaxQueries = 8, kMaxQueriesHalf = 5 * W / 8 < kMaxQueries ? 5 * W / 8 : kMaxQueries;
  constexpr int64_t kMaxQueriesInt8 = 15;  // measured: with more, a block of queries is as fast
  const int64_t most = c.k_scales.data                                   ? kMaxQueriesInt8
                       : c.dtype == REGARD_F32 || c.heads == c.key_heads ? kMaxQueries
                                                                         : kMaxQueriesHalf;
  return !c.invariant && few_rows(c) <= kMaxRows && c.nq <= most && !c.tiles.data;
}

// Keys of a part: few enough for many threads, enough to be worth a merge. It depends on shapes only. all: keys of all
// key heads and batch elements.
static int64_t part_keys(int64_t all) {
  const int64_t even = (all / 128 + kChunk - 1) / kChunk * kChunk;
  return even < 256 ? 256 : even > 2048 ? 2048 : even;
}

static int64_t part_size(const regard_call& c) { return few_rows(c) * StoredState::size(c); }

// Room for what of a chunk's values cannot be read in place.
template <class Rows>
static int64_t value_scratch(const regard_call& c) {
  return c.v.col == 1 ? Rows::scratch(c, c.dv) : kChunk * round_up(c.dv);
}

template <class Score>
static int64_t decode_scratch(const typename Score::Given& given) {
  const regard_call& c = Score::call(given);
  return few_rows(c) * kChunk + value_scratch<typename Score::Rows>(c) + Score::size(given, few_rows(c));
}

// The positions of a chunk's keys, and dropout's words.
static void place_keys(FewRows& f, const Chunk& t) {
  if (!f.c.k_at) return;
  const int64_t* k_at = f.c.k_at + offset(f.c.k_at_batch, f.p) + t.j;
  for (int64_t n = 0; n < t.count; ++n) {
    f.at[n / W][n % W] = wrapping_sub(k_at[n], k_at[0]);
    f.word[n / W][n % W] = Dropout::key_word(k_at[n]);
  }
}

// The scales of a chunk's keys, or values: 0 for those that fill up a vector.
static void place_scales(const FewRows& f, const Chunk& t, const regard_tensor& scales, float* to) {
  read_scales(f.c, scales, f.p, f.key_head, t.j, t.count, to);
  for (int64_t n = t.count; n % W; ++n) to[n] = 0;
}

// A chunk's scores become weights, and the weighted values are added to the states.
template <int dtype, class Rows>
static void accumulate_chunk(FewRows& f, const Chunk& t, Rows& values) {
  const regard_call& c = f.c;
  for (int64_t r = 0; r < f.rows; ++r) {
    SoftmaxState<float>& state = state_of(f, r).sums();
    const float most = greatest_lane(f.top[r]), top = most > state.m ? most : state.m;
    f.alpha[r] = state.merge(top, weigh_row(f, t, r, finite_shift(top)));
  }
  if (c.v.col != 1) return add_chunk<REGARD_F32>(f, t, gather_rows(f, t, c.v, c.dv, f.v));
  values.find(f, t, c.v);
  add_chunk<dtype>(f, t, values);
}

// The rows of one (batch element, key head): which queries they are, and which keys they see.
static Limits begin_rows(FewRows& f, int64_t key_head) {
  const regard_call& c = f.c;
  f.rows = few_rows(c);
  f.key_head = key_head;
  Limits limits = Limits::none(c);
  for (int64_t r = 0; r < f.rows; ++r) {
    Row& row = f.row[r];
    row.h = key_head * (c.heads / c.key_heads) + r / c.nq;
    row.i = r % c.nq;
    row.first = 0;
    row.last = c.nk;
    if (c.start.data) {
      row.first = at<int32_t>(c.start, f.p, row.h)[row.i * c.start.row];
      row.last = at<int32_t>(c.stop, f.p, row.h)[row.i * c.stop.row];
    }
    limits.add(row.first, row.last);
  }
  return limits;
}

// Whether rows are prefetched: where a call reads more than a second-level cache keeps for it, since the keys of a
// model that generates have left the third level too when a step reads them, behind the model's weights. Measured on
// Zen 3: 1 to 8 MB took 1.1 to 1.6 times as long without, in memory, and 0.9 to 2.2 times where the third level held
// them. Zen 4: 4 to 16 MB took as long without, in memory, and 0.8 to 0.95 times in the third level; more, 1.1 to 1.2.
static bool prefetches(const regard_call& c, const Limits& limits) {
  constexpr int64_t kSecondLevel = 1 << 20;  // bytes
  return elements(c) * c.key_heads * (limits.hi - limits.lo) * (c.dk + c.dv) * size_of(kv_dtype(c)) > kSecondLevel;
}

// Calls run(chunk) for the keys of [from, to) that some row may see, and pass(first, last) for the rest of those within
// the limits.
template <class Run, class Pass>
REGARD_INLINE void each_chunk(FewRows& f, const Limits& limits, int64_t from, int64_t to, Run run, Pass pass) {
  from = from > limits.lo ? from : limits.lo;
  to = to < limits.hi ? to : limits.hi;
  const bool ahead = prefetches(f.c, limits);
  for (int64_t j = from; j < to; j += kChunk) {
    Chunk t{j, to - j < kChunk ? to - j : kChunk, false, ahead && j + 2 * kChunk <= limits.hi, 0};
    if (!TileMasks::find(f, j, t.count, t.masks)) {
      pass(j, j + t.count);
      continue;
    }
    t.some = f.c.allowed.data || t.masks || limits.inner_lo > j || limits.inner_hi < j + t.count;
    place_keys(f, t);
    if (f.c.k_scales.data) {
      place_scales(f, t, f.c.k_scales, f.k_scale);
      place_scales(f, t, f.c.v_scales, f.v_scale);
    }
    run(t);
  }
}

// Merges the states of a row, `step` floats apart, in order, adds its sink, and writes out, lse and row statistics.
static void merge_row(const regard_call& c, const Place& p, int64_t h, int64_t i, float* states, int64_t step,
                      int64_t count) {
  const float sink = sink_of(c, p, h);
  const auto part = [&](int64_t n) { return StoredState{states + n * step}; };
  float top = sink;
  for (int64_t n = 0; n < count; ++n) top = part(n).sums().m > top ? part(n).sums().m : top;
  SoftmaxState<float> whole;
  whole.merge(top, exp2_of(sink - finite_shift(top)));
  bool keyless = true;  // the row saw no key: o is 0, whatever the values are that no weight multiplies
  for (int64_t n = 0; n < count; ++n) {
    SoftmaxState<float>& state = part(n).sums();
    keyless &= state.empty();
    state.m = whole.merge(state);  // from here on what o is multiplied by
  }
  if (c.lse.data) at<float>(c.lse, p, h)[i * c.lse.row] = whole.lse();
  if (c.row_stats.data) {
    const RowStats<float> stats = whole.stats();
    float* row_stats = at<float>(c.row_stats, p, h) + i * c.row_stats.row;
    row_stats[0] = stats.shift;
    row_stats[c.row_stats.col] = stats.inverse;
  }
  char* to = (char*)c.out.data + size_of(c.out_dtype) * (offset(c.out, p, h) + i * c.out.row);
  for (int64_t d = 0; d < c.dv; d += W) {
    vf o = vf{};
    for (int64_t n = 0; n < count; ++n) o += load(part(n).o() + d) * splat(part(n).sums().m);
    o = keyless ? vf{} : o / splat(whole.l);
    store_some(to + size_of(c.out_dtype) * d * c.out.col, c.out_dtype, c.out.col, c.dv - d < W ? c.dv - d : W, o);
  }
}

// The forward of few rows, for any similarity: Score.begin(few, row) once a row, then Score.score(few, chunk).
// Score::Rows: where keys and values are.
template <class Score>
struct FewRowsForward {
  using Rows = typename Score::Rows;
  const typename Score::Given& given;
  const regard_call& c;
  int64_t keys, first, parts;  // keys of a part; the first part that holds a visible key, and how many from there on
  float* states;
  int64_t* left;  // of each pair: the parts that are not finished

  int64_t scratch() const { return decode_scratch<Score>(given); }

  void run(int64_t item, float* memory) const {
    const int64_t pair = item / parts, key_head = pair % c.key_heads, from = (first + item % parts) * keys,
                  to = from + keys;
    FewRows f(c);
    f.p = place_in_batch(c, pair / c.key_heads);
    f.s = memory;
    f.v = f.s + few_rows(c) * kChunk;
    Score score(given, few_rows(c), f.v + value_scratch<Rows>(c));
    f.states = states + item * part_size(c);
    Rows values(c, c.dv, f.v);
    const Limits limits = begin_rows(f, key_head);
    for (int64_t r = 0; r < f.rows; ++r) {
      score.begin(f, r);
      state_of(f, r).clear(c);
    }
    const auto add = [&](const Chunk& t) {
      score.score(f, t);
      with_kv_dtype(kv_dtype(c), [&](auto dtype) { accumulate_chunk<dtype>(f, t, values); });
    };
    each_chunk(f, limits, from, to < c.nk ? to : c.nk, add, [](int64_t, int64_t) {});
    if (__atomic_sub_fetch(&left[pair], 1, __ATOMIC_ACQ_REL) != 0) return;
    float* all = states + pair * parts * part_size(c);
    for (int64_t r = 0; r < f.rows; ++r)
      merge_row(c, f.p, f.row[r].h, f.row[r].i, all + r * StoredState::size(c), part_size(c), parts);
  }
};

template <class Score>
static int32_t forward_few_rows(const typename Score::Given& given, regard_parallel parallel) {
  const regard_call& c = Score::call(given);
  const Limits seen = Interval::limits(c);
  const int64_t pairs = elements(c) * c.key_heads, keys = part_keys(pairs * c.nk);  // pairs: (batch element, key head)
  const int64_t first = seen.lo < seen.hi ? seen.lo / keys : 0,
                last = seen.lo < seen.hi ? (seen.hi + keys - 1) / keys : 1;
  const int64_t parts = last - first, items = pairs * parts;
  int64_t* left = (int64_t*)malloc((size_t)pairs * sizeof(int64_t) + (size_t)(items * part_size(c)) * sizeof(float));
  if (!left) return 1;
  for (int64_t n = 0; n < pairs; ++n) left[n] = parts;
  const FewRowsForward<Score> forward{given, c, keys, first, parts, (float*)(left + pairs), left};
  const int32_t failed = share(forward, items, c.threads, parallel);
  free(left);
  return failed;
}

}  // namespace regard
