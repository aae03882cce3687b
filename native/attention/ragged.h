// A ragged batch: sequences that have any number of queries each, of which some prefill and some decode, in one call.
// Each sequence is computed as a call of its own would be, few queries as in decode.h and more in blocks; the items of
// all are one list, heaviest first.
#pragma once
#include "attention/decode.h"
#include "attention/forward_items.h"
#include "attention/interval_rule.h"

namespace regard {

// Whether a call has something that sequences of any lengths cannot share, or a result that they do not have.
static bool has_other_rows(const regard_call& c) {
  return regard_not_ragged(&c) || c.threshold || c.lse.data || c.row_stats.data;
}

static int64_t keys_of(const regard_ragged& r, int64_t b) { return r.key_counts ? r.key_counts[b] : r.call.nk; }

// Whether `count` positions count up by one.
static bool consecutive(const int64_t* at, int64_t count) {
  bool right = true;
  for (int64_t n = 1; n < count; ++n) right &= (uint64_t)at[n] - (uint64_t)at[n - 1] == 1;
  return right;
}

// How far the first query of a sequence is from its first key; 0 where nothing asks.
static int64_t distance_of(const regard_ragged& r, int64_t b) {
  return r.call.q_at ? r.call.q_at[r.q_offsets[b]] - r.call.k_at[0] : 0;
}

// Whether q and out have a row for each query, and keys and values one for each key of each sequence.
static bool right_rows(const regard_ragged& r) {
  const regard_call& c = r.call;
  const int64_t sequences[REGARD_BATCH_AXES] = {1, 1, 1, r.sequences};
  const auto of_keys = [&](const regard_tensor& t, int64_t dtype, int64_t width) {
    return c.block_table ? right_keys(c, t, dtype, width) : fits(t, dtype, sequences, c.key_heads, c.nk, width);
  };
  return fits(c.q, c.dtype, c.batch, c.heads, c.nq, c.dk) && fits(c.out, c.out_dtype, c.batch, c.heads, c.nq, c.dv) &&
         of_keys(c.k, kv_dtype(c), c.dk) && of_keys(c.v, kv_dtype(c), c.dv) && of_keys(c.k_scales, REGARD_F32, 1) &&
         of_keys(c.v_scales, REGARD_F32, 1);
}

// Whether the sequences lie within the queries and keys of the call, and it has nothing that is not divided among them.
static int32_t check_ragged(const regard_ragged& r) {
  const regard_call& c = r.call;
  if (!right_sizes(c) || elements(c) != 1 || has_other_rows(c) || far(c) || !both_or_none(c.q_at, c.k_at))
    return REGARD_BAD_ARGUMENT;
  if (!known_dtype(c.dtype) || !known_dtype(c.out_dtype) || (c.bounds && !c.q_at) || r.thread_work < 1)
    return REGARD_BAD_ARGUMENT;
  if (r.sequences < 1 || r.sequences >= kMaxIndex || !r.q_offsets || r.q_offsets[0]) return REGARD_BAD_ARGUMENT;
  if (!right_rows(r)) return REGARD_BAD_ARGUMENT;
  for (int64_t b = 0; b < r.sequences; ++b) {
    const int64_t row = r.q_offsets[b], next = r.q_offsets[b + 1];
    if (next < row || next > c.nq) return REGARD_BAD_ARGUMENT;
    if (keys_of(r, b) < 0 || keys_of(r, b) > c.nk) return REGARD_BAD_INTERVAL;
    if (next == row || !c.q_at) continue;
    int64_t distance;
    const bool near = !__builtin_sub_overflow(c.q_at[row], c.k_at[0], &distance) && distance > -kMaxIndex / 2 &&
                      distance < kMaxIndex / 2;
    if (!near || !consecutive(c.q_at + row, next - row)) return REGARD_BAD_POSITION;
  }
  if (c.k_at && !consecutive(c.k_at, c.nk)) return REGARD_BAD_POSITION;
  return r.q_offsets[r.sequences] == c.nq ? REGARD_DONE : REGARD_BAD_ARGUMENT;
}

// One sequence, as a call of its own.
struct Sequence {
  regard_call c;
  int64_t group;               // with many queries: blocks of an item
  int64_t keys, first, parts;  // with few: see FewRowsForward
  int64_t states;              // and where its states are, among those of all sequences
};

// The items of a sequence: those of a head follow each other, so that its keys stay in the second-level cache.
struct Items {
  int64_t weight;  // pairs of a query and a key that an item has, about
  int64_t sequence, count;
  int64_t before;  // items of heavier sequences
};

static int heavier(const void* a, const void* b) {
  const Items &x = *(const Items*)a, &y = *(const Items*)b;
  if (x.weight != y.weight) return x.weight > y.weight ? -1 : 1;
  return x.sequence < y.sequence ? -1 : x.sequence > y.sequence;
}

static int64_t element_size(const regard_tensor& t) {
  return t.dtype == REGARD_I64 ? 8 : t.dtype == REGARD_I32 ? 4 : t.dtype == REGARD_BOOL ? 1 : size_of(dtype_of(t));
}

// Leads an operand to the part of sequence b; whether it has one. What of it is read there, check_call checks.
static bool move_to_part(regard_tensor& t, int64_t b) {
  int64_t skipped;
  if (!t.data) return true;
  if (__builtin_mul_overflow(b, t.batch[REGARD_BATCH_AXES - 1], &skipped) || skipped < 0 || skipped > t.size)
    return false;
  t.data = (char*)t.data + skipped * element_size(t);
  t.size -= skipped;
  return true;
}

// Fills in the call of sequence b, whose intervals are written to start and stop; returns the code of what is wrong
// with it.
static int32_t divide(const regard_ragged& r, int64_t b, int32_t* start, int32_t* stop, regard_call& c) {
  constexpr int kAxis = REGARD_BATCH_AXES - 1;
  const int64_t row = r.q_offsets[b];
  c = r.call;
  c.nq = r.q_offsets[b + 1] - row;
  c.nk = keys_of(r, b) > 1 ? keys_of(r, b) : 1;
  c.q.data = (void*)advance(c.q.data, row * c.q.row, c.dtype);
  c.out.data = (void*)advance(c.out.data, row * c.out.row, c.out_dtype);
  if (c.q_at && (Modifiers::compare_positions(c) || TileMasks::compare_positions(c))) c.q_at += row;
  else c.q_at = c.k_at = nullptr;  // bounds alone ask for them
  if (c.block_table) c.block_table += b * c.block_table_batch[kAxis];
  else
    for (regard_tensor* t : {&c.k, &c.v, &c.k_scales, &c.v_scales})
      if (t->data) t->data = (void*)advance(t->data, b * t->batch[kAxis], dtype_of(*t));
  for (int n = 0; regard_tensor* t = regard_parted(&c, n); ++n)
    if (!move_to_part(*t, b)) return REGARD_BAD_ARGUMENT;
  c.first += distance_of(r, b);
  c.last += distance_of(r, b);
  if (r.key_starts) c.key_starts = r.key_starts + b;
  if (r.key_counts) c.key_counts = r.key_counts + b;  // where it is 0, the intervals hide the one key that nk counts
  const int64_t rows = c.bounds ? c.nq : 1;
  bool hides = false;
  if (const int32_t wrong = write_intervals(c, Place{}, rows, start, stop, hides)) return wrong;
  if (hides) {
    c.start = c.stop = regard_tensor{nullptr, {}, 0, rows > 1, 0, rows, REGARD_I32};
    c.start.data = start;
    c.stop.data = stop;
  }
  return check_call(c, c.dtype);
}

template <class Rows>
struct RaggedForward {
  using Few = FewRowsForward<Dots<Rows>>;
  Sequence* sequences;
  Items* list;    // of each sequence
  int64_t* left;  // (sequence, key head): see FewRowsForward
  float* states = nullptr;
  int64_t count = 0, items = 0, floats = 0;  // floats: the scratch of an item, at most

