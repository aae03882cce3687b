// Few rows against a chunk of keys: sums over lanes, and what becomes of a similarity's scores.
#pragma once
#include "core/pages.h"
#include "steps/steps.h"

namespace regard {

constexpr int kRowsAtOnce = 4;

// How many keys, or vectors of features, are multiplied with `rows` rows at once: a power of two, so that the registers
// hold the sums.
constexpr int vectors_at_once(int rows, int most) {
  int n = 1;
  while (2 * n <= most && 2 * n * rows <= (W == 16 ? 24 : 12)) n *= 2;
  return n;
}

// Which lanes of two vectors are added, where sums are spread over lanes: neighbours, or, where that costs more, lanes
// of blocks of `span`: first within 128 bits, whole quarters last.
template <int step, bool second>
struct Folded {
  static constexpr int span = step <= 2 ? 4 : W;
  static constexpr int lane(int n) {
    if (Isa::kUnzips) return 2 * n + second;
    return n / span * span + n % step + n % span / (2 * step) * step + (n & step ? W : 0) + (second ? span / 2 : 0);
  }
};

// Adds the halves of a and of b: two sums spread over lanes, in one vector.
template <int step>
REGARD_INLINE vf fold_lanes(vf a, vf b) {
  return shuffle<Folded<step, false>>(a, b) + shuffle<Folded<step, true>>(a, b);
}

// The sums of W vectors over their lanes, as one vector.
REGARD_INLINE vf sums(vf (&x)[W]) {
#pragma GCC unroll 8
  for (int n = 0; n < W / 2; ++n) x[n] = fold_lanes<1>(x[2 * n], x[2 * n + 1]);
#pragma GCC unroll 4
  for (int n = 0; n < W / 4; ++n) x[n] = fold_lanes<2>(x[2 * n], x[2 * n + 1]);
#if REGARD_W >= 8
#pragma GCC unroll 2
  for (int n = 0; n < W / 8; ++n) x[n] = fold_lanes<4>(x[2 * n], x[2 * n + 1]);
#endif
#if REGARD_W >= 16
  x[0] = fold_lanes<8>(x[0], x[1]);
#endif
  return x[0];
}

// 2 W features from d on, as floats. Of bfloat16 the even ones and the odd ones, since a shift and a mask widen two
// vectors at once where widening in order costs a shuffle and a shift for each; in_order() undoes that.
struct TwoVectors {
  vf a, b;

  template <int dtype>
  REGARD_INLINE TwoVectors read(const char* row, int64_t d) {
    if constexpr (dtype != REGARD_BF16) return {load_some(row, d, dtype), load_some(row, d + W, dtype)};
    typedef vu Halves __attribute__((aligned(2), may_alias));
    const vu x = *(const Halves*)(row + 2 * d);
    return {(vf)(x << 16), (vf)(x & 0xffff0000u)};
  }

  template <bool second>
  struct Zipped {
    static constexpr int lane(int n) { return n / 2 + (n % 2) * W + second * (W / 2); }
  };
  template <bool second>
  struct Unzipped {
    static constexpr int lane(int n) { return 2 * n + second; }
  };

  // From the order of read() to that of memory, and back.
  template <int dtype>
  TwoVectors in_order() const {
    if constexpr (dtype != REGARD_BF16) return *this;
    return {shuffle<Zipped<false>>(a, b), shuffle<Zipped<true>>(a, b)};
  }
  TwoVectors split() const { return {shuffle<Unzipped<false>>(a, b), shuffle<Unzipped<true>>(a, b)}; }
};

// Before the scores of a chunk are computed.
REGARD_INLINE void open_chunk(FewRows& f, const Chunk& t) {
  const bool plain = !Modifiers::used(f.c) && !f.c.allowed.data && !t.masks;
  for (int64_t r = 0; r < f.rows; ++r) {
    f.top[r] = splat(-kInf);
    f.whole[r] = plain && f.row[r].first <= t.j && f.row[r].last >= t.j + t.count;
  }
}

// Takes the similarity of a row and keys [n, n + W) of the chunk, and stores the scores.
REGARD_INLINE void keep_scores(FewRows& f, const Chunk& t, int64_t n, int64_t r, vf s) {
  vf derivative = splat(1.0f);
  if (!f.whole[r] || n + W > t.count) s = apply_steps(RowKeys{f, f.row[r], t, n}, s, derivative);
  store(f.s + r * kChunk + n, s);
  if (f.derivative) store(f.derivative + r * kChunk + n, derivative);
  f.top[r] = greater_of(s, f.top[r]);
}

// Converts a row of `cols` elements to floats [width], padded by zeros, times factor.
static void gather(float* dst, int64_t width, const char* src, const regard_tensor& t, int dtype, int64_t cols,
                   float factor) {
  for (int64_t d = 0; d < width; d += W) store(dst + d, floats(src, d * t.col, t.col, cols - d, dtype) * splat(factor));
}

// Stores the first of W floats, `valid` of them real, `step` elements apart.
REGARD_INLINE void store_some(float* to, int64_t step, int64_t valid, vf x) {
  if (step == 1 && valid >= W) return store(to, x);
  for (int64_t n = 0; n < W && n < valid; ++n) to[n * step] = x[n];
}

// The first element of a row of a head.
REGARD_INLINE const char* row_ptr(const regard_tensor& t, const Place& p, int64_t head, int64_t row, int dtype) {
  return (const char*)advance(t.data, offset(t, p, head) + row * t.row, dtype);
}

// Rows one behind the other, `step` bytes apart.
struct Run {
  const char* first;
  int64_t step;
  const char* operator[](int64_t n) const { return first + n * step; }
};

// Where the rows of a chunk of keys (of values) are, W of them at a time; those of the chunk after it, if t.more, come
// behind them. find() is called for one chunk after the other, where the columns of x are contiguous. Strided: in one
// tensor.
struct StridedRows {
  Run rows;

