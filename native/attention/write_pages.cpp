// New keys and values, copied to the pages of their sequences.
#include <stddef.h>

#include "core/api.h"
#include "core/check.h"

using namespace regard;

namespace {

struct PageWriter {
  const regard_page_write& w;

  // Whether every page that is written is one of the pool.
  bool right() const {
    if (w.batch < 0 || w.heads < 0 || w.n < 0 || w.dk < 0 || w.dv < 0 || w.page_size < 1 || w.pages < 0) return false;
    if (w.element != 1 && w.element != 2 && w.element != 4 && w.element != 8) return false;
    const int64_t sequences[REGARD_BATCH_AXES] = {1, 1, 1, w.offsets ? 1 : w.batch},
                  pool[REGARD_BATCH_AXES] = {1, 1, 1, w.pages};
    if (!fits(w.k, w.k.dtype, sequences, w.heads, w.n, w.dk) || !fits(w.v, w.v.dtype, sequences, w.heads, w.n, w.dv))
      return false;
    if (!fits(w.k_pages, w.k.dtype, pool, w.heads, w.page_size, w.dk)) return false;
    if (!fits(w.v_pages, w.v.dtype, pool, w.heads, w.page_size, w.dv)) return false;
    if (w.n > kMost || (w.offsets && w.offsets[0] != 0)) return false;
    for (int64_t b = 0; b < w.batch; ++b) {
      if (w.offsets && (w.offsets[b + 1] < w.offsets[b] || w.offsets[b + 1] > w.n)) return false;
      if (rows(b) == 0) continue;
      const int64_t from = w.lengths[b];
      if (from < 0 || from > kMost) return false;
      const int64_t last = (from + rows(b) - 1) / w.page_size;
      if (last >= w.room) return false;
      for (int64_t page = from / w.page_size; page <= last; ++page) {
        const int32_t own = w.block_table[b * w.room + page];
        if (own < 0 || own >= w.pages) return false;
      }
    }
    return true;
  }

  // New rows of sequence b.
  int64_t rows(int64_t b) const { return w.offsets ? w.offsets[b + 1] - w.offsets[b] : w.n; }

  void copy(const regard_tensor& from, const regard_tensor& pages, int64_t width) const {
    if (width == 0) return;  // such tensors may have no address
    for (int64_t b = 0; b < w.batch; ++b) {
      const int64_t before = w.offsets ? w.offsets[b] * from.row : b * from.batch[REGARD_BATCH_AXES - 1];
      for (int64_t i = 0; i < rows(b); ++i) {
        const int64_t at = w.lengths[b] + i, page = w.block_table[b * w.room + at / w.page_size];
        const char* row = (const char*)from.data + (before + i * from.row) * w.element;
        char* to =
            (char*)pages.data + (page * pages.batch[REGARD_BATCH_AXES - 1] + at % w.page_size * pages.row) * w.element;
        for (int64_t h = 0; h < w.heads; ++h, row += from.head * w.element, to += pages.head * w.element) {
          if (from.col == 1) __builtin_memcpy(to, row, (size_t)(width * w.element));
          else
            for (int64_t d = 0; d < width; ++d)
              __builtin_memcpy(to + d * w.element, row + d * from.col * w.element, (size_t)w.element);
        }
      }
    }
  }

 private:
  static constexpr int64_t kMost = (int64_t)1 << 31;
};

}  // namespace

REGARD_API int32_t regard_write_pages(const regard_page_write* write, regard_parallel) {
  const PageWriter writer{*write};
  if (!writer.right()) return REGARD_BAD_PAGE;
  writer.copy(write->k, write->k_pages, write->dk);
  writer.copy(write->v, write->v_pages, write->dv);
  return REGARD_DONE;
}
