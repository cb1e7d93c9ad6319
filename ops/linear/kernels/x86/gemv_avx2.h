// gemv with AVX2: one to eight tokens, one panel.
#pragma once

#include "linear/kernels/x86/read_panel_avx2.h"

namespace armllm::avx2 {
namespace {

enum class SumKind { g32i, g32iz, row, groups };

// −m · z · Σ x over all groups of g32iz, two at a time, for the rows of row_sums().
template <int T>
ARMLLM_INLINE void narrow_zero_point_sums(const uint8_t* panel, const PanelLayout& layout,
                                          const int32_t* group_sums, int64_t row_groups, __m256i (*sums)[T]) {
  // Bytes of the two groups of each lane, in 16 bytes of multipliers and in 8 bytes of zero points.
  const __m256i multiplier_bytes = _mm256_set_epi32(0xff0bff03, 0xff0aff02, 0xff09ff01, 0xff08ff00,
                                                    0xff0bff03, 0xff0aff02, 0xff09ff01, 0xff08ff00);
  const __m256i zero_bytes = _mm256_set_epi32(0xff06ff02, 0xff06ff02, 0xff06ff02, 0xff06ff02, 0xff04ff00,
                                              0xff04ff00, 0xff04ff00, 0xff04ff00);
  const __m256i nibble_shifts = _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0),
                zero_shifts = _mm256_set_epi32(6, 4, 2, 0, 6, 4, 2, 0);
  const uint8_t *multipliers = panel + layout.multipliers, *zero_points = panel + layout.zero_points;
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) sums[0][t] = sums[1][t] = _mm256_setzero_si256();
  for (int64_t g = 0; g < layout.groups; g += 16) {
    const int64_t left = layout.groups - g < 16 ? layout.groups - g : 16;
    alignas(32) int16_t x[T][16];  // −Σ x, and zeros past the last group
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const int32_t* from = group_sums + t * row_groups + g;
      alignas(32) int32_t padded[16];
      if (left < 16) {
        for (int i = 0; i < 16; ++i) padded[i] = i < left ? from[i] : 0;
        from = padded;
      }
      const __m256i both =
          _mm256_packs_epi32(_mm256_srai_epi32(load(from), 3), _mm256_srai_epi32(load(from + 8), 3));
      store(x[t], _mm256_permute4x64_epi64(both, 0xd8));
    }
    asm("" : "+m"(x));  // or else GCC extracts the pairs from registers
    for (int i = 0; i < left; i += 2, multipliers += 16, zero_points += 8) {
      const __m256i nibbles =
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(multipliers)));
      const __m256i bits = broadcast8(reinterpret_cast<const int8_t*>(zero_points));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i from = _mm256_add_epi8(multiplier_bytes, _mm256_set1_epi16(int16_t(4 * h))),
                      zeros_from = _mm256_add_epi8(zero_bytes, _mm256_set1_epi16(int16_t(h)));
        const __m256i m = _mm256_and_si256(
            _mm256_srlv_epi32(_mm256_shuffle_epi8(nibbles, from), nibble_shifts), _mm256_set1_epi16(15));
        const __m256i z = _mm256_and_si256(
            _mm256_srlv_epi32(_mm256_shuffle_epi8(bits, zeros_from), zero_shifts), _mm256_set1_epi16(3));
        const __m256i term = _mm256_mullo_epi16(_mm256_add_epi16(m, _mm256_set1_epi16(1)),
                                                _mm256_add_epi16(z, _mm256_set1_epi16(kLowestZeroPoint)));
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
          add_lanes(sums[h][t],
                    _mm256_madd_epi16(term, broadcast4(reinterpret_cast<const int8_t*>(x[t] + i))));
      }
    }
  }
}

template <SumKind kSum, int T>
void gemv_i4_maddubs(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                     int64_t first_token, float* out) {
  const int64_t groups = x.groups, row_bytes = x.row_bytes(), row_groups = x.row_groups(),
                step = groups_per_scale(layout.scheme);
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* group_sums = x.group_sums + first_token * row_groups;
  const uint8_t* w = panel + layout.values;
  constexpr bool kMultiplied = kSum == SumKind::g32i || kSum == SumKind::g32iz;
  const bool zero_points = kSum == SumKind::g32iz || has_zero_points(layout.scheme);
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
      if constexpr (kMultiplied) {
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
  __m256i more[2][T];
  if constexpr (kSum == SumKind::g32iz)
    narrow_zero_point_sums<T>(panel, layout, group_sums, row_groups, more);
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      if constexpr (kSum != SumKind::groups) {
        __m256i sum = row_sums(total[h][0][t], total[h][1][t]);
        if constexpr (kSum == SumKind::g32iz) sum = _mm256_add_epi32(sum, more[h][t]);
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
  if (layout.scheme == Scheme::g32iz) return gemv_i4_maddubs<SumKind::g32iz, T>(panel, layout, x, first, out);
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
