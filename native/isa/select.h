// Isa, the instruction set that this object is compiled for: its width W, and the functions that use its instructions. Each has a header
// here, which also tells whether the processor runs it. To add one: its header, its two lines below, its line in
// CMakeLists.txt and in backends/native/ffi.py.
#pragma once

#if defined(REGARD_W)  // set by tests: the compiler splits vectors that the processor does not have
#include "isa/plain.h"
namespace regard {
struct Isa : PlainIsa<Isa> {};
}
#elif defined(__AVX512BF16__)
#define REGARD_SELECTED_AVX512BF16
#elif defined(__AVX512F__)
#define REGARD_SELECTED_AVX512
#elif defined(__AVX2__)
#define REGARD_SELECTED_AVX2
#else
#define REGARD_SELECTED_BASE
#endif

#include "isa/avx2.h"
#include "isa/avx512.h"
#include "isa/avx512bf16.h"
#include "isa/base.h"

namespace regard {

template <class... Each>
static bool runs_one(const char* name) {
  return ((__builtin_strcmp(name, Each::name) == 0 && Each::runs()) || ...);
}

// Whether this processor runs an instruction set, by name.
static bool runs(const char* name) { return runs_one<RunsBase, RunsAvx2, RunsAvx512, RunsAvx512Bf16>(name); }

}  // namespace regard
