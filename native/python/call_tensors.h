// The queries, keys and values of a call: tensors, pages that a block table names, or rows of int8 with their scales.
#pragma once
#include "python/objects.h"

namespace regard {

struct CallTensors {
  bool paged = false, int8 = false;
  DLTensor x[3]{}, table{};  // how q, k and v lie, or the pages of k and v, and their block table
  DLTensor scales[2]{};      // of k and v, where they are rows of int8, or the pages of these
  int64_t nq = 0, nk = 0;

  // Whether q, k and v are what the kernels can read.
  bool read(PyObject* const* qkv) {
    if (!regard::read(qkv[0], x[0], false) || x[0].ndim < 2) return false;
    nq = x[0].shape[x[0].ndim - 2];
    int8 = has_type(qkv[1], py.int8_rows);
    return int8 ? has_type(qkv[2], py.int8_rows) && read_int8(qkv[1], qkv[2]) : read_rows(qkv[1], qkv[2], x[1], x[2]);
  }

 private:
  // The numbers of rows of int8 last: their scales must lie as they do.
  bool read_int8(PyObject* k, PyObject* v) {
    const Ref scales_of_k{PyObject_GetAttr(k, py.scales)}, scales_of_v{PyObject_GetAttr(v, py.scales)};
    if (!scales_of_k || !scales_of_v || !read_rows(scales_of_k.get(), scales_of_v.get(), scales[0], scales[1]))
      return false;
    const bool in_pages = paged;
    const DLTensor table_of_scales = table;
    const int64_t count = nk;
    const Ref k_numbers{PyObject_GetAttr(k, py.int8_numbers)}, v_numbers{PyObject_GetAttr(v, py.int8_numbers)};
    if (!k_numbers || !v_numbers || !read_rows(k_numbers.get(), v_numbers.get(), x[1], x[2])) return false;
    if (paged != in_pages || nk != count) return false;
    return !paged || (table.data == table_of_scales.data && x[1].shape[2] == scales[0].shape[2]);
  }

  // How keys and values lie, or numbers and scales: in tensors, or in pages that one table names.
  bool read_rows(PyObject* k, PyObject* v, DLTensor& k_rows, DLTensor& v_rows) {
    paged = has_type(k, py.paged);
    if (paged) return read_pages(k, v, k_rows, v_rows);
    if (!regard::read(k, k_rows, false) || k_rows.ndim < 2 || !regard::read(v, v_rows, false) || v_rows.ndim < 2)
      return false;
    nk = k_rows.shape[k_rows.ndim - 2];
    return v_rows.shape[v_rows.ndim - 2] == nk;
  }

  bool read_pages(PyObject* k, PyObject* v, DLTensor& k_pages, DLTensor& v_pages) {
    if (!has_type(v, py.paged)) return false;
    const Ref of_k{PyObject_GetAttr(k, py.pages)}, of_v{PyObject_GetAttr(v, py.pages)};
    const Ref table_of_k{PyObject_GetAttr(k, py.block_table)}, table_of_v{PyObject_GetAttr(v, py.block_table)};
    const Ref shape{PyObject_GetAttr(k, py.shape)};
    if (!of_k || !of_v || !table_of_k || table_of_k.get() != table_of_v.get() || !shape ||
        PyTuple_Size(shape.get()) != 4)
      return false;
    nk = PyLong_AsLongLong(PyTuple_GetItem(shape.get(), 2));
    return regard::read(of_k.get(), k_pages, true) && regard::read(of_v.get(), v_pages, true) &&
           regard::read(table_of_k.get(), table, true) && k_pages.shape[2] == v_pages.shape[2];
  }
};

}  // namespace regard
