// gemv with SMMLA for schemes g32i and g32iz and 2 tokens: multiplies packed nibbles, and applies the
// multipliers per group.
#pragma once

#include "linear/kernels/arm/narrow_zero_points_smmla.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Σ over groups of m[row] · group_sum[token] for rows 0 … 7, the excess of low nibbles that are stored as q +
// 8.  Group sums are split into two bytes.
template <int kPairs>
struct GroupSumProducts {
  int32x4_t upper[kPairs][4] = {};
  uint32x4_t lower[kPairs][4] = {};

  // Adds eight groups; `from` holds their group sums, token by token.
  ARMLLM_INLINE void add(const uint8_t* multipliers, const int32_t* const* from) {
    uint8x16_t m[4], fours[4], rows[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      m[i] = vaddq_u8(vandq_u8(vld1q_u8(multipliers + 16 * i), vdupq_n_u8(15)), vdupq_n_u8(1));
    const uint8x16_t four = {0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27};  // rows × groups
    const uint8x16x2_t first = {{m[0], m[1]}}, second = {{m[2], m[3]}};
    fours[0] = vqtbl2q_u8(first, four);
    fours[1] = vqtbl2q_u8(second, four);
    fours[2] = vqtbl2q_u8(first, vaddq_u8(four, vdupq_n_u8(4)));
    fours[3] = vqtbl2q_u8(second, vaddq_u8(four, vdupq_n_u8(4)));
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const int8x16_t a = vreinterpretq_s8_u8(fours[i]), b = vreinterpretq_s8_u8(fours[i + 1]);
      rows[i] = vreinterpretq_u8_s8(zip1_words(a, b));
      rows[i + 1] = vreinterpretq_u8_s8(zip2_words(a, b));
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      int8x16_t both[2];
#pragma GCC unroll 2
      for (int t = 0; t < 2; ++t)
        both[t] = vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(vld1q_s32(from[2 * p + t])),
                                                  vreinterpretq_s16_s32(vld1q_s32(from[2 * p + t] + 4))));
      const uint8x16_t low = vreinterpretq_u8_s8(vuzp1q_s8(both[0], both[1]));
      const int8x16_t high = vuzp2q_s8(both[0], both[1]);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        upper[p][v] = vmmlaq_s32(upper[p][v], high, vreinterpretq_s8_u8(rows[v]));
        lower[p][v] = vmmlaq_u32(lower[p][v], low, rows[v]);
      }
    }
  }
};

template <int kPairs>
ARMLLM_IN_WRITTEN_ORDER void group_sum_products(const uint8_t* multipliers, int64_t groups,
                                                const TokenPairs& x, int32x4_t (*sums)[4]) {
  GroupSumProducts<kPairs> products;
  int64_t g = 0;
  const int32_t* from[2 * kPairs];
#pragma GCC unroll 4
  for (int t = 0; t < 2 * kPairs; ++t) from[t] = x.group_sums_of(t);
  for (; g + 8 <= groups; g += 8, multipliers += 64) {
    products.add(multipliers, from);
#pragma GCC unroll 4
    for (int t = 0; t < 2 * kPairs; ++t) from[t] += 8;
  }
  if (g < groups) {  // the multipliers' section is padded to 64 bytes
    int32_t last[2 * kPairs][8] = {};
#pragma GCC unroll 4
    for (int t = 0; t < 2 * kPairs; ++t) {
      for (int64_t i = 0; i < groups - g; ++i) last[t][i] = from[t][i];
      from[t] = last[t];
    }
    products.add(multipliers, from);
  }
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      sums[p][v] =
          vaddq_s32(vshlq_n_s32(products.upper[p][v], 8), vreinterpretq_s32_u32(products.lower[p][v]));
}

// Accumulators of a pass over 4 low and 4 high rows; index 2·pair + vector.
template <int kPairs>
struct RunningSums {
  Products<kPairs, 2> products;
  int32x4_t low_total[kPairs][2] = {}, high_total[kPairs][2] = {};
  uint8x16_t low_before = vdupq_n_u8(0), high_before = vdupq_n_u8(0);  // multipliers minus one
};

// Adds the running products, times a multiplier (or a difference of multipliers) per row, to the totals.
template <int kPairs>
ARMLLM_INLINE void multiply(RunningSums<kPairs>& s, uint8x16_t low, uint8x16_t low_sign, uint8x16_t high,
                            uint8x16_t high_sign, const uint8_t* lanes) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const uint8x16_t at = vld1q_u8(lanes + 16 * v);
    const int32x4_t l = broadcast_pair<0>(low, low_sign, at), h = broadcast_pair<1>(high, high_sign, at);
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      s.low_total[p][v] = vmlaq_s32(s.low_total[p][v], s.products.low[p][v], l);
      s.high_total[p][v] = vmlaq_s32(s.high_total[p][v], s.products.high16(p, v), h);
    }
  }
}

