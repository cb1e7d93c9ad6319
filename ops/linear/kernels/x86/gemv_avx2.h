// gemv with AVX2: one to eight tokens, one panel.
#pragma once

#include "linear/kernels/x86/read_panel_avx2.h"

namespace armllm::avx2 {
namespace {

enum class SumKind { g32i, row, groups };

template <SumKind kSum, int T>
void gemv_i4_maddubs(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                     int64_t first_token, float* out) {
  const int64_t groups = x.groups, row_bytes = x.row_bytes(), row_groups = x.row_groups(),
                step = groups_per_scale(layout.scheme);
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* group_sums = x.group_sums + first_token * row_groups;
  const uint8_t* w = panel + layout.values;
  const bool zero_points = has_zero_points(layout.scheme);
  PanelStream<4, T == 1 ? Prefetch::hardware : Prefetch::software_far> stream(panel, layout);
  __m256i total[2][2][T];  // [half of the line][low, high nibbles]
  __m256 total_f[2][T];
  int32_t correction[T] = {};  // −8 · Σ x since the last scale
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      total[h][0][t] = total[h][1][t] = _mm256_setzero_si256();
      total_f[h][t] = _mm256_setzero_ps();
    }
  }
  int64_t left = step;  // groups left of this scale
  for (int64_t g = 0; g < groups; ++g, w += 256) {
    const int8_t* xg = values + g * kGroup;
    stream.group();
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) correction[t] += group_sums[t * row_groups + g];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      // A 16-bit lane sums 8 products u·x, and one of a row's four lanes starts from the group's correction.
      // The final sum is at most 32512, so intermediate wrap-around is harmless.
      __m256i low_acc[T], high_acc[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t)
        low_acc[t] = high_acc[t] =
            _mm256_set1_epi64x(zero_points ? 0 : group_sums[t * row_groups + g] & 0xffff);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m256i half = load(w + j * 64 + h * 32), low = low_rows(half), high = high_rows(half);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const __m256i eight = broadcast8(xg + t * row_bytes + j * 8);
          add_words(low_acc[t], _mm256_maddubs_epi16(low, eight));
          add_words(high_acc[t], _mm256_maddubs_epi16(high, eight));
        }
        in_written_order();
      }
      __m256i low_factor = _mm256_set1_epi16(1), high_factor = low_factor;
      if constexpr (kSum == SumKind::g32i) {
        row_nibbles(panel + layout.multipliers + g * 8 + h * 4, &low_factor, &high_factor);
        low_factor = _mm256_add_epi16(low_factor, _mm256_set1_epi16(1));
        high_factor = _mm256_add_epi16(high_factor, _mm256_set1_epi16(1));
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        add_lanes(total[h][0][t], _mm256_madd_epi16(low_acc[t], low_factor));
        add_lanes(total[h][1][t], _mm256_madd_epi16(high_acc[t], high_factor));
      }
    }
    if constexpr (kSum == SumKind::groups) {
      if (--left != 0 && g + 1 != groups) continue;
      const int64_t column = g / step;
      left = step;
#pragma GCC unroll 4
      for (int h = 0; h < 2; ++h) {
        const __m256 scale = group_scales(panel, layout, column, h);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          __m256i sum = row_sums(total[h][0][t], total[h][1][t]);
          if (zero_points)
            sum = _mm256_add_epi32(sum, zero_term(panel + layout.zero_points + column * 8, h, correction[t]));
          total_f[h][t] = _mm256_add_ps(total_f[h][t], _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum)));
          total[h][0][t] = total[h][1][t] = _mm256_setzero_si256();
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) correction[t] = 0;
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      if constexpr (kSum != SumKind::groups) {
        __m256i sum = row_sums(total[h][0][t], total[h][1][t]);
        if (kSum == SumKind::row && zero_points)
          sum = _mm256_add_epi32(sum, zero_term(panel + layout.zero_points, h, correction[t]));
        total_f[h][t] = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), row_floats(panel_scales(panel) + 4 * h));
      }
      store_rows(out + t * kPanel + 4 * h, total_f[h][t]);
    }
  }
}

template <int T>
void gemv_i8_maddubs(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                     int64_t first_token, float* out) {
  const int64_t row_bytes = x.row_bytes();
  const int8_t* values = x.values + first_token * row_bytes;
  const uint8_t* w = panel + layout.values;
  PanelStream<8, T == 1 ? Prefetch::hardware : Prefetch::software_far> stream(panel, layout);
  __m256i total[2][T];
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) total[h][t] = _mm256_setzero_si256();
  for (int64_t g = 0; g < x.groups; ++g) {
    stream.group();
    for (int j = 0; j < 8; ++j, w += 64) {
#pragma GCC unroll 4
      for (int h = 0; h < 2; ++h) {
        const __m256i line = load(w + h * 32), magnitude = _mm256_abs_epi8(line);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
          dot_signed(total[h][t], line, magnitude, broadcast4(values + t * row_bytes + g * kGroup + j * 4));
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
      _mm256_storeu_ps(out + t * kPanel + h * 8, _mm256_mul_ps(_mm256_cvtepi32_ps(total[h][t]),
                                                               _mm256_loadu_ps(panel_scales(panel) + h * 8)));
}

template <int T>
void gemv_maddubs_by_scheme(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                            int64_t first, float* out) {
  if (layout.scheme == Scheme::i8) return gemv_i8_maddubs<T>(panel, layout, x, first, out);
  if (layout.scheme == Scheme::g32i) return gemv_i4_maddubs<SumKind::g32i, T>(panel, layout, x, first, out);
  if (has_float_groups(layout.scheme))
    return gemv_i4_maddubs<SumKind::groups, T>(panel, layout, x, first, out);
  return gemv_i4_maddubs<SumKind::row, T>(panel, layout, x, first, out);
}

// Four tokens at most per pass: more accumulators would not fit 16 registers.
void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first, int tokens, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  for (; tokens >= 4; tokens -= 4, first += 4, out += 4 * kPanel)
    gemv_maddubs_by_scheme<4>(panel, layout, x, first, out);
  switch (tokens) {
    case 1:
      return gemv_maddubs_by_scheme<1>(panel, layout, x, first, out);
    case 2:
      return gemv_maddubs_by_scheme<2>(panel, layout, x, first, out);
    case 3:
      return gemv_maddubs_by_scheme<3>(panel, layout, x, first, out);
  }
}

}  // namespace
}  // namespace armllm::avx2
