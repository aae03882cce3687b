// Random right calls of the kernels' C interface, each buffer of exactly the size that the call says.
#pragma once
#include "native_fuzz_programs.h"

#include "additive/gradients.h"

extern "C" {
int64_t regard_queries();
int64_t regard_keys();
const char* regard_runnable(int64_t);
int32_t regard_forward(const regard_call*, regard_parallel);
int32_t regard_backward(const regard_gradients*, regard_parallel);
int32_t regard_additive_forward(const regard_additive*, regard_parallel);
int32_t regard_additive_backward(const regard_additive_gradients*, regard_parallel);
int32_t regard_facts(const regard_fact_args*, regard_parallel);
int32_t regard_write_pages(const regard_page_write*, regard_parallel);
}

namespace {

constexpr int64_t kRoom = 64;  // floats behind a table of offsets, as backends/native/modifiers/offsets.py has it

enum Entry { kForward, kBackward, kAdditive, kAdditiveBackward, kFacts };
const char* const kEntries[] = {"forward", "backward", "additive_forward", "additive_backward", "facts"};

int32_t in_turns(int64_t begin, int64_t end, int64_t, regard_body body, void* context) {
  for (int64_t n = begin; n < end; ++n) body(n, n + 1, context);
  return 0;
}

// Whether something in a call compares positions.
bool needs_positions(const regard_call& c) {
  return c.threshold || (c.slopes && !c.points_of_q) || c.log_distance_weights || c.power_distance_weights ||
         c.until.data;
}

// One right call of a kind of kernels, in memory of its own.
struct Case : RandomMemory {
  bool additive, facts, int8 = false;
  regard_gradients g{};
  regard_additive_gradients x{};
  regard_fact_args f{};
  regard_call c{};

  // programs: of kExact, those of scores are left out, whose results may differ by any amount for a rounding.
  Case(Random& random, int kind, Programs programs) : RandomMemory(random), additive(kind == 1), facts(kind == 2) {
    sizes();
    operands();
    if (!additive && !facts && r.chance(3)) pages();
    steps();
    hide();
    if (r.chance(3)) mask_program(*this, programs);
    if (programs != Programs::kExact && r.chance(4)) score_program(*this, programs);
    if (additive) weights(programs == Programs::kExact);
    else if (facts) facts_of();
    else gradients();
  }

  // A tensor (batch, head, row, col), its axes in some order, some of them shared where that is allowed.
  regard_tensor tensor(Kind kind, int64_t heads, int64_t rows, int64_t cols, bool shared) {
    int64_t size[7] = {c.batch[0], c.batch[1], c.batch[2], c.batch[3], heads, rows, cols}, step[7];
    int order[7] = {6, 5, 4, 3, 2, 1, 0};
    if (r.chance(3)) {
      const int64_t from = r.between(0, 2), to = r.between(0, 2);
      const int axis = order[from];
      order[from] = order[to];
      order[to] = axis;
    }
    int64_t count = 1;
    for (int axis : order) {
      const bool once = size[axis] == 1 || (shared && axis != 6 && r.chance(3));
      step[axis] = once ? 0 : count;
      count *= once ? 1 : size[axis];
    }
    const int64_t reached = heads && rows && cols ? count : 0;
    return {make(kind, count), {step[0], step[1], step[2], step[3]}, step[4], step[5], cols == 1 ? 1 : step[6], reached,
            kDtypes[kind]};
  }

  int64_t elements() const { return c.batch[0] * c.batch[1] * c.batch[2] * c.batch[3]; }

  void sizes() {
    for (int64_t& n : c.batch) n = r.chance(4) ? r.between(1, 3) : 1;
    c.key_heads = r.between(1, 3);
    c.heads = c.key_heads * r.between(1, 3);
    c.nq = r.chance(2) ? r.between(1, 9) : r.between(1, 150);
    c.nk = r.chance(3) ? r.between(1, 20) : r.between(1, 400);
    c.dk = r.chance(20) ? 0 : r.between(1, 40);
    c.dv = facts ? 0 : r.chance(20) ? 0 : r.between(1, 40);
    c.dtype = (int32_t)r.between(0, 2);
    c.out_dtype = additive || r.chance(2) ? REGARD_F32 : c.dtype;
    c.threads = (int32_t)r.between(1, 3);
    c.invariant = r.chance(4);
    int8 = !additive && !facts && r.chance(4);
    c.scale = 0.3f;
    c.keep = 1;
  }

