// TileCounts: what a forward does with each tile of blocks of queries and keys, found without its products.
#pragma once
#include "attention/forward.h"

namespace regard {

// For Python, in this order: regard_count_tiles.
struct TileCounts {
  int64_t skipped = 0;  // hidden as intervals, a tile map or ranges of whole numbers say: no pair is looked at
  int64_t hidden = 0;   // hidden once their pairs were looked at; where a program hides them, no product
  int64_t whole = 0;    // seen whole: no pair is looked at
  int64_t mixed = 0;

  void add(const Block<kVectors>& b, int64_t j) {
    const int64_t left = b.c.nk - j;
    Tile t = tile_for_block(b, KvTile{b.p, 0, j, left < kKeys ? left : kKeys}, j);
    if (!t.count) {
      ++skipped;
      return;
    }
    uint64_t bits[kKeys];
    load_bits(b.c, b.p, t, bits);
    if (hides_all(t)) ++hidden;
    else if (t.bits || t.edge) ++mixed;
    else ++whole;
  }

  static TileCounts of(const regard_call& c) {
    TileCounts counts;
    const Scratch none{};
    for (int64_t element = 0; element < elements(c); ++element)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t row = 0; row < c.nq; row += kQueries) {
          Place p = place_in_batch(c, element);
          p.h = h;
          p.row = row;
          p.rows = c.nq - row < kQueries ? c.nq - row : kQueries;
          Block<kVectors> b{c, none, p};
          set_limits(b);
          for (int64_t j = 0; j < c.nk; j += kKeys) counts.add(b, j);
        }
    return counts;
  }
};

}  // namespace regard
