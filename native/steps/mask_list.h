// The members that a mask of tiles defines, and the list that calls them for each mask of a call. Such a mask says of a
// tile whether no pair, all pairs or some pairs are visible, and in the last case finds the bits of its pairs.
#pragma once
#include "core/check.h"
#include "core/rows.h"

namespace regard {

// Whether no pair, some pairs or all pairs of a tile are visible.
enum class Cover { kNone, kSome, kAll };

// The defaults of a mask's members. Each mask also defines
//   used(call)                     whether the call has it
//   cover(call, place, j, count)   the cover of a place's queries and the keys [j, j + count)
//   hide(bits, call, place, j, count)   clears the bits of the hidden pairs: of each key a word, of each query a bit
//   visible(RowKeys)               which of W keys a row sees: lanes of all bits, or of none
struct TileMask {
  // Checks the members of the call that it reads: REGARD_DONE, or the code of what is wrong.
  static int32_t check(const regard_call&) { return REGARD_DONE; }

  // The cover of few rows and the keys [j, j + count); called where the call has the mask.
  static Cover cover(const FewRows&, int64_t /* j */, int64_t /* count */) { return Cover::kSome; }

  // Whether it compares positions of queries.
  static constexpr bool compares_positions = false;

  // Whether it summarises its operands once per call, for `cover` to read; how many bytes that takes; and what writes
  // these, and sets the members of the call that lead to them. All but the first: sizes and operands are checked.
  static bool summarises(const regard_call&) { return false; }
  static int64_t summary_size(const regard_call&) { return 0; }
  static void summarise(regard_call&, char*) {}
};

// The masks of the kernels. A set of them is a number: bit n is the n-th mask.
template <class... Each>
struct MaskList {
  static bool used(const regard_call& c) { return (Each::used(c) || ...); }

  static bool compare_positions(const regard_call& c) { return ((Each::compares_positions && Each::used(c)) || ...); }

  static int32_t check(const regard_call& c) {
    int32_t wrong = REGARD_DONE;
    ((wrong == REGARD_DONE ? (void)(wrong = Each::check(c)) : void()), ...);
    return wrong;
  }

  // Finds the masks that hide some of the pairs of a place's queries and the keys [j, j + count); returns false if one
  // hides all of them.
  static bool find(const regard_call& c, const Place& p, int64_t j, int64_t count, uint32_t& masks) {
    return find([&](auto mask) { return mask.used(c) ? mask.cover(c, p, j, count) : Cover::kAll; }, masks);
  }

  // The same of few rows.
  static bool find(const FewRows& f, int64_t j, int64_t count, uint32_t& masks) {
    return find([&](auto mask) { return mask.used(f.c) ? mask.cover(f, j, count) : Cover::kAll; }, masks);
  }

  // Clears the bits of the pairs of a tile that these masks hide.
  static void hide(uint32_t masks, uint64_t* bits, const regard_call& c, const Place& p, int64_t j, int64_t count) {
    each(masks, [&](auto mask) { mask.hide(bits, c, p, j, count); });
  }

  // Which of W keys these masks let a row see.
  REGARD_INLINE vi visible(uint32_t masks, const RowKeys& x) {
    vi seen = splat_int(-1);
    each(masks, [&](auto mask) { seen &= mask.visible(x); });
    return seen;
  }

  static bool summarise(const regard_call& c) { return (summarises<Each>(c) || ...); }

  // Bytes of the summaries of a call's masks, each on a multiple of 64.
  static int64_t summary_size(const regard_call& c) { return (room<Each>(c) + ...); }

  static void summarise(regard_call& c, char* memory) { (summarise_one<Each>(c, memory), ...); }

 private:
  template <class One>
  static bool summarises(const regard_call& c) {
    return One::used(c) && One::summarises(c);
  }

  template <class One>
  static int64_t room(const regard_call& c) {
    return summarises<One>(c) ? (One::summary_size(c) + 63) / 64 * 64 : 0;
  }

  template <class One>
  static void summarise_one(regard_call& c, char*& memory) {
    if (!summarises<One>(c)) return;
    One::summarise(c, memory);
    memory += room<One>(c);
  }

  template <class F>
  REGARD_INLINE bool find(const F& cover, uint32_t& masks) {
    masks = 0;
    uint32_t bit = 1;
    return (add(cover(Each{}), bit, masks) && ...);
  }

  REGARD_INLINE bool add(Cover cover, uint32_t& bit, uint32_t& masks) {
    if (cover == Cover::kSome) masks |= bit;
    bit <<= 1;
    return cover != Cover::kNone;
  }

  template <class F>
  REGARD_INLINE void each(uint32_t masks, const F& f) {
    uint32_t bit = 1;
    ((masks & bit ? f(Each{}) : void(), bit <<= 1), ...);
  }
};

// A table (batch, head, n) without an address: `length` numbers for each batch element and head that the strides tell
// apart, `count` in all.
static regard_tensor lay_out(const regard_call& c, const int64_t* batch, int64_t heads, int64_t length,
                             int64_t& count) {
  regard_tensor table{};
  table.row = length > 1;
  table.head = heads > 1 ? length : 0;
  count = length * heads;
  for (int n = REGARD_BATCH_AXES - 1; n >= 0; --n) {
    if (batch[n] == 0) continue;
    table.batch[n] = count;
    count *= c.batch[n];
  }
  return table;
}

}  // namespace regard
