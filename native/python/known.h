// The plans that attend() may use, and which calls each is for.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "python/outlines.h"

namespace regard {

// Shape but for the number of rows, and dtype; of pages, how many rows each has, but not how many there are.
struct Layout {
  static constexpr int kAxes = REGARD_BATCH_AXES + 3;
  DLDataType dtype;
  int32_t axes;
  int64_t sizes[kAxes];

  void take(const DLTensor& t) {
    dtype = t.dtype, axes = t.ndim;
    for (int n = 0; n < axes; ++n) sizes[n] = t.shape[n];
  }
  bool holds(const DLTensor& t, bool paged) const {
    if (t.ndim != axes || t.dtype.code != dtype.code || t.dtype.bits != dtype.bits) return false;
    for (int n = 0; n < axes; ++n)
      if (n != (paged ? 0 : axes - 2) && t.shape[n] != sizes[n]) return false;
    return true;
  }
};

constexpr int kMost = 64;

// A plan that attend() may use, and the calls that it is for.
struct Known {
  const regard_plan* plan;     // null: none here
  PyObject *owner, *outlines;  // owner: keeps the plan and what its struct leads to. outlines: of score, mask and sink
  PyObject *score, *mask;      // such as have no tensors, or null: the same object needs no second look
  bool placed, paged, int8;  // whether there are positions, and whether keys and values lie in pages, are rows of int8
  uint32_t needs;  // which of q, k, v and the leaves have a gradient, a bit each; then the plan is for training
  char isa[16];    // what REGARD_ISA says
  Layout q, k, v;
};
static Known known[kMost];  // the oldest makes room for a new one
static int remembered;      // since forget()

static const char* isa_named() {
  const char* const name = getenv("REGARD_ISA");
  return name ? name : "";
}

// Puts a plan, or none, in the place of another. What ends with that may call Python, and Python attend(): so it ends
// last.
static void replace(Known& place, const Known& by) {
  const Known old = place;
  place = by;
  if (!old.plan) return;
  for (PyObject* const object : (PyObject* const[]){old.owner, old.outlines, old.score, old.mask})
    if (object) Py_DecRef(object);
}

// A bit for each tensor that has a gradient; null has none.
static uint32_t needs_of(PyObject* const* tensors, int count) {
  uint32_t needs = 0;
  for (int n = 0; n < count; ++n)
    if (tensors[n]) needs |= (uint32_t)truth_of(Ref{PyObject_GetAttr(tensors[n], py.requires_grad)}) << n;
  return needs;
}

// A call as attend() is given it.
struct Given {
  PyObject *const *tensors, *score, *mask, *sink;
  bool placed, recorded, paged = false, int8 = false;  // recorded: whether torch records gradients
  DLTensor x[3], table;  // how q, k and v lie, or the pages of k and v, and their block table
  DLTensor scales[2];    // of k and v, where they are rows of int8, or the pages of these
  int64_t nq = 0, nk = 0;

  Given(PyObject* const* given, bool has_positions)
      : tensors(given),
        score(given[3]),
        mask(given[4]),
        sink(given[6]),
        placed(has_positions),
        recorded(truth_of(Ref{PyObject_CallFunctionObjArgs(py.is_grad_enabled, nullptr)})) {}

  // Whether q, k and v are what the kernels can read.
  bool read() {
    if (!regard::read(tensors[0], x[0], true) || x[0].ndim < 2) return false;
    nq = x[0].shape[x[0].ndim - 2], int8 = has_type(tensors[1], py.int8_rows);
    return int8 ? has_type(tensors[2], py.int8_rows) && read_int8() : read_rows(tensors[1], tensors[2], x[1], x[2]);
  }

 private:
  // The numbers of rows of int8 first: their scales must lie as they do.
  bool read_int8() {
    const Ref scales_of_k{PyObject_GetAttr(tensors[1], py.scales)},
        scales_of_v{PyObject_GetAttr(tensors[2], py.scales)};
    if (!scales_of_k || !scales_of_v || !read_rows(scales_of_k.get(), scales_of_v.get(), scales[0], scales[1]))
      return false;
    const bool in_pages = paged;
    const DLTensor table_of_scales = table;
    const int64_t count = nk;
    const Ref k{PyObject_GetAttr(tensors[1], py.int8_numbers)}, v{PyObject_GetAttr(tensors[2], py.int8_numbers)};
    if (!k || !v || !read_rows(k.get(), v.get(), x[1], x[2]) || paged != in_pages || nk != count) return false;
    return !paged || (table.data == table_of_scales.data && x[1].shape[2] == scales[0].shape[2]);
  }

  // How keys and values lie, or numbers and scales: in tensors, or in pages that one table names.
  bool read_rows(PyObject* k, PyObject* v, DLTensor& k_rows, DLTensor& v_rows) {
    paged = has_type(k, py.paged);
    if (paged) return read_pages(k, v, k_rows, v_rows);
    if (!regard::read(k, k_rows, true) || k_rows.ndim < 2 || !regard::read(v, v_rows, true) || v_rows.ndim < 2)
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

// The plan for a call; the tensors of its score, mask and sink go to `leaves`.
static const Known* find(const Given& given, Leaves& leaves) {
  const char* const isa = isa_named();
  const uint32_t needs = given.recorded ? needs_of(given.tensors, 3) : 0;
  for (int n = 0; n < kMost && known[n].plan; ++n) {
    const Known& one = known[n];
    if ((one.needs & 7) != needs || one.placed != given.placed || one.paged != given.paged || one.int8 != given.int8)
      continue;
    if (strcmp(one.isa, isa)) continue;
    if (!one.q.holds(given.x[0], false) || !one.k.holds(given.x[1], one.paged) || !one.v.holds(given.x[2], one.paged))
      continue;
    leaves.count = 0, leaves.reads_numbers = !one.needs;  // autograd saves tensors
    const bool same =
        (given.score == one.score || has_outline(given.score, PyTuple_GetItem(one.outlines, 0), leaves)) &&
        (given.mask == one.mask || has_outline(given.mask, PyTuple_GetItem(one.outlines, 1), leaves)) &&
        has_outline(given.sink, PyTuple_GetItem(one.outlines, 2), leaves);
    if (same && (!given.recorded || needs_of(leaves.objects, leaves.count) == one.needs >> 3)) return &one;
  }
  return nullptr;
}

}  // namespace regard
