// exp and the activations built on it, on sixteen lanes: one polynomial and one order of operations in every
// variant.
//
// The coefficients are weighted minimax fits (Lawson's iteration in double precision) of the functions in the
// comments.
#pragma once

#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Returns y of e^x = y · 2^count with |ln y| ≤ ln(2) / 2, where count is x / ln(2) rounded to an integer.
inline F32 exp_mantissa(F32 x, F32 count) {
  const F32 r = fma(count, set1(-0x1.7f7d1cp-20f), fma(count, set1(-0x1.62e4p-1f), x));
  F32 q = set1(0.0013814431f);  // (e^r − 1 − r) / r², |r| ≤ ln(2) / 2
  q = fma(q, r, set1(0.00836879689f));
  q = fma(q, r, set1(0.0416683958f));
  q = fma(q, r, set1(0.1666652f));
  q = fma(q, r, set1(0.499999934f));
  return fma(r * r, q, r) + set1(1.0f);
}
inline F32 exp_parts(F32 x, I32& n) {
  n = round_to_int(x * set1(1.44269504f));
  return exp_mantissa(x, to_float(n));
}

// e^x within 1.1 ulp, including denormal results.  −∞ returns 0, above 88.7228 returns ∞, NaN stays NaN.
__attribute__((always_inline)) inline F32 exp(F32 x) {
  // In this argument order a NaN passes through min and max.
  x = min(set1(89.0f), max(set1(-104.0f), x));
  I32 n;
  const F32 y = exp_parts(x, n);
  // 2^n in two factors: n is −150 … 128, beyond the exponent range of one float.
  const I32 half = shift_right<1>(n), bias = set1i(127);
  return y * from_bits(shift_left<23>(half + bias)) * from_bits(shift_left<23>(n - half + bias));
}

// e^x for x ≤ 0, if any result below 3e-38 may be replaced by 3e-38.
inline F32 exp_weight(F32 x) {
  I32 n;
  const F32 y = exp_parts(max(set1(-86.5f), x), n);
  return y * from_bits(shift_left<23>(n + set1i(127)));
}

__attribute__((always_inline)) inline F32 sigmoid(F32 x) { return set1(1.0f) / (set1(1.0f) + exp(-x)); }

__attribute__((always_inline)) inline F32 tanh(F32 x) {
  const F32 size = abs(x), z = x * x;
  F32 q = set1(-0.00570497837f);  // (tanh(x) / x − 1) / x², |x| ≤ 0.625
  q = fma(q, z, set1(0.0206390787f));
  q = fma(q, z, set1(-0.0537397122f));
  q = fma(q, z, set1(0.133314422f));
  q = fma(q, z, set1(-0.333332819f));
  const F32 small = fma(x * z, q, x);
  const F32 large = set1(1.0f) - set1(2.0f) / (exp(size + size) + set1(1.0f));
  return select_greater(size, set1(0.625f), select_greater(x, zero(), large, -large), small);
}

// e^(t²/2) · Φ(−t) for t ≥ 0 from s = 1 / (1 + t/4).
__attribute__((always_inline)) inline F32 normal_tail(F32 s) {
  F32 p = set1(0.0165797523f);
  p = fma(p, s, set1(-0.0627926933f));
  p = fma(p, s, set1(0.0516535311f));
  p = fma(p, s, set1(0.0284343939f));
  p = fma(p, s, set1(0.0127128972f));
  p = fma(p, s, set1(0.0866564122f));
  p = fma(p, s, set1(0.0719995496f));
  p = fma(p, s, set1(0.0955156996f));
  p = fma(p, s, set1(0.0994925579f));
  p = fma(p, s, set1(0.0997479035f));
  return s * p;
}

// x · Φ(x) as a product, so that the left tail keeps its relative accuracy.
__attribute__((always_inline)) inline F32 gelu(F32 x) {
  const F32 t = abs(x), s = set1(1.0f) / fma(t, set1(0.25f), set1(1.0f));
  const F32 tail = exp(t * t * set1(-0.5f)) * normal_tail(s);
  return x * select_greater(x, zero(), set1(1.0f) - tail, tail);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