  int64_t scratch() const { return floats; }

  void run(int64_t item, float* memory) const {
    int64_t low = 0, high = count;  // the last sequence whose items begin at this one or before it
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (list[middle].before <= item) low = middle;
      else high = middle;
    }
    const Items& of = list[low];
    const Sequence& s = sequences[of.sequence];
    const int64_t own = item - of.before;
    if (!has_few_rows(s.c)) return Forward{s.c, s.group}.run(own, memory);
    Few{s.c, s.c, s.keys, s.first, s.parts, states + s.states, left + of.sequence * s.c.key_heads}.run(own, memory);
  }

  void add(const Items& more, int64_t scratch) {
    list[count++] = more;
    items += more.count;
    floats = scratch > floats ? scratch : floats;
  }

  // Adds a sequence with many queries. blocks: of all such sequences.
  void add_blocks(int64_t sequence, int64_t blocks) {
    Sequence& s = sequences[sequence];
    s.group = group_of(s.c, blocks);
    const Forward forward{s.c, s.group};
    const int64_t pairs = s.c.heads * s.c.nq * s.c.nk;
    add({pairs / forward.items(), sequence, forward.items(), 0}, forward.scratch());
  }

  // Adds one with few queries; returns how many floats its states take. keys: of all such sequences and their key
  // heads.
  int64_t add_parts(int64_t sequence, int64_t keys, int64_t states_before) {
    Sequence& s = sequences[sequence];
    const Limits seen = Interval::limits(s.c);
    s.keys = part_keys(keys);
    s.first = seen.lo < seen.hi ? seen.lo / s.keys : 0;
    s.parts = (seen.lo < seen.hi ? (seen.hi + s.keys - 1) / s.keys : 1) - s.first;
    s.states = states_before;
    for (int64_t h = 0; h < s.c.key_heads; ++h) left[sequence * s.c.key_heads + h] = s.parts;
    const int64_t items = s.c.key_heads * s.parts;
    add({few_rows(s.c) * s.c.nk / s.parts, sequence, items, 0}, decode_scratch<Dots<Rows>>(s.c));
    return items * part_size(s.c);
  }

