// The instructions that every x86-64 or ARM processor has: four lanes.
#pragma once
#define REGARD_W 4
#include "isa/plain.h"

namespace regard {

struct Isa : PlainIsa<Isa> {
#if defined(__SSE__)
  REGARD_INLINE uint32_t lanes_set(vi c) { return (uint32_t)__builtin_ia32_movmskps((vf)c); }
#endif
};

}  // namespace regard
