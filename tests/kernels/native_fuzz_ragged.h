// Fuzz of ragged calls: sequences with any numbers of queries and keys, right and wrong, each buffer of exactly the
// size that they say.
#pragma once
#include "native_fuzz_programs.h"

extern "C" {
int64_t regard_queries();
int64_t regard_keys();
int32_t regard_forward_ragged(const regard_ragged*, regard_parallel);
}

namespace {

// Operands of which each sequence has a part: tensors of the padded batch, some of whose axes are shared.
struct PaddedOperands {
  RandomMemory& memory;
  Random& r;
  regard_call& c;
  int64_t sequences;

  void* make(Kind kind, int64_t count) { return memory.make(kind, count); }

  regard_tensor tensor(Kind kind, int64_t heads, int64_t rows, int64_t cols, bool) {
    const int64_t size[4] = {sequences, heads, rows, cols};
    int64_t step[4], count = 1;
    for (int axis = 3; axis >= 0; --axis) {
      const bool once = size[axis] == 1 || (axis != 3 && r.chance(3));
      step[axis] = once ? 0 : count;
      count *= once ? 1 : size[axis];
    }
    return {make(kind, count), {0, 0, 0, step[0]}, step[1], step[2], cols == 1 ? 1 : step[3], count, kDtypes[kind]};
  }

  void tiles() {
    const int64_t rows = (c.nq + regard_queries() - 1) / regard_queries();
    const int64_t cols = (c.nk + regard_keys() - 1) / regard_keys();
    c.bits_count = r.between(0, 3);
    if (c.bits_count) c.bits = memory.numbers<int64_t>(kI64, c.bits_count * regard_keys(), 0, INT64_MAX - 1);
    c.tiles = tensor(kI32, c.heads, rows, cols, true);
    for (int64_t n = 0; n < c.tiles.size; ++n) ((int32_t*)c.tiles.data)[n] = (int32_t)r.between(-2, c.bits_count - 1);
  }

  void all() {
    if (r.chance(3)) c.bias = tensor((Kind)r.between(0, 2), c.heads, c.nq, c.nk, true);
    if (r.chance(4)) c.allowed = tensor(kByte, c.heads, c.nq, c.nk, true);
    if (r.chance(4)) tiles();
    if (r.chance(4)) c.sink = tensor(kF32, c.heads, 1, 1, true);
    if (r.chance(3)) mask_program(*this, Programs::kAny);
    if (r.chance(3)) score_program(*this, Programs::kAny);
  }
};

struct RaggedCase : RandomMemory {
  regard_ragged a{};
  int64_t *offsets, *keys, *starts, *q_at, *k_at;

  explicit RaggedCase(Random& random) : RandomMemory(random) {
    regard_call& c = a.call;
    for (int64_t& n : c.batch) n = 1;
    a.sequences = r.between(1, 6);
    a.thread_work = r.between(1, 1000);
    offsets = numbers<int64_t>(kI64, a.sequences + 1, 0, 0);
    const int64_t most = r.chance(2) ? 9 : 150;
    for (int64_t b = 0; b < a.sequences; ++b) offsets[b + 1] = offsets[b] + (r.chance(4) ? 0 : r.between(1, most));
    if (offsets[a.sequences] == 0) ++offsets[a.sequences];
    c.nq = offsets[a.sequences];
    c.nk = r.between(1, r.chance(2) ? 20 : 600);
    keys = numbers<int64_t>(kI64, a.sequences, 0, c.nk);
    starts = numbers<int64_t>(kI64, a.sequences, 0, 0);  // where a sequence has no key, its first is 0
    for (int64_t b = 0; b < a.sequences; ++b) starts[b] = r.between(0, keys[b]);
    a.key_starts = r.chance(3) ? starts : nullptr;
    a.q_offsets = offsets;
    a.key_counts = r.chance(3) ? nullptr : keys;
    c.key_heads = r.between(1, 3);
    c.heads = c.key_heads * r.between(1, 3);
    c.dk = r.between(1, 40);
    c.dv = r.between(1, 40);
    c.dtype = (int32_t)r.between(0, 2);
    c.out_dtype = r.chance(2) ? REGARD_F32 : c.dtype;
    c.threads = (int32_t)r.between(1, 3);
    c.scale = 0.3f;
    c.keep = 1;
    c.invariant = r.chance(4);
    c.q = rows((Kind)c.dtype, 1, c.heads, c.nq, c.dk);
    c.out = rows((Kind)c.out_dtype, 1, c.heads, c.nq, c.dv);
    if (r.chance(2)) pages();
    else key_rows(a.sequences, c.nk);
    positions();
    if (r.chance(4)) c.cap = 2;
    if (r.chance(3)) c.sink = {make(kF32, c.heads), {}, 1, 0, 0, c.heads, REGARD_F32};
    if (r.chance(3)) {
      c.slopes_stride = r.between(0, 1);
      c.slopes = numbers<float>(kF32, c.slopes_stride ? c.heads : 1, 0, 1);
    }
    c.bounds = (int32_t)r.between(0, REGARD_FIRST | REGARD_LAST);
    c.first = r.between(-300, 100);
    c.last = r.between(-100, 300);
    PaddedOperands padded{*this, r, c, a.sequences};
    c.nq = longest();
    padded.all();
    c.nq = offsets[a.sequences];
  }

