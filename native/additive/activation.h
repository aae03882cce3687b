// The additive similarity s_ij = Σ_k w_k f(a_ik + c_jk): f, its derivative, and how f is computed for many pairs at
// once.
//
// tanh and the sigmoid are separable: with A = e^(rate a), C = e^(rate c) and r = 1 / (1 + A C),
//   tanh(a + c) = 1 - 2 r, rate 2;   sigmoid(a + c) = r, rate -1.
// So a pair costs no exponential; two of them share a division, 1/x + 1/y = (x + y) / (x y).
#pragma once
#include "abi/structs.h"
#include "core/micro.h"

namespace regard {

constexpr float kMaxExponent = 86;  // up to this |rate · a| and |rate · c|, A and C are finite and A C is not 0 · inf
constexpr float kFarEnd = 0x1p64f;  // stands for infinity where derivatives are taken
constexpr int kProductBits = 59;    // two sums 1 + A C below 2^kProductBits have a finite product
constexpr int kWeightBits =
    30;  // weights below 2^-kWeightBits of the largest are replaced by that: what it adds is below rounding

// Σ_k w_k f = factor · Σ_k w_k (r - 1/2) + middle · Σ_k w_k. Subtracting 1/2 first keeps the digits that r and 1/2 do
// not share.
struct Separable {
  float rate, factor, middle;
};

REGARD_INLINE Separable separable(int activation) {
  return activation == REGARD_TANH ? Separable{2, -2, 0} : Separable{-1, 1, 0.5f};
}

struct TanhOf {
  REGARD_INLINE vf value(vf x, float) { return tanhv(x); }
  REGARD_INLINE vf slope(vf, vf y, float) { return splat(1.0f) - y * y; }
};

struct SigmoidOf {
  REGARD_INLINE vf value(vf x, float) {
    vf t = x * splat(-kLog2e);
    t = t > splat(126.0f) ? splat(126.0f) : t;  // exp2v's limit; NaN stays
    return splat(1.0f) / (splat(1.0f) + exp2v(t));
  }
  REGARD_INLINE vf slope(vf, vf y, float) { return y - y * y; }
};

struct LeakyReluOf {
  REGARD_INLINE vf value(vf x, float slope) { return x > splat(0.0f) ? x : x * splat(slope); }
  REGARD_INLINE vf slope(vf x, vf, float slope) { return x > splat(0.0f) ? splat(1.0f) : splat(slope); }
};

// x where it is finite. Else a number at which f' is that of x, and whose product with 0 is 0: 0 for NaN.
REGARD_INLINE vf finite_end(vf x) {
  const vf end = x > splat(0.0f) ? splat(kFarEnd) : x < splat(0.0f) ? splat(-kFarEnd) : vf{};
  return x - x == vf{} ? x : end;
}

// The largest |x| of `count` numbers; infinite if one is not finite. Absolute values are compared as integers, of which
// NaN is the largest.
REGARD_INLINE float max_abs(const float* x, int64_t count) {
  constexpr int32_t kSize = 0x7fffffff, kLimit = 0x7f800000;
  vi top = vi{};
  int32_t most = 0;
  int64_t n = 0;
  for (; n + W <= count; n += W) {
    const vi size = (vi)load(x + n) & splat_int(kSize);
    top = size > top ? size : top;
  }
  for (; n < count; ++n) {
    int32_t size;
    __builtin_memcpy(&size, x + n, 4);
    most = (size & kSize) > most ? size & kSize : most;
  }
  for (int m = 0; m < W; ++m) most = top[m] > most ? top[m] : most;
  most = most < kLimit ? most : kLimit;
  float found;
  __builtin_memcpy(&found, &most, 4);
  return found;
}

}  // namespace regard
