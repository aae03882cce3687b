// Calls of a structure seen before, from Python's objects to the kernels without the interpreter.
//
// Python keeps plans (src/regard/runtime/plan_cache.py); `bind` makes the struct of a call from a plan's. `remember`
// lets `attend` find a plan by itself, where nothing changes from call to call but the tensors, the lengths and the
// positions; whatever it does not know it leaves to Python, with the answer None.
#include "core/api.h"
#include "python/append.h"
#include "python/bind.h"
#include "python/known.h"

using namespace regard;

namespace {

// The span of positions, where they have one.
bool span_of(PyObject* positions, Span& span) {
  if (!has_type(positions, py.positions)) return false;
  const Ref members{PyObject_GetAttr(positions, py.dict)};
  PyObject* const made = members ? PyDict_GetItem(members.get(), py.made) : nullptr;
  return made && read_span(made, span);
}

// What Python needs to record a call: (plan, out, row_stats, (bytes of the struct, what it leads to), leaves).
PyObject* to_record(PyObject* owner, PyObject* out, PyObject* row_stats, const regard_call& call, const Span& span,
                    const Leaves& leaves) {
  Ref all{PyTuple_New(5)}, tensors{PyTuple_New(leaves.count)}, kernel{PyTuple_New(2)};
  Ref bytes{PyBytes_FromStringAndSize((const char*)&call, sizeof(call))};
  if (!all || !tensors || !kernel || !bytes) return nullptr;
  PyTuple_SetItem(kernel.get(), 0, bytes.release());
  PyTuple_SetItem(kernel.get(), 1, span.shifts ? new_ref(span.shifts.get()) : return_none());
  for (int n = 0; n < leaves.count; ++n) PyTuple_SetItem(tensors.get(), n, new_ref(leaves.objects[n]));
  PyObject* const parts[5] = {new_ref(owner), new_ref(out), new_ref(row_stats), kernel.release(), tensors.release()};
  for (int n = 0; n < 5; ++n) PyTuple_SetItem(all.get(), n, parts[n]);
  return all.release();
}

// attend(q, k, v, score, mask, positions, sink) -> out; of a call with gradients what to_record() says; or None.
PyObject* attend(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 7 || !remembered) return return_none();
  PyObject* const positions = arguments[5];
  CallObjects given{arguments, positions != kNone};
  if (!given.read() || watched()) return leave_to_python();
  Leaves leaves{given.tensors.nq, given.tensors.nk};
  Found found;
  if (!find(given, leaves, found)) return leave_to_python();
  const regard_plan& plan = *found.plan;
  const bool training = found.training;
  const CallTensors& tensors = given.tensors;
  Span span{0, tensors.nq, 0, tensors.nk};
  if (given.placed ? !span_of(positions, span) : tensors.nq != tensors.nk && plan.positional) return leave_to_python();
  regard_call call = *plan.call;
  Ref out{bind(plan, call, arguments, tensors, &span)};
  const Ref row_stats{out && training ? empty_row_stats(plan, call) : nullptr};
  if (!out || (training && !row_stats)) return leave_to_python();
  for (int n = 0; n < plan.leaves; ++n) {
    const int64_t which = plan.leaf[n];
    char* const operand = (char*)&call + plan.leaf_at[n];
    *(const void**)operand = address(leaves.tensors[which]);
    if (leaves.of_pairs[which] && !as_operand(leaves.tensors[which], plan.axes, *(regard_tensor*)operand))
      return leave_to_python();
  }
  PyThreadState* const state = PyEval_SaveThread();
  const int32_t code = ((int32_t (*)(const void*, void*))plan.entry)(&call, plan.parallel);
  PyEval_RestoreThread(state);
  if (code != REGARD_DONE) return leave_to_python();
  return training ? to_record(found.owner.get(), out.get(), row_stats.get(), call, span, leaves) : out.release();
}

