// One token against one panel with SDOT, shared by the variants that have it.
#pragma once

#include "linear/arm_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Σ over one group for each of the 16 rows, on top of `start`; nibbles count as 0 … 15.
ARMLLM_INLINE void sdot_nibbles(const uint8_t* group, const int8_t* x, int32x4_t start, int32x4_t* sums) {
  const int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sums[i] = start;
#define ARMLLM_SDOT_LINE(j, x, lane)                                 \
  {                                                                  \
    const Line<4> line = load_nibbles<4>(group + 64 * j);            \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {            \
      sums[i] = vdotq_laneq_s32(sums[i], line.low[i], x, lane);      \
      sums[i] = vdotq_laneq_s32(sums[i], line.high[i], x, lane + 1); \
    }                                                                \
  }
  ARMLLM_SDOT_LINE(0, x0, 0)
  ARMLLM_SDOT_LINE(1, x0, 2)
  ARMLLM_SDOT_LINE(2, x1, 0)
  ARMLLM_SDOT_LINE(3, x1, 2)
#undef ARMLLM_SDOT_LINE
}

// A group's sum is at most 32 · 8 · 127 = 32512 in size and thus fits 16 bits: two narrowings and four widening
// multiply-accumulates instead of spreading the multipliers to 32 bits.
inline void sdot_token_g32i(const uint8_t* panel, const PanelLayout& layout, const int8_t* x,
                            const int32_t* offsets, float* out) {
  const uint8_t* values = panel + layout.values;
  const uint8_t* multipliers = panel + layout.multipliers;
  int32x4_t total[4] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    int32x4_t sums[4];
    sdot_nibbles(values + 256 * g, x + kGroup * g, vdupq_n_s32(offsets[g]), sums);
    const uint8x16_t rows = row_multipliers(multipliers + 8 * g);
    const int16x8_t m0 = vreinterpretq_s16_u8(vzip1q_u8(rows, vdupq_n_u8(0)));
    const int16x8_t m1 = vreinterpretq_s16_u8(vzip2q_u8(rows, vdupq_n_u8(0)));
    const int16x8_t s0 = vuzp1q_s16(vreinterpretq_s16_s32(sums[0]), vreinterpretq_s16_s32(sums[1]));
    const int16x8_t s1 = vuzp1q_s16(vreinterpretq_s16_s32(sums[2]), vreinterpretq_s16_s32(sums[3]));
    total[0] = vmlal_s16(total[0], vget_low_s16(s0), vget_low_s16(m0));
    total[1] = vmlal_high_s16(total[1], s0, m0);
    total[2] = vmlal_s16(total[2], vget_low_s16(s1), vget_low_s16(m1));
    total[3] = vmlal_high_s16(total[3], s1, m1);
  }
  const float* scales = panel_scales(panel);
  for (int i = 0; i < 4; ++i) store_scaled(out + 4 * i, total[i], scales + 4 * i);
}

inline void sdot_token_row(const uint8_t* panel, const PanelLayout& layout, const int8_t* x,
                           const int32_t* offsets, float* out) {
  const uint8_t* values = panel + layout.values;
  int32x4_t total[4] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    int32x4_t sums[4];
    sdot_nibbles(values + 256 * g, x + kGroup * g, vdupq_n_s32(offsets[g]), sums);
    for (int i = 0; i < 4; ++i) total[i] = vaddq_s32(total[i], sums[i]);
  }
  const float* scales = panel_scales(panel);
  for (int i = 0; i < 4; ++i) store_scaled(out + 4 * i, total[i], scales + 4 * i);
}

inline void sdot_token_g32(const uint8_t* panel, const PanelLayout& layout, const int8_t* x,
                           const int32_t* offsets, float* out) {
  const uint8_t* values = panel + layout.values;
  const float* scales = panel_scales(panel);
  float32x4_t total[4] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    int32x4_t sums[4];
    sdot_nibbles(values + 256 * g, x + kGroup * g, vdupq_n_s32(offsets[g]), sums);
    for (int i = 0; i < 4; ++i)
      total[i] =
          vaddq_f32(total[i], vmulq_f32(vld1q_f32(scales + kPanel * g + 4 * i), vcvtq_f32_s32(sums[i])));
  }
  for (int i = 0; i < 4; ++i) vst1q_f32(out + 4 * i, total[i]);
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

inline void sdot_token(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t token, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const int8_t* values = token_values(x, token);
  const int32_t* offsets = x.group_offsets == nullptr ? nullptr : x.group_offsets + token * x.groups;
  switch (scheme) {
    case Scheme::g32i:
      return sdot_token_g32i(panel, layout, values, offsets, out);
    case Scheme::row:
      return sdot_token_row(panel, layout, values, offsets, out);
    case Scheme::g32:
      return sdot_token_g32(panel, layout, values, offsets, out);
    case Scheme::i8:
      return sdot_token_i8(panel, layout, values, out);
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
