// Vectors of W lanes, for an instruction set that has set REGARD_W.
#pragma once
#include <stdint.h>

#define REGARD_INLINE static inline __attribute__((always_inline))

namespace regard {

constexpr int W = REGARD_W;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef vf vf_any __attribute__((aligned(4), may_alias));
typedef vi vi_any __attribute__((aligned(4), may_alias));
typedef vu vu_any __attribute__((aligned(4), may_alias));
typedef vh vh_any __attribute__((aligned(2), may_alias));

}  // namespace regard