  static int64_t scratch(const regard_call&, int64_t) { return 0; }
  StridedRows(const regard_call&, int64_t, float*) : rows{} {}
  explicit StridedRows(Run rows) : rows(rows) {}

  void find(const FewRows& f, const Chunk& t, const regard_tensor& x) {
    rows = {row_ptr(x, f.p, f.key_head, t.j, kv_dtype(f.c)), x.row * size_of(kv_dtype(f.c))};
  }
  Run run(int64_t n) const {
    return {rows[n], rows.step};
  }  // rows [n, n + W), n a multiple of W; of the next chunk, to be prefetched
};

// The rows of a chunk whose columns are not contiguous, as floats [count][columns rounded up to W].
static StridedRows gather_rows(const FewRows& f, const Chunk& t, const regard_tensor& x, int64_t columns, float* to) {
  const int64_t width = round_up(columns);
  for (int64_t n = 0; n < t.count; ++n)
    gather(to + n * width, width, (const char*)row_of(f.c, x, f.p, f.key_head, t.j + n), x, kv_dtype(f.c), columns, 1);
  return StridedRows({(const char*)to, width * (int64_t)sizeof(float)});
}

// In pages: W rows of one page where they lie, W rows of several pages copied. Of the next chunk nothing is copied yet:
// where its rows lie in several pages, run() gives a place behind `copies`, which may be prefetched but not read.
struct PagedRows {
  char* const copies;                // [kChunk][width]
  const int64_t width;               // bytes of a row
  const int64_t page_size;           // rows of a page
  const uint64_t inverse;            // 2^64 / page_size, rounded up; 0 for pages of one row, which are all copied
  int64_t step = 0, page_step = 0;   // bytes from row to row, and from page to page
  const char* first_page = nullptr;  // of the head
  const int32_t* table = nullptr;
  int64_t j = 0;  // the first key of the chunk

  static int64_t scratch(const regard_call& c, int64_t columns) {
    return kChunk * columns * size_of(kv_dtype(c)) / (int64_t)sizeof(float);
  }
  PagedRows(const regard_call& c, int64_t columns, float* at)
      : copies((char*)at),
        width(columns * size_of(kv_dtype(c))),
        page_size(c.page_size),
        inverse(~(uint64_t)0 / (uint64_t)c.page_size + 1) {}

  void find(const FewRows& f, const Chunk& t, const regard_tensor& x) {
    const regard_call& c = f.c;
    step = x.row * size_of(kv_dtype(c));
    page_step = x.batch[REGARD_BATCH_AXES - 1] * size_of(kv_dtype(c));
    first_page = page_row(x, f.key_head, 0, 0);
    table = table_of(c, f.p);
    j = t.j;
    if (j % W == 0 && page_size % W == 0) return;
    for (int64_t n = 0; n < t.count; n += W) {
      char* const to = copies + n * width;
      if (run(n).first == to)
        copy_from_pages(to, c, x, f.p, f.key_head, j + n, t.count - n < W ? t.count - n : W,
                        width / size_of(kv_dtype(c)));
    }
  }
  Run run(int64_t n) const {
    // j / page_size, exact while j · page_size < 2^64: a division would keep the reads of the rows waiting
    const int64_t page = (int64_t)((unsigned __int128)(j + n) * inverse >> 64), row = j + n - page * page_size;
    if (row + W > page_size) return {copies + n * width, width};
    return {first_page + table[page] * page_step + row * step, step};
  }
};

}  // namespace regard
