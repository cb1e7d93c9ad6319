// gemv with AVX-512 VNNI: one to eight tokens, one panel.
#pragma once

#include "linear/kernels/x86/gemv_g32iz_avx512.h"
#include "linear/kernels/x86/gemv_int3_avx512.h"
#include "linear/kernels/x86/gemv_int6_avx512.h"
#include "linear/kernels/x86/read_panel_avx512.h"
#include "simd/deinterleave_avx512.h"

namespace armllm::avx512 {
namespace {

// Schemes whose integer sums end with each group: float group scales, or the multipliers of g32i.
template <bool kMultiplied, int T, Prefetch kPrefetch>
void gemv_grouped_vpdpbusd(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                           int64_t first_token, float* out) {
  const int64_t groups = x.groups, row_bytes = x.row_bytes(), step = groups_per_scale(layout.scheme);
  const int8_t* values = x.values + first_token * row_bytes;
  const int64_t row_groups = x.row_groups();
  const int32_t* group_sums = x.group_sums + first_token * row_groups;
  const uint8_t* w = panel + layout.values;
  const bool zero_points = has_zero_points(layout.scheme);
  // A symmetric scheme adds the correction to one of the two lanes of each row.
  const __mmask16 correction_lanes = zero_points ? 0 : 0x5555;
  const __m512i ones = _mm512_set1_epi16(1);
  PanelStream<4, kPrefetch> stream(panel, layout);
  __m512i total[T];
  __m512 total_f[T];
  int32_t correction[T];  // −8 · Σ x since the last scale
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    total[t] = _mm512_setzero_si512();
    total_f[t] = _mm512_setzero_ps();
    correction[t] = 0;
  }
  int64_t left = step;  // groups left of this scale
  for (int64_t g = 0; g < groups; ++g) {
    __m512i low_acc[T], high_acc[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      low_acc[t] = high_acc[t] = _mm512_maskz_set1_epi32(correction_lanes, group_sums[t * row_groups + g]);
      if constexpr (!kMultiplied) correction[t] += group_sums[t * row_groups + g];
    }
    const int8_t* xg = values + g * kGroup;
    stream.group();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, w += 64) {
      const __m512i line = load(w), low = low_rows(line), high = high_rows(line);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i eight = broadcast8(xg + t * row_bytes + j * 8);
        dot(low_acc[t], low, eight);
        dot(high_acc[t], high, eight);
      }
    }
    // Half a group's sum is at most 16·15·127 in magnitude, or 32·8·127 with the correction, so it fits 16
    // bits.
    __m512i factor = ones;
    if constexpr (kMultiplied)
      factor = _mm512_add_epi16(lane_nibbles(panel + layout.multipliers + g * 8), ones);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      total[t] = _mm512_dpwssd_epi32(total[t], _mm512_packs_epi32(low_acc[t], high_acc[t]), factor);
    if constexpr (!kMultiplied) {
      if (--left != 0 && g + 1 != groups) continue;
      const int64_t column = g / step;
      left = step;
      const __m512 scale = _mm512_permutexvar_ps(row_of_lane(), group_scales(panel, layout, column));
      __m512i zero = _mm512_setzero_si512();
      if (zero_points)
        zero = _mm512_and_si512(lane_nibbles(panel + layout.zero_points + column * 8), _mm512_set1_epi32(15));
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        // −z · Σ x; |Σ x| of 128 values fits 16 bits
        if (zero_points) total[t] = _mm512_dpwssd_epi32(total[t], zero, _mm512_set1_epi32(correction[t] / 8));
        total_f[t] = _mm512_add_ps(total_f[t], _mm512_mul_ps(scale, _mm512_cvtepi32_ps(total[t])));
        total[t] = _mm512_setzero_si512();
        correction[t] = 0;
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    if constexpr (kMultiplied) {
      const __m512i sum = _mm512_permutexvar_epi32(lane_of_row(), total[t]);
      _mm512_storeu_ps(out + t * kPanel,
                       _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(panel_scales(panel))));
    } else {
      _mm512_storeu_ps(out + t * kPanel, _mm512_permutexvar_ps(lane_of_row(), total_f[t]));
    }
  }
}

// Sums the two lanes of each row, in row order.
ARMLLM_INLINE __m512i add_halves(__m512i low, __m512i high) {
  const EvenOdd lanes = even_odd_i32(low, high);
  return _mm512_add_epi32(lanes.even, lanes.odd);
}