  void operands() {
    c.q = tensor(additive ? kF32 : (Kind)c.dtype, c.heads, c.nq, c.dk, false);
    keys(c.nk, r.chance(3), r.chance(3));
    if (!facts) c.out = tensor((Kind)c.out_dtype, c.heads, c.nq, c.dv, false);
    if (r.chance(2)) c.lse = tensor(kF32, c.heads, c.nq, 1, false);
    c.row_stats = tensor(kF32, c.heads, c.nq, 2, false);
    if (r.chance(3)) c.sink = tensor(kF32, c.heads, 1, 1, true);
  }

  // Keys and values, or their pages, with the scales of int8.
  void keys(int64_t rows, bool share_keys, bool share_values) {
    const Kind kind = int8 ? kI8 : (Kind)c.dtype;
    c.k = tensor(additive ? kF32 : kind, c.key_heads, rows, c.dk, share_keys);
    if (!facts) c.v = tensor(kind, c.key_heads, rows, c.dv, share_values);
    if (!int8) return;
    c.k_scales = tensor(kF32, c.key_heads, rows, 1, share_keys);
    c.v_scales = tensor(kF32, c.key_heads, rows, 1, share_values);
  }

  // Keys and values in pages, some of which several sequences share.
  void pages() {
    c.page_size = r.chance(2) ? r.between(1, 20) : r.between(1, 300);
    c.pages = r.between(1, 5);
    int64_t batch[REGARD_BATCH_AXES];
    memcpy(batch, c.batch, sizeof batch);
    for (int n = 0; n < REGARD_BATCH_AXES; ++n) c.batch[n] = n + 1 < REGARD_BATCH_AXES ? 1 : c.pages;
    keys(c.page_size, false, false);
    memcpy(c.batch, batch, sizeof batch);
    int64_t step = table_pages();
    for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) {
      c.block_table_batch[n] = step;
      step *= c.batch[n];
    }
    c.block_table = numbers<int32_t>(kI32, elements() * table_pages(), 0, c.pages - 1);
  }

  int64_t table_pages() const { return (c.nk + c.page_size - 1) / c.page_size; }

  // How many keys of an element are read at most.
  int64_t keys_of(int64_t element) const { return c.key_counts ? c.key_counts[element] : c.nk; }

  // Behind the last page of a sequence, any numbers will do.
  void forget_pages() {
    for (int64_t b = 0; b < elements(); ++b)
      for (int64_t n = (keys_of(b) + c.page_size - 1) / c.page_size; n < table_pages(); ++n)
        ((int32_t*)c.block_table)[b * table_pages() + n] = r.chance(2) ? -1 : INT32_MAX;
  }

