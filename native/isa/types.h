// Vectors of W lanes, for an instruction set that has set REGARD_W; what the two operands of a product of tiles hold.
#pragma once
#include <stdint.h>

#include <utility>

#define REGARD_INLINE static inline __attribute__((always_inline))
// What is rarely called, and what holds a microkernel: inside a large function the compiler moves its accumulators to
// memory.
#define REGARD_NOINLINE static __attribute__((noinline))

namespace regard {

constexpr int W = REGARD_W;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int16_t vs __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));
typedef vf vf_any __attribute__((aligned(4), may_alias));
typedef vi vi_any __attribute__((aligned(4), may_alias));
typedef vu vu_any __attribute__((aligned(4), may_alias));
typedef vh vh_any __attribute__((aligned(2), may_alias));
typedef vb vb_any __attribute__((aligned(1), may_alias));

REGARD_INLINE vf load(const float* p) { return *(const vf_any*)p; }
REGARD_INLINE void store(float* p, vf x) { *(vf_any*)p = x; }
REGARD_INLINE vf splat(float x) { return x - (vf){}; }  // x - 0 keeps -0
REGARD_INLINE vf splat_any(const float* p) {  // 4 bytes of any meaning and alignment: bits are not to be computed with
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return (vf)(x - (vi){});
}
REGARD_INLINE vi splat_int(int32_t x) { return x + (vi){}; }

// Lane n of the result is lane Pick::lane(n) of a, or, from W on, of b.
template <class Pick, int... n>
REGARD_INLINE vf shuffle(vf a, vf b, std::integer_sequence<int, n...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, Pick::lane(n)...);
#else  // before GCC 12
  return __builtin_shuffle(a, b, vi{Pick::lane(n)...});
#endif
}

template <class Pick>
REGARD_INLINE vf shuffle(vf a, vf b) {
  return shuffle<Pick>(a, b, std::make_integer_sequence<int, W>{});
}

struct Floats {
  static constexpr bool pairs = false;
  static constexpr int parts = 0;
};

// The left operand of a matrix unit: a matrix of bfloat16, or several parts whose sum it is. Of row n, the 32 elements
// from 32 k on lie at at[n · row + k · step + p · part], p being the part.
struct LeftParts {
  const uint16_t* at;
  int64_t row, step, part;
};

// The left operand of outer products: number k of row n, or pair, is at[n / 16 · panel + k · step + n % 16].
struct Panels {
  const float* at;
  int64_t panel, step;
};

// The right operand: elements 2k and 2k + 1 of column n are at[k · row + n / 32 · column + n % 32 · 2 + p · part] and
// its neighbour.
struct RightParts {
  const uint16_t* at;
  int64_t row, column, part;
};

struct BFloat16Pairs {  // two neighbours along the sum in 4 bytes; their products are added in float
  static constexpr bool pairs = true;
  static constexpr int parts = 0;
};

template <int count>
struct BFloat16Parts {  // what a matrix unit multiplies: sums of so many bfloat16
  static constexpr bool pairs = false;
  static constexpr int parts = count;
};

// Which operands of a product are not yet in registers.
enum class Loads : int8_t { kBoth, kLeft, kRight };

// Which part of the left operand is multiplied with which of the right one. In a chain, each term shares an operand
// with the one before.
struct MatrixTerm {
  int8_t a, b;
  Loads loads = Loads::kBoth;
};

// Terms that are multiplied one after the other for 32 elements of the sum, then for the next 32.
struct MatrixChain {
  const MatrixTerm* terms;
  int64_t count;
};

// Numbers as sums of `parts` bfloat16, largest first, and the products of parts that their product needs: chains,
// smallest first.
template <int parts>
struct MatrixTerms;

template <>
struct MatrixTerms<1> {  // bfloat16
  static constexpr int kChains = 1;
  static constexpr MatrixTerm kOnly[] = {{0, 0}};
  static constexpr MatrixChain kChain[] = {{kOnly, 1}};
};

template <>
struct MatrixTerms<2> {  // float16: 11 bits as 8 and 3
  static constexpr int kChains = 1;
  static constexpr MatrixTerm kAll[] = {{0, 1}, {1, 1, Loads::kLeft}, {1, 0, Loads::kRight}, {0, 0, Loads::kLeft}};
  static constexpr MatrixChain kChain[] = {{kAll, 4}};
};

template <>
struct MatrixTerms<3> {  // float32: 24 bits as 8, 8 and 8. The products that are left out are below 2^-24 of the
                         // largest.
  static constexpr int kChains = 2;
  static constexpr MatrixTerm kSmall[] = {
      {2, 0}, {1, 0, Loads::kLeft}, {1, 1, Loads::kRight}, {0, 1, Loads::kLeft}, {0, 2, Loads::kRight}};
  static constexpr MatrixTerm kLarge[] = {{0, 0}};
  static constexpr MatrixChain kChain[] = {{kSmall, 5}, {kLarge, 1}};
};

}  // namespace regard
