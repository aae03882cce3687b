// Vectors of W float lanes and what can be done with them, on compiler vectors: GCC and Clang, every processor.
#pragma once
#include "abi/structs.h"
#include "isa/select.h"

namespace regard {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kInf = __builtin_inff();
constexpr float kMaxFloat = 3.40282347e38f;  // the largest float

// Differences of positions; they wrap around where they do not fit.
REGARD_INLINE int32_t wrapping_sub(int64_t a, int64_t b) { return (int32_t)((uint64_t)a - (uint64_t)b); }
REGARD_INLINE vi wrapping_sub(vi a, vi b) { return (vi)((vu)a - (vu)b); }
REGARD_INLINE vf select(vi c, vf a, vf b) { return c ? a : b; }

// The second operand where either is NaN: callers choose the order.
REGARD_INLINE vf greater_of(vf a, vf b) { return a > b ? a : b; }
REGARD_INLINE vf lesser_of(vf a, vf b) { return a < b ? a : b; }

// The least whole number that is not below x, for |x| < 2^31; what is not finite stays so.
REGARD_INLINE vf ceiling(vf x) {
  const vf whole = __builtin_convertvector(__builtin_convertvector(x, vi), vf);
  const vf up = whole < x ? whole + splat(1.0f) : whole;
  return (vf)((vi)x & 0x7fffffff) < splat(2147483648.0f) ? up : x;
}

REGARD_INLINE vi lanes() {
  vi v;
  for (int n = 0; n < W; ++n) v[n] = n;
  return v;
}

REGARD_INLINE vf absolute(vf x) { return (vf)((vi)x & splat_int(0x7fffffff)); }

// Natural logarithms (biases, sinks) are added to scores in base 2: s + x log2(e), in one rounding where there is a
// fused multiply-add. Finite numbers stay finite, so that finfo.min hides no key of a row that has it everywhere: x is
// bounded by kBound, and a score of kSaturated or more, in base 2, stands for all larger ones.
constexpr float kBound = 2.3586e38f, kSaturated = REGARD_SATURATED;

REGARD_INLINE vi is_finite(vf x) { return absolute(x) < splat(kInf); }

REGARD_INLINE vf bounded(vf x) { return Isa::bounded(x, kBound); }

REGARD_INLINE vf plus_bounded(vf s, vf x) { return s + x * splat(kLog2e); }

// The same for any x and s. A sum of finite numbers that became infinite is replaced by the largest float, whose bits
// are one less.
REGARD_NOINLINE vf plus_saturated(vf s, vf x) {
  const vf y = plus_bounded(s, bounded(x));
  return (vf)((vi)y + ((absolute(y) == splat(kInf)) & is_finite(s) & is_finite(x)));
}
REGARD_INLINE vf plus_natural(vf s, vf x) {
  const vf y = plus_bounded(s, x);
  return Isa::lanes_set(~is_finite(y)) ? plus_saturated(s, x) : y;
}

// From base 2 to natural.
REGARD_INLINE vf natural(vf s) {
  const vf most = s < vf{} ? splat(-kMaxFloat) : splat(kMaxFloat);
  return (is_finite(s) & (absolute(s) >= splat(kSaturated))) ? most : s * splat(kLn2);
}

// Square roots, through memory: from there compilers vectorise them.
REGARD_INLINE vf sqrtv(vf x) {
  float y[W];
  store(y, x);
  for (int n = 0; n < W; ++n) y[n] = __builtin_sqrtf(y[n]);
  return load(y);
}

REGARD_INLINE vf take(const float* p, vi at) {
  vf x;
  for (int n = 0; n < W; ++n) x[n] = p[at[n]];
  return x;
}

constexpr float kMagic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer in the low bits

// 2^(n + f) for |f| ≤ 1/2, where t = n + kMagic.
REGARD_INLINE vf exp2_parts(vf t, vf f) {
  vf f2 = f * f;
  vf scale = (vf)(((vu)t << 23) + 0x3f800000u);  // by multiplication, which keeps every NaN; 2^-127 is 0
  vf a = splat(1.53458118e-4f) * f + splat(1.33999314e-3f);
  vf b = splat(9.61848896e-3f) * f + splat(5.55032878e-2f);
  vf c = splat(2.40226469e-1f) * f + splat(6.93147206e-1f);
  vf p = (a * f2 + b) * f2 + c;  // three short chains: the latency, not the count, is what costs
  return p * (f * scale) + scale;
}

// 2^x to 1.1 ulp: at most 2^-126 from it below -126, where numbers are not normal, and 0 below -127; NaN stays NaN.
// x ≤ 127.
REGARD_INLINE vf exp2v(vf x) {
  if constexpr (Isa::kExp2) return Isa::exp2(x);
  vf y = greater_of(splat(-127.0f), x), t = y + splat(kMagic);
  return exp2_parts(t, y - (t - splat(kMagic)));
}

// e^x to 1 ulp for |x| ≤ 86.
REGARD_INLINE vf expv(vf x) {
  vf t = x * splat(kLog2e) + splat(kMagic), n = t - splat(kMagic);
  vf f = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);  // ln 2 in two parts, the first of few bits
  return exp2_parts(t, f * splat(kLog2e));
}

