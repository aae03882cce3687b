// The state (m, l, o) of the online softmax over a set of keys, as State is in src/regard/core/state.py, with scores in
// base 2: m ≥ max_j s_j, l = Σ_j 2^(s_j - m), o = Σ_j 2^(s_j - m) v_j. m and l are of one row (T = float), or of W
// rows, one in each lane (T = vf). o lies in memory: what merges states returns the factor of o.
#pragma once
#include <type_traits>

#include "core/vec.h"

namespace regard {

template <class T>
REGARD_INLINE T constant(float x) {
  if constexpr (std::is_same_v<T, vf>) return splat(x);
  else return x;
}

REGARD_INLINE vf exp2_of(vf x) { return exp2v(x); }
REGARD_INLINE float exp2_of(float x) { return exp2v(splat(x))[0]; }
REGARD_INLINE vf log_of(vf x) { return logv(x); }
REGARD_INLINE float log_of(float x) { return __builtin_logf(x); }
REGARD_INLINE float natural(float s) { return natural(splat(s))[0]; }

// What is subtracted from scores: the maximum; 0 for a row that sees nothing, since 2^(-inf - -inf) is NaN.
template <class T>
REGARD_INLINE T finite_shift(T m) {
  return m == constant<T>(-kInf) ? T{} : m;
}

// What turns the scores of a row into weights, as RowStats is in state.py: 2^(s - shift) · inverse.
template <class T>
struct RowStats {
  T shift, inverse;

  __attribute__((always_inline)) vf weight(vf s) const {
    if constexpr (std::is_same_v<T, vf>) return exp2v(s - shift) * inverse;
    else return exp2v(s - splat(shift)) * splat(inverse);
  }
};

template <class T>
struct SoftmaxState {
  T m = constant<T>(-kInf), l = T{};

  __attribute__((always_inline)) T shift() const { return finite_shift(m); }
  __attribute__((always_inline)) auto empty() const { return l == T{}; }  // the rows that see nothing

  // What l and o are multiplied by where m becomes top.
  __attribute__((always_inline)) T scale_to(T top) const { return exp2_of(m - finite_shift(top)); }

  // m becomes top ≥ m. Returns the factor of o.
  __attribute__((always_inline)) T raise(T top) {
    const T alpha = scale_to(top);
    l = l * alpha;
    m = top;
    return alpha;
  }

  // Merges keys whose weights, relative to top ≥ m, sum up to `sum`. Returns the factor of o.
  __attribute__((always_inline)) T merge(T top, T sum) {
    const T alpha = scale_to(top);
    l = l * alpha + sum;
    m = top;
    return alpha;
  }

  // Merges the state of other keys, whose m is not above this one's. Returns the factor of their o.
  __attribute__((always_inline)) T merge(const SoftmaxState& lower) {
    const T alpha = lower.scale_to(m);
    l += lower.l * alpha;
    return alpha;
  }

  // Merges the state of a sink: of one key with this logit and no value. Returns the factor of o.
  __attribute__((always_inline)) T merge_sink(T logit) {
    const T top = logit > m ? logit : m;
    return merge(top, exp2_of(logit - finite_shift(top)));
  }

  // The natural log-sum-exp.
  __attribute__((always_inline)) T lse() const { return empty() ? constant<T>(-kInf) : natural(m) + log_of(l); }

  __attribute__((always_inline)) RowStats<T> stats() const {
    return {empty() ? T{} : m, empty() ? T{} : constant<T>(1.0f) / l};
  }
};

// o = o · alpha + more, of W numbers of o.
REGARD_INLINE void merge_values(float* o, vf alpha, vf more) { store(o, load(o) * alpha + more); }

}  // namespace regard
