// The struct of a call, made from that of a plan: what follows from where the tensors lie, how many queries and keys there are, and
// their positions.
#pragma once
#include "python/objects.h"

namespace regard {

// Positions that count up by one: the first, and how many.
struct Span {
  int64_t q_first, queries, k_first, keys;
};

// The span that Python has as ((first, count), (first, count), ...).
static bool read_span(PyObject* tuple, Span& span) {
  int64_t* const to[2][2] = {{&span.q_first, &span.queries}, {&span.k_first, &span.keys}};
  for (int side = 0; side < 2; ++side) {
    PyObject* const pair = PyTuple_GetItem(tuple, side);
    for (int n = 0; n < 2; ++n) {
      PyObject* const number = pair ? PyTuple_GetItem(pair, n) : nullptr;
      if (!number) return false;
      *to[side][n] = PyLong_AsLongLong(number);
    }
  }
  return !PyErr_Occurred();
}

// A tensor for the output, (lead..., nq, dv): of v's dtype, or float.
static PyObject* empty_out(const regard_plan& plan, PyObject* q, PyObject* v, const DLTensor (&given)[3], int64_t nq) {
  const DLTensor &like = given[0], &values = given[2];
  const int64_t axes = plan.leads + 2;
  bool as_q = like.ndim == axes && like.shape[axes - 1] == plan.dv && like.dtype.bits == (plan.float_out ? 32 : values.dtype.bits) &&
              (plan.float_out || like.dtype.code == values.dtype.code);
  for (int64_t n = 0; as_q && n < plan.leads; ++n) as_q = like.shape[n] == plan.lead[n];
  for (int64_t n = axes - 1, step = 1; as_q && n >= 0; step *= like.shape[n--]) as_q = like.shape[n] == 1 || like.strides[n] == step;
  if (as_q) return PyObject_CallFunctionObjArgs(py.empty_like, q, nullptr);  // the fastest way that torch has
  const Ref shape{PyTuple_New(axes)};
  for (int64_t n = 0; shape && n < axes; ++n) {
    const int64_t size = n < plan.leads ? plan.lead[n] : n == plan.leads ? nq : plan.dv;
    PyTuple_SetItem(shape.get(), n, PyLong_FromLongLong(size));
  }
  return shape ? PyObject_CallFunctionObjArgs(py.new_empty, plan.float_out ? py.float_tensor : v, shape.get(), nullptr) : nullptr;
}

// Tells the call which pages its keys and values lie in, where it has such; false where the table does not reach.
static bool set_pages(regard_call& c, const DLTensor& pages, const DLTensor& table) {
  if (pages.ndim != 4 || table.ndim != 2 || table.dtype.bits != 32 || table.shape[0] != c.batch[REGARD_BATCH_AXES - 1]) return false;
  if (table.strides[1] != 1 || table.shape[1] * pages.shape[2] < c.nk) return false;
  c.block_table = (const int32_t*)address(table);
  c.block_table_batch[REGARD_BATCH_AXES - 1] = table.strides[0];
  c.page_size = pages.shape[2], c.pages = pages.shape[0];
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
  return made && read(made.get(), t, true) && as_operand(t, plan.axes, c.row_stats) ? made.release() : nullptr;
}

// Fills in a copy of the plan's struct; returns out. k and v may be pages, so nk is told; v: any tensor of its dtype. span: null where
// positions are no such thing.
// Null without an error of Python's: the plan does not serve such a call.
static PyObject* bind(const regard_plan& plan, regard_call& c, PyObject* q, PyObject* v, const DLTensor (&given)[3], int64_t nq, int64_t nk,
                      const Span* span) {
  constexpr int64_t kMost = (int64_t)1 << 31;  // kernels count keys, and distances, in 32 bits
  if (nq <= 0 || nq >= kMost || nk <= 0 || nk >= kMost || (plan.queries && nq != plan.queries)) return nullptr;
  regard_tensor* const operands[3] = {&c.q, &c.k, &c.v};
  for (int n = 0; n < 3; ++n)
    if (!as_operand(given[n], plan.axes, *operands[n])) return nullptr;
  c.nq = nq, c.nk = nk;
  if (span) {
    const int64_t offset = span->q_first - span->k_first;
    if (span->queries != nq || span->keys != nk || (offset < 0 ? -offset : offset) + nq + nk >= kMost) return nullptr;
    if (plan.bounded) c.first = offset - plan.before, c.last = offset + plan.after + 1;
  }
  const int64_t most = number_of(Ref{PyObject_CallFunctionObjArgs(py.get_num_threads, nullptr)});
  const double wanted = (double)plan.pair_work * (double)nq * (double)nk / (double)plan.thread_work;
  c.threads = wanted < 1 || most < 1 ? 1 : wanted < (double)most ? (int32_t)wanted : (int32_t)most;
  Ref out{empty_out(plan, q, v, given, nq)};
  DLTensor made;
  if (!out || !read(out.get(), made, true) || !as_operand(made, plan.axes, c.out)) return nullptr;
  return out.release();
}

}  // namespace regard
