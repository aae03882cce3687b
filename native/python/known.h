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
  const regard_plan* plan;          // null: none here
  PyObject *owner, *outlines;       // owner: keeps the plan and what its struct leads to. outlines: of score, mask and sink
  PyObject *score, *mask;           // such as have no tensors, or null: the same object needs no second look
  bool placed, paged;               // whether there are positions, and whether keys and values lie in pages
  uint32_t needs;                   // which of q, k, v and the leaves have a gradient, a bit each; then the plan is for training
  char isa[16];                     // what REGARD_ISA says
  Layout q, k, v;
};
static Known known[kMost];  // the oldest makes room for a new one
static int remembered;      // since forget()

static const char* isa_named() {
  const char* const name = getenv("REGARD_ISA");
  return name ? name : "";
}

// Puts a plan, or none, in the place of another. What ends with that may call Python, and Python attend(): so it ends last.
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
  bool placed, recorded, paged = false;  // recorded: whether torch records gradients
  DLTensor x[3], table;                  // how q, k and v lie, or the pages of k and v, and their block table
  int64_t nq = 0, nk = 0;

  Given(PyObject* const* given, bool has_positions)
      : tensors(given), score(given[3]), mask(given[4]), sink(given[6]), placed(has_positions),
        recorded(truth_of(Ref{PyObject_CallFunctionObjArgs(py.is_grad_enabled, nullptr)})) {}

  // Whether q, k and v are what the kernels can read.
  bool read() {
    if (!regard::read(tensors[0], x[0], true) || x[0].ndim < 2) return false;
    nq = x[0].shape[x[0].ndim - 2], paged = has_type(tensors[1], py.paged);
    if (paged) return read_pages();
    for (int n = 1; n < 3; ++n)
      if (!regard::read(tensors[n], x[n], true) || x[n].ndim < 2) return false;
    nk = x[1].shape[x[1].ndim - 2];
    return x[2].shape[x[2].ndim - 2] == nk;
  }

 private:
  bool read_pages() {
    if (!has_type(tensors[2], py.paged)) return false;
    const Ref k{PyObject_GetAttr(tensors[1], py.pages)}, v{PyObject_GetAttr(tensors[2], py.pages)};
    const Ref table_of_k{PyObject_GetAttr(tensors[1], py.block_table)}, table_of_v{PyObject_GetAttr(tensors[2], py.block_table)};
    const Ref shape{PyObject_GetAttr(tensors[1], py.shape)};
    if (!k || !v || !table_of_k || table_of_k.get() != table_of_v.get() || !shape || PyTuple_Size(shape.get()) != 4) return false;
    nk = PyLong_AsLongLong(PyTuple_GetItem(shape.get(), 2));
    return regard::read(k.get(), x[1], true) && regard::read(v.get(), x[2], true) && regard::read(table_of_k.get(), table, true) &&
           x[1].shape[2] == x[2].shape[2];
  }
};

// The plan for a call; the tensors of its score, mask and sink go to `leaves`.
static const Known* find(const Given& given, Leaves& leaves) {
  const char* const isa = isa_named();
  const uint32_t needs = given.recorded ? needs_of(given.tensors, 3) : 0;
  for (int n = 0; n < kMost && known[n].plan; ++n) {
    const Known& one = known[n];
    if ((one.needs & 7) != needs || one.placed != given.placed || one.paged != given.paged || strcmp(one.isa, isa)) continue;
    if (!one.q.holds(given.x[0], false) || !one.k.holds(given.x[1], one.paged) || !one.v.holds(given.x[2], one.paged)) continue;
    leaves.count = 0, leaves.reads_numbers = !one.needs;  // autograd saves tensors
    const bool same = (given.score == one.score || has_outline(given.score, PyTuple_GetItem(one.outlines, 0), leaves)) &&
                      (given.mask == one.mask || has_outline(given.mask, PyTuple_GetItem(one.outlines, 1), leaves)) &&
                      has_outline(given.sink, PyTuple_GetItem(one.outlines, 2), leaves);
    if (same && (!given.recorded || needs_of(leaves.objects, leaves.count) == one.needs >> 3)) return &one;
  }
  return nullptr;
}

}  // namespace regard
