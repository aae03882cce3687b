// Few rows (decoding): some queries of the heads that share a key head, against a chunk of keys. Lanes of scores are
// keys.
#pragma once
#include "core/place.h"
#include "core/state.h"

namespace regard {

constexpr int64_t kMaxRows = 64;  // rows (queries × heads of a group) at most
constexpr int64_t kChunk = 128;   // keys held at once

REGARD_INLINE int64_t round_up(int64_t n) { return (n + W - 1) & ~(int64_t)(W - 1); }

struct Row {  // one query of one head, and the keys [first, last) that it sees
  int64_t h, i, first, last;
};

struct FewRows {
  explicit FewRows(const regard_call& call) : c(call) {}
  const regard_call& c;
  Place p;
  int64_t rows, key_head;
  float* s;                     // [rows][kChunk] scores, then weights; the weight of a hidden key is -0
  float* derivative = nullptr;  // [rows][kChunk] of the modifiers; null where no gradient is computed
  float* v;                     // [kChunk][dv rounded up to W], values that cannot be read in place
  float* states;                // of each row a StoredState
  float alpha[kMaxRows];        // what the state so far is multiplied by
  Row row[kMaxRows];
  bool whole[kMaxRows];                    // every key of the chunk is visible and no modifier changes its score
  vf top[kMaxRows];                        // largest scores of the chunk
  vi at[kChunk / W];                       // positions of the chunk's keys, relative to the first
  vu word[kChunk / W];                     // dropout's words of the chunk's keys
  float k_scale[kChunk], v_scale[kChunk];  // of the chunk's keys and values, where these are int8
};

struct Chunk {
  int64_t j, count;  // keys
  bool some;         // some row does not see some key
  bool more;         // a whole chunk follows, in this part of the keys or the next, and is prefetched
  uint32_t masks;    // those of TileMasks that hide some pair
};

// One row and the keys [n, n + W) of a chunk: what the row form of a step reads.
struct RowKeys {
  const FewRows& f;
  const Row& row;
  const Chunk& t;
  int64_t n;

  int64_t key() const { return t.j + n; }        // the first of them
  int64_t valid() const { return t.count - n; }  // how many of them exist
};

// The state of a row in memory: m and l, then o [dv rounded up to W].
struct StoredState {
  static constexpr int64_t kSums = 2;
  float* at;

  SoftmaxState<float>& sums() const { return *(SoftmaxState<float>*)at; }
  float* o() const { return at + kSums; }

  static int64_t size(const regard_call& c) { return round_up(c.dv) + kSums; }

  void clear(const regard_call& c) const {
    sums() = {};
    for (int64_t d = 0; d < round_up(c.dv); d += W) store(o() + d, vf{});
  }
};

// The state of row r.
REGARD_INLINE StoredState state_of(const FewRows& f, int64_t r) { return {f.states + r * StoredState::size(f.c)}; }

}  // namespace regard
