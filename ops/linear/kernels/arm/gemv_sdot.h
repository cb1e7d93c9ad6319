// gemv with SDOT for one or two tokens, shared by the variants that have it.
//
// Weights are used as they are packed.  An accumulator lane holds one row and half of each 8 k; pairs of
// lanes are added when a group's sum is needed.  Accumulators are never reset: a group's sum is the
// difference from the previous value, modulo 2^16 or 2^32, which is exact because the sum itself fits.
#pragma once

#include "linear/kernels/arm/gemv_int3_sdot.h"
#include "linear/kernels/arm/gemv_int6_sdot.h"
#include "linear/kernels/arm/narrow_zero_points.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Dot products with 16 rows: A over whole bytes (16 · high + low nibble) and B over low nibbles.
template <int kCount>
struct Dots {
  int32x4_t whole[kCount][4] = {}, low[kCount][4] = {};

  ARMLLM_INLINE void add_group(const uint8_t* lines, const int8_t* const* x, int64_t k) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      int8x16_t bytes[4], chunk[kCount];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) bytes[v] = load_values(lines + 64 * j + 16 * v);
#pragma GCC unroll 2
      for (int t = 0; t < kCount; ++t) chunk[t] = broadcast8(x[t] + k + 8 * j);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const int8x16_t u = low_nibbles(bytes[v]);
#pragma GCC unroll 2
        for (int t = 0; t < kCount; ++t) {
          whole[t][v] = vdotq_s32(whole[t][v], bytes[v], chunk[t]);
          low[t][v] = vdotq_s32(low[t][v], u, chunk[t]);
        }
      }
    }
  }

  // Rows 4·i … 4·i + 3: sums of the low nibbles, and 16 times those of the high nibbles.
  ARMLLM_INLINE int32x4_t low_sum(int t, int i) const { return vpaddq_s32(low[t][2 * i], low[t][2 * i + 1]); }
  ARMLLM_INLINE int32x4_t high_sum16(int t, int i) const {
    return vsubq_s32(vpaddq_s32(whole[t][2 * i], whole[t][2 * i + 1]), low_sum(t, i));
  }
};

// Broadcasts the low 16 bits of *p.
ARMLLM_INLINE int16x8_t broadcast_low16(const int32_t* p) {
  int16_t half;
  __builtin_memcpy(&half, p, 2);
  return vdupq_n_s16(half);
}

// g32i, and g32iz with kZeros.  A group's sum with zero points of 8 is at most 32 · 8 · 127 = 32512 in
// magnitude, so 16 bits hold it.
template <int kCount, bool kZeros = false>
ARMLLM_IN_WRITTEN_ORDER void gemv_g32i_sdot(const uint8_t* panel, const PanelLayout& layout,
                                            const int8_t* const* x, const int32_t* const* group_sums,
                                            float* out) {
  const uint8_t* lines = panel + layout.values;
  const uint8_t* multipliers = panel + layout.multipliers;
  Dots<kCount> dots;
  int16x8_t low_before[kCount] = {}, high_before[kCount] = {};
  int32x4_t total[kCount][4] = {};
  if constexpr (kZeros) narrow_zero_point_sums<kCount>(panel, layout, group_sums, total);
  const auto group = [&](int64_t g, int16x8_t low_factor, int16x8_t high_factor) ARMLLM_INLINE_LAMBDA {
    dots.add_group(lines, x, kGroup * g);
    lines += 256;
#pragma GCC unroll 2
    for (int t = 0; t < kCount; ++t) {
      const int32x4_t low0 = dots.low_sum(t, 0), low1 = dots.low_sum(t, 1);
      const int32x4_t high0 = dots.high_sum16(t, 0), high1 = dots.high_sum16(t, 1);
      const int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(low0), vreinterpretq_s16_s32(low1));
      const int16x8_t high = vshrn_high_n_s32(vshrn_n_s32(high0, 4), high1, 4);
      const int16x8_t l = vaddq_s16(vsubq_s16(low, low_before[t]), broadcast_low16(group_sums[t] + g));
      const int16x8_t h = vsubq_s16(high, high_before[t]);
      low_before[t] = low;
      high_before[t] = high;
      total[t][0] = vmlal_s16(total[t][0], vget_low_s16(l), vget_low_s16(low_factor));
      total[t][1] = vmlal_high_s16(total[t][1], l, low_factor);
      total[t][2] = vmlal_s16(total[t][2], vget_low_s16(h), vget_low_s16(high_factor));
      total[t][3] = vmlal_high_s16(total[t][3], h, high_factor);
    }
  };
  // Widens by ZIP with zeros, because shifts have fewer pipes.
  const uint8x16_t none = vdupq_n_u8(0), one = vdupq_n_u8(1);
  int64_t g = 0;
  for (; g < layout.groups; g += 2) {
    const uint8x16_t two = vld1q_u8(multipliers + 8 * g);  // the values follow the last multipliers
    const uint8x16_t low = vaddq_u8(vandq_u8(two, vdupq_n_u8(15)), one);
    const uint8x16_t high = vaddq_u8(vshrq_n_u8(two, 4), one);
    group(g, vreinterpretq_s16_u8(vzip1q_u8(low, none)), vreinterpretq_s16_u8(vzip1q_u8(high, none)));
    if (g + 1 == layout.groups) break;
    group(g + 1, vreinterpretq_s16_u8(vzip2q_u8(low, none)), vreinterpretq_s16_u8(vzip2q_u8(high, none)));
  }
  const float* scales = panel_scales(panel);
  for (int t = 0; t < kCount; ++t)
    for (int i = 0; i < 4; ++i) store_scaled(out + t * kPanel + 4 * i, total[t][i], scales + 4 * i);
}