// Adds four groups, or `count` at the end.
template <int kPairs, int kFirst>
ARMLLM_INLINE void add_four(RunningSums<kPairs>& s, int count, const uint8_t*& lines,
                            const uint8_t*& multipliers, const int8_t*& values, const uint8_t* lanes) {
  // Multipliers of four rows in four groups.  Reading past the last is safe: the values follow.
  const uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(multipliers));
  const uint32x4_t b = vreinterpretq_u32_u8(vld1q_u8(multipliers + 16));
  const uint8x16_t four = vreinterpretq_u8_u32(kFirst == 0 ? vuzp1q_u32(a, b) : vuzp2q_u32(a, b));
  const uint8x16_t low = vandq_u8(four, vdupq_n_u8(15)), high = vshrq_n_u8(four, 4);
  const uint8x16_t low_step = vsubq_u8(vextq_u8(s.low_before, low, 12), low);
  const uint8x16_t high_step = vsubq_u8(vextq_u8(s.high_before, high, 12), high);
  const uint8x16_t low_sign = vcltzq_s8(vreinterpretq_s8_u8(low_step));
  const uint8x16_t high_sign = vcltzq_s8(vreinterpretq_s8_u8(high_step));
  s.low_before = low;
  s.high_before = high;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if (i == count) break;
    multiply<kPairs>(s, low_step, low_sign, high_step, high_sign, lanes + 32 * i);
    s.products.add_group(lines + 256 * i, values + 64 * kPairs * i);
  }
  lines += 1024;
  values += 256 * kPairs;
  multipliers += 32;
}

// g32i.  Accumulators run over all groups without a reset.  With S_g the sum of groups 0 … g,
//
//   Σ m_g · s_g = Σ (m_g − m_(g+1)) · S_g + m_last · S_last
//
// which is exact modulo 2^32.  One pass covers rows 2·kFirst … 2·kFirst + 3 of both halves.  Sums begin with
// those of `start`, by pairs of rows: 0 … 7, and 8 … 15 of g32iz.
template <int kPairs, int kFirst, bool kZeros>
ARMLLM_IN_WRITTEN_ORDER void gemv_rows_g32i_smmla_2(const uint8_t* panel, const PanelLayout& layout,
                                                    const TokenPairs& x,
                                                    const int32x4_t (*start)[kZeros ? 8 : 4], float* out) {
  const uint8_t* lines = panel + layout.values + 16 * kFirst;
  const uint8_t* multipliers = panel + layout.multipliers;
  const int8_t* values = x.values;
  const uint8_t* lanes = kPairLanes.index[0];
  __asm__("" : "+r"(lanes));  // one pointer instead of eight constants
  int32x4_t low_sum[kPairs][2], high_sum[kPairs][2] = {};
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      low_sum[p][v] = start[p][kFirst + v];
      if constexpr (kZeros) high_sum[p][v] = start[p][4 + kFirst + v];
    }
  for (int64_t begin = 0; begin < layout.groups; begin += kSegment) {
    const int64_t end = begin + kSegment < layout.groups ? begin + kSegment : layout.groups;
    RunningSums<kPairs> s;
    int64_t g = begin;
    for (; g + 4 <= end; g += 4) add_four<kPairs, kFirst>(s, 4, lines, multipliers, values, lanes);
    if (g < end) add_four<kPairs, kFirst>(s, int(end - g), lines, multipliers, values, lanes);
    const uint8x16_t last = vaddq_u8(row_nibbles(panel + layout.multipliers + 8 * (end - 1)), vdupq_n_u8(1));
    multiply<kPairs>(s, last, vdupq_n_u8(0), vextq_u8(last, last, 8), vdupq_n_u8(0), lanes + 16 * kFirst);
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        low_sum[p][v] = vaddq_s32(low_sum[p][v], s.low_total[p][v]);
        high_sum[p][v] = vsraq_n_s32(high_sum[p][v], s.high_total[p][v], 4);
      }
  }
  const float* scales = panel_scales(panel) + 2 * kFirst;
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p) {
    float* to = out + 2 * p * x.stride + 2 * kFirst;
    float* second = x.second(out + 2 * kFirst, p);
    store_pairs(low_sum[p][0], low_sum[p][1], scales, to, second);
    store_pairs(high_sum[p][0], high_sum[p][1], scales + 8, to + 8, second ? second + 8 : nullptr);
  }
}

// g32i, and g32iz with kZeros.
template <int kPairs, bool kZeros>
void gemv_g32i_smmla_2(const uint8_t* panel, const PanelLayout& layout, const TokenPairs& x, float* out) {
  int32x4_t start[kPairs][kZeros ? 8 : 4];
  if constexpr (kZeros) {
    narrow_zero_point_sums<kPairs, true>(panel, layout, x, start);
  } else {
    group_sum_products<kPairs>(panel + layout.multipliers, layout.groups, x, start);
  }
  gemv_rows_g32i_smmla_2<kPairs, 0, kZeros>(panel, layout, x, start, out);
  gemv_rows_g32i_smmla_2<kPairs, 2, kZeros>(panel, layout, x, start, out);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
