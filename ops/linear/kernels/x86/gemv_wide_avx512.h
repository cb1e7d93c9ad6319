// gemv with AVX-512 VNNI for nine to sixteen tokens: weights are converted to unsigned bytes in registers,
// once for all tokens.
#pragma once

#include "linear/kernels/x86/gemv_int6_avx512.h"
#include "linear/kernels/x86/read_panel_avx512.h"

namespace armllm::avx512 {
namespace {

// Weights of g32i, or g32iz with kZeros, times their multipliers, as unsigned bytes.  Lines are in the lane
// order of row_of_lane().
template <bool kZeros>
struct UnsignedG32i {
  static constexpr int kLines = 4;            // of 64 bytes per group
  static constexpr int kMultiplierBytes = 8;  // per group
  static constexpr int kZeroPointBytes = kZeros ? 4 : 0;
  __m512i low_factor, high_factor, low_bias, high_bias;

  ARMLLM_INLINE void group(const uint8_t* multipliers, const uint8_t* zero_points) {
    const __m512i ones = _mm512_set1_epi16(1);
    row_nibbles(multipliers, &low_factor, &high_factor);
    low_factor = _mm512_add_epi16(low_factor, ones);
    high_factor = _mm512_add_epi16(high_factor, ones);
    if constexpr (kZeros) {
      unsigned_biases(zero_points, low_factor, high_factor, &low_bias, &high_bias);
    } else {
      low_bias = unsigned_bias(low_factor);
      high_bias = unsigned_bias(high_factor);
    }
  }
  // k = 0 … 3 and k = 4 … 7 of eight k of a group
  template <int kEight>
  ARMLLM_INLINE void lines(const uint8_t* w, __m512i* first, __m512i* second) const {
    const __m512i line = load(w + kEight * 64);
    const __m512i low = _mm512_add_epi8(_mm512_mullo_epi16(low_rows(line), low_factor), low_bias),
                  high = _mm512_add_epi8(_mm512_mullo_epi16(high_rows(line), high_factor), high_bias);
    *first = even_k4(low, high);
    *second = odd_k4(low, high);
  }
  static ARMLLM_INLINE __m512i rows(__m512i sums) { return _mm512_permutexvar_epi32(lane_of_row(), sums); }
};

struct UnsignedI8 {
  static constexpr int kLines = 8;
  static constexpr int kMultiplierBytes = 0, kZeroPointBytes = 0;

  ARMLLM_INLINE void group(const uint8_t*, const uint8_t*) {}
  template <int kEight>
  ARMLLM_INLINE void lines(const uint8_t* w, __m512i* first, __m512i* second) const {
    *first = _mm512_xor_si512(load(w + kEight * 128), _mm512_set1_epi8(-128));
    *second = _mm512_xor_si512(load(w + kEight * 128 + 64), _mm512_set1_epi8(-128));
  }
  static ARMLLM_INLINE __m512i rows(__m512i sums) { return sums; }
};

// int6 weights times their multipliers.
struct UnsignedInt6 {
  static constexpr int kLines = 6;
  static constexpr int kMultiplierBytes = 4, kZeroPointBytes = 0;
  __m512i one, two, bias;  // rows whose multiplier has bit 0 or 1; 128 − 32 · m

