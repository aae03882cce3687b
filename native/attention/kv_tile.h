// A tile of keys and values as the blocks of an item read it: in place, copied from several pages, or converted.
#pragma once
#include "core/pages.h"
#include "core/parts.h"

namespace regard {

// Rows of keys (of values) in their own dtype: the caller's, or copied from several pages to scratch.
struct RawRows {
  const void* at = nullptr;
  int64_t row = 0, col = 0;
};

// A tile of keys and values that the blocks of an item share: read in place, or converted to scratch once.
struct KvTile {
  const Place& p;
  int64_t key_head, j, count;
  int place = 0;  // which of the tiles that are held at once
  RawRows values = {};
  const float *k = nullptr, *v = nullptr;
  int64_t k_row = 0, v_row = 0;
  LeftParts key_parts = {}, value_parts = {};
  bool ready = false, located = false, widened = false,
       paired = false;  // whether keys, values (raw, as floats, in pairs) are loaded
  int finite = -1;      // whether all values are finite; -1 before that is computed
  bool unfit = false;   // whether some key or value has no parts, or some value of one part isn't finite
};

static RawRows raw_rows(const regard_call& c, const regard_tensor& t, const KvTile& x, int64_t width, char* copy) {
  if (in_one_piece(c, x.j, x.count)) return {row_of(c, t, x.p, x.key_head, x.j), t.row, t.col};
  copy_from_pages(copy, c, t, x.p, x.key_head, x.j, x.count, width);
  return {copy, width, 1};
}

static const RawRows& raw_values(const regard_call& c, const Scratch& w, KvTile& x) {
  if (!x.located) {
    x.values = raw_rows(c, c.v, x, c.dv, w.v_rows);
    x.located = true;
  }
  return x.values;
}

// Converts the rows of a tile to floats without gaps. scales: of rows of int8.
static void widen_tile(const regard_call& c, const KvTile& x, const RawRows& rows, const regard_tensor& scales,
                       int64_t width, float* to) {
  if (!scales.data) return widen(to, rows.at, c.dtype, rows.row, rows.col, x.count, width);
  float scale[kKeys];
  read_scales(c, scales, x.p, x.key_head, x.j, x.count, scale);
  widen_scaled(to, rows.at, scale, rows.row, rows.col, x.count, width);
}

// The rows of a tile in the dtype of the products: int8 is widened to `floats`.
static RawRows product_rows(const regard_call& c, const KvTile& x, const RawRows& rows, const regard_tensor& scales,
                            int64_t width, float* floats) {
  if (!scales.data) return rows;
  widen_tile(c, x, rows, scales, width, floats);
  return {floats, width, 1};
}

// Keys as the left operand of outer products: kQueries of them after the other, each key a lane.
template <class Op>
static void load_panels(const regard_call& c, const Scratch& w, KvTile& x, const RawRows& raw) {
  const RawRows keys = product_rows(c, x, raw, c.k_scales, c.dk, w.k + kKeys * c.dk);
  const int dtype = product_dtype(c);
  x.k = w.k;
  x.k_row = Op::pairs ? c.dk / 2 : c.dk;
  for (int64_t n = 0; n < x.count; n += kQueries) {
    const void* from = advance(keys.at, n * keys.row, dtype);
    const int64_t rows = x.count - n < kQueries ? x.count - n : kQueries;
    if (Op::pairs) pack_pairs<kVectors>(w.k + n * x.k_row, kQueries, (const uint16_t*)from, keys.row, rows, x.k_row);
    else pack<kVectors>(w.k + n * x.k_row, kQueries, from, dtype, keys.row, keys.col, rows, c.dk, 1.0f);
  }
}

template <class Op>
static void load_keys(const regard_call& c, const Scratch& w, KvTile& x) {
  if (x.ready) return;
  x.ready = true;
  const RawRows keys = raw_rows(c, c.k, x, c.dk, w.k_rows);
  if constexpr (Isa::kOuterProducts) return load_panels<Op>(c, w, x, keys);
  x.k = (const float*)keys.at;
  x.k_row = Op::pairs ? keys.row / 2 : keys.row;
  if (Op::pairs || in_place(c, c.k)) return;
  widen_tile(c, x, keys, c.k_scales, c.dk, w.k);
  x.k = w.k;
  x.k_row = c.dk;
}

static void load_values(const regard_call& c, const Scratch& w, KvTile& x) {
  if (x.widened) return;
  x.widened = true;
  const RawRows& values = raw_values(c, w, x);
  x.v = (const float*)values.at;
  x.v_row = values.row;
  if (in_place(c, c.v)) return;
  widen_tile(c, x, values, c.v_scales, c.dv, w.v);
  x.v = w.v;
  x.v_row = c.dv;
}

// Keys as the left operand of S^T = K Q^T, in place where they are bfloat16 in whole rows. Keys past the tile may be
// anything.
template <class Op>
static void load_key_parts(const regard_call& c, const Scratch& w, KvTile& x) {
  if (x.ready) return;
  x.ready = true;
  const int64_t depth = whole_depth(c.dk), rows = whole_depth(x.count);
  const int dtype = product_dtype(c);
  const RawRows keys = product_rows(c, x, raw_rows(c, c.k, x, c.dk, w.k_rows), c.k_scales, c.dk, w.k);
  const bool readable = c.block_table ? in_one_piece(c, x.j, rows) : x.j + rows <= c.nk;
  if (dtype == REGARD_BF16 && keys.col == 1 && depth == c.dk && readable) {
    x.key_parts = {(const uint16_t*)keys.at, keys.row, 32, 0};
    return;
  }
  uint16_t* to = w.k_parts + x.place * Op::parts * kKeys * depth;
  // a tile of the unit is read from neighbouring lines of the cache
  const PartRows split{to, 32, kKeys * 32, kKeys * depth};
  x.unfit |= !split_rows<Op::parts>(split, depth, keys.at, dtype, keys.row, keys.col, x.count, c.dk, 1,
                                    Sizes::of_scores(dtype));
  x.key_parts = split;
}

// Values as the left operand of O^T = V^T P^T. What is not finite is 0 there: keys that a block does not see get weight
// 0, and 0 · NaN is NaN.
template <class Op>
static void load_value_parts(const regard_call& c, const Scratch& w, KvTile& x) {
  if (x.paired) return;
  x.paired = true;
  const RawRows values = product_rows(c, x, raw_values(c, w, x), c.v_scales, c.dv, w.v);
  const int64_t width = whole_depth(c.dv);
  uint16_t* to = w.v_parts + x.place * Op::parts * width * kKeys;
  if (!transpose_values<Op::parts>(to, values.at, product_dtype(c), values.row, values.col, x.count, c.dv, w.v_split)) {
    x.unfit = true;
    clear_infinite(to, whole_depth(x.count) * Op::parts * width);
  }
  x.value_parts = {to, 32, Op::parts * width * 32, width * 32};
}

// Whether all numbers of the keys [from, from + count) of a tile, which are those that a block of queries sees, have
// parts. A block's instructions then depend on nothing that it does not see: the tile's other keys are there for other
// blocks, which share it as threads divide them.
template <class Op>
static bool have_parts(const regard_call& c, const Scratch& w, const KvTile& x, int64_t from, int64_t count) {
  const int dtype = product_dtype(c);
  const auto within = [&](const RawRows& rows, int64_t width, const Sizes& sizes) {
    return rows_within(advance(rows.at, from * rows.row, dtype), dtype, rows.row, rows.col, count, width, sizes);
  };
  const RawRows values = product_rows(c, x, raw_rows(c, c.v, x, c.dv, w.v_rows), c.v_scales, c.dv, w.v);
  if (!within(values, c.dv, Sizes::of_values(dtype))) return false;
  if (Op::parts == 1) return true;  // what is not finite in a key stays in its scores
  const RawRows keys = product_rows(c, x, raw_rows(c, c.k, x, c.dk, w.k_rows), c.k_scales, c.dk, w.k);
  return within(keys, c.dk, Sizes::of_scores(dtype));
}

static void load_pairs(const regard_call& c, const Scratch& w, KvTile& x) {
  if (x.paired) return;
  x.paired = true;
  const RawRows& values = raw_values(c, w, x);
  interleave(w.pairs, (const uint16_t*)values.at, values.row, values.col, x.count, c.dv);
}

// Whether all values of a tile are finite.
template <class Op>
static bool finite_values(const regard_call& c, const Scratch& w, KvTile& x) {
  if (x.finite >= 0) return x.finite;
  if (Op::pairs) {
    const RawRows& values = raw_values(c, w, x);
    x.finite = all_finite_bf16((const uint16_t*)values.at, values.row, values.col, x.count, c.dv);
  } else {
    load_values(c, w, x);
    x.finite = all_finite(x.v, 1, x.v_row, c.dv, x.count);
  }
  return x.finite;
}

// The same of the pairs of keys that hold [from, from + count), those that a block of queries sees. (Of floats it need
// not be asked: both ways to add them have the same bits.)
static bool finite_pairs(const regard_call& c, const Scratch& w, KvTile& x, int64_t from, int64_t count) {
  const RawRows& values = raw_values(c, w, x);
  const int64_t with_partner = from + count + count % 2 < x.count ? count + count % 2 : x.count - from;
  const uint16_t* first = (const uint16_t*)values.at + from * values.row;
  return all_finite_bf16(first, values.row, values.col, with_partner, c.dv);
}

// The rows of keys (of values) from `next` up to `last` that are prefetched: at most a tile, where they lie in one
// piece.
static Prefetch prefetch_next(const regard_call& c, const regard_tensor& t, const KvTile& x, int64_t features,
                              int64_t next, int64_t last, bool alone) {
  const int64_t rows = last - next < kKeys ? last - next : kKeys;
  if (rows <= 0 || !in_one_piece(c, next, rows)) return {};
  return prefetch_of(c, t, row_of(c, t, x.p, x.key_head, next), features, rows, alone);
}

}  // namespace regard
