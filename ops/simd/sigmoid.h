// y · sigmoid(z), accurate to the precision of the type that the result is rounded to.
//
// No division and no conversion between float and integer, which run on one pipe where additions run on four:
// 1 / d starts from the bits of d, which approximate its logarithm, and adding 1.5 · 2^23 rounds to an
// integer.  Same order of operations in every variant.
#pragma once

#include "simd/accumulator_init.h"
#include "simd/exp.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Largest relative error: float32 3e-7, float16 9e-6, bfloat16 2e-4 (a tenth of its rounding error).
enum class Accuracy { f32, f16, bf16 };

template <typename T>
struct AccuracyOf {
  static constexpr Accuracy value = Accuracy::f32;
};
template <>
struct AccuracyOf<f16> {
  static constexpr Accuracy value = Accuracy::f16;
};
template <>
struct AccuracyOf<bf16> {
  static constexpr Accuracy value = Accuracy::bf16;
};

// 2^f for |f| ≤ 1/2, minimax fits of the relative error.
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 exp2_fraction(F32 f) {
  if (accuracy == Accuracy::bf16) {
    static constexpr AccumulatorInit c0{0.999928057f}, c1{0.693260968f}, c2{0.242611125f};
    return fma(fma(fma(set1(0.0551716685f), f, init(c2)), f, init(c1)), f, init(c0));
  }
  if (accuracy == Accuracy::f16) {
    static constexpr AccumulatorInit c0{0.999999285f}, c1{0.693121791f}, c2{0.240247443f}, c3{0.0559178591f};
    const F32 p = fma(fma(set1(0.00957010221f), f, init(c3)), f, init(c2));
    return fma(fma(p, f, init(c1)), f, init(c0));
  }
  static constexpr AccumulatorInit c0{1.0f}, c1{0.693147182f}, c2{0.240226462f}, c3{0.0555032864f},
      c4{0.00961848907f}, c5{0.00133999309f};
  F32 p = fma(set1(0.000153458124f), f, init(c5));
  p = fma(fma(p, f, init(c4)), f, init(c3));
  p = fma(fma(p, f, init(c2)), f, init(c1));
  return fma(p, f, init(c0));
}

// 1 / d for 1 ≤ d ≤ 2^125.  The relative error of the initial approximation is at most 5.1 %; a Newton step
// squares it, and the third-order step r + r (h + h²) with h = 1 − d r cubes it.
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 reciprocal(F32 d) {
  F32 r = from_bits(set1i(0x7ef31200) - bits(d));
  if (accuracy == Accuracy::bf16) {
    static constexpr AccumulatorInit one{1.0f};
    const F32 h = fnma(d, r, init(one));
    return fma(r, fma(h, h, h), r);
  }
  r = r * reciprocal_step(d, r);
  r = r * reciprocal_step(d, r);
  return accuracy == Accuracy::f32 ? r * reciprocal_step(d, r) : r;
}

// Upper bound of exp_minus's argument; e^−86 is negligible to the callers.
constexpr float kExpEnd = 86.0f;

// e^−x = power · y for −86 ≤ x ≤ 86, where power is a power of two; NaN input has no specified result.
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 exp_minus_parts(F32 x, F32& power) {
  static constexpr AccumulatorInit shift{0x1.8p23f + 127.0f};  // leaves the biased exponent in the low bits
  const F32 log2e = set1(1.44269504f), shifted = fnma(x, log2e, init(shift));
  F32 f = fnma(x, log2e, set1(shift.lanes[0]) - shifted);
  if (accuracy == Accuracy::f32) f = fnma(x, set1(1.92596303e-08f), f);
  power = from_bits(shift_left<23>(bits(shifted)));
  return exp2_fraction<accuracy>(f);
}
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 exp_minus(F32 x) {
  F32 power;
  const F32 y = exp_minus_parts<accuracy>(x, power);
  return y * power;
}
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 one_and_exp_minus(F32 x) {
  static constexpr AccumulatorInit one{1.0f};
  F32 power;
  const F32 y = exp_minus_parts<accuracy>(x, power);
  return fma(y, power, init(one));
}

__attribute__((always_inline)) inline F32 clamp_exp_floor(F32 x) { return at_least(x, set1(-kExpEnd)); }

// For z from clamp_exp_floor(); NaN if y is NaN.
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 times_sigmoid(F32 y, F32 z) {
  return y * reciprocal<accuracy>(one_and_exp_minus<accuracy>(at_most(z, set1(kExpEnd))));
}

// silu(x) · up
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 silu_times(F32 x, F32 up) {
  const F32 z = clamp_exp_floor(x);
  return times_sigmoid<accuracy>(z * up, z);
}

// x/2 · (1 + tanh(u / 2)) = x · sigmoid(u),  u = 2 √(2/π) · (x + 0.044715 x³)
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 gelu_tanh_times(F32 x, F32 up) {
  const F32 u = x * fma(x * x, set1(0.044715f * 1.59576912f), set1(1.59576912f));
  return times_sigmoid<accuracy>(clamp_exp_floor(x) * up, clamp_exp_floor(u));
}

// x · Φ(x) as in exp.h, for results that are rounded to 16 bits.
template <Accuracy accuracy>
__attribute__((always_inline)) inline F32 gelu_times(F32 x, F32 up) {
  const F32 t = at_most(abs(x), set1(13.0f)), s = reciprocal<Accuracy::f16>(fma(t, set1(0.25f), set1(1.0f)));
  const F32 tail = exp_minus<accuracy>(t * t * set1(0.5f)) * normal_tail(s);
  return clamp_exp_floor(x) * up * select_greater(x, zero(), set1(1.0f) - tail, tail);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
