// What zero points add to the sums of g32iz, for variants with SDOT: m · (8 − z) · Σ x of every group to sums
// with zero points of 8.  −Σ x is 128 · upper + lower, two signed bytes, so that dot products of bytes do.
#pragma once

#include <type_traits>

#include "linear/kernels/arm/read_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// The bytes of multipliers of rows 4·i … 4·i + 3 (low nibbles) and of 8 rows later (high nibbles) in
// quads[i]: four groups of each row.
ARMLLM_INLINE void load_multiplier_quads(const uint8_t* multipliers, uint8x16_t* quads) {
  const uint8x16_t transposed = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const uint32x4x2_t words = vld2q_u32(reinterpret_cast<const uint32_t*>(multipliers));
  quads[0] = vqtbl1q_u8(vreinterpretq_u8_u32(words.val[0]), transposed);
  quads[1] = vqtbl1q_u8(vreinterpretq_u8_u32(words.val[1]), transposed);
}

// The zero points of rows 4·i … 4·i + 3 of eight groups in bytes[i], a byte for each group.  The upper bit of
// each is flipped: as a signed number of two bits, it is z − 8.
struct NarrowZeros {
  uint8x8_t bytes[4];

  ARMLLM_INLINE explicit NarrowZeros(const uint8_t* zero_points) {
    const uint8x8x4_t stored = vld4_u8(zero_points);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) bytes[i] = veor_u8(stored.val[i], vdup_n_u8(0xaa));
  }
};

// −Σ x of eight groups from −8 · Σ x.
struct SplitSums {
  int16x8_t upper, lower;

  ARMLLM_INLINE explicit SplitSums(const int32_t* group_sums) {
    const int16x8_t eights = vuzp1q_s16(vreinterpretq_s16_s32(vld1q_s32(group_sums)),
                                        vreinterpretq_s16_s32(vld1q_s32(group_sums + 4)));
    upper = vrshrq_n_s16(eights, 10);
    lower = vsubq_s16(vshrq_n_s16(eights, 3), vshlq_n_s16(upper, 7));
  }
};

// Returns `group_sums` if `left` is at least 8, or else `padded` with copies of `left` of them and zeros.
ARMLLM_INLINE const int32_t* eight_sums(const int32_t* group_sums, int64_t left, int32_t* padded) {
  if (left >= 8) return group_sums;
  for (int i = 0; i < 8; ++i) padded[i] = i < left ? group_sums[i] : 0;
  return padded;
}

// The sums of kCount tokens with rows 4·i … 4·i + 3 in sums[t][i].  Eight groups at a time: the sections are
// padded.
template <int kCount>
__attribute__((noinline)) void narrow_zero_point_sums(const uint8_t* panel, const PanelLayout& layout,
                                                      const int32_t* const* group_sums,
                                                      int32x4_t (*sums)[4]) {
  const int32x4_t to_top = {64, 16, 4, 1};  // moves the bits of each row to the top of its four bytes
  const uint8_t *multipliers = panel + layout.multipliers, *zero_points = panel + layout.zero_points;
  int32x4_t upper[kCount][4] = {}, lower[kCount][4] = {};
  for (int64_t g = 0; g < layout.groups; g += 8, multipliers += 64, zero_points += 32) {
    int8x16_t x[kCount];
#pragma GCC unroll 2
    for (int t = 0; t < kCount; ++t) {
      int32_t padded[8];
      const SplitSums split(eight_sums(group_sums[t] + g, layout.groups - g, padded));
      x[t] = vuzp1q_s8(vreinterpretq_s8_s16(split.upper), vreinterpretq_s8_s16(split.lower));
    }
    const NarrowZeros zeros(zero_points);
    const auto add_four = [&](auto half) ARMLLM_INLINE_LAMBDA {
      constexpr int kHalf = decltype(half)::value;
      uint8x16_t quads[2];
      load_multiplier_quads(multipliers + 32 * kHalf, quads);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const uint8x16_t less_one = i < 2 ? vandq_u8(quads[i], vdupq_n_u8(15)) : vshrq_n_u8(quads[i - 2], 4);
        const int32x4_t bits = vmulq_lane_s32(to_top, vreinterpret_s32_u8(zeros.bytes[i]), kHalf);
        const int8x16_t zero = vshrq_n_s8(vreinterpretq_s8_s32(bits), 6);
        const int8x16_t term = vmlaq_s8(zero, zero, vreinterpretq_s8_u8(less_one));
#pragma GCC unroll 2
        for (int t = 0; t < kCount; ++t) {
          upper[t][i] = vdotq_laneq_s32(upper[t][i], term, x[t], kHalf);
          lower[t][i] = vdotq_laneq_s32(lower[t][i], term, x[t], 2 + kHalf);
        }
      }
    };
    add_four(std::integral_constant<int, 0>());
    add_four(std::integral_constant<int, 1>());
  }
#pragma GCC unroll 2
  for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[t][i] = vaddq_s32(vshlq_n_s32(upper[t][i], 7), lower[t][i]);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
