// Functions that write the keys and values of a decoding step to a cache: as they are or rounded to int8, behind one
// another or in pages. They answer None, and nothing is written, where tensors do not fit, are many or need gradients,
// and where somebody must see what is done: then torch's operations do it.
#pragma once
#include "python/pages.h"

namespace regard {

// Whether torch records what is done with new keys and values.
static bool recorded(PyObject* k, PyObject* v) {
  return truth_of(Ref{PyObject_CallFunctionObjArgs(py.is_grad_enabled, nullptr)}) &&
         (truth_of(Ref{PyObject_GetAttr(k, py.requires_grad)}) || truth_of(Ref{PyObject_GetAttr(v, py.requires_grad)}));
}

// write_rows(row, k, keys, v, values): copies k (*lead, n, dk) to the rows from `row` on of keys (*lead, capacity, dk),
// and v to those of values; answers `row`.
static PyObject* write_rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 5 || watched()) return leave_to_python();
  const int64_t row = PyLong_AsLongLong(given[0]);
  DLTensor from[2], to[2];
  for (int n = 0; n < 2; ++n) {
    const bool known = read(given[1 + 2 * n], from[n], true) && read(given[2 + 2 * n], to[n], true);
    if (!known || !fits(to[n], from[n], row)) return leave_to_python();
  }
  if (rows_of(from[0]) != rows_of(from[1]) || recorded(given[1], given[3])) return leave_to_python();
  for (int n = 0; n < 2; ++n) copy_rows(to[n], from[n], row);
  return new_ref(given[0]);
}

// round_rows(x, numbers, scales): rounds rows (*lead, n, d) to int8 (*lead, n, d) and their scales (*lead, n, 1);
// answers `scales`.
static PyObject* round_rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
  RoundedRows rows;
  if (count != 3 || watched() || !rows.read(given) || !rows.fit(0) || !rows.have_room(0) ||
      recorded(given[0], given[0]))
    return leave_to_python();
  rows.round(0);
  return new_ref(given[2]);
}

// write_rounded_rows(row, k, keys, key_scales, v, values, value_scales): rounds k (*lead, n, dk) to the rows from `row`
// on of keys (*lead, capacity, dk) and key_scales (*lead, capacity, 1), and v to those of values; answers `row`.
static PyObject* write_rounded_rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
  RoundedRows x[2];
  if (count != 7 || watched()) return leave_to_python();
  const int64_t row = PyLong_AsLongLong(given[0]);
  for (int n = 0; n < 2; ++n)
    if (!x[n].read(given + 1 + 3 * n) || !x[n].fit(0) || !x[n].have_room(row)) return leave_to_python();
  if (rows_of(x[0].t) != rows_of(x[1].t) || recorded(given[1], given[4])) return leave_to_python();
  for (const RoundedRows& rows : x) rows.round(row);
  return new_ref(given[0]);
}

// (most, lengths, block_table, k, where its rows go, v, where its rows go): writes k (batch, heads, n, dk), n <= most,
// behind the lengths[b] rows of each sequence b that lie in the pages block_table[b], and v; answers n.
template <class Rows, int kArguments>
PyObject* write_each_sequence(PyObject* const* given, Py_ssize_t count) {
  if (count != 3 + 2 * kArguments || watched()) return leave_to_python();
  const int64_t most = PyLong_AsLongLong(given[0]);
  Sequences sequences;
  Rows k, v;
  if (most < 1 || !sequences.read(given[2], given[1]) || !k.read(given + 3) || !v.read(given + 3 + kArguments) ||
      recorded(given[3], given[3 + kArguments]))
    return leave_to_python();
  const int64_t rows = write_to_pages(sequences, k, v, most);
  return rows < 0 ? leave_to_python() : PyLong_FromLongLong(rows);
}

// write_page_rows(most, lengths, block_table, k, keys, v, values): copies to pools (pages, heads, page_size, d).
static PyObject* write_page_rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return write_each_sequence<RowsOfPages, 2>(given, count);
}

// write_rounded_page_rows(most, lengths, block_table, k, keys, key_scales, v, values, value_scales): rounds to pools of
// int8 numbers (pages, heads, page_size, d) and of scales (pages, heads, page_size, 1).
static PyObject* write_rounded_page_rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return write_each_sequence<RoundedRowsOfPages, 3>(given, count);
}

}  // namespace regard