// bind(plan, struct, q, k, v, span) -> out, or None where the plan does not serve such a call. plan, struct: addresses;
// span: see positions.Span, () for positions that are tensors, None for none.
PyObject* bind_call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  CallTensors tensors;
  if (count != 6 || !tensors.read(given + 2)) return leave_to_python();
  const regard_plan& plan = *(const regard_plan*)PyLong_AsVoidPtr(given[0]);
  regard_call& call = *(regard_call*)PyLong_AsVoidPtr(given[1]);
  const bool placed = given[5] != kNone, counted = !placed || PyTuple_Size(given[5]) > 0;
  Span span{0, tensors.nq, 0, tensors.nk};
  if (placed ? counted && !read_span(given[5], span) : tensors.nq != tensors.nk && plan.positional)
    return leave_to_python();
  Ref out{bind(plan, call, given + 2, tensors, counted ? &span : nullptr)};
  if (!out) return PyErr_Occurred() ? nullptr : return_none();
  return out.release();
}

// set_operands(struct, axes, places, tensor, ...) -> how many of the tensors, None for none there, it could tell the
// struct: all of them, or as many as come before one that it cannot hold. struct: an address; places: a regard_place
// for each; axes: of the call's operands, a tensor of one axis less has none of heads; 0: each tensor has its own.
PyObject* set_operands(PyObject*, PyObject* const* given, Py_ssize_t count) {
  char* const to = (char*)PyLong_AsVoidPtr(given[0]);
  const int64_t axes = PyLong_AsLongLong(given[1]);
  const regard_place* const places = (const regard_place*)PyBytes_AsString(given[2]);
  if (!places) return nullptr;
  if (PyBytes_Size(given[2]) != (count - 3) * (Py_ssize_t)sizeof(*places)) return PyLong_FromLongLong(0);
  DLTensor t;
  Py_ssize_t n = 0;
  for (; n < count - 3; ++n) {
    if (given[n + 3] == kNone) continue;
    if (!read(given[n + 3], t, false) || !set_operand(to, places[n], axes ? axes : t.ndim, t)) break;
  }
  return PyLong_FromLongLong(n);
}

// differentiate(plan, call, saved, cotangent) -> the gradients of q, k and v, None where there is none; None where
// Python must find them; or the code of what is wrong. plan: an address; call: the bytes of the forward's struct.
PyObject* differentiate(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4 || watched() || truth_of(Ref{PyObject_CallFunctionObjArgs(py.is_grad_enabled, nullptr)}))
    return leave_to_python();
  const regard_backward_plan& plan = *(const regard_backward_plan*)PyLong_AsVoidPtr(given[0]);
  regard_gradients x = *plan.gradients;
  if (PyBytes_Size(given[1]) != (Py_ssize_t)sizeof(x.call)) return leave_to_python();
  __builtin_memcpy(&x.call, PyBytes_AsString(given[1]), sizeof(x.call));
  Ref made[3], found{PyTuple_New(3)};
  if (!found || !bind_backward(plan, x, given[2], given[3], made)) return leave_to_python();
  PyThreadState* const state = PyEval_SaveThread();
  const int32_t code = ((int32_t (*)(const void*, void*))plan.entry)(&x, plan.parallel);
  PyEval_RestoreThread(state);
  if (code != REGARD_DONE) return PyLong_FromLongLong(code);
  for (int n = 0; n < 3; ++n) PyTuple_SetItem(found.get(), n, made[n] ? made[n].release() : return_none());
  return found.release();
}

// remember(plan, owner, outlines, q, k, v, score, mask, positions, sink): lets attend() serve calls like this one.
// plan: an address, which owner keeps.
PyObject* remember(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 10) return return_none();
  PyObject* const outlines = arguments[2];
  CallObjects given{arguments + 3, arguments[8] != kNone};
  if (!given.read()) return leave_to_python();
  Leaves leaves{given.tensors.nq, given.tensors.nk}, all{given.tensors.nq, given.tensors.nk};
  char isa[sizeof(Known::isa)];
  Found found;
  if (!read_isa(isa) || find(given, leaves, found)) return leave_to_python();
  PyObject* parts[3] = {given.score, given.mask, given.sink};
  for (int n = 0; n < 3; ++n) {
    const int before = all.count;
    if (!has_outline(parts[n], PyTuple_GetItem(outlines, n), all))
      return leave_to_python();  // it would not be found again
    if (all.count > before) parts[n] = nullptr;
  }
  const uint32_t needs = given.recorded ? needs_of(given.objects, 3) | needs_of(all.objects, all.count) << 3 : 0;
  Known one{(const regard_plan*)PyLong_AsVoidPtr(arguments[0]),
            new_ref(arguments[1]),
            new_ref(outlines),
            parts[0],
            parts[1],
            given.placed,
            given.tensors.paged,
            given.tensors.int8,
            needs,
            {},
            {},
            {},
            {}};
  for (int n = 0; n < 2; ++n)
    if (parts[n]) Py_IncRef(parts[n]);
  memcpy(one.isa, isa, sizeof isa);
  one.q.take(given.tensors.x[0]);
  one.k.take(given.tensors.x[1]);
  one.v.take(given.tensors.x[2]);
  replace(known[remembered++ % kMost], one);
  return return_none();
}

