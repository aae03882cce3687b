// Elementary functions of any float, for programs: infinities and NaN as in IEEE 754 and in torch. Errors in ulp,
// against float64.
#pragma once
#include <cmath>

#include "core/vec.h"

namespace regard {

// One lane after the other: what compilers or the C library compute. Its errors are those of the C library (below 1 ulp
// in glibc).
template <class F>
REGARD_INLINE vf each_lane(vf x, const F& f) {
  float y[W];
  store(y, x);
  for (int n = 0; n < W; ++n) y[n] = f(y[n]);
  return load(y);
}

template <class F>
REGARD_INLINE vf each_lane(vf a, vf b, const F& f) {
  float x[W], y[W];
  store(x, a);
  store(y, b);
  for (int n = 0; n < W; ++n) x[n] = f(x[n], y[n]);
  return load(x);
}

// The greater and the lesser of two; NaN where either is.
REGARD_INLINE vf maximum(vf a, vf b) { return ((a > b) | (a != a)) ? a : b; }
REGARD_INLINE vf minimum(vf a, vf b) { return ((a < b) | (a != a)) ? a : b; }

// e^x to 4 ulp (3 with a fused multiply-add): as the square of e^(x/2), whose exponent fits. 0 below -104, inf
// above 88.7.
REGARD_INLINE vf exp_any(vf x) {
  const vf root = expv(lesser_of(splat(120.0f), greater_of(splat(-120.0f), x)) * splat(0.5f));
  return root * root;
}

// 2^x to 3 ulp, in the same way. 0 below -150, inf from 128 on.
REGARD_INLINE vf exp2_any(vf x) {
  const vf root = exp2v(lesser_of(splat(160.0f), greater_of(splat(-160.0f), x)) * splat(0.5f));
  return root * root;
}

// ln x to 2 ulp: -inf of 0, NaN of what is below.
REGARD_INLINE vf log_any(vf x) {
  const vi tiny = x < splat(0x1p-126f);
  const vf y = logv(select(tiny, x * splat(0x1p24f), x)) - select(tiny, splat(24 * kLn2), vf{});
  const vf low = select(x < vf{}, splat(__builtin_nanf("")), splat(-kInf));
  return x <= vf{} ? low : y;
}

// 1 / (1 + e^-x) to 4 ulp, without overflow: e^-|x| / (1 + e^-|x|) below 0.
REGARD_INLINE vf sigmoid(vf x) {
  const vf root = expv(greater_of(splat(-60.0f), absolute(x) * splat(-0.5f))), e = root * root;
  return Isa::quotient(x < vf{} ? e : splat(1.0f), splat(1.0f) + e);
}

// -1, 0 or 1; 0 of NaN.
REGARD_INLINE vf sign(vf x) { return x > vf{} ? splat(1.0f) : x < vf{} ? splat(-1.0f) : vf{}; }

// torch.remainder: of the divisor's sign.
REGARD_INLINE vf remainder_of(vf a, vf b) {
  return each_lane(a, b, [](float x, float y) {
    const float rest = __builtin_fmodf(x, y);
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
  });
}

// The greatest whole number not above a / b, for b != 0: exact, since the quotient of two 32-bit numbers as a double is
// no whole number unless it is one.
// Rounded down. A quotient of floats is right where both are whole numbers below 2^24; others are divided in double.
REGARD_INLINE vi floor_divide(vi a, vi b) {
  const vi most = splat_int(1 << 24), far = (a > most) | (a < -most) | (b > most) | (b < -most);
  if (!Isa::lanes_set(far)) {
    const vf quotient = __builtin_convertvector(a, vf) / __builtin_convertvector(b, vf);
    const vi whole = __builtin_convertvector(quotient, vi), rest = a - whole * b;
    return whole + ((rest != 0) & ((rest ^ b) < 0));  // true is -1
  }
  int32_t x[W], y[W];
  *(vi_any*)x = a;
  *(vi_any*)y = b;
  for (int n = 0; n < W; ++n) x[n] = (int32_t)__builtin_floor((double)x[n] / (double)y[n]);
  return *(const vi_any*)x;
}

}  // namespace regard
