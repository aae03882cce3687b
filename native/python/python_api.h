// What is called of Python and of torch, declared here: building needs no headers of either, and one object serves
// every version. All of it is in the stable ABI of Python 3.10 (PEP 384) and in DLPack 1.3 (github.com/dmlc/dlpack).
#pragma once
#include <stdint.h>

extern "C" {

struct PyObject;
struct PyThreadState;
typedef intptr_t Py_ssize_t;

struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
  int flags;
  const char* doc;
};
constexpr int METH_FASTCALL = 0x80;

#if defined(_WIN32)
__declspec(dllimport)  // data of another library: functions need no such word
#endif
extern PyObject _Py_NoneStruct;  // NOLINT(bugprone-reserved-identifier): Python's name

void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
int PyObject_IsTrue(PyObject*);
int PyObject_IsInstance(PyObject*, PyObject* type);
int PyObject_RichCompareBool(PyObject*, PyObject*, int operation);
PyObject* PyUnicode_InternFromString(const char*);
PyObject* PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyBytes_FromStringAndSize(const char*, Py_ssize_t);
char* PyBytes_AsString(PyObject*);
Py_ssize_t PyBytes_Size(PyObject*);
PyObject* PyTuple_New(Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);       // borrowed
int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);  // takes the item
Py_ssize_t PyList_Size(PyObject*);                      // -1 with an error for what is no list
PyObject* PyList_GetItem(PyObject*, Py_ssize_t);        // borrowed
PyObject* PyDict_GetItem(PyObject*, PyObject* key);     // borrowed; null without an error where there is none
void* PyCapsule_GetPointer(PyObject*, const char* name);
PyObject* PyErr_Occurred();
void PyErr_Clear();
PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState*);

struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
constexpr int32_t kDLCPU = 1;
constexpr uint8_t kDLInt = 0, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6;

struct DLPackExchangeAPI {
  struct {
    uint32_t major, minor;
  } version;
  DLPackExchangeAPI* previous;
  void *allocate, *from_object, *to_object;
  int (*read)(PyObject*, DLTensor*);  // what the tensor owns, for as long as it lives and is not resized
};

}  // extern "C"
