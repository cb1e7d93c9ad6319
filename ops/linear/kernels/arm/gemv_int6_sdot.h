// gemv of scheme int6 with SDOT for one token.
#pragma once

#include "linear/kernels/arm/read_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Four INT8 lines of u = q + 32, 4 rows × 4 k each, from two lines of bits 0 … 3 and one of bits 4 and 5. SLI
// replaces the upper half of a byte, so that only two bits of the next value are left to mask.
struct Int6Lines {
  int8x16_t u[4];

  ARMLLM_INLINE Int6Lines(const uint8_t* first, const uint8_t* second, const uint8_t* bits45) {
    const uint8x16_t n0 = vld1q_u8(first), n1 = vld1q_u8(second), high = vld1q_u8(bits45);
    u[0] = masked(vsliq_n_u8(n0, high, 4));
    u[1] = masked(vsliq_n_u8(vshrq_n_u8(n0, 4), vshrq_n_u8(high, 2), 4));
    u[2] = masked(vsliq_n_u8(n1, vshrq_n_u8(high, 4), 4));
    u[3] = vreinterpretq_s8_u8(vsliq_n_u8(vshrq_n_u8(n1, 4), vshrq_n_u8(high, 6), 4));
  }

 private:
  static ARMLLM_INLINE int8x16_t masked(uint8x16_t v) {
    return vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(63)));
  }
};

// Multipliers 1 … 4 of rows first … first + 3, from both planes of their bits.
ARMLLM_INLINE int32x4_t int6_multipliers(uint32x4_t planes, int first) {
  const uint32x4_t bits = {1u << first, 2u << first, 4u << first, 8u << first};
  const int32x4_t one = vreinterpretq_s32_u32(vtstq_u32(planes, bits));
  const int32x4_t two = vreinterpretq_s32_u32(vtstq_u32(planes, vshlq_n_u32(bits, 16)));
  return vsubq_s32(vsubq_s32(vdupq_n_s32(1), one), vaddq_s32(two, two));  // set lanes are −1
}

ARMLLM_IN_WRITTEN_ORDER void gemv_int6_sdot(const uint8_t* panel, const PanelLayout& layout, const int8_t* x,
                                            const int32_t* group_sums, float* out) {
  const uint8_t *w = panel + layout.values, *multipliers = panel + layout.multipliers;
  int32x4_t total[4] = {};
  for (int64_t g = 0; g < layout.groups; ++g, w += 384, multipliers += 4, x += kGroup) {
    int32x4_t sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i] = vdupq_n_s32(4 * group_sums[g]);  // −32 · Σ x
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int8x16_t chunk = load_values(x + 16 * half);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const uint8_t* low = w + 128 * half + 16 * i;
        const Int6Lines lines(low, low + 64, w + 256 + 64 * half + 16 * i);
        sums[i] = vdotq_laneq_s32(sums[i], lines.u[0], chunk, 0);
        sums[i] = vdotq_laneq_s32(sums[i], lines.u[1], chunk, 1);
        sums[i] = vdotq_laneq_s32(sums[i], lines.u[2], chunk, 2);
        sums[i] = vdotq_laneq_s32(sums[i], lines.u[3], chunk, 3);
      }
    }
    uint32_t both;
    __builtin_memcpy(&both, multipliers, 4);
    const uint32x4_t planes = vdupq_n_u32(both);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) total[i] = vmlaq_s32(total[i], sums[i], int6_multipliers(planes, 4 * i));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) store_scaled(out + 4 * i, total[i], panel_scales(panel) + 4 * i);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
