// Deinterleaves two registers of 32-bit pairs into their even and odd elements.
#pragma once

#include <immintrin.h>

namespace armllm {
namespace {

struct EvenOdd {
  __m512i even, odd;
};

__attribute__((always_inline)) inline EvenOdd even_odd_i32(__m512i low, __m512i high) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high)};
}

}  // namespace
}  // namespace armllm
