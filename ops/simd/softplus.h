// ln(1 + e^x) on sixteen lanes: one series and one order of operations in every variant.
#pragma once

#include "simd/exp.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// 2 · atanh(z) = ln((1 + z) / (1 − z)) for |z| ≤ 1/3, by its series; relative error 1e-9.
inline F32 twice_atanh(F32 z) {
  const F32 y = z * z;
  F32 q = set1(2.0f / 17.0f);
  q = fma(q, y, set1(2.0f / 15.0f));
  q = fma(q, y, set1(2.0f / 13.0f));
  q = fma(q, y, set1(2.0f / 11.0f));
  q = fma(q, y, set1(2.0f / 9.0f));
  q = fma(q, y, set1(2.0f / 7.0f));
  q = fma(q, y, set1(2.0f / 5.0f));
  q = fma(q, y, set1(2.0f / 3.0f));
  return fma(z * y, q, z + z);
}

// ln(1 + e^x) = max(x, 0) + ln(1 + e^−|x|); NaN stays NaN.
__attribute__((always_inline)) inline F32 softplus(F32 x) {
  const F32 e = exp(-abs(x));
  return max(zero(), x) + twice_atanh(e / (set1(2.0f) + e));
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
