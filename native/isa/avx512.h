// AVX-512 (F, BW, VL, DQ, CD): sixteen lanes.
#pragma once
#include "isa/avx2.h"

namespace regard {

struct RunsAvx512 {
  static constexpr const char* name = "avx512";
  static bool runs() {
#if defined(__x86_64__)
    return RunsAvx2::runs() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
#else
    return false;
#endif
  }
};

}  // namespace regard

#if defined(REGARD_SELECTED_AVX512) || defined(REGARD_SELECTED_AVX512BF16)
#define REGARD_W 16
#include "isa/plain.h"

namespace regard {

template <class Own>
struct Avx512Isa : PlainIsa<Own> {
  REGARD_INLINE vf multiply_add(vf acc, vf a, vf b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));  // as for AVX2
    return acc;
  }

  REGARD_INLINE uint32_t lanes_set(vi c) {
    return (uint32_t)__builtin_ia32_cvtd2mask512((__attribute__((vector_size(64))) int)c);
  }
};

}  // namespace regard
#endif

#if defined(REGARD_SELECTED_AVX512)
namespace regard {
struct Isa : Avx512Isa<Isa> {};
}
#endif
