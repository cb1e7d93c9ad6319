// Sums and products of adjacent elements through each variant's load_pairs().  Arm's BF16 instructions take
// pairs directly: neon.h has overloads for them, with the same bits.
#pragma once

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_SIMD __attribute__((always_inline)) inline

template <typename T>
ARMLLM_SIMD void add_squares(const T* p, F32& even, F32& odd) {
  F32 a, b;
  load_pairs(p, a, b);
  even = fma(a, a, even);
  odd = fma(b, b, odd);
}
template <typename T>
ARMLLM_SIMD void add_values(const T* p, F32& even, F32& odd) {
  F32 a, b;
  load_pairs(p, a, b);
  even = even + a;
  odd = odd + b;
}

#if !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
ARMLLM_SIMD void multiply_pairs(const bf16* x, const bf16* w, F32& even, F32& odd) {
  F32 a, b, c, d;
  load_pairs(x, a, b);
  load_pairs(w, c, d);
  even = fma(a, c, zero());
  odd = fma(b, d, zero());
}
ARMLLM_SIMD void sum_pairs(const bf16* x, const bf16* y, F32& even, F32& odd) {
  F32 a, b, c, d;
  load_pairs(x, a, b);
  load_pairs(y, c, d);
  even = (a + zero()) + c;
  odd = (b + zero()) + d;
}
#endif

#undef ARMLLM_SIMD

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
