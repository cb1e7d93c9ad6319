// gemv of scheme int3 with AVX-512 VNNI: one to eight tokens, one panel.
#pragma once

#include <type_traits>

#include "linear/kernels/x86/read_panel_avx512.h"

namespace armllm::avx512 {
namespace {

// A line of nibbles, each the u of a row, from its bits 0 and 1 and its bit 2.
template <int kLine>
ARMLLM_INLINE __m512i int3_line(__m512i low, __m512i high) {
  constexpr int kShift = kLine - 2;  // of bit 2
  if constexpr (kLine % 2 != 0) low = _mm512_srli_epi16(low, 2);
  if constexpr (kShift < 0) high = _mm512_slli_epi16(high, -kShift);
  if constexpr (kShift > 0) high = _mm512_srli_epi16(high, kShift);
  // low & 0x33 | high & 0x44
  return _mm512_ternarylogic_epi32(low, _mm512_and_si512(high, _mm512_set1_epi8(0x44)),
                                   _mm512_set1_epi8(0x33), 0xec);
}

template <int T, Prefetch kPrefetch>
void gemv_int3_vpdpbusd(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                        int64_t first_token, float* out) {
  const int64_t groups = x.groups, row_bytes = x.row_bytes(), row_groups = x.row_groups();
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* group_sums = x.group_sums + first_token * row_groups;
  const uint8_t *w = panel + layout.values, *multipliers = panel + layout.multipliers,
                *signs = panel + layout.signs;
  const __m512i ones = _mm512_set1_epi16(1), nibble = _mm512_set1_epi8(15);
  PanelStream<3, kPrefetch> stream(panel, layout);
  __m512i total[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_si512();
  for (int64_t g = 0; g < groups; ++g, w += 192, multipliers += 8, signs += 2) {
    const int8_t* xg = values + g * kGroup;
    stream.group();
    __m512i low_acc[T], high_acc[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      // −4 · Σ x, or −3 · Σ x for negative multipliers, in one of the two lanes of each row
      const int32_t eight = group_sums[t * row_groups + g], four = eight / 2, three = four - eight / 8;
      const __m512i plus = _mm512_set1_epi64(uint32_t(four)), minus = _mm512_set1_epi64(uint32_t(three));
      low_acc[t] = _mm512_mask_mov_epi64(plus, signs[0], minus);
      high_acc[t] = _mm512_mask_mov_epi64(plus, signs[1], minus);
    }
    const __m512i high_bits = load(w + 128);
    const auto step = [&](auto line, __m512i low_bits) __attribute__((always_inline)) {
      constexpr int kLine = decltype(line)::value;
      const __m512i both = int3_line<kLine>(low_bits, high_bits);
      const __m512i low = _mm512_and_si512(both, nibble),
                    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i eight = broadcast8(xg + t * row_bytes + kLine * 8);
        dot(low_acc[t], low, eight);
        dot(high_acc[t], high, eight);
      }
    };
    const __m512i first = load(w), second = load(w + 64);
    step(std::integral_constant<int, 0>(), first);
    step(std::integral_constant<int, 1>(), first);
    step(std::integral_constant<int, 2>(), second);
    step(std::integral_constant<int, 3>(), second);
    // Half a group's sum is at most (16·7 + 32·4)·127 in magnitude, so it fits 16 bits.
    const __m512i factor = _mm512_add_epi16(lane_nibbles(multipliers), ones);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      total[t] = _mm512_dpwssd_epi32(total[t], _mm512_packs_epi32(low_acc[t], high_acc[t]), factor);
  }
  const __m512 scales = _mm512_loadu_ps(panel_scales(panel));
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const __m512i sum = _mm512_permutexvar_epi32(lane_of_row(), total[t]);
    _mm512_storeu_ps(out + t * kPanel, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales));
  }
}

}  // namespace
}  // namespace armllm::avx512
