// The same as narrow_zero_points.h for pairs of tokens with SMMLA.
#pragma once

#include "linear/kernels/arm/narrow_zero_points.h"
#include "linear/kernels/arm/smmla_products.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// −Σ x of a segment's groups in two bytes, for all panels.
struct SplitPairs {
  alignas(16) int8_t bytes[kMostPairs][kSegment / 8][2][16];  // [pair][8 groups][upper, lower][token][group]

  void set(const TokenPairs& x, int64_t begin, int64_t groups) {
    for (int p = 0; p < (x.tokens + 1) / 2; ++p) {
      const int32_t* from[2] = {x.group_sums_of(2 * p) + begin, x.group_sums_of(2 * p + 1) + begin};
      for (int64_t g = 0; g < groups; g += 8) {
        int32_t padded[2][8];
        const SplitSums a(eight_sums(from[0] + g, groups - g, padded[0])),
            b(eight_sums(from[1] + g, groups - g, padded[1]));
        int8_t (*to)[16] = bytes[p][g / 8];
        vst1q_s8(to[0], vuzp1q_s8(vreinterpretq_s8_s16(a.upper), vreinterpretq_s8_s16(b.upper)));
        vst1q_s8(to[1], vuzp1q_s8(vreinterpretq_s8_s16(a.lower), vreinterpretq_s8_s16(b.lower)));
      }
    }
  }
};

// m · (z − 8), or m · z for rows 0 … 7 with kWhole, of rows 2·v and 2·v + 1 of eight groups in terms[v].
template <bool kWhole>
ARMLLM_INLINE void narrow_zero_point_terms(const uint8_t* multipliers, const uint8_t* zero_points,
                                           int8_t (*terms)[16]) {
  const int8x16_t even = {6, 6, 6, 6, 6, 6, 6, 6, 4, 4, 4, 4, 4, 4, 4, 4},
                  odd = {2, 2, 2, 2, 2, 2, 2, 2,
                         0, 0, 0, 0, 0, 0, 0, 0};  // move the bits of a row to the top
  uint8x16_t first[2], second[2];
  load_multiplier_quads(multipliers, first);
  load_multiplier_quads(multipliers + 32, second);
  const NarrowZeros zeros(zero_points);
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    const int8x16_t a = vreinterpretq_s8_u8(first[v / 2]), b = vreinterpretq_s8_u8(second[v / 2]);
    const uint8x16_t rows = vreinterpretq_u8_s8(v % 2 ? zip2_words(a, b) : zip1_words(a, b));
#pragma GCC unroll 2
    for (int high = 0; high < 2; ++high) {
      const uint8x8_t bytes = zeros.bytes[2 * high + v / 2];
      const uint8x16_t bits = vshlq_u8(vcombine_u8(bytes, bytes), v % 2 ? odd : even);
      int8x16_t zero = vshrq_n_s8(vreinterpretq_s8_u8(bits), 6);
      if (kWhole && high == 0) zero = vaddq_s8(zero, vdupq_n_s8(8));
      const uint8x16_t less_one = high ? vshrq_n_u8(rows, 4) : vandq_u8(rows, vdupq_n_u8(15));
      vst1q_s8(terms[4 * high + v], vmlaq_s8(zero, zero, vreinterpretq_s8_u8(less_one)));
    }
  }
}

// The sums of pairs of tokens with rows 2·v and 2·v + 1 in sums[pair][v].  With kWhole, the sums to which
// those of rows 0 … 7 are added have zero points of 0.
template <int kPairs, bool kWhole>
__attribute__((noinline)) void narrow_zero_point_sums(const uint8_t* panel, const PanelLayout& layout,
                                                      const TokenPairs& x, int32x4_t (*sums)[8]) {
  alignas(16) int8_t terms[kSegment / 8][8][16];
  for (int p = 0; p < kPairs; ++p)
    for (int v = 0; v < 8; ++v) sums[p][v] = vdupq_n_s32(0);
  for (int64_t begin = 0; begin < layout.groups; begin += kSegment) {
    const int64_t left = layout.groups - begin, groups = left < kSegment ? left : kSegment,
                  eights = ceil_div(groups, 8);
    const uint8_t* multipliers = panel + layout.multipliers + 8 * begin;
    const uint8_t* zero_points = panel + layout.zero_points + 4 * begin;
    for (int64_t i = 0; i < eights; ++i)
      narrow_zero_point_terms<kWhole>(multipliers + 64 * i, zero_points + 32 * i, terms[i]);
    SplitPairs split;
    if (x.split == nullptr) split.set(x, begin, groups);
    for (int p = 0; p < kPairs; ++p) {
      const int8_t (*bytes)[2][16] = (x.split == nullptr ? &split : x.split)->bytes[p];
      int32x4_t upper[8] = {}, lower[8] = {};
      for (int64_t i = 0; i < eights; ++i) {
        const int8x16_t a = vld1q_s8(bytes[i][0]), b = vld1q_s8(bytes[i][1]);
#pragma GCC unroll 8
        for (int v = 0; v < 8; ++v) {
          const int8x16_t term = vld1q_s8(terms[i][v]);
          upper[v] = vmmlaq_s32(upper[v], a, term);
          lower[v] = vmmlaq_s32(lower[v], b, term);
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v)
        sums[p][v] = vaddq_s32(sums[p][v], vaddq_s32(vshlq_n_s32(upper[v], 7), lower[v]));
    }
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
