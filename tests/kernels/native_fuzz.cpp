// Fuzz of the kernels' C interface, for AddressSanitizer and UndefinedBehaviorSanitizer: right calls, which must return
// 0, and the same with one field or index out of range, which must return an error and touch nothing beside a buffer.
// Arguments: how many calls, a seed.
#include "native_fuzz.h"
#include "native_fuzz_ragged.h"

#include <map>
#include <string>

namespace {

struct Wrong {
  const char* name;
  int32_t code;
  bool (*apply)(Case&, Entry);  // false where it would not be wrong
};

// Where some element, head, row and column of a tensor lies.
int32_t* any_of(Case& x, const regard_tensor& t, int64_t heads, int64_t rows, int64_t cols) {
  int64_t at = x.r.between(0, heads - 1) * t.head + x.r.between(0, rows - 1) * t.row + x.r.between(0, cols - 1) * t.col;
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) at += x.r.between(0, x.c.batch[n] - 1) * t.batch[n];
  return (int32_t*)t.data + at;
}

bool set_interval(Case& x, int64_t start, int64_t stop) {
  if (!x.c.start.data) return false;
  int32_t* p = any_of(x, x.c.start, x.c.heads, x.c.nq, 1);
  x.touch(p, start);
  x.touch((int32_t*)x.c.stop.data + (p - (int32_t*)x.c.start.data), stop);
  return true;
}

bool set_count(Case& x, const int64_t* counts, int64_t value) {
  if (!counts) return false;
  x.touch((int32_t*)(counts + x.r.between(0, x.elements() - 1)), value);
  return true;
}

// Of all elements.
template <int64_t kShift>
bool set_shift(Case& x) {
  static const int64_t shift = kShift;
  if (!x.c.bounds) return false;
  x.c.shifts = &shift;
  memset(x.c.shifts_batch, 0, sizeof x.c.shifts_batch);
  return true;
}

bool set_tile(Case& x, int64_t which) {
  if (!x.c.tiles.data) return false;
  const int64_t rows = (x.c.nq + regard_queries() - 1) / regard_queries(),
                cols = (x.c.nk + regard_keys() - 1) / regard_keys();
  x.touch(any_of(x, x.c.tiles, x.c.heads, rows, cols), which);
  return true;
}

bool set_cell(Case& x, bool query, int64_t cell) {
  if (!x.c.q_cell) return false;
  const int64_t count = x.elements() * (query ? x.c.nq : x.c.nk);
  x.touch((int32_t*)(query ? x.c.q_cell : x.c.k_cell) + x.r.between(0, count - 1), cell);
  return true;
}

bool set_page(Case& x, int64_t page) {
  const int64_t b = x.r.between(0, x.elements() - 1);
  if (!x.c.block_table || x.keys_of(b) == 0) return false;
  x.touch((int32_t*)x.c.block_table + b * x.table_pages() + x.r.between(0, (x.keys_of(b) - 1) / x.c.page_size), page);
  return true;
}

bool set_group(Case& x, int64_t group) {
  if (!x.f.groups) return false;
  x.touch((int32_t*)x.f.group + x.r.between(0, x.elements() * x.c.nk - 1), group);
  return true;
}

// Sets a part of an instruction of a program: of one that reads the operand whose number it has, or of any.
bool set_code(Case& x, const int32_t* code, int64_t count, int part, int64_t value) {
  if (!code) return false;
  int64_t n = x.r.between(0, count - 1);
  for (int64_t tried = 0;
       part == 5 && tried < count && code[6 * n] != REGARD_DO_LOAD && code[6 * n] != REGARD_DO_GATHER; ++tried)
    n = (n + 1) % count;
  if (part == 5 && code[6 * n] != REGARD_DO_LOAD && code[6 * n] != REGARD_DO_GATHER) return false;
  x.touch((int32_t*)code + 6 * n + part, value);
  return true;
}

