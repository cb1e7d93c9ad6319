// gemv of scheme int3 with SDOT for one token.
#pragma once

#include "linear/kernels/arm/read_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Dot products of u with 16 rows: A over whole bytes (16 · high + low nibble) and B over low nibbles.
// Accumulators are never reset, as in gemv_sdot.h.
struct Int3Dots {
  int32x4_t whole[4] = {}, low[4] = {};

  ARMLLM_INLINE void add_group(const uint8_t* lines, const int8_t* x) {
    const uint8x16_t bit2 = vdupq_n_u8(0x44);
    int8x16_t chunk[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) chunk[j] = broadcast8(x + 8 * j);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const uint8x16_t first = vld1q_u8(lines + 16 * v), second = vld1q_u8(lines + 64 + 16 * v);
      const uint8x16_t high = vld1q_u8(lines + 128 + 16 * v);
      add(v, vbslq_u8(bit2, vshlq_n_u8(high, 2), first), chunk[0]);
      add(v, vbslq_u8(bit2, vshlq_n_u8(high, 1), vshrq_n_u8(first, 2)), chunk[1]);
      add(v, vbslq_u8(bit2, high, second), chunk[2]);
      add(v, vbslq_u8(bit2, vshrq_n_u8(high, 1), vshrq_n_u8(second, 2)), chunk[3]);
    }
  }

  // Rows 0 … 7 and 8 … 15, modulo 2^16.
  ARMLLM_INLINE int16x8_t low_rows() const {
    return vuzp1q_s16(vreinterpretq_s16_s32(low_sum(0)), vreinterpretq_s16_s32(low_sum(1)));
  }
  ARMLLM_INLINE int16x8_t high_rows() const {
    return vshrn_high_n_s32(vshrn_n_s32(high_sum16(0), 4), high_sum16(1), 4);
  }

 private:
  // Bits 3 and 7 of `nibbles` are arbitrary.
  ARMLLM_INLINE void add(int v, uint8x16_t nibbles, int8x16_t chunk) {
    whole[v] = vdotq_s32(whole[v], vreinterpretq_s8_u8(vandq_u8(nibbles, vdupq_n_u8(0x77))), chunk);
    low[v] = vdotq_s32(low[v], vreinterpretq_s8_u8(vandq_u8(nibbles, vdupq_n_u8(0x07))), chunk);
  }
  ARMLLM_INLINE int32x4_t low_sum(int i) const { return vpaddq_s32(low[2 * i], low[2 * i + 1]); }
  ARMLLM_INLINE int32x4_t high_sum16(int i) const {
    return vsubq_s32(vpaddq_s32(whole[2 * i], whole[2 * i + 1]), low_sum(i));
  }
};

// −4 · Σ x, or −3 · Σ x for negative multipliers, of 8 rows; `eight` is −8 · Σ x.
ARMLLM_INLINE int16x8_t int3_corrections(uint8_t signs, int32_t eight) {
  const uint16x8_t bits = {1, 2, 4, 8, 16, 32, 64, 128};
  const int32_t four = eight / 2, three = four - eight / 8;
  return vbslq_s16(vtstq_u16(vdupq_n_u16(signs), bits), vdupq_n_s16(int16_t(three)),
                   vdupq_n_s16(int16_t(four)));
}

ARMLLM_IN_WRITTEN_ORDER void gemv_int3_sdot(const uint8_t* panel, const PanelLayout& layout, const int8_t* x,
                                            const int32_t* group_sums, float* out) {
  const uint8_t *lines = panel + layout.values, *multipliers = panel + layout.multipliers,
                *signs = panel + layout.signs;
  Int3Dots dots;
  int16x8_t low_before = {}, high_before = {};
  int32x4_t total[4] = {};
  for (int64_t g = 0; g < layout.groups; ++g, lines += 192, multipliers += 8, signs += 2, x += kGroup) {
    dots.add_group(lines, x);
    // A group's sum is at most 32 · 4 · 127 in magnitude, so 16 bits hold it.
    const int16x8_t low = dots.low_rows(), high = dots.high_rows();
    const int16x8_t l = vaddq_s16(vsubq_s16(low, low_before), int3_corrections(signs[0], group_sums[g]));
    const int16x8_t h = vaddq_s16(vsubq_s16(high, high_before), int3_corrections(signs[1], group_sums[g]));
    low_before = low;
    high_before = high;
    const uint8x8_t nibbles = vld1_u8(multipliers), one = vdup_n_u8(1);
    const int16x8_t low_factor =
        vreinterpretq_s16_u16(vmovl_u8(vadd_u8(vand_u8(nibbles, vdup_n_u8(15)), one)));
    const int16x8_t high_factor = vreinterpretq_s16_u16(vmovl_u8(vadd_u8(vshr_n_u8(nibbles, 4), one)));
    total[0] = vmlal_s16(total[0], vget_low_s16(l), vget_low_s16(low_factor));
    total[1] = vmlal_high_s16(total[1], l, low_factor);
    total[2] = vmlal_s16(total[2], vget_low_s16(h), vget_low_s16(high_factor));
    total[3] = vmlal_high_s16(total[3], h, high_factor);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) store_scaled(out + 4 * i, total[i], panel_scales(panel) + 4 * i);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