// One scale per row: sums run over all of K, and the zero points need a single product at the end.
template <int T, Prefetch kPrefetch>
void gemv_row_vpdpbusd(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                       int64_t first_token, float* out) {
  const int64_t groups = x.groups, row_bytes = x.row_bytes();
  const int8_t* values = x.values + first_token * row_bytes;
  const int64_t row_groups = x.row_groups();
  const int32_t* group_sums = x.group_sums + first_token * row_groups;
  const uint8_t* w = panel + layout.values;
  PanelStream<4, kPrefetch> stream(panel, layout);
  __m512i low_acc[T], high_acc[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) low_acc[t] = high_acc[t] = _mm512_setzero_si512();
  for (int64_t g = 0; g < groups; ++g) {
    const int8_t* xg = values + g * kGroup;
    stream.group();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, w += 64) {
      const __m512i line = load(w), low = low_rows(line), high = high_rows(line);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i eight = broadcast8(xg + t * row_bytes + j * 8);
        dot(low_acc[t], low, eight);
        dot(high_acc[t], high, eight);
      }
    }
  }
  __m512i zero = _mm512_set1_epi32(8);
  if (has_zero_points(layout.scheme)) zero = row_nibbles_i32(panel + layout.zero_points);
  const __m512 scales = _mm512_loadu_ps(panel_scales(panel));
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    int32_t correction = 0;  // −8·Σ x
    for (int64_t g = 0; g < groups; ++g) correction += group_sums[t * row_groups + g];
    const __m512i sum = _mm512_add_epi32(add_halves(low_acc[t], high_acc[t]),
                                         _mm512_mullo_epi32(zero, _mm512_set1_epi32(correction / 8)));
    _mm512_storeu_ps(out + t * kPanel, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales));
  }
}

template <int T, Prefetch kPrefetch>
void gemv_i8_vpdpbusd(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                      int64_t first_token, float* out) {
  const int64_t groups = x.groups, row_bytes = x.row_bytes();
  const int8_t* values = x.values + first_token * row_bytes;
  const int64_t row_groups = x.row_groups();
  const int32_t* group_sums = x.group_sums + first_token * row_groups;
  const uint8_t* w = panel + layout.values;
  const __m512i flip = _mm512_set1_epi8(-128);
  PanelStream<8, kPrefetch> stream(panel, layout);
  __m512i even[T], odd[T];  // two dependency chains per token
  int32_t correction[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    even[t] = odd[t] = _mm512_setzero_si512();
    correction[t] = 0;
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int8_t* xg = values + g * kGroup;
    stream.group();
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) correction[t] += group_sums[t * row_groups + g];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, w += 128) {
      const __m512i first = _mm512_xor_si512(load(w), flip), second = _mm512_xor_si512(load(w + 64), flip);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        dot(even[t], first, broadcast4(xg + t * row_bytes + j * 8));
        dot(odd[t], second, broadcast4(xg + t * row_bytes + j * 8 + 4));
      }
    }
  }
  const __m512 scales = _mm512_loadu_ps(panel_scales(panel));
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(even[t], odd[t]), _mm512_set1_epi32(16 * correction[t]));
    _mm512_storeu_ps(out + t * kPanel, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales));
  }
}

template <int T, Prefetch kPrefetch = Prefetch::software_far>
void gemv_vpdpbusd_by_scheme(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                             int64_t first, float* out) {
  if (layout.scheme == Scheme::i8) return gemv_i8_vpdpbusd<T, kPrefetch>(panel, layout, x, first, out);
  if (layout.scheme == Scheme::g32iz) return gemv_g32iz_vpdpbusd<T, kPrefetch>(panel, layout, x, first, out);
  if (layout.scheme == Scheme::int3) return gemv_int3_vpdpbusd<T, kPrefetch>(panel, layout, x, first, out);
  if (layout.scheme == Scheme::int6) return gemv_int6_vpdpbusd<T, kPrefetch>(panel, layout, x, first, out);
  if (layout.scheme == Scheme::g32i)
    return gemv_grouped_vpdpbusd<true, T, kPrefetch>(panel, layout, x, first, out);
  if (has_float_groups(layout.scheme))
    return gemv_grouped_vpdpbusd<false, T, kPrefetch>(panel, layout, x, first, out);
  return gemv_row_vpdpbusd<T, kPrefetch>(panel, layout, x, first, out);
}

// Choice measured on Zen 4 and 5 and on a Xeon with AMX; see Prefetch.
void gemv_one_token(const uint8_t* panel, const PanelLayout& layout, const Activations& x, int64_t first,
                    float* out) {
  static const bool intel = __builtin_cpu_is("intel");
  if (intel) return gemv_vpdpbusd_by_scheme<1, Prefetch::software_near>(panel, layout, x, first, out);
  if (layout.scheme == Scheme::i8)
    return gemv_i8_vpdpbusd<1, Prefetch::hardware>(panel, layout, x, first, out);
  return gemv_vpdpbusd_by_scheme<1, Prefetch::software_one>(panel, layout, x, first, out);
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first, int tokens, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  switch (tokens) {
    case 1:
      return gemv_one_token(panel, layout, x, first, out);
    case 2:
      return gemv_vpdpbusd_by_scheme<2>(panel, layout, x, first, out);
    case 3:
      return gemv_vpdpbusd_by_scheme<3>(panel, layout, x, first, out);
    case 4:
      return gemv_vpdpbusd_by_scheme<4>(panel, layout, x, first, out);
    case 5:
      return gemv_vpdpbusd_by_scheme<5>(panel, layout, x, first, out);
    case 6:
      return gemv_vpdpbusd_by_scheme<6>(panel, layout, x, first, out);
    case 7:
      return gemv_vpdpbusd_by_scheme<7>(panel, layout, x, first, out);
    case 8:
      return gemv_vpdpbusd_by_scheme<8>(panel, layout, x, first, out);
  }
}

}  // namespace
}  // namespace armllm::avx512
