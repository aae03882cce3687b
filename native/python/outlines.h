// Scores, masks and sinks, compared with outlines as src/regard/runtime/outline.py makes them.
#pragma once
#include "python/objects.h"

namespace regard {

// The tensors of a score, a mask and a sink, depth first.
struct Leaves {
  static constexpr int kMost = REGARD_LEAVES;
  PyObject* objects[kMost];  // null where no tensor has been made of its numbers
  DLTensor tensors[kMost];
  bool of_pairs[kMost];  // whether its outline leaves open how it lies
  int count = 0;
  int64_t nq, nk;              // queries and keys of the call
  bool reads_numbers = false;  // whether numbers may be read without a tensor

  Leaves(int64_t queries, int64_t keys) : nq(queries), nk(keys) {}

  // Takes a tensor that lies as an outline says: dtype, sizes, strides; of one of pairs dtype and the first sizes.
  bool take(PyObject* object, PyObject* outline) {
    if (count == kMost || PyTuple_Size(outline) != 3) return false;
    DLTensor& t = tensors[count];
    if (!read(object, t, false)) return false;
    const Ref dtype{PyObject_GetAttr(object, py.dtype_name)};
    if (dtype.get() != PyTuple_GetItem(outline, 0)) return false;
    of_pairs[count] = PyTuple_GetItem(outline, 2) == kNone;
    if (of_pairs[count] && !has_pairs(t, PyTuple_GetItem(outline, 1))) return false;
    for (int part = 1; part < 3 && !of_pairs[count]; ++part) {
      PyObject* const expected = PyTuple_GetItem(outline, part);
      if (PyTuple_Size(expected) != t.ndim) return false;
      for (int n = 0; n < t.ndim; ++n)
        if (PyLong_AsLongLong(PyTuple_GetItem(expected, n)) != (part == 1 ? t.shape : t.strides)[n]) return false;
    }
    objects[count++] = object;
    return true;
  }

  // Takes numbers of which a tensor (n,) has not been made yet; it would lie as an outline says.
  bool take_numbers(PyObject* numbers, PyObject* outline) {
    if (count == kMost || !has_type(numbers, py.tuple) || PyTuple_Size(outline) != 3) return false;
    if (PyTuple_GetItem(outline, 0) != py.int64 || PyTuple_Size(PyTuple_GetItem(outline, 1)) != 1) return false;
    if (PyLong_AsLongLong(PyTuple_GetItem(PyTuple_GetItem(outline, 1), 0)) != PyTuple_Size(numbers)) return false;
    bytes_[count].own(packed(numbers, 0));
    if (!bytes_[count]) {
      PyErr_Clear();
      return false;
    }  // too large a number
    objects[count] = nullptr;
    of_pairs[count] = false;
    tensors[count] = DLTensor{};
    tensors[count].data = PyBytes_AsString(bytes_[count].get());
    ++count;
    return true;
  }

 private:
  Ref bytes_[kMost];

  // Whether a tensor has these sizes, and then a number for each query, or one, and for each key, or one.
  bool has_pairs(const DLTensor& t, PyObject* sizes) const {
    const int axes = t.ndim - 2;
    if (axes < 0 || PyTuple_Size(sizes) != axes) return false;
    for (int n = 0; n < axes; ++n)
      if (PyLong_AsLongLong(PyTuple_GetItem(sizes, n)) != t.shape[n]) return false;
    return (t.shape[axes] == 1 || t.shape[axes] == nq) && (t.shape[axes + 1] == 1 || t.shape[axes + 1] == nk);
  }
};

// The numbers of Lengths of which no tensors have been made yet, (keys, queries); null for other values.
static PyObject* numbers_of(PyObject* item, PyObject* type) {
  if (type != py.lengths) return nullptr;
  const Ref members{PyObject_GetAttr(item, py.dict)};
  PyObject* const names = PyDict_GetItem(py.fields, type);
  if (!members || PyDict_GetItem(members.get(), PyTuple_GetItem(names, 0))) return nullptr;
  return PyDict_GetItem(members.get(), py.numbers);
}

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
    PyObject* const numbers = same && leaves.reads_numbers ? numbers_of(item, first) : nullptr;
    for (Py_ssize_t n = 0; same && n < PyTuple_Size(names); ++n) {
      if (numbers) {
        PyObject *const part = PyTuple_GetItem(numbers, n), *const expected = PyTuple_GetItem(outline, n + 1);
        same = part == kNone || expected == kNone ? part == expected : leaves.take_numbers(part, expected);
        continue;
      }
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
