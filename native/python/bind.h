// The struct of a call, made from that of a plan: what follows from where the tensors lie, how many queries and keys
// there are, and their positions.
#pragma once
#include "python/call_tensors.h"

namespace regard {

// Positions that count up by one: the first, and how many.
struct Span {
  int64_t q_first, queries, k_first, keys;
  Ref shifts{};  // where the queries of each sequence have a first position: how far it is from k_first, as int64 bytes
};

// The span that Python has as ((first, count), (first, count), ...); the first of the queries may be a tuple.
static bool read_span(PyObject* tuple, Span& span) {
  PyObject *const q = PyTuple_GetItem(tuple, 0), *const k = PyTuple_GetItem(tuple, 1);
  PyObject* const first = q && k ? PyTuple_GetItem(q, 0) : nullptr;
  if (!first) return false;
  span.queries = PyLong_AsLongLong(PyTuple_GetItem(q, 1));
  span.k_first = PyLong_AsLongLong(PyTuple_GetItem(k, 0));
  span.keys = PyLong_AsLongLong(PyTuple_GetItem(k, 1));
  if (has_type(first, py.tuple)) {
    span.q_first = span.k_first;
    span.shifts.own(packed(first, span.k_first));
  } else span.q_first = PyLong_AsLongLong(first);
  return !PyErr_Occurred();
}

// Fills in what positions decide; false where they are `most` or more apart, or not of this batch.
static bool set_positions(const regard_plan& plan, regard_call& c, const Span& span, int64_t most) {
  constexpr int kAxis = REGARD_BATCH_AXES - 1;
  PyObject* const shifts = span.shifts.get();
  const int64_t offset = difference(span.q_first, span.k_first),
                count = shifts ? PyBytes_Size(shifts) / (Py_ssize_t)sizeof(int64_t) : 1;
  const int64_t* const each = shifts ? (const int64_t*)PyBytes_AsString(shifts) : &offset;
  for (int64_t n = 0; n < count; ++n)
    if (each[n] <= -most || each[n] >= most) return false;
  if (shifts && (plan.axes < 4 || (count != 1 && count != c.batch[kAxis]))) return false;
  if (!plan.bounded) return true;
  c.first = offset - plan.before;
  c.last = offset + plan.after + 1;
  c.shifts = shifts ? each : nullptr;
  c.shifts_batch[kAxis] = count > 1;
  return true;
}

// A tensor for the output, (lead..., nq, dv): of v's dtype, of q's where v is in pages or int8, or float. Where it may
// be, it is laid out as q: see `empty_out` of launch.py.
static PyObject* empty_out(const regard_plan& plan, PyObject* q, PyObject* v, const CallTensors& given) {
  const bool of_q = given.paged || given.int8;
  const DLTensor &like = given.x[0], &values = given.x[of_q ? 0 : 2];
  const int64_t axes = plan.leads + 2;
  bool as_q = like.ndim == axes && like.shape[axes - 1] == plan.dv && rows_apart(like);
  for (int64_t n = 0; as_q && n < plan.leads; ++n) as_q = like.shape[n] == plan.lead[n];
  const bool alike = plan.float_out ? like.dtype.bits == 32
                                    : like.dtype.bits == values.dtype.bits && like.dtype.code == values.dtype.code;
  if (as_q && alike) return PyObject_CallFunctionObjArgs(py.empty_like, q, nullptr);  // the fastest way
  if (as_q && plan.float_out) return PyObject_CallFunctionObjArgs(py.empty_float_like, q, nullptr);
  const Ref shape{PyTuple_New(axes)};
  for (int64_t n = 0; shape && n < axes; ++n) {
    const int64_t size = n < plan.leads ? plan.lead[n] : n == plan.leads ? given.nq : plan.dv;
    PyTuple_SetItem(shape.get(), n, PyLong_FromLongLong(size));
  }
  PyObject* const source = plan.float_out ? py.float_tensor : of_q ? q : v;
  return shape ? PyObject_CallFunctionObjArgs(py.new_empty, source, shape.get(), nullptr) : nullptr;
}

// Tells the call which pages its keys and values lie in, where it has such; false where the table does not reach.
static bool set_pages(regard_call& c, const DLTensor& pages, const DLTensor& table) {
  if (pages.ndim != 4 || table.ndim != 2 || table.dtype.bits != 32 || table.shape[0] != c.batch[REGARD_BATCH_AXES - 1])
    return false;
  if (table.strides[1] != 1 || table.shape[1] * pages.shape[2] < c.nk) return false;
  c.block_table = (const int32_t*)address(table);
  c.block_table_batch[REGARD_BATCH_AXES - 1] = table.strides[0];
  c.page_size = pages.shape[2];
  c.pages = pages.shape[0];
  return true;
}

// A float tensor for the row statistics, (batch..., heads, nq, 2), which the call then leads to.
static PyObject* empty_row_stats(const regard_plan& plan, regard_call& c) {
  const int64_t batches = plan.axes - 3;
  const Ref shape{PyTuple_New(plan.axes)};
  for (int64_t n = 0; shape && n < plan.axes; ++n) {
    const int64_t rest[3] = {c.heads, c.nq, 2};
    const int64_t size = n < batches ? c.batch[REGARD_BATCH_AXES - batches + n] : rest[n - batches];
    PyTuple_SetItem(shape.get(), n, PyLong_FromLongLong(size));
  }
  Ref made{shape ? PyObject_CallFunctionObjArgs(py.new_empty, py.float_tensor, shape.get(), nullptr) : nullptr};
  DLTensor t;
  return made && read_new(made.get(), t) && as_operand(t, plan.axes, c.row_stats) ? made.release() : nullptr;
}

// Fills in a copy of the plan's struct; returns out. qkv: the objects of which `given` tells how they lie.
// span: null where positions are no such thing. Null without an error of Python's: the plan does not serve such a call.
static PyObject* bind(const regard_plan& plan, regard_call& c, PyObject* const* qkv, const CallTensors& given,
                      const Span* span) {
  constexpr int64_t kMost = (int64_t)1 << 31;  // kernels count keys, and distances, in 32 bits
  const int64_t nq = given.nq, nk = given.nk;
  if (nq <= 0 || nq >= kMost || nk <= 0 || nk >= kMost || (plan.queries && nq != plan.queries)) return nullptr;
  regard_tensor* const operands[3] = {&c.q, &c.k, &c.v};
  for (int n = 0; n < 3; ++n)
    if (!as_operand(given.x[n], plan.axes, *operands[n])) return nullptr;
  regard_tensor* const scales[2] = {&c.k_scales, &c.v_scales};
  for (int n = 0; n < 2 && given.int8; ++n)
    if (!as_operand(given.scales[n], plan.axes, *scales[n])) return nullptr;
  c.nq = nq;
  c.nk = nk;
  if (given.paged && !set_pages(c, given.x[1], given.table)) return nullptr;
  if (span) {
    if (span->queries != nq || span->keys != nk || !set_positions(plan, c, *span, kMost - nq - nk)) return nullptr;
  }
  const int64_t most = number_of(Ref{PyObject_CallFunctionObjArgs(py.get_num_threads, nullptr)});
  const double wanted = (double)plan.pair_work * (double)nq * (double)nk / (double)plan.thread_work;
  c.threads = wanted < 1 || most < 1 ? 1 : wanted < (double)most ? (int32_t)wanted : (int32_t)most;
  Ref out{empty_out(plan, qkv[0], qkv[2], given)};
  DLTensor made;
  if (!out || !read_new(out.get(), made) || !as_operand(made, plan.axes, c.out)) return nullptr;
  return out.release();
}

// Fills in a copy of the plan's struct for a backward: saved are q, k, v, the leaves, out and the row statistics.
// Writes new tensors for the gradients of q, k and v to `made`. Returns false where the plan does not serve such
// tensors.
static bool bind_backward(const regard_backward_plan& plan, regard_gradients& x, PyObject* saved, PyObject* cotangent,
                          Ref (&made)[3]) {
  const Py_ssize_t count = PyTuple_Size(saved);
  if (count < 5) return false;
  regard_tensor* const operands[5] = {&x.call.q, &x.call.k, &x.call.v, &x.call.out, &x.call.row_stats};
  regard_tensor* const gradients[3] = {&x.dq, &x.dk, &x.dv};
  DLTensor t;
  for (int n = 0; n < 5; ++n)
    if (!read(PyTuple_GetItem(saved, n < 3 ? n : count - 5 + n), t, true) || !as_operand(t, plan.axes, *operands[n]))
      return false;
  if (!read(cotangent, t, true) || t.strides[t.ndim - 1] != 1 || !as_operand(t, plan.axes, x.dout)) return false;
  if (x.dout.dtype != REGARD_F32 && x.dout.dtype != REGARD_BF16 && x.dout.dtype != REGARD_F16) return false;
  for (int n = 0; n < plan.leaves; ++n) {
    if (plan.leaf[n] >= count - 5 || !read(PyTuple_GetItem(saved, 3 + plan.leaf[n]), t, false)) return false;
    *(const void**)((char*)&x + plan.leaf_at[n]) = address(t);
  }
  for (int n = 0; n < 3; ++n) {
    if (!plan.needs[n]) continue;
    made[n].own(PyObject_CallFunctionObjArgs(py.empty_like, PyTuple_GetItem(saved, n), nullptr));
    if (!made[n] || !read_new(made[n].get(), t) || !as_operand(t, plan.axes, *gradients[n])) return false;
  }
  return true;
}

}  // namespace regard
