// Blocks of queries as items of work: how many share the tiles of an item, and which of them an item has.
#pragma once
#include "attention/forward.h"

namespace regard {

// The blocks of queries of all heads of a batch element.
static int64_t all_blocks(const regard_call& c) { return (c.nq + kQueries - 1) / kQueries * c.heads; }

// Blocks of an item: as many as the second-level cache holds besides a tile, but few enough to give items to all
// threads. blocks: of the whole call.
static int64_t group_of(const regard_call& c, int64_t blocks) {
  const int64_t floats = c.k_scales.data ? kGroupFloatsInt8 : kGroupFloats;
  const int64_t held = floats / ((c.dk + c.dv + 1) * kQueries),
                busy = c.threads > 1 ? blocks / (4 * c.threads) : kGroup;
  int64_t most = held < kGroup ? held : kGroup;
  most = busy < most ? busy : most;
  return most < 1 ? 1 : most;
}

// Blocks of queries as items of work.
struct Forward {
  const regard_call& c;
  int64_t group;  // blocks of queries of an item

  // Whether an item's blocks, which share keys, are of several heads of a group: where each head has one block only.
  bool across() const { return c.nq <= kQueries; }
  int64_t heads() const { return across() ? c.key_heads : c.heads; }
  int64_t blocks() const { return across() ? c.heads / c.key_heads : (c.nq + kQueries - 1) / kQueries; }
  int64_t groups() const { return (blocks() + group - 1) / group; }
  int64_t items() const { return groups() * heads() * elements(c); }
  int64_t scratch() const { return forward_scratch(c, group); }

  // The rows of an item, the same for each of `count` heads from that of the place on.
  Place place(int64_t item, int64_t& count) const {
    // the last queries see most keys under a causal mask: the longest items first
    const int64_t first = (groups() - 1 - item % groups()) * group, pair = item / groups(), rest = blocks() - first;
    const int64_t element = pair / heads(), head = pair % heads(), taken = rest < group ? rest : group;
    count = across() ? taken : 1;
    return across() ? place_at(c, element, head * blocks() + first, 0)
                    : place_at(c, element, head, first * kQueries, taken * kQueries);
  }

  // What an item reads, where that is one tile of keys which is read in place. It has little work: of 32 keys of 32
  // features less than prefetching takes.
  NextItem rows_of(int64_t item) const {
    if (item >= items() || c.nk > kKeys || c.nk * c.dk < 2048) return {};
    if (c.block_table || !in_place(c, c.k) || !in_place(c, c.v)) return {};
    int64_t count;
    const Place p = place(item, count);
    const int64_t key_head = p.h / (c.heads / c.key_heads);
    return {prefetch_rows(c.k, REGARD_F32, p, key_head, 0, c.nk, c.dk),
            prefetch_rows(c.v, REGARD_F32, p, key_head, 0, c.nk, c.dv),
            prefetch_rows(c.q, REGARD_F32, p, p.h, p.row, p.rows, c.dk)};
  }

  void run(int64_t item, float* memory) const {
    int64_t count;
    const Place p = place(item, count);
    Scratch w = forward_places(c, group, memory);
    w.next = rows_of(item + c.threads);  // the item of this thread, where all keep step
    run_item(c, w, p, count);
  }
};

}  // namespace regard