  void steps() {
    const int64_t far = r.chance(3) ? (int64_t)1 << 40 : 500;
    int64_t step = c.nq;
    for (int n = 3; n >= 0; --n) {
      c.q_at_batch[n] = step;
      step *= c.batch[n];
    }
    step = c.nk;
    for (int n = 3; n >= 0; --n) {
      c.k_at_batch[n] = step;
      step *= c.batch[n];
    }
    const int64_t queries = elements() * c.nq, keys = elements() * c.nk;
    if (r.chance(4)) {
      c.cap = 2;
      c.cap_last = r.chance(2);
    }
    if (c.cap != 0 && r.chance(2)) {
      c.caps_stride = r.between(0, 1);
      c.caps = numbers<float>(kF32, c.caps_stride ? c.heads : 1, 1, 3);
    }
    if (r.chance(4)) {
      c.temperatures_stride = r.between(0, 1);
      c.temperatures = numbers<float>(kF32, c.temperatures_stride ? c.heads : 1, 1, 3);
    }
    if (r.chance(4)) {
      c.threshold = 1 << 22;
      c.seed = r.next();
      c.keep = 4.0f / 3;
    }
    if (r.chance(4)) {
      c.slopes_stride = r.between(0, 1);
      c.slopes = numbers<float>(kF32, c.slopes_stride ? c.heads : 1, 0, 1);
    }
    if (c.slopes && r.chance(2)) {
      c.dims = r.between(1, REGARD_DIMS);
      c.points_of_q = (float*)make(kF32, c.dims * c.nq);
      c.points_of_k = (float*)make(kF32, c.dims * c.nk);
    }
    if (r.chance(4)) {
      c.log_distance_weights_stride = r.between(0, 1);
      c.log_distance_rates_stride = r.between(0, 1);
      c.log_distance_weights = numbers<float>(kF32, c.log_distance_weights_stride ? c.heads : 1, 0, 2);
      c.log_distance_rates = numbers<float>(kF32, c.log_distance_rates_stride ? c.heads : 1, 0, 3);
    }
    if (r.chance(4)) {
      c.power_distance_weights_stride = r.between(0, 1);
      c.power_distance_powers_stride = r.between(0, 1);
      c.power_distance_weights = numbers<float>(kF32, c.power_distance_weights_stride ? c.heads : 1, 0, 2);
      c.power_distance_powers = (float*)make(kF32, c.power_distance_powers_stride ? c.heads : 1);
    }
    if (r.chance(3)) retained();
    if (needs_positions(c) || r.chance(4)) {
      c.q_at = numbers<int64_t>(kI64, queries, -far, far);
      c.k_at = numbers<int64_t>(kI64, keys, -far, far);
    }
    if (r.chance(4)) {
      c.offsets_count = c.nq + c.nk - 1;
      if (r.chance(2)) {
        const int64_t reach = r.between(1, 50);
        c.offsets_count = 2 * reach + 1;
        c.q_cell = numbers<int32_t>(kI32, queries, 2 * reach, 2 * reach);
        c.k_cell = numbers<int32_t>(kI32, keys, 0, 2 * reach);
        memcpy(c.q_cell_batch, c.q_at_batch, sizeof c.q_at_batch);
        memcpy(c.k_cell_batch, c.k_at_batch, sizeof c.k_at_batch);
      }
      const bool shared = r.chance(2);
      c.offsets_stride = shared ? 0 : c.offsets_count + kRoom;
      c.offsets = (float*)make(kF32, (shared ? 1 : c.heads) * (c.offsets_count + kRoom));
    }
    if (!r.chance(4)) return;
    c.bias = tensor((Kind)r.between(0, 2), c.heads, c.nq, c.nk, true);
  }

  // Numbers of elements that `t` leads to, in its own memory.
  int64_t extent(const regard_tensor& t, int64_t heads, int64_t rows, int64_t cols) const {
    int64_t last = (heads - 1) * t.head + (rows - 1) * t.row + (cols - 1) * t.col;
    for (int n = 0; n < 4; ++n) last += (c.batch[n] - 1) * t.batch[n];
    return last + 1;
  }

  void hide() {
    if (r.chance(3)) {
      c.start = tensor(kI32, c.heads, c.nq, 1, true);
      const int64_t count = extent(c.start, c.heads, c.nq, 1);
      c.stop = c.start;
      c.stop.data = make(kI32, count);
      for (int64_t n = 0; n < count; ++n) {
        const bool nothing = r.chance(8);  // then any numbers will do
        ((int32_t*)c.start.data)[n] = (int32_t)(nothing ? r.between(0, INT32_MAX) : r.between(0, c.nk));
        ((int32_t*)c.stop.data)[n] = (int32_t)(nothing ? r.between(INT32_MIN, 0) : r.between(0, c.nk));
      }
    }
    if (!c.start.data && r.chance(2)) rule();
    if (r.chance(3)) documents();
    if (c.block_table) forget_pages();
    if (r.chance(4)) c.allowed = tensor(kByte, c.heads, c.nq, c.nk, true);
    if (!r.chance(4)) return;
    const int64_t rows = (c.nq + regard_queries() - 1) / regard_queries(),
                  cols = (c.nk + regard_keys() - 1) / regard_keys();
    c.bits_count = r.between(0, 3);
    if (c.bits_count || r.chance(2)) c.bits = numbers<int64_t>(kI64, c.bits_count * regard_keys(), 0, INT64_MAX - 1);
    c.tiles = tensor(kI32, c.heads, rows, cols, true);
    for (int64_t n = 0; n < extent(c.tiles, c.heads, rows, cols); ++n)
      ((int32_t*)c.tiles.data)[n] = (int32_t)r.between(-2, c.bits_count - 1);
  }