  ARMLLM_INLINE void group(const uint8_t* multipliers, const uint8_t*) {
    uint16_t plane[2];
    __builtin_memcpy(plane, multipliers, 4);
    one = _mm512_maskz_set1_epi32(plane[0], -1);
    two = _mm512_maskz_set1_epi32(plane[1], -1);
    bias = _mm512_sub_epi8(_mm512_sub_epi8(_mm512_set1_epi8(96), _mm512_and_si512(one, _mm512_set1_epi8(32))),
                           _mm512_and_si512(two, _mm512_set1_epi8(64)));
  }
  ARMLLM_INLINE __m512i multiplied(__m512i u) const {
    const __m512i more =
        _mm512_add_epi8(_mm512_and_si512(u, one), _mm512_and_si512(_mm512_add_epi8(u, u), two));
    return _mm512_add_epi8(_mm512_add_epi8(u, bias), more);
  }
  template <int kEight>
  ARMLLM_INLINE void lines(const uint8_t* w, __m512i* first, __m512i* second) const {
    const __m512i low = load(w + kEight * 64), high = load(w + 256 + kEight / 2 * 64);
    *first = multiplied(int6_line<2 * kEight>(low, high));
    *second = multiplied(int6_line<2 * kEight + 1>(low, high));
  }
  static ARMLLM_INLINE __m512i rows(__m512i sums) { return sums; }
};

// One panel, T tokens of one block; `corrections` holds −128 · Σ x of each token.
template <typename Weights, int T>
void gemv_vpdpbusd_9_16(const uint8_t* panel, const PanelLayout& layout, const int8_t* x,
                        const int32_t* corrections, int tokens, float* out, int64_t out_stride) {
  const uint8_t* w = panel + layout.values;
  const uint8_t *multipliers = panel + layout.multipliers, *zero_points = panel + layout.zero_points;
  __m512i acc[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) acc[t] = _mm512_set1_epi32(corrections[t]);
  PanelStream<Weights::kLines, Prefetch::software_far> stream(panel, layout);
  Weights weights;
  const auto multiply_eight = [&](auto eight) __attribute__((always_inline)) {
    __m512i first, second;
    weights.template lines<decltype(eight)::value>(w, &first, &second);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) dot_broadcast4(acc[t], first, x + t * 8);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) dot_broadcast4(acc[t], second, x + t * 8 + 4);
    x += T * 8;
  };
  for (int64_t g = 0; g < layout.groups; ++g) {
    stream.group();
    weights.group(multipliers, zero_points);
    multiply_eight(std::integral_constant<int, 0>());
    multiply_eight(std::integral_constant<int, 1>());
    multiply_eight(std::integral_constant<int, 2>());
    multiply_eight(std::integral_constant<int, 3>());
    w += Weights::kLines * 64;
    multipliers += Weights::kMultiplierBytes;
    zero_points += Weights::kZeroPointBytes;
  }
  const __m512 scales = _mm512_loadu_ps(panel_scales(panel));
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    if (t >= tokens) break;
    _mm512_storeu_ps(out + t * out_stride, _mm512_mul_ps(_mm512_cvtepi32_ps(Weights::rows(acc[t])), scales));
  }
}

template <typename Weights, int T>
void gemv_panels_vpdpbusd_9_16(const uint8_t* panel, int64_t panel_stride, int64_t panels,
                               const PanelLayout& layout, const Activations& x, int tokens, float* out,
                               int64_t out_stride) {
  int32_t corrections[T] = {};
  for (int t = 0; t < tokens; ++t) {
    const int32_t* group_sums = x.group_sums + t * x.row_groups();
    int32_t sum = 0;  // −8 · Σ x
    for (int64_t g = 0; g < x.groups; ++g) sum += group_sums[g];
    corrections[t] = 16 * sum;
  }
  for (int64_t p = 0; p < panels; ++p, panel += panel_stride, out += kPanel)
    gemv_vpdpbusd_9_16<Weights, T>(panel, layout, x.values, corrections, tokens, out, out_stride);
}

template <typename Weights>
void gemv_panels_vpdpbusd_9_16_by_block(const uint8_t* panel, int64_t panel_stride, int64_t panels,
                                        const PanelLayout& layout, const Activations& x, int tokens,
                                        float* out, int64_t out_stride) {
  switch (x.block) {
    case 10:
      return gemv_panels_vpdpbusd_9_16<Weights, 10>(panel, panel_stride, panels, layout, x, tokens, out,
                                                    out_stride);
    case 12:
      return gemv_panels_vpdpbusd_9_16<Weights, 12>(panel, panel_stride, panels, layout, x, tokens, out,
                                                    out_stride);
    case 14:
      return gemv_panels_vpdpbusd_9_16<Weights, 14>(panel, panel_stride, panels, layout, x, tokens, out,
                                                    out_stride);
    case 16:
      return gemv_panels_vpdpbusd_9_16<Weights, 16>(panel, panel_stride, panels, layout, x, tokens, out,
                                                    out_stride);
  }
}

void gemv_wide(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
               const Activations& x, int tokens, float* out, int64_t out_stride) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const auto multiply = scheme == Scheme::i8      ? gemv_panels_vpdpbusd_9_16_by_block<UnsignedI8>
                        : scheme == Scheme::int6  ? gemv_panels_vpdpbusd_9_16_by_block<UnsignedInt6>
                        : scheme == Scheme::g32iz ? gemv_panels_vpdpbusd_9_16_by_block<UnsignedG32i<true>>
                                                  : gemv_panels_vpdpbusd_9_16_by_block<UnsignedG32i<false>>;
  multiply(panel, panel_stride, panels, layout, x, tokens, out, out_stride);
}

}  // namespace
}  // namespace armllm::avx512
