// One or two tokens against one panel with SDOT, shared by the variants that have it.
#pragma once

#include "linear/arm_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Adds a group to the sums of 16 rows for each token; nibbles count as 0 … 15.
template <int kCount>
ARMLLM_INLINE void sdot_group(const uint8_t* group, const int8_t* const* x, int64_t k, int32x4_t (*sums)[4]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const Line<4> line = load_nibbles<4>(group + 64 * j);
#pragma GCC unroll 2
    for (int t = 0; t < kCount; ++t) {
      const int8x8_t chunk = vld1_s8(x[t] + k + 8 * j);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sums[t][i] = vdotq_lane_s32(sums[t][i], line.low[i], chunk, 0);
        sums[t][i] = vdotq_lane_s32(sums[t][i], line.high[i], chunk, 1);
      }
    }
  }
}

// total += sums · multipliers.  A group's sum is at most 32 · 8 · 127 = 32512 in size and thus fits 16 bits: two
// narrowings and four widening multiply-accumulates instead of spreading the multipliers to 32 bits.
ARMLLM_INLINE void add_multiplied(int32x4_t* total, const int32x4_t* sums, uint8x16_t rows) {
  const int16x8_t m0 = vreinterpretq_s16_u8(vzip1q_u8(rows, vdupq_n_u8(0)));
  const int16x8_t m1 = vreinterpretq_s16_u8(vzip2q_u8(rows, vdupq_n_u8(0)));
  const int16x8_t s0 = vuzp1q_s16(vreinterpretq_s16_s32(sums[0]), vreinterpretq_s16_s32(sums[1]));
  const int16x8_t s1 = vuzp1q_s16(vreinterpretq_s16_s32(sums[2]), vreinterpretq_s16_s32(sums[3]));
  total[0] = vmlal_s16(total[0], vget_low_s16(s0), vget_low_s16(m0));
  total[1] = vmlal_high_s16(total[1], s0, m0);
  total[2] = vmlal_s16(total[2], vget_low_s16(s1), vget_low_s16(m1));
  total[3] = vmlal_high_s16(total[3], s1, m1);
}

template <int kCount>
void sdot_g32i(const uint8_t* panel, const PanelLayout& layout, const int8_t* const* x,
               const int32_t* const* offsets, float* out) {
  const uint8_t* values = panel + layout.values;
  const uint8_t* multipliers = panel + layout.multipliers;
  int32x4_t total[kCount][4] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    int32x4_t sums[kCount][4];
#pragma GCC unroll 2
    for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[t][i] = vdupq_n_s32(offsets[t][g]);
    sdot_group<kCount>(values + 256 * g, x, kGroup * g, sums);
    const uint8x16_t rows = row_multipliers(multipliers + 8 * g);
#pragma GCC unroll 2
    for (int t = 0; t < kCount; ++t) add_multiplied(total[t], sums[t], rows);
  }
  const float* scales = panel_scales(panel);
  for (int t = 0; t < kCount; ++t)
    for (int i = 0; i < 4; ++i) store_scaled(out + t * kPanel + 4 * i, total[t][i], scales + 4 * i);
}

template <int kCount>
void sdot_row(const uint8_t* panel, const PanelLayout& layout, const int8_t* const* x,
              const int32_t* const* offsets, float* out) {
  const uint8_t* values = panel + layout.values;
  int32x4_t total[kCount][4] = {};
  int32_t offset[kCount] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    sdot_group<kCount>(values + 256 * g, x, kGroup * g, total);
    for (int t = 0; t < kCount; ++t) offset[t] += offsets[t][g];
  }
  const float* scales = panel_scales(panel);
  for (int t = 0; t < kCount; ++t)
    for (int i = 0; i < 4; ++i)
      store_scaled(out + t * kPanel + 4 * i, vaddq_s32(total[t][i], vdupq_n_s32(offset[t])), scales + 4 * i);
}

template <int kCount>
void sdot_g32(const uint8_t* panel, const PanelLayout& layout, const int8_t* const* x,
              const int32_t* const* offsets, float* out) {
  const uint8_t* values = panel + layout.values;
  const float* scales = panel_scales(panel);
  float32x4_t total[kCount][4] = {};
  for (int64_t g = 0; g < layout.groups; ++g, scales += kPanel) {
    int32x4_t sums[kCount][4];
#pragma GCC unroll 2
    for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[t][i] = vdupq_n_s32(offsets[t][g]);
    sdot_group<kCount>(values + 256 * g, x, kGroup * g, sums);
#pragma GCC unroll 2
    for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        total[t][i] = vaddq_f32(total[t][i], vmulq_f32(vld1q_f32(scales + 4 * i), vcvtq_f32_s32(sums[t][i])));
  }
  for (int t = 0; t < kCount; ++t)
    for (int i = 0; i < 4; ++i) vst1q_f32(out + t * kPanel + 4 * i, total[t][i]);
}

inline void sdot_token_i8(const uint8_t* panel, const PanelLayout& layout, const int8_t* x, float* out) {
  const int8_t* values = reinterpret_cast<const int8_t*>(panel + layout.values);
  int32x4_t even[4] = {}, odd[4] = {};  // two chains each: eight accumulators keep the pipes full
  for (int64_t c = 0; c < 2 * layout.groups; ++c) {
    const int8x16_t chunk = vld1q_s8(x + 16 * c);
    const int8_t* lines = values + 256 * c;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      even[i] = vdotq_laneq_s32(even[i], vld1q_s8(lines + 16 * i), chunk, 0);
      odd[i] = vdotq_laneq_s32(odd[i], vld1q_s8(lines + 64 + 16 * i), chunk, 1);
      even[i] = vdotq_laneq_s32(even[i], vld1q_s8(lines + 128 + 16 * i), chunk, 2);
      odd[i] = vdotq_laneq_s32(odd[i], vld1q_s8(lines + 192 + 16 * i), chunk, 3);
    }
  }
  const float* scales = panel_scales(panel);
  for (int i = 0; i < 4; ++i) store_scaled(out + 4 * i, vaddq_s32(even[i], odd[i]), scales + 4 * i);
}

// kCount tokens from `first` on against one panel.
template <int kCount>
void sdot_tokens(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const int8_t* values[kCount];
  for (int t = 0; t < kCount; ++t) values[t] = token_values(x, first + t);
  if (scheme == Scheme::i8) {
    for (int t = 0; t < kCount; ++t) sdot_token_i8(panel, layout, values[t], out + t * kPanel);
    return;
  }
  const int32_t* offsets[kCount];
  for (int t = 0; t < kCount; ++t) offsets[t] = x.group_offsets + (first + t) * x.groups;
  if (scheme == Scheme::g32i) sdot_g32i<kCount>(panel, layout, values, offsets, out);
  if (scheme == Scheme::row) sdot_row<kCount>(panel, layout, values, offsets, out);
  if (scheme == Scheme::g32) sdot_g32<kCount>(panel, layout, values, offsets, out);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