  // Intervals as a rule, all of whose numbers are right.
  void rule() {
    c.bounds = (int32_t)r.between(0, REGARD_FIRST | REGARD_LAST);
    c.first = r.between(-500, 500);
    c.last = r.between(-500, 500);
    int64_t step = 1;
    for (int n = 3; n >= 0; --n) {
      c.key_counts_batch[n] = c.query_counts_batch[n] = step;
      step *= c.batch[n];
    }
    memcpy(c.shifts_batch, c.key_counts_batch, sizeof c.shifts_batch);
    memcpy(c.key_starts_batch, c.key_counts_batch, sizeof c.key_starts_batch);
    if (r.chance(3)) c.key_starts = numbers<int64_t>(kI64, elements(), 0, c.nk);
    if (r.chance(3)) c.shifts = numbers<int64_t>(kI64, elements(), -500, 500);
    if (r.chance(3)) c.key_counts = numbers<int64_t>(kI64, elements(), 0, c.nk);
    if (r.chance(3)) c.query_counts = numbers<int64_t>(kI64, elements(), 0, c.nq);
  }

  // Documents in order, in long pieces of any order, or each key in any; with intervals in a table, as a rule, or
  // without.
  void documents() {
    const int64_t piece = r.chance(2) ? r.between(1, 200) : 1;
    const bool ordered = r.chance(2);
    c.q_documents = numbers<int64_t>(kI64, elements() * c.nq, -1, 3);
    c.k_documents = numbers<int64_t>(kI64, elements() * c.nk, 0, 0);
    memcpy(c.q_documents_batch, c.q_at_batch, sizeof c.q_at_batch);
    memcpy(c.k_documents_batch, c.k_at_batch, sizeof c.k_at_batch);
    for (int64_t n = 0; n < elements() * c.nk; ++n)
      ((int64_t*)c.k_documents)[n] = ordered ? n % c.nk * 3 / c.nk : n / piece * 5 % 4;
  }

  // Positions up to which keys are seen, among those of the queries or far from them.
  void retained() {
    int64_t group = r.between(1, c.heads);
    while (c.heads % group) --group;
    c.until_heads = group;
    c.until = tensor(kI64, group, 1, c.nk, true);
    for (int64_t n = 0; n < extent(c.until, group, 1, c.nk); ++n)
      ((int64_t*)c.until.data)[n] = r.chance(9) ? INT64_MIN : r.between(-600, 600);
  }

  void gradients() {
    g.dout = tensor((Kind)r.between(0, 2), c.heads, c.nq, c.dv, false);
    if (r.chance(2)) g.dlse = tensor(kF32, c.heads, c.nq, 1, false);
    if (!r.chance(4)) g.dq = tensor((Kind)c.dtype, c.heads, c.nq, c.dk, false);
    if (!r.chance(4)) g.dk = tensor((Kind)c.dtype, c.key_heads, c.nk, c.dk, false);
    if (!r.chance(4)) g.dv = tensor((Kind)c.dtype, c.key_heads, c.nk, c.dv, false);
    gradients_of_modifiers();
  }

  void gradients_of_modifiers() {
    if (c.bias.data && !r.chance(4)) {
      g.dbias = c.bias;
      const bool shared = c.bias.row == 0 || c.bias.col == 0;
      const int64_t count = extent(c.bias, c.heads, c.nq, c.nk);
      g.dbias.data = make(shared ? kF64 : kF32, count);
      g.dbias.size = count;
      g.dbias.dtype = shared ? REGARD_F64 : REGARD_F32;
    }
    if (c.slopes && !r.chance(4)) g.dslopes = (float*)make(kF32, c.heads);
    if (c.log_distance_weights && !r.chance(4)) g.dlog_distance_weights = (float*)make(kF32, c.heads);
    if (c.log_distance_weights && !r.chance(4)) g.dlog_distance_rates = (float*)make(kF32, c.heads);
    if (c.power_distance_weights && !r.chance(4)) g.dpower_distance_weights = (float*)make(kF32, c.heads);
    if (c.power_distance_weights && !r.chance(4)) g.dpower_distance_powers = (float*)make(kF32, c.heads);
    gradients_of_program(*this);
    if (c.temperatures && !r.chance(4)) g.dtemperatures = (float*)make(kF32, c.heads);
    if (c.offsets && !r.chance(4)) g.doffsets = (float*)make(kF32, c.heads * c.offsets_count);
  }

