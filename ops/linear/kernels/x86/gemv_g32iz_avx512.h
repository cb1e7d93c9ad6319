// gemv of scheme g32iz with AVX-512 VNNI: one to eight tokens, one panel.
#pragma once

#include "linear/kernels/x86/read_panel_avx512.h"

namespace armllm::avx512 {
namespace {

// Multipliers m and products m · z of two groups, in the lane order of VPACKSSDW: the low word of a lane is
// that of the first group.
struct TwoGroups {
  __m512i m, product;

  ARMLLM_INLINE TwoGroups(const uint8_t* multipliers, const uint8_t* zero_points) {
    const __m512i multiplier_bytes = _mm512_set_epi32(
        0xff0fff07, 0xff0eff06, 0xff0fff07, 0xff0eff06, 0xff0dff05, 0xff0cff04, 0xff0dff05, 0xff0cff04,
        0xff0bff03, 0xff0aff02, 0xff0bff03, 0xff0aff02, 0xff09ff01, 0xff08ff00, 0xff09ff01, 0xff08ff00);
    const __m512i zero_bytes = _mm512_set_epi32(
        0x07060302, 0x07060302, 0x05040100, 0x05040100, 0x07060302, 0x07060302, 0x05040100, 0x05040100,
        0x07060302, 0x07060302, 0x05040100, 0x05040100, 0x07060302, 0x07060302, 0x05040100, 0x05040100);
    const __m512i zero_shifts = _mm512_set_epi32(0x000e000e, 0x000c000c, 0x000e000e, 0x000c000c, 0x000a000a,
                                                 0x00080008, 0x000a000a, 0x00080008, 0x00060006, 0x00040004,
                                                 0x00060006, 0x00040004, 0x00020002, 0, 0x00020002, 0);
    const __m512i nibble_shifts = _mm512_set_epi32(4, 4, 0, 0, 4, 4, 0, 0, 4, 4, 0, 0, 4, 4, 0, 0);
    const __m512i bytes = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load16(multipliers)), multiplier_bytes);
    const __m512i nibbles = _mm512_and_si512(_mm512_srlv_epi32(bytes, nibble_shifts), _mm512_set1_epi16(15));
    m = _mm512_add_epi16(nibbles, _mm512_set1_epi16(1));
    const __m512i halves =
        _mm512_shuffle_epi8(broadcast8(reinterpret_cast<const int8_t*>(zero_points)), zero_bytes);
    const __m512i two = _mm512_and_si512(_mm512_srlv_epi16(halves, zero_shifts), _mm512_set1_epi16(3));
    product = _mm512_mullo_epi16(m, _mm512_add_epi16(two, _mm512_set1_epi16(kLowestZeroPoint)));
  }
  // The multipliers of one group in both words of a lane.
  template <int kGroupOfTwo>
  ARMLLM_INLINE __m512i factor() const {
    const __m512i words = _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100);
    return _mm512_shuffle_epi8(m, _mm512_add_epi8(words, _mm512_set1_epi8(2 * kGroupOfTwo)));
  }
};

// −Σ x of up to sixteen groups, and zeros for the rest.
ARMLLM_INLINE void store_sums(const int32_t* group_sums, int64_t groups, int16_t* sums) {
  const __mmask16 some = __mmask16(groups < 16 ? (1u << groups) - 1 : 0xffff);
  const __m512i eights = _mm512_maskz_loadu_epi32(some, group_sums);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), _mm512_cvtepi32_epi16(_mm512_srai_epi32(eights, 3)));
}

// Sums of u · x end with each group, and −m · z · Σ x is added for two groups at a time.
template <int T, Prefetch kPrefetch>
void gemv_g32iz_vpdpbusd(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                         int64_t first_token, float* out) {
  const int64_t groups = x.groups, row_bytes = x.row_bytes(), row_groups = x.row_groups();
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* group_sums = x.group_sums + first_token * row_groups;
  const uint8_t *w = panel + layout.values, *multipliers = panel + layout.multipliers,
                *zero_points = panel + layout.zero_points;
  PanelStream<4, kPrefetch> stream(panel, layout);
  __m512i total[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_si512();
  const auto add_group = [&](__m512i factor) __attribute__((always_inline)) {
    __m512i low_acc[T], high_acc[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) low_acc[t] = high_acc[t] = _mm512_setzero_si512();
    stream.group();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i line = load(w + j * 64), low = low_rows(line), high = high_rows(line);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i eight = broadcast8(values + t * row_bytes + j * 8);
        dot(low_acc[t], low, eight);
        dot(high_acc[t], high, eight);
      }
    }
    w += 256;
    values += kGroup;
    // Half a group's sum is at most 16 · 15 · 127 in magnitude, so it fits 16 bits.
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      total[t] = _mm512_dpwssd_epi32(total[t], _mm512_packs_epi32(low_acc[t], high_acc[t]), factor);
  };
  int16_t sums[T][16];
  for (int64_t g = 0; g < groups; g += 2, multipliers += 16, zero_points += 8) {
    if (g % 16 == 0)
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) store_sums(group_sums + t * row_groups + g, groups - g, sums[t]);
    const TwoGroups two(multipliers, zero_points);  // the sections are padded
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) dot_broadcast2(total[t], two.product, sums[t] + g % 16);
    add_group(two.factor<0>());
    if (g + 1 < groups) add_group(two.factor<1>());
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