// Adds −z · Σ x to sums of low nibbles (low) or to 16 times those of high nibbles, which are stored as u − 8
// (high16).  `correction` is −8 · Σ x; without zero points, z = 8.
struct ZeroPoints {
  int32x4_t row_zeros[4];

  ARMLLM_INLINE explicit ZeroPoints(const uint8_t* eight) {
    const uint8x16_t rows = row_nibbles(eight);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) row_zeros[i] = widen4(rows, 4 * i);
  }
  ARMLLM_INLINE int32x4_t low(int32x4_t sum, int i, int32_t correction) const {
    return vmlaq_n_s32(sum, row_zeros[i], correction / 8);
  }
  ARMLLM_INLINE int32x4_t high16(int32x4_t sum, int i, int32_t correction) const {
    return vmlaq_n_s32(sum, vsubq_s32(row_zeros[2 + i], vdupq_n_s32(8)), 2 * correction);
  }
};

// row, rowz
template <int kCount>
ARMLLM_IN_WRITTEN_ORDER void gemv_row_sdot(const uint8_t* panel, const PanelLayout& layout,
                                           const int8_t* const* x, const int32_t* const* group_sums,
                                           float* out) {
  Dots<kCount> dots;
  int32_t correction[kCount] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    dots.add_group(panel + layout.values + 256 * g, x, kGroup * g);
    for (int t = 0; t < kCount; ++t) correction[t] += group_sums[t][g];
  }
  const float* scales = panel_scales(panel);
  for (int t = 0; t < kCount; ++t)
    for (int i = 0; i < 2; ++i) {
      int32x4_t low = dots.low_sum(t, i), high = vshrq_n_s32(dots.high_sum16(t, i), 4);
      if (has_zero_points(layout.scheme)) {
        const ZeroPoints zeros(panel + layout.zero_points);
        low = zeros.low(low, i, correction[t]);
        high = vmlaq_n_s32(high, vsubq_s32(zeros.row_zeros[2 + i], vdupq_n_s32(8)), correction[t] / 8);
      } else {
        low = vaddq_s32(low, vdupq_n_s32(correction[t]));
      }
      store_scaled(out + t * kPanel + 4 * i, low, scales + 4 * i);
      store_scaled(out + t * kPanel + 8 + 4 * i, high, scales + 8 + 4 * i);
    }
}

// Float group scales: total = total + s · float(sum) for each scale.
template <int kCount, bool kZeros>
ARMLLM_IN_WRITTEN_ORDER void gemv_groups_sdot(const uint8_t* panel, const PanelLayout& layout,
                                              const int8_t* const* x, const int32_t* const* group_sums,
                                              float* out) {
  const bool halves = has_bf16_scales(layout.scheme);
  const int64_t scale_bytes = kPanel * (halves ? 2 : 4), step = groups_per_scale(layout.scheme);
  const uint8_t* scales = panel + layout.scales;
  const uint8_t* zero_points = panel + layout.zero_points;
  const uint8_t* lines = panel + layout.values;
  Dots<kCount> dots;
  int32x4_t before[kCount][4] = {};
  float32x4_t total[kCount][4] = {};
  for (int64_t g = 0; g < layout.groups; scales += scale_bytes, zero_points += 8) {
    int32_t correction[kCount] = {};
    const int64_t end = g + step < layout.groups ? g + step : layout.groups;
    for (; g < end; ++g, lines += 256) {
      dots.add_group(lines, x, kGroup * g);
      for (int t = 0; t < kCount; ++t) correction[t] += group_sums[t][g];
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const float32x4_t low_scale = group_scales(scales, halves, 4 * i);
      const float32x4_t high_scale = group_scales(scales, halves, 8 + 4 * i);
#pragma GCC unroll 2
      for (int t = 0; t < kCount; ++t) {
        const int32x4_t low = dots.low_sum(t, i), high = dots.high_sum16(t, i);
        int32x4_t l = vsubq_s32(low, before[t][i]), h = vsubq_s32(high, before[t][2 + i]);
        before[t][i] = low;
        before[t][2 + i] = high;
        if constexpr (kZeros) {
          const ZeroPoints zeros(zero_points);
          l = zeros.low(l, i, correction[t]);
          h = zeros.high16(h, i, correction[t]);
        } else {
          l = vaddq_s32(l, vdupq_n_s32(correction[t]));
        }
        total[t][i] = vaddq_f32(total[t][i], vmulq_f32(low_scale, vcvtq_f32_s32(l)));
        total[t][2 + i] = vaddq_f32(total[t][2 + i], vmulq_f32(high_scale, vcvtq_n_f32_s32(h, 4)));
      }
    }
  }
  for (int t = 0; t < kCount; ++t)
    for (int i = 0; i < 4; ++i) vst1q_f32(out + t * kPanel + 4 * i, total[t][i]);
}

