// Scores, masks and sinks, compared with outlines as src/regard/runtime/outline.py makes them.
#pragma once
#include "python/objects.h"

namespace regard {

// The tensors of a score, a mask and a sink, depth first.
struct Leaves {
  static constexpr int kMost = REGARD_LEAVES;
  PyObject* objects[kMost];
  DLTensor tensors[kMost];
  int count = 0;

  // Takes a tensor that lies as an outline says: dtype, sizes, strides.
  bool take(PyObject* object, PyObject* outline) {
    if (count == kMost || PyTuple_Size(outline) != 3) return false;
    DLTensor& t = tensors[count];
    if (!read(object, t, false)) return false;
    const Ref dtype{PyObject_GetAttr(object, py.dtype_name)};
    if (dtype.get() != PyTuple_GetItem(outline, 0)) return false;
    for (int part = 1; part < 3; ++part) {
      PyObject* const told = PyTuple_GetItem(outline, part);
      if (PyTuple_Size(told) != t.ndim) return false;
      for (int n = 0; n < t.ndim; ++n)
        if (PyLong_AsLongLong(PyTuple_GetItem(told, n)) != (part == 1 ? t.shape : t.strides)[n]) return false;
    }
    objects[count++] = object;
    return true;
  }
};

// Whether runtime/outline.py would make this outline of a value, or of a part of one; its tensors go to `leaves`.
static bool has_outline(PyObject* item, PyObject* outline, Leaves& leaves) {
  if (item == outline) return true;
  const Ref type{PyObject_Type(item)};
  if (!has_type(outline, py.tuple)) {
    if (outline == type.get()) return true;  // a class without fields
    return has_type(outline, type.get()) && PyObject_RichCompareBool(item, outline, 2 /* == */) == 1;
  }
  PyObject* const first = PyTuple_Size(outline) ? PyTuple_GetItem(outline, 0) : nullptr;
  if (first && has_type(first, py.dtype)) return leaves.take(item, outline);
  PyObject* const names = first ? PyDict_GetItem(py.fields, first) : nullptr;
  if (names && PyTuple_Size(names)) {
    bool same = first == type.get();
    for (Py_ssize_t n = 0; same && n < PyTuple_Size(names); ++n) {
      const Ref part{PyObject_GetAttr(item, PyTuple_GetItem(names, n))};
      same = part && has_outline(part.get(), PyTuple_GetItem(outline, n + 1), leaves);
    }
    return same;
  }
  if (type.get() != py.tuple || PyTuple_Size(item) != PyTuple_Size(outline)) return false;
  for (Py_ssize_t n = 0; n < PyTuple_Size(item); ++n)
    if (!has_outline(PyTuple_GetItem(item, n), PyTuple_GetItem(outline, n), leaves)) return false;
  return true;
}

}  // namespace regard
