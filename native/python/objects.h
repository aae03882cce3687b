// Objects of Python's, and torch's tensors as DLPack shows them.
#pragma once
#include "abi/structs.h"
#include "python/python_api.h"

namespace regard {

// A reference that ends with its scope.
class Ref {
 public:
  explicit Ref(PyObject* owned = nullptr) : object_(owned) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() {
    if (object_) Py_DecRef(object_);
  }
  explicit operator bool() const { return object_; }
  PyObject* get() const { return object_; }
  void own(PyObject* object) {
    if (object_) Py_DecRef(object_);
    object_ = object;
  }
  PyObject* release() {
    PyObject* own = object_;
    object_ = nullptr;
    return own;
  }

 private:
  PyObject* object_;
};

static PyObject* const kNone = &_Py_NoneStruct;

static PyObject* return_none() {
  Py_IncRef(kNone);
  return kNone;
}

static PyObject* new_ref(PyObject* object) {
  Py_IncRef(object);
  return object;
}

static bool has_type(PyObject* object, PyObject* type) {
  const Ref own{PyObject_Type(object)};
  return own.get() == type;
}

// A number that Python or torch answers; -1 where that fails.
static int64_t number_of(const Ref& object) { return object ? PyLong_AsLongLong(object.get()) : -1; }
static bool truth_of(const Ref& object) { return object && PyObject_IsTrue(object.get()) == 1; }

// Python's numbers may be any; an overflow is no error.
static int64_t difference(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }

// The numbers of a tuple, each less the same one, as int64 in a bytes object; null with an error where some are no such
// numbers.
static PyObject* packed(PyObject* tuple, int64_t less) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  PyObject* const bytes = count < 0 ? nullptr : PyBytes_FromStringAndSize(nullptr, count * (Py_ssize_t)sizeof(int64_t));
  int64_t* const to = bytes ? (int64_t*)PyBytes_AsString(bytes) : nullptr;
  for (Py_ssize_t n = 0; to && n < count; ++n) to[n] = difference(PyLong_AsLongLong(PyTuple_GetItem(tuple, n)), less);
  if (!bytes || !PyErr_Occurred()) return bytes;
  Py_DecRef(bytes);
  return nullptr;
}

// What is used of torch and of regard's own classes, set by start() and kept for ever.
struct Names {
  const DLPackExchangeAPI* dlpack;
  PyObject *tensor, *parameter, *positions, *paged, *int8_rows;  // types
  PyObject *is_neg, *empty_like, *empty_float_like, *new_empty;  // called with a tensor
  PyObject *get_num_threads, *is_grad_enabled,
      *guards;                                         // guards: true where somebody watches or changes what torch does
  PyObject *forward_ad, *float_tensor;                 // the module; a tensor of float32
  PyObject *fields, *dtype, *tuple, *lengths, *int64;  // of each class of values; types; a dtype
  PyObject *requires_grad, *dict, *made, *numbers, *dtype_name, *current_level, *pages, *block_table, *shape,
      *int8_numbers, *scales;  // attributes' names
};
static Names py;

// Whether a mode or a transform must see the call.
static bool watched() {
  for (Py_ssize_t n = 0; n < PyTuple_Size(py.guards); ++n) {
    const Ref answer{PyObject_CallFunctionObjArgs(PyTuple_GetItem(py.guards, n), nullptr)};
    if (!answer || PyObject_IsTrue(answer.get())) return true;
  }
  return number_of(Ref{PyObject_GetAttr(py.forward_ad, py.current_level)}) >= 0;
}

// What a function answers where Python must do it instead, and say what is wrong.
static PyObject* leave_to_python() {
  PyErr_Clear();
  return return_none();
}

static char* address(const DLTensor& t) { return (char*)t.data + t.byte_offset; }

static bool empty(const DLTensor& t) {
  for (int n = 0; n < t.ndim; ++n)
    if (t.shape[n] == 0) return true;
  return false;
}

// How a tensor lies; false where it lies elsewhere than in the CPU's memory, or nowhere.
static bool read_layout(PyObject* object, DLTensor& t) {
  if (py.dlpack->read(object, &t) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!address(t) && !empty(t)) return false;  // its memory has been given back
  return t.device.type == kDLCPU && t.dtype.lanes == 1;
}

