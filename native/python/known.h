// The plans that attend() may use, and which calls each is for.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "python/call_tensors.h"
#include "python/outlines.h"

#if defined(_WIN32)
extern "C" __declspec(dllimport) unsigned long __stdcall GetEnvironmentVariableA(const char* name, char* to,
                                                                                 unsigned long size);
#endif

namespace regard {

// Shape but for the number of rows, and dtype; of pages, how many rows each has, but not how many there are.
struct Layout {
  static constexpr int kAxes = REGARD_BATCH_AXES + 3;
  DLDataType dtype;
  int32_t axes;
  int64_t sizes[kAxes];

  void take(const DLTensor& t) {
    dtype = t.dtype;
    axes = t.ndim;
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

// What REGARD_ISA says, or nothing; false where that is too long.
static bool read_isa(char (&to)[sizeof(Known::isa)]) {
  memset(to, 0, sizeof to);
#if defined(_WIN32)
  // not getenv: each C library of a process keeps a copy of its own
  return GetEnvironmentVariableA("REGARD_ISA", to, sizeof to) < sizeof to;
#else
  const char* const name = getenv("REGARD_ISA");
  if (name) strncpy(to, name, sizeof to - 1);
  return !name || strlen(name) < sizeof to;
#endif
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
struct CallObjects {
  PyObject *const *objects, *score, *mask, *sink;
  bool placed, recorded;  // whether there are positions, and whether torch records gradients
  CallTensors tensors{};

  CallObjects(PyObject* const* given, bool has_positions)
      : objects(given),
        score(given[3]),
        mask(given[4]),
        sink(given[6]),
        placed(has_positions),
        recorded(truth_of(Ref{PyObject_CallFunctionObjArgs(py.is_grad_enabled, nullptr)})) {}

  bool read() { return tensors.read(objects); }
};

// A plan that serves a call, and what keeps it.
struct Found {
  const regard_plan* plan = nullptr;
  Ref owner;
  bool training = false;
};

// Finds the plan for a call; the tensors of its score, mask and sink go to `leaves`. False where there is none.
static bool find(const CallObjects& given, Leaves& leaves, Found& found) {
  char isa[sizeof(Known::isa)];
  if (!read_isa(isa)) return false;
  const CallTensors& t = given.tensors;
  const uint32_t needs = given.recorded ? needs_of(given.objects, 3) : 0;
  for (int n = 0; n < kMost && known[n].plan; ++n) {
    const Known& at = known[n];
    if ((at.needs & 7) != needs || at.placed != given.placed || at.paged != t.paged || at.int8 != t.int8) continue;
    if (strcmp(at.isa, isa) != 0) continue;
    if (!at.q.holds(t.x[0], false) || !at.k.holds(t.x[1], at.paged) || !at.v.holds(t.x[2], at.paged)) continue;
    const Known one = at;  // what reads a tensor may let other threads run, which put another plan in this place
    found.owner.own(new_ref(one.owner));
    const Ref outlines{new_ref(one.outlines)};
    leaves.count = 0;
    leaves.reads_numbers = !one.needs;  // autograd saves tensors
    const bool same =
        (given.score == one.score || has_outline(given.score, PyTuple_GetItem(outlines.get(), 0), leaves)) &&
        (given.mask == one.mask || has_outline(given.mask, PyTuple_GetItem(outlines.get(), 1), leaves)) &&
        has_outline(given.sink, PyTuple_GetItem(outlines.get(), 2), leaves);
    if (!same || (given.recorded && needs_of(leaves.objects, leaves.count) != one.needs >> 3)) continue;
    found.plan = one.plan;
    found.training = one.needs != 0;
    return true;
  }
  return false;
}

}  // namespace regard