  void weights(bool exact) {
    regard_additive& w = x.forward;
    w.activation = (int32_t)r.between(0, 2);
    w.slope = 0.1f;
    if (!exact && r.chance(3)) feature_program(*this);
    else {
      w.w_stride = r.chance(2) ? 0 : c.dk;
      w.w = (float*)make(kF32, w.w_stride ? c.heads * c.dk : c.dk);
    }
    x.dout = tensor(kF32, c.heads, c.nq, c.dv, false);
    if (r.chance(2)) x.dlse = tensor(kF32, c.heads, c.nq, 1, false);
    x.dq = tensor(kF32, c.heads, c.nq, c.dk, false);
    x.dk = tensor(kF32, c.key_heads, c.nk, c.dk, false);
    x.dv = tensor(kF32, c.key_heads, c.nk, c.dv, false);
    x.dw = (float*)make(kF32, (w.code ? w.parameter_count : 1) * c.heads * c.dk);
    if (exact) return;  // over far distances they are sums that cancel, of which two instruction sets have other digits
    gradients_of_modifiers();
    memcpy(&x.dtemperatures, &g.dtemperatures, sizeof g - offsetof(regard_gradients, dtemperatures));
  }

  void facts_of() {
    const int64_t heads = elements() * c.heads, rows = heads * c.nq, keys = heads * c.nk;
    auto some = [&](int64_t count) { return r.chance(2) ? (float*)make(kF32, count) : nullptr; };
    auto counts = [&](int64_t count) { return r.chance(2) ? (int64_t*)make(kI64, count) : nullptr; };
    f.lse = some(rows);
    f.entropy = some(rows);
    f.visible = counts(rows);
    f.readers = counts(keys);
    f.received = some(keys);
    f.shares = some(rows);
    f.most = some(keys);
    f.distance = some(rows);
    if ((f.max_score = some(rows))) f.max_key = (int64_t*)make(kI64, rows);
    if ((f.top = r.chance(2) ? r.between(1, REGARD_TOP) : 0)) {
      f.top_weights = (float*)make(kF32, rows * f.top);
      f.top_keys = (int64_t*)make(kI64, rows * f.top);
      f.top_rest = (float*)make(kF32, rows);
    }
    f.map_rows = r.between(1, c.nq);
    f.map_cols = r.between(1, c.nk);
    f.map = some(heads * f.map_rows * f.map_cols);
    if ((f.groups = r.chance(2) ? r.between(1, REGARD_SETS) : 0)) {
      f.group = numbers<int32_t>(kI32, elements() * c.nk, -3, f.groups - 1);
      f.mass = (float*)make(kF32, rows * f.groups);
    }
    f.q_at = numbers<int64_t>(kI64, elements() * c.nq, -900, 900);
    f.k_at = numbers<int64_t>(kI64, elements() * c.nk, -900, 900);
    if ((f.bands = r.chance(2) ? r.between(1, REGARD_SETS) : 0)) {
      f.band = numbers<int32_t>(kI32, f.bands * 2, -1000, 1000);
      f.within = (float*)make(kF32, rows * f.bands);
    }
    if ((f.levels = r.chance(2) ? r.between(1, 5) : 0)) {
      f.level = (float*)make(kF32, f.levels);
      f.reached = (int64_t*)make(kI64, heads * f.levels);
    }
    f.concentration = some(rows);
  }

  std::vector<Entry> entries() const {
    if (facts) return {kFacts};
    if (additive) return {kAdditive, kAdditiveBackward};
    if (c.block_table || int8) return {kForward};
    return {kForward, kBackward};
  }

  int32_t run(Entry entry, regard_parallel parallel) {
    g.call = x.forward.call = f.call = c;
    switch (entry) {
      case kForward: return regard_forward(&c, parallel);
      case kBackward: return regard_backward(&g, parallel);
      case kAdditive: return regard_additive_forward(&x.forward, parallel);
      case kAdditiveBackward: return regard_additive_backward(&x, parallel);
      default: return regard_facts(&f, parallel);
    }
  }
};

}  // namespace