  int64_t longest() const {
    int64_t most = 1;
    for (int64_t b = 0; b < a.sequences; ++b)
      most = offsets[b + 1] - offsets[b] > most ? offsets[b + 1] - offsets[b] : most;
    return most;
  }

  // (batch, head, row, column), heads or rows first.
  regard_tensor rows(Kind kind, int64_t batch, int64_t heads, int64_t count, int64_t width) {
    const bool first = r.chance(2);
    const int64_t size = batch * heads * count * width;
    return {make(kind, size),
            {0, 0, 0, heads * count * width},
            first ? count * width : width,
            first ? width : heads * width,
            1,
            size,
            kDtypes[kind]};
  }

  // Keys and values, with the scales of int8.
  void key_rows(int64_t batch, int64_t count) {
    regard_call& c = a.call;
    const bool int8 = r.chance(3);
    const Kind kind = int8 ? kI8 : (Kind)c.dtype;
    c.k = rows(kind, batch, c.key_heads, count, c.dk);
    c.v = rows(kind, batch, c.key_heads, count, c.dv);
    if (int8) {
      c.k_scales = rows(kF32, batch, c.key_heads, count, 1);
      c.v_scales = rows(kF32, batch, c.key_heads, count, 1);
    }
  }

  void pages() {
    regard_call& c = a.call;
    c.page_size = r.between(1, 50);
    c.pages = r.between(1, 5);
    key_rows(c.pages, c.page_size);
    const int64_t room = (c.nk + c.page_size - 1) / c.page_size;
    int32_t* table = numbers<int32_t>(kI32, a.sequences * room, 0, c.pages - 1);
    c.block_table = table;
    c.block_table_batch[REGARD_BATCH_AXES - 1] = room;
    for (int64_t b = 0; b < a.sequences; ++b)  // behind the last page of a sequence, any numbers will do
      for (int64_t n = (keys_of(b) + c.page_size - 1) / c.page_size; n < room; ++n) table[b * room + n] = -7;
  }

  int64_t keys_of(int64_t b) const { return a.key_counts ? keys[b] : a.call.nk; }

  void positions() {
    q_at = numbers<int64_t>(kI64, a.call.nq, 0, 0);
    k_at = numbers<int64_t>(kI64, a.call.nk, 0, 0);
    const int64_t first = r.between(-900, 900);
    for (int64_t j = 0; j < a.call.nk; ++j) k_at[j] = first + j;
    for (int64_t b = 0; b < a.sequences; ++b)
      for (int64_t i = offsets[b]; i < offsets[b + 1]; ++i) q_at[i] = first + keys_of(b) - offsets[b + 1] + i;
    a.call.q_at = q_at;
    a.call.k_at = k_at;
  }

  int32_t run() const {
    return regard_forward_ragged(&a,
                                 [](int64_t begin, int64_t end, int64_t, regard_body body, void* context) -> int32_t {
                                   for (int64_t n = begin; n < end; ++n) body(n, n + 1, context);
                                   return 0;
                                 });
  }