// The parts of a logarithm, for x ≥ 2^-126: x = 2^exponent (1 + f), where 1 + f is between sqrt(1/2) and sqrt(2), and
// ln(1 + f) = f - f²/2 + cubic f². Cephes' polynomial.
struct LogParts {
  vf exponent, f, cubic;
};
REGARD_INLINE LogParts log_parts(vf x) {
  vi bits = (vi)((vu)x - 0x3f3504f3u);  // sqrt(1/2)
  vf e = __builtin_convertvector(bits >> 23, vf);
  vf f = (vf)((bits & splat_int(0x7fffff)) + splat_int(0x3f3504f3)) - splat(1.0f);
  vf p = splat(7.0376836292e-2f);
  const float more[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                        -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
#pragma GCC unroll 8
  for (int n = 0; n < 8; ++n) p = p * f + splat(more[n]);
  return {e, f, p * f};
}

// ln x to 2 ulp for x ≥ 2^-126: what is not finite stays so.
REGARD_INLINE vf logv(vf x) {
  const LogParts parts = log_parts(x);
  const vf e = parts.exponent, f = parts.f, z = f * f;
  const vf y = parts.cubic * z + e * splat(-2.12194440e-4f) - splat(0.5f) * z + f + e * splat(0.693359375f);
  return x < splat(kInf) ? y : x;
}

// ln(1 + x) for x > -1 (Higham, Accuracy and Stability of Numerical Algorithms, 1.14.1): what rounding does to 1 + x
// cancels. NaN for what is -1 or below; inf and NaN stay so.
REGARD_INLINE vf log1pv(vf x) {
  const vf u = splat(1.0f) + x, moved = u - splat(1.0f);
  const vf y = moved == vf{} ? x : logv(u) * (x / moved), inside = x > splat(-1.0f) ? y : splat(__builtin_nanf(""));
  return x < splat(kInf) ? inside : x;
}

// tanh to 2.5 ulp, of which half is the quotient's; ±1 for large arguments, NaN stays NaN. With E = e^2|x| - 1, it is
// E / (E + 2): e^r - 1 = r + r² p(r) for |r| ≤ ln 2 / 2 loses no digits of small arguments, and those of large ones do
// not change the quotient. Of r and of E only the halves are computed, which rounds as they do.
REGARD_INLINE vf tanhv(vf x) {
  const vf most = lesser_of(splat(12.0f), absolute(x));
  const vf t = most * splat(2 * kLog2e) + splat(kMagic), half = most - (t - splat(kMagic)) * splat(kLn2 / 2);
  vf p = splat(32 * 1.3882522471249104e-3f) * half + splat(16 * 8.366514928638935e-3f);
  p = p * half + splat(8 * 4.166720062494278e-2f);
  p = p * half + splat(4 * 1.6666543483734130e-1f);
  p = p * half + splat(2 * 4.999999701976776e-1f);
  p = p * (half * half) + half;
  const vf scale = (vf)(((vu)t << 23) + 0x3f800000u), e = p * scale + (scale * splat(0.5f) - splat(0.5f));
  const vf y = Isa::quotient(e, e + splat(1.0f));
  return (vf)((vi)y | ((vi)x & splat_int((int32_t)0x80000000)));
}

REGARD_INLINE float bf16_to_float(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

REGARD_INLINE float fp16_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, body = (uint32_t)(h & 0x7fff) << 13, u;
  if (body >= 0x0f800000) {
    u = body | 0x7f800000;  // inf, NaN
  } else {
    float scaled;  // the exponent is raised by a multiplication, which is exact and normalises denormals
    __builtin_memcpy(&scaled, &body, 4);
    scaled *= 0x1p112f;
    __builtin_memcpy(&u, &scaled, 4);
  }
  u |= sign;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

// Two vectors of floats as one of pairs of bfloat16, cut off.
REGARD_INLINE vf cut_pair(vf first, vf second) { return (vf)(((vu)first >> 16) | ((vu)second & 0xffff0000u)); }

REGARD_INLINE vf load_int8(const int8_t* p) { return __builtin_convertvector(Isa::widen_int8(*(const vb_any*)p), vf); }

REGARD_INLINE vf load_bf16(const uint16_t* p) {
  vh h = *(const vh_any*)p;
  return (vf)(Isa::widen_uint16(h) << 16);
}

REGARD_INLINE vf load_fp16(const uint16_t* p) { return Isa::widen_fp16(*(const vh_any*)p); }

// The bits of the nearest bfloat16, ties to even; NaN stays NaN, kept quiet.
REGARD_INLINE vu bf16_bits(vf x) {
  const vu u = (vu)x, kept = (u >> 16) | 0x40u, rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return x == x ? rounded : kept;
}

REGARD_INLINE void store_bf16(uint16_t* p, vf x) { *(vh_any*)p = __builtin_convertvector(bf16_bits(x), vh); }
REGARD_INLINE void store_fp16(uint16_t* p, vf x) { *(vh_any*)p = Isa::narrow_fp16(x); }

// Two vectors of floats as one of pairs of half precision.
template <int dtype>
REGARD_INLINE vf half_pair(vf first, vf second) {
  if constexpr (dtype == REGARD_BF16 && (Isa::kPairs || Isa::kMatrixUnit)) return Isa::pair_of(first, second);
  const auto bits = [](vf x) { return dtype == REGARD_BF16 ? bf16_bits(x) : Isa::widen_uint16(Isa::narrow_fp16(x)); };
  return (vf)(bits(first) | bits(second) << 16);
}

// Lane n of the result is lane n + step, around the end.
template <int step>
struct Turned {
  static constexpr int lane(int n) { return (n + step) % W; }
};

template <int step = W / 2>
REGARD_INLINE float sum_of_lanes(vf x) {
  if constexpr (step == 0) return x[0];
  else return sum_of_lanes<step / 2>(x + shuffle<Turned<step>>(x, x));
}

// No lane is NaN.
template <int step = W / 2>
REGARD_INLINE float greatest_lane(vf x) {
  if constexpr (step == 0) return x[0];
  else return greatest_lane<step / 2>(greater_of(x, shuffle<Turned<step>>(x, x)));
}

// W × W transpose in registers: row[n][m] becomes row[m][n].
template <int step = 1>
REGARD_INLINE void transpose(vf row[W]) {
#pragma GCC unroll 16
  for (int n = 0; n < W; ++n)
    if (!(n & step)) Isa::exchange_blocks<step>(row[n], row[n + step]);
  if constexpr (2 * step < W) transpose<2 * step>(row);
}

}  // namespace regard