// forget(): as if nothing had been remembered.
PyObject* forget(PyObject*, PyObject* const*, Py_ssize_t) {
  remembered = 0;
  for (Known& place : known) replace(place, Known{});
  return return_none();
}

using Method = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// A method that answers without an error of Python's: one that is set beside an answer would be raised by another call.
template <Method kMethod>
PyObject* settled(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  PyObject* const answer = kMethod(self, given, count);
  if (answer && PyErr_Occurred()) PyErr_Clear();
  return answer;
}

PyMethodDef methods[] = {{"attend", settled<attend>, METH_FASTCALL, nullptr},
                         {"bind", settled<bind_call>, METH_FASTCALL, nullptr},
                         {"set_operands", settled<set_operands>, METH_FASTCALL, nullptr},
                         {"differentiate", settled<differentiate>, METH_FASTCALL, nullptr},
                         {"write_rows", settled<write_rows>, METH_FASTCALL, nullptr},
                         {"round_rows", settled<round_rows>, METH_FASTCALL, nullptr},
                         {"write_rounded_rows", settled<write_rounded_rows>, METH_FASTCALL, nullptr},
                         {"write_page_rows", settled<write_page_rows>, METH_FASTCALL, nullptr},
                         {"write_rounded_page_rows", settled<write_rounded_page_rows>, METH_FASTCALL, nullptr},
                         {"remember", settled<remember>, METH_FASTCALL, nullptr},
                         {"forget", settled<forget>, METH_FASTCALL, nullptr}};

}  // namespace

// The functions above, from what they use of Python's, in the order of Names.
REGARD_API PyObject* regard_start(PyObject* given) {
  PyObject** const to[] = {
      &py.tensor,          &py.parameter,  &py.positions,        &py.paged,        &py.int8_rows,
      &py.is_neg,          &py.empty_like, &py.empty_float_like, &py.new_empty,    &py.get_num_threads,
      &py.is_grad_enabled, &py.guards,     &py.forward_ad,       &py.float_tensor, &py.fields,
      &py.dtype,           &py.tuple,      &py.lengths,          &py.int64};
  constexpr Py_ssize_t kCount = sizeof(to) / sizeof(to[0]);
  if (PyTuple_Size(given) != kCount + 1) return return_none();
  py.dlpack = (const DLPackExchangeAPI*)PyCapsule_GetPointer(PyTuple_GetItem(given, 0), "dlpack_exchange_api");
  if (!py.dlpack) return nullptr;
  if (py.dlpack->version.major != 1 || !py.dlpack->read) return return_none();
  for (Py_ssize_t n = 0; n < kCount; ++n) *to[n] = new_ref(PyTuple_GetItem(given, n + 1));
  const struct {
    PyObject** to;
    const char* name;
  } names[] = {{&py.requires_grad, "requires_grad"},
               {&py.dict, "__dict__"},
               {&py.made, "_span"},
               {&py.numbers, "_numbers"},
               {&py.dtype_name, "dtype"},
               {&py.current_level, "_current_level"},
               {&py.pages, "pages"},
               {&py.block_table, "block_table"},
               {&py.shape, "shape"},
               {&py.int8_numbers, "numbers"},
               {&py.scales, "scales"}};
  for (const auto& one : names) *one.to = PyUnicode_InternFromString(one.name);
  constexpr Py_ssize_t kMethods = sizeof(methods) / sizeof(methods[0]);
  PyObject* const made = PyTuple_New(kMethods);
  for (Py_ssize_t n = 0; made && n < kMethods; ++n)
    PyTuple_SetItem(made, n, PyCFunction_NewEx(&methods[n], nullptr, nullptr));
  return made;
}

REGARD_API uint64_t regard_abi() { return REGARD_ABI; }