// Whether a program loads or gathers an operand.
bool reads(const int32_t* code, int64_t count, int32_t which) {
  bool found = false;
  for (int64_t n = 0; code && n < count; ++n)
    found |= (code[6 * n] == REGARD_DO_LOAD || code[6 * n] == REGARD_DO_GATHER) && code[6 * n + 5] == which;
  return found;
}
#define LOADED(code, count, which) reads(x.c.code, x.c.count, which)

constexpr int32_t kBad = REGARD_BAD_ARGUMENT;
constexpr int64_t kFar = (int64_t)1 << 30;

#define WRONG(name, code, body)                   \
  {name, code, [](Case& x, Entry entry) -> bool { \
     (void)x, (void)entry;                        \
     body                                         \
   }}
#define FIELD(field, value) WRONG(#field " = " #value, kBad, x.field = value; return true;)
#define FIELD_WHERE(there, field, value) \
  WRONG(#field " = " #value, kBad, if (!(there)) return false; x.field = value; return true;)

// An operand that is smaller than what is read, of another dtype, or declared without an address.
#define OPERAND_WHERE(there, field)                                                    \
  FIELD_WHERE(there, field.size, x.field.size - 1), FIELD_WHERE(there, field.size, 0), \
      FIELD_WHERE(there, field.dtype, REGARD_OTHER), FIELD_WHERE(there, field.data, nullptr)
#define OPERAND(field) OPERAND_WHERE(x.field.data&& x.field.size, field)
#define CODES(code, count)                                                                                           \
  WRONG("an operation past the last of " #code, kBad, return set_code(x, x.c.code, x.c.count, 0, REGARD_DO_COUNT);), \
      WRONG("an operation of -1 of " #code, kBad, return set_code(x, x.c.code, x.c.count, 0, -1);),                  \
      WRONG("a slot past the last of " #code, kBad, return set_code(x, x.c.code, x.c.count, 1, REGARD_SLOTS);),      \
      WRONG("a slot of -1 of " #code, kBad, return set_code(x, x.c.code, x.c.count, 2, -1);),                        \
      WRONG("a slot far away of " #code, kBad, return set_code(x, x.c.code, x.c.count, 3, INT32_MAX);),              \
      WRONG("an operand past the last of " #code, kBad,                                                              \
            return set_code(x, x.c.code, x.c.count, 5, REGARD_PROGRAM_OPERANDS);),                                   \
      WRONG("an operand of -1 of " #code, kBad, return set_code(x, x.c.code, x.c.count, 5, -1);),                    \
      FIELD_WHERE(x.c.code, c.count, x.c.count - 1), FIELD_WHERE(x.c.code, c.count, 0),                              \
      FIELD_WHERE(x.c.code, c.count, -1)
#define OPERAND_OF(kind, field) OPERAND_WHERE(entry == kind && x.field.data && x.field.size, field)

const Wrong kWrong[] = {
    WRONG("stop beyond the keys", REGARD_BAD_INTERVAL, return set_interval(x, 0, x.c.nk + 1);),
    WRONG("stop far beyond the keys", REGARD_BAD_INTERVAL, return set_interval(x, x.c.nk / 2, kFar);),
    WRONG("start before the keys", REGARD_BAD_INTERVAL, return set_interval(x, -1, x.c.nk);),
    WRONG("start far before the keys", REGARD_BAD_INTERVAL, return set_interval(x, INT32_MIN, 1);),
    WRONG("both beyond the keys", REGARD_BAD_INTERVAL, return set_interval(x, kFar, kFar + 5);),
    WRONG("more keys than there are", REGARD_BAD_INTERVAL, return set_count(x, x.c.key_counts, x.c.nk + 1);),
    WRONG("fewer keys than none", REGARD_BAD_INTERVAL, return set_count(x, x.c.key_counts, -1);),
    WRONG("a first key behind the last", REGARD_BAD_INTERVAL, return set_count(x, x.c.key_starts, x.c.nk + 1);),
    WRONG("a first key before the first", REGARD_BAD_INTERVAL, return set_count(x, x.c.key_starts, -1);),
    WRONG("more queries than there are", REGARD_BAD_INTERVAL, return set_count(x, x.c.query_counts, x.c.nq + 1);),
    WRONG("a shift too far", kBad, return set_shift<INT64_MAX>(x);),
    WRONG("a shift too far back", kBad, return set_shift<INT64_MIN>(x);),
    FIELD_WHERE(x.c.bounds, c.first, INT64_MAX),
    FIELD_WHERE(x.c.bounds, c.last, INT64_MIN),
    FIELD_WHERE(x.c.q_documents, c.q_documents, nullptr),
    FIELD_WHERE(x.c.q_documents, c.k_documents, nullptr),
    WRONG("a rule and a table", kBad, if (!x.c.start.data) return false; x.c.bounds = REGARD_LAST; return true;),
    WRONG("lengths and a table", kBad, if (!x.c.start.data) return false; static const int64_t none = 0;
          x.c.key_counts = &none; return true;),
    WRONG("first keys and a table", kBad, if (!x.c.start.data) return false; static const int64_t none = 0;
          x.c.key_starts = &none; return true;),
    WRONG("shifts and a table", kBad, if (!x.c.start.data || !x.c.q_documents) return false;
          static const int64_t none = 0; x.c.shifts = &none; return true;),
    WRONG("a tile past the bits", REGARD_BAD_TILE, return set_tile(x, x.c.bits_count);),
    WRONG("a tile far past the bits", REGARD_BAD_TILE, return set_tile(x, INT32_MAX);),
    WRONG("a tile of -3", REGARD_BAD_TILE, return set_tile(x, -3);),
    WRONG("a query's cell too large", REGARD_BAD_CELL, return set_cell(x, true, kFar);),
    WRONG("a query's cell too small", REGARD_BAD_CELL, return set_cell(x, true, -1);),
    WRONG("a key's cell too large", REGARD_BAD_CELL, return set_cell(x, false, INT32_MAX);),
    WRONG("a key's cell too small", REGARD_BAD_CELL, return set_cell(x, false, -1);),
    WRONG("a key's cell far too small", REGARD_BAD_CELL, return set_cell(x, false, INT32_MIN);),
    WRONG("a page past the last", REGARD_BAD_PAGE, return set_page(x, x.c.pages);),
    WRONG("a page far past the last", REGARD_BAD_PAGE, return set_page(x, INT32_MAX);),
    WRONG("a page of -1", REGARD_BAD_PAGE, return set_page(x, -1);),
    FIELD_WHERE(x.c.block_table, c.page_size, 0),
    FIELD_WHERE(x.c.block_table, c.page_size, -3),
    FIELD_WHERE(x.c.block_table, c.pages, 0),
    WRONG("pages that no kernel reads", kBad, if (entry == kForward) return false; static const int32_t first = 0;
          x.c.block_table = &first; x.c.page_size = x.c.nk; x.c.pages = 1; return true;),
    WRONG("scales that no kernel reads", kBad, if (x.int8 || !x.c.dk) return false; static const float one = 1;
          x.c.k_scales.data = x.c.v_scales.data = (void*)&one; x.c.k_scales.size = x.c.v_scales.size = 1; return true;),
    WRONG("a group past the last", REGARD_BAD_GROUP, return set_group(x, x.f.groups);),
    WRONG("a group far past the last", REGARD_BAD_GROUP, return set_group(x, INT32_MAX);),
    FIELD(c.batch[0], 0),
    FIELD(c.batch[3], -1),
    FIELD(c.batch[2], (int64_t)1 << 60),
    FIELD(c.heads, 0),
    FIELD(c.heads, -2),
    FIELD(c.key_heads, 0),
    FIELD(c.key_heads, -1),
    FIELD(c.key_heads, x.c.heads + 1),
    FIELD(c.nq, 0),
    FIELD(c.nq, -1),
    FIELD(c.nq, (int64_t)1 << 31),
    FIELD(c.nk, 0),
    FIELD(c.nk, -7),
    FIELD(c.nk, (int64_t)1 << 31),
    FIELD(c.dk, -1),
    FIELD(c.dv, -1),
    FIELD(c.dk, (int64_t)1 << 60),
    FIELD(c.dtype, 3),
    FIELD(c.dtype, -1),
    FIELD(c.out_dtype, 3),
    FIELD_WHERE(x.c.bias.data, c.bias.dtype, 3),
    FIELD_WHERE(x.c.dk, c.q.data, nullptr),
    FIELD_WHERE(x.c.dk, c.k.data, nullptr),
    FIELD_WHERE(x.c.dv, c.v.data, nullptr),
    FIELD_WHERE(x.c.dv, c.out.data, nullptr),
    FIELD_WHERE(x.c.start.data, c.start.data, nullptr),
    FIELD_WHERE(x.c.start.data, c.stop.data, nullptr),
    OPERAND(c.q),
    OPERAND(c.k),
    OPERAND(c.v),
    OPERAND(c.out),
    OPERAND(c.lse),
    OPERAND(c.row_stats),
    OPERAND(c.start),
    OPERAND(c.stop),
    OPERAND(c.k_scales),
    OPERAND(c.v_scales),
    OPERAND(c.allowed),
    OPERAND(c.tiles),
    OPERAND(c.until),
    FIELD_WHERE(x.c.until.data, c.until_heads, 0),
    FIELD_WHERE(x.c.until.data, c.until_heads, -1),
    FIELD_WHERE(x.c.until.data, c.until_heads, x.c.heads + 1),
    FIELD_WHERE(x.c.until.data, c.until.data, nullptr),
    OPERAND(c.sink),
    OPERAND(c.bias),
    CODES(mask_code, mask_count),
    CODES(program_code, program_count),
    FIELD_WHERE(LOADED(mask_code, mask_count, 11), c.program_11.data, nullptr),
    FIELD_WHERE(LOADED(mask_code, mask_count, 11), c.program_11.size, 0),
    FIELD_WHERE(LOADED(program_code, program_count, 0), c.program_0.data, nullptr),
    FIELD_WHERE(LOADED(program_code, program_count, 0), c.program_0.dtype, REGARD_OTHER),
    OPERAND_OF(kBackward, g.dout),
    OPERAND_OF(kBackward, g.dlse),
    OPERAND_OF(kBackward, g.dq),
    OPERAND_OF(kBackward, g.dk),
    OPERAND_OF(kBackward, g.dv),
    OPERAND_OF(kBackward, g.dbias),
    OPERAND_OF(kAdditiveBackward, x.dout),
    OPERAND_OF(kAdditiveBackward, x.dlse),
    OPERAND_OF(kAdditiveBackward, x.dq),
    OPERAND_OF(kAdditiveBackward, x.dk),
    OPERAND_OF(kAdditiveBackward, x.dv),
    OPERAND_OF(kAdditiveBackward, x.dbias),
    FIELD_WHERE(x.c.tiles.data, c.bits_count, -1),
    FIELD_WHERE(x.c.tiles.data && x.c.bits_count, c.bits, nullptr),
    FIELD(c.temperatures_stride, 2),
    FIELD(c.temperatures_stride, -1),
    FIELD(c.caps_stride, 2),
    FIELD(c.caps_stride, -1),
    FIELD(c.slopes_stride, 2),
    FIELD(c.slopes_stride, -1),
    FIELD(c.log_distance_weights_stride, 2),
    FIELD(c.log_distance_weights_stride, -1),
    FIELD(c.log_distance_rates_stride, 2),
    FIELD(c.log_distance_rates_stride, -1),
    FIELD_WHERE(x.c.log_distance_weights, c.log_distance_weights, nullptr),
    FIELD_WHERE(x.c.log_distance_weights, c.log_distance_rates, nullptr),
    FIELD(c.power_distance_weights_stride, 2),
    FIELD(c.power_distance_weights_stride, -1),
    FIELD(c.power_distance_powers_stride, 2),
    FIELD(c.power_distance_powers_stride, -1),
    FIELD_WHERE(x.c.power_distance_weights, c.power_distance_weights, nullptr),
    FIELD_WHERE(x.c.power_distance_weights, c.power_distance_powers, nullptr),
    FIELD_WHERE(x.c.points_of_q, c.points_of_k, nullptr),
    FIELD_WHERE(x.c.points_of_q, c.points_of_q, nullptr),
    FIELD_WHERE(x.c.points_of_q, c.dims, REGARD_DIMS + 1),
    FIELD_WHERE(x.c.points_of_q, c.dims, -1),
    FIELD_WHERE(x.c.q_at, c.q_at, nullptr),
    FIELD_WHERE(x.c.q_at, c.k_at, nullptr),
    WRONG("no positions", kBad, if (!needs_positions(x.c)) return false; x.c.q_at = x.c.k_at = nullptr; return true;),
    FIELD_WHERE(x.c.q_cell, c.q_cell, nullptr),
    FIELD_WHERE(x.c.q_cell, c.k_cell, nullptr),
    FIELD_WHERE(x.c.offsets && x.c.offsets_count > 1, c.offsets_stride, 1),
    FIELD_WHERE(x.c.offsets, c.offsets_count, -1),
    FIELD_WHERE(x.c.offsets && !x.c.q_cell, c.offsets_count, x.c.nq + x.c.nk - 2),
    FIELD_WHERE(entry == kBackward || entry == kAdditiveBackward, c.row_stats.data, nullptr),
    FIELD_WHERE(entry == kBackward && x.c.dv, g.dout.data, nullptr),
    FIELD_WHERE(entry == kBackward && x.g.dout.data, g.dout.dtype, -1),
    FIELD_WHERE(entry == kBackward && x.g.dslopes, c.slopes, nullptr),
    FIELD_WHERE(entry == kAdditiveBackward && x.x.dslopes, c.slopes, nullptr),
    FIELD_WHERE(entry == kAdditiveBackward && x.x.doffsets, c.offsets, nullptr),
    WRONG("the gradient of no log distance", kBad,
          if (entry != kBackward || !(x.g.dlog_distance_weights || x.g.dlog_distance_rates)) return false;
          x.c.log_distance_weights = x.c.log_distance_rates = nullptr; return true;),
    WRONG("the gradient of no power distance", kBad,
          if (entry != kBackward || !(x.g.dpower_distance_weights || x.g.dpower_distance_powers)) return false;
          x.c.power_distance_weights = x.c.power_distance_powers = nullptr; return true;),
    FIELD_WHERE(entry == kBackward && x.g.doffsets, c.offsets, nullptr),
    FIELD_WHERE(entry == kBackward && x.g.dtemperatures, c.temperatures, nullptr),
    FIELD_WHERE(x.additive && x.c.dk && !x.x.forward.code, x.forward.w, nullptr),
    FIELD_WHERE(x.additive && x.x.forward.code, x.forward.code_count, 0),
    FIELD_WHERE(x.additive && x.x.forward.code, x.forward.code_count, x.x.forward.code_count - 1),
    FIELD_WHERE(x.additive && x.x.forward.code, x.forward.parameter_count, -1),
    FIELD_WHERE(x.additive && x.c.dk > 1, x.forward.w_stride, 1),
    FIELD_WHERE(x.additive, x.forward.activation, 3),
    FIELD_WHERE(x.additive, x.forward.activation, -1),
    FIELD_WHERE(entry == kAdditiveBackward, c.out_dtype, REGARD_BF16),
    FIELD_WHERE(entry == kAdditiveBackward && x.c.dv, x.dout.data, nullptr),
    FIELD_WHERE(entry == kAdditiveBackward && x.c.dk, x.dq.data, nullptr),
    FIELD_WHERE(entry == kAdditiveBackward && x.c.dk, x.dk.data, nullptr),
    FIELD_WHERE(entry == kAdditiveBackward && x.c.dv, x.dv.data, nullptr),
    FIELD_WHERE(entry == kAdditiveBackward && x.c.dk && (!x.x.forward.code || x.x.forward.parameter_count), x.dw,
                nullptr),
    FIELD_WHERE(x.facts, f.top, REGARD_TOP + 1),
    FIELD_WHERE(x.facts, f.top, -1),
    FIELD_WHERE(x.facts, f.groups, REGARD_SETS + 1),
    FIELD_WHERE(x.facts, f.groups, -1),
    FIELD_WHERE(x.facts, f.bands, REGARD_SETS + 1),
    FIELD_WHERE(x.facts, f.bands, -1),
    FIELD_WHERE(x.facts, f.levels, -1),
    FIELD_WHERE(x.facts, f.levels, (int64_t)1 << 60),
    FIELD_WHERE(x.f.top, f.top_keys, nullptr),
    FIELD_WHERE(x.f.top, f.top_weights, nullptr),
    FIELD_WHERE(x.f.top, f.top_rest, nullptr),
    FIELD_WHERE(x.f.groups, f.group, nullptr),
    FIELD_WHERE(x.f.groups, f.mass, nullptr),
    FIELD_WHERE(x.f.bands, f.band, nullptr),
    FIELD_WHERE(x.f.bands, f.within, nullptr),
    FIELD_WHERE(x.f.levels, f.level, nullptr),
    FIELD_WHERE(x.f.levels, f.reached, nullptr),
    FIELD_WHERE(x.f.map, f.map_rows, 0),
    FIELD_WHERE(x.f.map, f.map_rows, x.c.nq + 1),
    FIELD_WHERE(x.f.map, f.map_cols, x.c.nk + 1),
    FIELD_WHERE(x.f.map, f.map_cols, -1),
    FIELD_WHERE(x.f.distance || x.f.bands, f.q_at, nullptr),
    FIELD_WHERE(x.f.distance || x.f.bands, f.k_at, nullptr),
    FIELD_WHERE(x.f.max_key, f.max_score, nullptr),
    FIELD_WHERE(x.f.max_key, f.max_key, nullptr),
};

// What a wrong call returns, and everything as it was; false where there is nothing to make wrong.
bool run_wrong(Case& x, Entry entry, const Wrong& wrong, int32_t& code) {
  const regard_call c = x.c;
  const auto g = x.g;
  const auto a = x.x;
  const auto f = x.f;
  const bool applies = wrong.apply(x, entry);
  if (applies) code = x.run(entry, nullptr);
  memcpy(&x.c, &c, sizeof c);
  memcpy(&x.g, &g, sizeof g);
  memcpy(&x.x, &a, sizeof a);
  memcpy(&x.f, &f, sizeof f);
  for (auto change = x.touched.rbegin(); change != x.touched.rend(); ++change) *change->first = change->second;
  x.touched.clear();
  return applies;
}

// Writes rows to pages; returns whether right calls are done and wrong ones refused.
bool write_pages(Random& r) {
  const int64_t batch = r.between(0, 3), heads = r.between(1, 3), n = r.between(0, 9), dk = r.between(0, 5),
                dv = r.between(0, 5);
  const int64_t element = (int64_t)1 << r.between(0, 3), page_size = r.between(1, 6), pages = r.between(1, 4),
                room = r.between(4, 6);
  std::vector<std::vector<char>> memory;
  const auto tensor = [&](int64_t lead, int64_t rows, int64_t width) {
    memory.emplace_back((size_t)(lead * heads * rows * width * element));
    return regard_tensor{
        memory.back().data(), {0, 0, 0, heads * rows * width}, rows * width, width, 1, lead * heads * rows * width,
        REGARD_OTHER};
  };
  regard_page_write w{batch, heads, n, dk, dv, element};
  w.k = tensor(batch, n, dk);
  w.v = tensor(batch, n, dv);
  w.k_pages = tensor(pages, page_size, dk);
  w.v_pages = tensor(pages, page_size, dv);
  std::vector<int32_t> table((size_t)(batch * room), -1);
  std::vector<int64_t> lengths((size_t)batch), offsets((size_t)batch + 1);
  for (int64_t b = 0; b < batch; ++b) offsets[(size_t)b + 1] = b + 1 == batch ? n : r.between(offsets[(size_t)b], n);
  if (r.chance(2)) {
    w.offsets = offsets.data();
    w.k = tensor(1, n, dk);
    w.v = tensor(1, n, dv);
  }
  bool fits = true;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t rows = w.offsets ? offsets[(size_t)b + 1] - offsets[(size_t)b] : n;
    lengths[(size_t)b] = r.between(0, room * page_size);
    const int64_t last = (lengths[(size_t)b] + rows - 1) / page_size;
    fits &= rows == 0 || last < room;
    for (int64_t page = lengths[(size_t)b] / page_size; rows && page <= last && page < room; ++page)
      table[(size_t)(b * room + page)] = (int32_t)r.between(0, pages - 1);
  }
  w.page_size = page_size;
  w.pages = pages;
  w.block_table = table.data();
  w.room = room;
  w.lengths = lengths.data();
  const auto refused = [](const regard_page_write& wrong) {
    return regard_write_pages(&wrong, nullptr) == REGARD_BAD_PAGE;
  };
  bool right = regard_write_pages(&w, nullptr) == (fits ? REGARD_DONE : REGARD_BAD_PAGE);
  regard_page_write wrong = w;
  wrong.element = 3;
  right &= refused(wrong);
  wrong = w;
  wrong.page_size = 0;
  right &= refused(wrong);
  wrong = w;
  wrong.n = -1;
  right &= refused(wrong);
  wrong = w;
  for (regard_tensor* t : {&wrong.k, &wrong.v, &wrong.k_pages, &wrong.v_pages}) {
    if (!t->size) continue;
    --t->size;
    right &= refused(wrong);
    wrong = w;
    t->data = nullptr;
    right &= refused(wrong);
    wrong = w;
  }
  wrong.k_pages.dtype = REGARD_F32;
  right &= w.k_pages.size == 0 || refused(wrong);
  wrong = w;
  if (!batch || !n || !fits) return right;
  for (int64_t wrong_offset : {(int64_t)-1, n + 1, INT64_MAX}) {
    const int64_t was = offsets[1];
    offsets[1] = wrong_offset;
    right &= !w.offsets || refused(w);
    offsets[1] = was;
  }
  if (w.offsets && offsets[1] == 0) return right;
  int32_t& page = table[(size_t)(lengths[0] / page_size)];
  page = (int32_t)pages;
  right &= refused(w);
  page = -1;
  right &= refused(w);
  page = 0;
  lengths[0] = -1;
  right &= refused(w);
  lengths[0] = INT64_MAX;
  right &= refused(w);
  return right;
}

}  // namespace

int main(int count, char** words) {
  const long long calls = count > 1 ? atoll(words[1]) : 200, seed = count > 2 ? atoll(words[2]) : 1;
  regard_runnable(99);  // asks the system for the matrix unit
  std::map<std::string, int> tried;
  for (long long n = 0; n < calls; ++n) {
    Random random{(uint64_t)(seed * 1000003 + n)};
    if (!write_pages(random)) {
      printf("call %lld of seed %lld: write_pages\n", n, seed);
      return 1;
    }
    if (!ragged(random)) {
      printf("call %lld of seed %lld: forward_ragged\n", n, seed);
      return 1;
    }
    Case one(random, (int)(n % 3), Programs::kAny);
    for (Entry entry : one.entries()) {
      int32_t code = one.run(entry, n % 2 ? in_turns : nullptr);
      if (code) {
        printf("call %lld of seed %lld: %s returned %d\n", n, seed, kEntries[entry], code);
        return 1;
      }
      for (const Wrong& wrong : kWrong) {
        if (!run_wrong(one, entry, wrong, code)) continue;
        ++tried[std::string(kEntries[entry]) + ": " + wrong.name];
        if (code != wrong.code) {
          printf("call %lld of seed %lld: %s with %s returned %d, not %d\n", n, seed, kEntries[entry], wrong.name, code,
                 wrong.code);
          return 1;
        }
      }
    }
  }
  for (const auto& [name, times] : tried) printf("%s %d\n", name.c_str(), times);
}
