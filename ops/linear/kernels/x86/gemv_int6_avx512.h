// gemv of scheme int6 with AVX-512 VNNI: one to eight tokens, one panel.
#pragma once

#include <type_traits>

#include "linear/kernels/x86/read_panel_avx512.h"

namespace armllm::avx512 {
namespace {

// An INT8 line of u = q + 32 from its bits 0 … 3 and 4 … 5.
template <int kLine>
ARMLLM_INLINE __m512i int6_line(__m512i low, __m512i high) {
  constexpr int kShift = kLine % 4 * 2 - 4;  // of bits 4 and 5
  if constexpr (kLine % 2 != 0) low = _mm512_srli_epi16(low, 4);
  if constexpr (kShift < 0) high = _mm512_slli_epi16(high, -kShift);
  if constexpr (kShift > 0) high = _mm512_srli_epi16(high, kShift);
  // low & 15 | high & 48
  return _mm512_ternarylogic_epi32(low, _mm512_and_si512(high, _mm512_set1_epi8(48)), _mm512_set1_epi8(15),
                                   0xec);
}

template <int T, Prefetch kPrefetch>
void gemv_int6_vpdpbusd(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                        int64_t first_token, float* out) {
  const int64_t groups = x.groups, row_bytes = x.row_bytes(), row_groups = x.row_groups();
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* group_sums = x.group_sums + first_token * row_groups;
  const uint8_t *w = panel + layout.values, *planes = panel + layout.multipliers;
  PanelStream<6, kPrefetch> stream(panel, layout);
  __m512i total[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_si512();
  for (int64_t g = 0; g < groups; ++g, w += 384, planes += 4) {
    const int8_t* xg = values + g * kGroup;
    stream.group();
    __m512i even[T], odd[T];  // two dependency chains per token
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      even[t] = _mm512_set1_epi32(4 * group_sums[t * row_groups + g]);  // −32 · Σ x
      odd[t] = _mm512_setzero_si512();
    }
    const auto step = [&](auto line, __m512i low, __m512i high) __attribute__((always_inline)) {
      constexpr int kLine = decltype(line)::value;
      const __m512i first = int6_line<kLine>(low, high), second = int6_line<kLine + 1>(low, high);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        dot(even[t], first, broadcast4(xg + t * row_bytes + kLine * 4));
        dot(odd[t], second, broadcast4(xg + t * row_bytes + kLine * 4 + 4));
      }
    };
    const __m512i high0 = load(w + 256), high1 = load(w + 320);
    step(std::integral_constant<int, 0>(), load(w), high0);
    step(std::integral_constant<int, 2>(), load(w + 64), high0);
    step(std::integral_constant<int, 4>(), load(w + 128), high1);
    step(std::integral_constant<int, 6>(), load(w + 192), high1);
    uint16_t plane[2];
    __builtin_memcpy(plane, planes, 4);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m512i sum = _mm512_add_epi32(even[t], odd[t]);
      total[t] = _mm512_add_epi32(total[t], sum);
      total[t] = _mm512_mask_add_epi32(total[t], plane[0], total[t], sum);
      total[t] = _mm512_mask_add_epi32(total[t], plane[1], total[t], _mm512_add_epi32(sum, sum));
    }
  }
  const __m512 scales = _mm512_loadu_ps(panel_scales(panel));
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
    _mm512_storeu_ps(out + t * kPanel, _mm512_mul_ps(_mm512_cvtepi32_ps(total[t]), scales));
}

}  // namespace
}  // namespace armllm::avx512
