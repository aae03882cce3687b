// Dropout of the weights. A hash of (seed, batch element, head, query, key) decides which ones are dropped, the same
// for every tiling.
#pragma once
#include "core/rows.h"

namespace regard {

template <int V>
struct Block;

struct Dropout {
  template <int V>
  struct State {
    vu word[V];  // of each lane's query
  };

  static int32_t check(const regard_call& c) { return c.threshold && !c.q_at ? REGARD_BAD_ARGUMENT : REGARD_DONE; }

  template <class T>
  REGARD_INLINE T mix(T x) {  // a vector of words, or one
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
  }

  // An index of 64 bits as a word; those below 2^32 stay as they are.
  REGARD_INLINE uint32_t low_word(int64_t n) { return (uint32_t)(n ^ (n >> 32) * 0x165667B1); }

  REGARD_INLINE uint32_t head_word(const regard_call& c, int64_t b, int64_t head) {
    uint32_t x = mix((uint32_t)(low_word(b) * 0x9E3779B1u + (uint32_t)c.seed));
    return mix((uint32_t)(x + low_word(head) * 0x85EBCA77u + (uint32_t)(c.seed >> 32)));
  }

  // The words of a query and of a key at a position; their sum is hashed.
  REGARD_INLINE uint32_t query_word(uint32_t head, int64_t at) {
    return mix((uint32_t)(head + low_word(at) * 0xC2B2AE3Du));
  }
  REGARD_INLINE uint32_t key_word(int64_t at) { return low_word(at) * 0x27D4EB2Fu; }

  template <int V>
  static void begin(Block<V>& b) {
    const int64_t* q_at = b.c.q_at + offset(b.c.q_at_batch, b.p) + b.p.row;
    const uint32_t head = head_word(b.c, b.p.b, b.p.h);
    for (int64_t n = 0; n < V * W; ++n) b.word[n / W][n % W] = query_word(head, q_at[n < b.p.rows ? n : 0]);
  }

  REGARD_INLINE vu row_word(const FewRows& f, const Row& row) {
    return vu{} + query_word(head_word(f.c, f.p.b, row.h), f.c.q_at[offset(f.c.q_at_batch, f.p) + row.i]);
  }

  // A weight times keep, or 0 where it is dropped; the gradient of the weight from that of the result is the same
  // function.
  REGARD_INLINE vf apply(const regard_call& c, vu query, vu key, vf p) {
    const vi stays = (mix(query + key) >> 8) >= c.threshold;
    return select(stays, p * splat(c.keep), vf{});
  }
};

}  // namespace regard