  // Whether the call with one number made wrong returns the code.
  template <class T>
  bool refuses(int32_t code, T& number, T wrong) {
    const T was = number;
    number = wrong;
    const bool refused = run() == code;
    number = was;
    return refused;
  }
};

// Whether a right call is done, and wrong ones are refused.
bool ragged(Random& random) {
  RaggedCase x(random);
  regard_ragged& a = x.a;
  regard_call& c = a.call;
  const int64_t b = x.r.between(0, a.sequences - 1), kFarAway = (int64_t)1 << 62;
  bool right = x.run() == REGARD_DONE;
  for (int64_t wrong : {(int64_t)0, (int64_t)-1, kFarAway}) right &= x.refuses(REGARD_BAD_ARGUMENT, a.sequences, wrong);
  for (int64_t wrong : {(int64_t)-1, c.nq + 1, INT64_MIN, INT64_MAX})
    right &= x.refuses(REGARD_BAD_ARGUMENT, x.offsets[b + 1], wrong);
  right &= x.refuses(REGARD_BAD_ARGUMENT, x.offsets[0], (int64_t)1) &&
           x.refuses(REGARD_BAD_ARGUMENT, x.offsets[a.sequences], c.nq - 1);
  right &= x.refuses(REGARD_BAD_ARGUMENT, c.nq, c.nq + 1) && x.refuses(REGARD_BAD_ARGUMENT, c.nk, (int64_t)0);
  for (int64_t wrong : {(int64_t)-1, c.nk + 1, INT64_MAX})
    right &= !a.key_counts || x.refuses(REGARD_BAD_INTERVAL, x.keys[b], wrong);
  for (int64_t wrong : {(int64_t)-1, c.nk + 1, INT64_MAX})
    right &= !a.key_starts || x.offsets[b + 1] == x.offsets[b] || x.refuses(REGARD_BAD_INTERVAL, x.starts[b], wrong);
  if (x.offsets[b + 1] > x.offsets[b])
    for (int64_t wrong : {kFarAway, -kFarAway, INT64_MIN, INT64_MAX})
      right &= x.refuses(REGARD_BAD_POSITION, x.q_at[x.offsets[b]], wrong);
  if (c.nk > 1) right &= x.refuses(REGARD_BAD_POSITION, x.k_at[c.nk - 1], x.k_at[0]);
  right &= x.refuses(REGARD_BAD_ARGUMENT, c.q_at, (const int64_t*)nullptr) &&
           x.refuses(REGARD_BAD_ARGUMENT, c.batch[2], (int64_t)2);
  right &= x.refuses(REGARD_BAD_ARGUMENT, c.key_counts, (const int64_t*)x.keys) &&
           x.refuses(REGARD_BAD_ARGUMENT, c.key_starts, (const int64_t*)x.starts) &&
           x.refuses(REGARD_BAD_ARGUMENT, c.threshold, (uint32_t)1);
  right &= x.refuses(REGARD_BAD_ARGUMENT, c.lse.data, (void*)x.k_at) &&
           x.refuses(REGARD_BAD_ARGUMENT, c.offsets, (const float*)x.k_at);
  for (regard_tensor* t : {&c.bias, &c.allowed, &c.tiles, &c.sink}) {
    if (!t->data) {
      right &= x.refuses(REGARD_BAD_ARGUMENT, t->data, (void*)x.k_at);
      continue;
    }
    right &= x.refuses(REGARD_BAD_ARGUMENT, t->size, (int64_t)0) &&
             x.refuses(REGARD_BAD_ARGUMENT, t->dtype, (int64_t)REGARD_I64);
    for (int64_t wrong : {t->size, (int64_t)-1, kFarAway, INT64_MIN})
      right &= b == 0 || x.offsets[b + 1] == x.offsets[b] ||
               x.refuses(REGARD_BAD_ARGUMENT, t->batch[REGARD_BATCH_AXES - 1], wrong);
  }
  right &= x.refuses(REGARD_BAD_ARGUMENT, c.first, INT64_MAX) && x.refuses(REGARD_BAD_ARGUMENT, c.dtype, 3);
  for (regard_tensor* t : {&c.q, &c.k, &c.v, &c.out, &c.k_scales, &c.v_scales}) {
    if (!t->data) continue;
    for (int64_t wrong : {t->size - 1, t->size / 2, (int64_t)0})
      right &= x.refuses(REGARD_BAD_ARGUMENT, t->size, wrong);
    right &= x.refuses(REGARD_BAD_ARGUMENT, t->dtype, (int64_t)REGARD_I32);
  }
  if (c.k_scales.data) right &= x.refuses(REGARD_BAD_ARGUMENT, c.v_scales, regard_tensor{});
  if (c.block_table && x.offsets[b + 1] > x.offsets[b] && x.keys_of(b)) {
    int32_t& page = ((int32_t*)c.block_table)[b * c.block_table_batch[REGARD_BATCH_AXES - 1]];
    right &= x.refuses(REGARD_BAD_PAGE, page, (int32_t)c.pages) && x.refuses(REGARD_BAD_PAGE, page, -1);
  }
  return right;
}

}  // namespace