// i8: kCount tokens × 4 · kQuads rows.
template <int kCount, int kQuads>
ARMLLM_IN_WRITTEN_ORDER void gemv_i8_sdot(const uint8_t* panel, const PanelLayout& layout,
                                          const int8_t* const* x, int first, float* out) {
  constexpr int kChains = kCount * kQuads < 8 ? 2 : 1;  // eight accumulators keep the pipes full
  const uint8_t* lines = panel + layout.values + 16 * first;
  int32x4_t sums[kChains][kCount][kQuads] = {};
  for (int64_t c = 0; c < 2 * layout.groups; ++c, lines += 256) {
    int8x16_t chunk[kCount];
#pragma GCC unroll 8
    for (int t = 0; t < kCount; ++t) chunk[t] = load_values(x[t] + 16 * c);
#pragma GCC unroll 4
    for (int i = 0; i < kQuads; ++i) {
      const int8x16_t w0 = load_values(lines + 16 * i), w1 = load_values(lines + 64 + 16 * i);
      const int8x16_t w2 = load_values(lines + 128 + 16 * i), w3 = load_values(lines + 192 + 16 * i);
#pragma GCC unroll 8
      for (int t = 0; t < kCount; ++t) {
        int32x4_t& even = sums[0][t][i];
        int32x4_t& odd = sums[kChains - 1][t][i];
        even = vdotq_laneq_s32(even, w0, chunk[t], 0);
        odd = vdotq_laneq_s32(odd, w1, chunk[t], 1);
        even = vdotq_laneq_s32(even, w2, chunk[t], 2);
        odd = vdotq_laneq_s32(odd, w3, chunk[t], 3);
      }
    }
  }
  const float* scales = panel_scales(panel) + 4 * first;
#pragma GCC unroll 8
  for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
    for (int i = 0; i < kQuads; ++i) {
      int32x4_t sum = sums[0][t][i];
      if (kChains == 2) sum = vaddq_s32(sum, sums[kChains - 1][t][i]);
      store_scaled(out + t * kPanel + 4 * (first + i), sum, scales + 4 * i);
    }
}

// One panel of any scheme, kCount tokens from `first` on (block 1).
template <int kCount>
void gemv_sdot_by_scheme(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first,
                         float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const int8_t* values[kCount];
  const int32_t* group_sums[kCount];
  for (int t = 0; t < kCount; ++t) {
    values[t] = token_values(x, first + t);
    group_sums[t] = x.group_sums + (first + t) * x.row_groups();
  }
  if (scheme == Scheme::g32i) {  // one token at a time: two would need too many registers
    for (int t = 0; t < kCount; ++t)
      gemv_g32i_sdot<1>(panel, layout, values + t, group_sums + t, out + t * kPanel);
    return;
  }
  if (scheme == Scheme::g32iz) {
    for (int t = 0; t < kCount; ++t)
      gemv_g32i_sdot<1, true>(panel, layout, values + t, group_sums + t, out + t * kPanel);
    return;
  }
  if (scheme == Scheme::i8) return gemv_i8_sdot<kCount, 4>(panel, layout, values, 0, out);
  if (scheme == Scheme::int6 || scheme == Scheme::int3) {
    const auto gemv_one = scheme == Scheme::int6 ? gemv_int6_sdot : gemv_int3_sdot;
    for (int t = 0; t < kCount; ++t) gemv_one(panel, layout, values[t], group_sums[t], out + t * kPanel);
    return;
  }
  if (!has_float_groups(scheme)) return gemv_row_sdot<kCount>(panel, layout, values, group_sums, out);
  if (has_zero_points(scheme)) return gemv_groups_sdot<kCount, true>(panel, layout, values, group_sums, out);
  gemv_groups_sdot<kCount, false>(panel, layout, values, group_sums, out);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