  // Puts the heaviest first: a thread that took a long item last would keep the others waiting.
  void sort() {
    qsort(list, (size_t)count, sizeof(Items), heavier);
    int64_t before = 0;
    for (int64_t n = 0; n < count; ++n) {
      list[n].before = before;
      before += list[n].count;
    }
  }
};

template <class Rows>
static int32_t forward_ragged(const regard_ragged& r, regard_parallel parallel) {
  if (const int32_t wrong = check_ragged(r)) return wrong;
  const int64_t most = r.sequences, nq = r.call.nq, key_heads = r.call.key_heads;
  const int64_t bytes =
      most * ((int64_t)(sizeof(Sequence) + sizeof(Items)) + 8 * key_heads) + 8 * nq;  // 8: an interval
  const Workspace memory((size_t)bytes);
  if (!memory.at) return REGARD_NO_MEMORY;
  Sequence* sequences = (Sequence*)memory.at;
  Items* list = (Items*)(sequences + most);
  RaggedForward<Rows> work{sequences, list, (int64_t*)(list + most)};
  int32_t* start = (int32_t*)(work.left + most * key_heads);
  int64_t count = 0, keys = 0, blocks = 0,
          floats = 0;  // keys: of the sequences with few queries; blocks: of the others
  double pairs = 0;
  for (int64_t b = 0; b < most; ++b) {
    const int64_t row = r.q_offsets[b];
    if (r.q_offsets[b + 1] == row) continue;
    regard_call& c = sequences[count++].c;
    if (const int32_t wrong = divide(r, b, start + row, start + nq + row, c)) return wrong;
    pairs += (double)c.nq * (double)c.nk;
    if (has_few_rows(c)) keys += c.key_heads * c.nk;
    else blocks += all_blocks(c);
  }
  for (int64_t n = 0; n < count; ++n) {
    if (has_few_rows(sequences[n].c)) floats += work.add_parts(n, keys, floats);
    else work.add_blocks(n, blocks);
  }
  const Workspace states((size_t)(floats + 1) * sizeof(float));
  if (!states.at) return REGARD_NO_MEMORY;
  work.states = (float*)states.at;
  work.sort();
  const double busy = pairs * 2 * (double)(r.call.heads * (r.call.dk + r.call.dv)) / (double)r.thread_work;
  return share(work, work.items, busy < (double)r.call.threads ? (int64_t)busy : r.call.threads, parallel);
}

}  // namespace regard