// Whether an object is a tensor on the CPU, which the kernels can read where it lies: how it lies. It is a torch.Tensor
// itself, or a Parameter where `exact` is false; another subclass may hold its numbers elsewhere, or none.
static bool read(PyObject* object, DLTensor& t, bool exact) {
  if (!has_type(object, py.tensor) && (exact || !has_type(object, py.parameter))) return false;
  return read_layout(object, t) && !truth_of(Ref{PyObject_CallFunctionObjArgs(py.is_neg, object, nullptr)});
}

// The same of a tensor that torch has just made, whose numbers are all there.
static bool read_new(PyObject* object, DLTensor& t) { return has_type(object, py.tensor) && read_layout(object, t); }

// The dtype of an operand.
static int64_t dtype_of(DLDataType t) {
  if (t.code == kDLFloat)
    return t.bits == 32 ? REGARD_F32 : t.bits == 16 ? REGARD_F16 : t.bits == 64 ? REGARD_F64 : REGARD_OTHER;
  if (t.code == kDLBfloat) return t.bits == 16 ? REGARD_BF16 : REGARD_OTHER;
  if (t.code == kDLInt)
    return t.bits == 8 ? REGARD_I8 : t.bits == 32 ? REGARD_I32 : t.bits == 64 ? REGARD_I64 : REGARD_OTHER;
  return t.code == kDLBool ? REGARD_BOOL : REGARD_OTHER;
}

// An operand that lies as a tensor does. axes: of the call's operands; a tensor of one axis less has none of heads.
static bool as_operand(const DLTensor& t, int64_t axes, regard_tensor& operand) {
  constexpr int64_t kAxes = REGARD_BATCH_AXES + 3;
  if (axes > kAxes || (t.ndim != axes && t.ndim != axes - 1)) return false;
  int64_t steps[kAxes] = {}, last = 0;
  for (int64_t n = 0; n < t.ndim; ++n) {
    last += (t.shape[n] - 1) * t.strides[n];
    const int64_t from_end = t.ndim - n, missing = t.ndim < axes && from_end > 2;
    steps[kAxes - from_end - missing] = t.shape[n] == 1 ? 0 : t.strides[n];
  }
  operand.data = address(t);
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) operand.batch[n] = steps[n];
  operand.head = steps[kAxes - 3];
  operand.row = steps[kAxes - 2];
  operand.col = steps[kAxes - 1];
  operand.size = empty(t) ? 0 : last + 1;
  operand.dtype = dtype_of(t.dtype);
  return true;
}

// Whether the last `axes` axes of a tensor have no gaps.
static bool dense(const DLTensor& t, int axes) {
  int64_t step = 1;
  for (int n = t.ndim - 1; n >= t.ndim - axes && n >= 0; step *= t.shape[n--])
    if (t.shape[n] != 1 && t.strides[n] != step) return empty(t);
  return true;
}

// Whether the numbers of each row lie one behind the other, and no number belongs to two rows.
static bool rows_apart(const DLTensor& t) {
  const int last = t.ndim - 1;
  for (int n = 0; n < last; ++n)
    if (t.shape[n] != 1 && t.strides[n] < t.shape[last]) return empty(t);
  return t.shape[last] == 1 || t.strides[last] == 1;
}

// Fills in what a struct holds of one tensor; false where it cannot hold such a tensor. axes: as of as_operand.
static bool set_operand(char* to, const regard_place& place, int64_t axes, const DLTensor& t) {
  if (place.dtype < 0) return as_operand(t, axes, *(regard_tensor*)(to + place.at));
  const bool of_batch = place.batch >= 0;
  if (dtype_of(t.dtype) != place.dtype || !dense(t, of_batch ? 1 : t.ndim)) return false;
  *(const void**)(to + place.at) = address(t);
  if (place.stride >= 0) *(int64_t*)(to + place.stride) = t.ndim && t.shape[0] > 1 ? t.strides[0] : 0;
  if (!of_batch) return true;
  if (t.ndim > REGARD_BATCH_AXES + 1) return false;
  int64_t* const steps = (int64_t*)(to + place.batch);
  for (int n = 0; n < REGARD_BATCH_AXES; ++n) {
    const int own = n + t.ndim - 1 - REGARD_BATCH_AXES;
    steps[n] = own < 0 || t.shape[own] == 1 ? 0 : t.strides[own];
  }
  return true;
}

}  // namespace regard
