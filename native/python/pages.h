// A few new rows of each sequence, written to the pages that its block table names: the keys and values of a decoding
// step.
#pragma once
#include "python/round_rows.h"

namespace regard {

// A pool of pages (pages, heads, page_size, width), and the new rows (batch, heads, n, width) of the sequences.
struct RowsOfPages {
  DLTensor pool, rows;

  // Reads rows and pool; whether those can be copied to this.
  bool read(PyObject* const* given) {
    if (!regard::read(given[0], rows, true) || !regard::read(given[1], pool, true)) return false;
    if (pool.ndim != 4 || rows.ndim != 4 || !few_of_same_dtype(pool, rows)) return false;
    return rows.shape[1] == pool.shape[1] && rows.shape[3] == pool.shape[3] && pool.shape[2] > 0;
  }

  // Copies row n of sequence b to row `to` of a page.
  void write(int64_t b, int64_t n, int64_t page, int64_t to) const {
    int64_t one_row[4] = {1, rows.shape[1], 1, rows.shape[3]};
    DLTensor row = rows;
    row.shape = one_row;
    const int64_t element = rows.dtype.bits / 8;
    copy_axis(pool, row, 1, address(pool) + (page * pool.strides[0] + to * pool.strides[2]) * element,
              address(rows) + (b * rows.strides[0] + n * rows.strides[2]) * element);
  }
};

// The same, rounded to a pool of int8 numbers and one of float scales (pages, heads, page_size, 1).
struct RoundedRowsOfPages {
  DLTensor pool, rows;
  RoundedRows rounded;

  // Reads rows, numbers and scales.
  bool read(PyObject* const* given) {
    if (!rounded.read(given) || rounded.t.ndim != 4 || !rounded.fit(1)) return false;
    rows = rounded.t;
    pool = rounded.numbers;
    const DLTensor& scales = rounded.scales;
    return pool.shape[2] > 0 && scales.shape[0] == pool.shape[0] && scales.shape[2] == pool.shape[2];
  }

  void write(int64_t b, int64_t n, int64_t page, int64_t to) const { rounded.round_to_page(b, n, page, to); }
};

// Where the rows of sequences lie: the pages of each, int32 (batch, room), and how many rows each has, a list.
struct Sequences {
  DLTensor table;
  PyObject* lengths;

  bool read(PyObject* block_table, PyObject* list) {
    lengths = list;
    return regard::read(block_table, table, true) && table.ndim == 2 && table.dtype.code == kDLInt &&
           table.dtype.bits == 32 && table.shape[0] == PyList_Size(list);
  }

  // The page of row `row` of sequence b; -1 where the table names no page of the pool for it.
  int64_t page_of(int64_t b, int64_t row, const DLTensor& pool) const {
    const int64_t column = row / pool.shape[2];
    if (row < 0 || column >= table.shape[1]) return -1;
    const int64_t page = ((const int32_t*)address(table))[b * table.strides[0] + column * table.strides[1]];
    return page < pool.shape[0] ? page : -1;
  }

  // Calls run(b, i, page, row of the page) for row i of each sequence's n new rows, as long as it answers true.
  template <class Run>
  bool each_new_row(int64_t n, const DLTensor& pool, const Run& run) const {
    for (int64_t b = 0; b < table.shape[0]; ++b) {
      const int64_t length = PyLong_AsLongLong(PyList_GetItem(lengths, b));
      for (int64_t i = 0; i < n; ++i)
        if (!run(b, i, page_of(b, length + i, pool), (length + i) % pool.shape[2])) return false;
    }
    return true;
  }
};

// Writes the new rows of keys and values behind those that each sequence has, n <= most of them; returns n, or -1, and
// nothing is written, where they do not fit.
template <class Rows>
int64_t write_to_pages(const Sequences& to, const Rows& k, const Rows& v, int64_t most) {
  const int64_t n = rows_of(k.rows);
  if (n > most || rows_of(v.rows) != n || k.rows.shape[0] != to.table.shape[0] || v.rows.shape[0] != k.rows.shape[0])
    return -1;
  if (k.pool.shape[0] != v.pool.shape[0] || k.pool.shape[2] != v.pool.shape[2]) return -1;
  if (!to.each_new_row(n, k.pool, [](int64_t, int64_t, int64_t page, int64_t) { return page >= 0; })) return -1;
  const Rows* const both[2] = {&k, &v};
  for (const Rows* const x : both)
    if (!empty(x->rows))  // such tensors may have no address
      to.each_new_row(n, x->pool, [x](int64_t b, int64_t i, int64_t page, int64_t row) {
        x->write(b, i, page, row);
        return true;
      });
  return n;
}

}  // namespace regard
