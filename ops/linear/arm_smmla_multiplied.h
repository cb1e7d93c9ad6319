// gemv of scheme g32i with SMMLA for 2 to 4 tokens: straight from the nibbles, sums multiplied group by group.
#pragma once

#include "linear/arm_smmla_products.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kSegment = 256;  // groups whose sums times 16 · 16 fit 32 bits

// Σ over groups of m[row] · offset[token] for rows 0 … 7: what low nibbles, which hold q + 8, are too much.
// Offsets go in as their two bytes.
template <int kPairs>
struct MultipliedOffsets {
  int32x4_t upper[kPairs][4] = {};
  uint32x4_t lower[kPairs][4] = {};

  // Eight groups; `from` are their offsets, token by token.
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
ARMLLM_IN_WRITTEN_ORDER void multiplied_offsets(const uint8_t* multipliers, int64_t groups,
                                                const TokenPairs& x, int32x4_t (*sums)[4]) {
  MultipliedOffsets<kPairs> offsets;
  int64_t g = 0;
  const int32_t* from[2 * kPairs];
#pragma GCC unroll 4
  for (int t = 0; t < 2 * kPairs; ++t) from[t] = x.offsets_of(t);
  for (; g + 8 <= groups; g += 8, multipliers += 64) {
    offsets.add(multipliers, from);
#pragma GCC unroll 4
    for (int t = 0; t < 2 * kPairs; ++t) from[t] += 8;
  }
  if (g < groups) {  // the section of the multipliers is padded to 64 bytes
    int32_t last[2 * kPairs][8] = {};
#pragma GCC unroll 4
    for (int t = 0; t < 2 * kPairs; ++t) {
      for (int64_t i = 0; i < groups - g; ++i) last[t][i] = from[t][i];
      from[t] = last[t];
    }
    offsets.add(multipliers, from);
  }
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      sums[p][v] = vaddq_s32(vshlq_n_s32(offsets.upper[p][v], 8), vreinterpretq_s32_u32(offsets.lower[p][v]));
}

// The sums of a pass over 4 low and 4 high rows: index 2·pair + vector.
template <int kPairs>
struct RunningSums {
  Products<kPairs, 2> products;
  int32x4_t low_total[kPairs][2] = {}, high_total[kPairs][2] = {};
  uint8x16_t low_before = vdupq_n_u8(0), high_before = vdupq_n_u8(0);  // multipliers less one
};

// Adds the products so far times a multiplier (or a step of multipliers) of each row to the totals.
template <int kPairs>
ARMLLM_INLINE void multiply(RunningSums<kPairs>& s, uint8x16_t low, uint8x16_t low_sign, uint8x16_t high,
                            uint8x16_t high_sign, const uint8_t* lanes) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const uint8x16_t at = vld1q_u8(lanes + 16 * v);
    const int32x4_t l = spread_pair<0>(low, low_sign, at), h = spread_pair<1>(high, high_sign, at);
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      s.low_total[p][v] = vmlaq_s32(s.low_total[p][v], s.products.low[p][v], l);
      s.high_total[p][v] = vmlaq_s32(s.high_total[p][v], s.products.high16(p, v), h);
    }
  }
}

// Four groups, or `count` of them at the end.
template <int kPairs, int kFirst>
ARMLLM_INLINE void add_four(RunningSums<kPairs>& s, int count, const uint8_t*& lines,
                            const uint8_t*& multipliers, const int8_t*& values, const uint8_t* lanes) {
  // Four rows of four groups; the values follow the last multipliers.
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

// Four tokens × four groups, `blocks` times: what add_four() does, from all sums zero on.  In assembly because it takes
// every register: GCC 12 spills accumulators, differently with every change.
template <int kFirst>
ARMLLM_INLINE void add_blocks(RunningSums<2>& s, int64_t blocks, const uint8_t*& lines,
                              const uint8_t*& multipliers, const int8_t*& values, const uint8_t* lanes) {
// v0 … v3 whole bytes, v4 … v7 low nibbles, v8 … v11 and v12 … v15 their totals; v16 is 15
// v17, v18 multipliers before; v28 v29 and v30 v31 steps of the low and high rows' multipliers with their signs
#define ARMLLM_LINE(column0, column1, offset) \
  "ldp q21, q22, [%[lines], #" offset         \
  "]\n"                                       \
  "and v19.16b, v21.16b, v16.16b\n"           \
  "smmla v0.4s, " column0                     \
  ".16b, v21.16b\n"                           \
  "smmla v2.4s, " column1                     \
  ".16b, v21.16b\n"                           \
  "and v20.16b, v22.16b, v16.16b\n"           \
  "smmla v1.4s, " column0                     \
  ".16b, v22.16b\n"                           \
  "smmla v3.4s, " column1                     \
  ".16b, v22.16b\n"                           \
  "smmla v4.4s, " column0                     \
  ".16b, v19.16b\n"                           \
  "smmla v6.4s, " column1                     \
  ".16b, v19.16b\n"                           \
  "smmla v5.4s, " column0                     \
  ".16b, v20.16b\n"                           \
  "smmla v7.4s, " column1 ".16b, v20.16b\n"
#define ARMLLM_GROUP(lane, line0, line1, line2, line3)                                                     \
  "ldp q19, q20, [%[lanes], #" lane                                                                        \
  "]\n"                                                                                                    \
  "tbl v21.16b, {v28.16b, v29.16b}, v19.16b\n"                                                             \
  "tbl v23.16b, {v30.16b, v31.16b}, v19.16b\n"                                                             \
  "sub v25.4s, v0.4s, v4.4s\n"                                                                             \
  "sub v26.4s, v2.4s, v6.4s\n"                                                                             \
  "tbl v22.16b, {v28.16b, v29.16b}, v20.16b\n"                                                             \
  "tbl v24.16b, {v30.16b, v31.16b}, v20.16b\n"                                                             \
  "sub v27.4s, v1.4s, v5.4s\n"                                                                             \
  "sub v19.4s, v3.4s, v7.4s\n"                                                                             \
  "mla v8.4s, v4.4s, v21.4s\n"                                                                             \
  "mla v10.4s, v6.4s, v21.4s\n"                                                                            \
  "mla v12.4s, v25.4s, v23.4s\n"                                                                           \
  "mla v14.4s, v26.4s, v23.4s\n"                                                                           \
  "mla v9.4s, v5.4s, v22.4s\n"                                                                             \
  "mla v11.4s, v7.4s, v22.4s\n"                                                                            \
  "mla v13.4s, v27.4s, v24.4s\n"                                                                           \
  "mla v15.4s, v19.4s, v24.4s\n"                                                                           \
  "ld1 {v24.16b, v25.16b, v26.16b, v27.16b}, [%[values]], #64\n" ARMLLM_LINE("v24", "v25", line0)          \
      ARMLLM_LINE("v26", "v27",                                                                            \
                  line1) "ld1 {v24.16b, v25.16b, v26.16b, v27.16b}, [%[values]], #64\n" ARMLLM_LINE("v24", \
                                                                                                    "v25", \
                                                                                                    line2) \
          ARMLLM_LINE("v26", "v27", line3)
  register int32x4_t whole00 __asm__("v0");
  register int32x4_t whole01 __asm__("v1");
  register int32x4_t whole10 __asm__("v2");
  register int32x4_t whole11 __asm__("v3");
  register int32x4_t low00 __asm__("v4");
  register int32x4_t low01 __asm__("v5");
  register int32x4_t low10 __asm__("v6");
  register int32x4_t low11 __asm__("v7");
  register int32x4_t low_total00 __asm__("v8");
  register int32x4_t low_total01 __asm__("v9");
  register int32x4_t low_total10 __asm__("v10");
  register int32x4_t low_total11 __asm__("v11");
  register int32x4_t high_total00 __asm__("v12");
  register int32x4_t high_total01 __asm__("v13");
  register int32x4_t high_total10 __asm__("v14");
  register int32x4_t high_total11 __asm__("v15");
  register uint8x16_t low_before __asm__("v17");
  register uint8x16_t high_before __asm__("v18");
  __asm__ volatile(
      "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n"
      "movi v4.4s, #0\n movi v5.4s, #0\n movi v6.4s, #0\n movi v7.4s, #0\n"
      "movi v8.4s, #0\n movi v9.4s, #0\n movi v10.4s, #0\n movi v11.4s, #0\n"
      "movi v12.4s, #0\n movi v13.4s, #0\n movi v14.4s, #0\n movi v15.4s, #0\n"
      "movi v16.16b, #15\n movi v17.4s, #0\n movi v18.4s, #0\n"
      "1:\n"
      "ldp q21, q22, [%[multipliers]], #32\n"
      "uzp%c[half] v21.4s, v21.4s, v22.4s\n"
      "mov v28.16b, v17.16b\n"
      "mov v30.16b, v18.16b\n"
      "and v17.16b, v21.16b, v16.16b\n"
      "ushr v18.16b, v21.16b, #4\n"
      "ext v28.16b, v28.16b, v17.16b, #12\n"
      "ext v30.16b, v30.16b, v18.16b, #12\n"
      "sub v28.16b, v28.16b, v17.16b\n"
      "sub v30.16b, v30.16b, v18.16b\n"
      "cmlt v29.16b, v28.16b, #0\n"
      "cmlt v31.16b, v30.16b, #0\n"
      "subs %[blocks], %[blocks], #1\n"
      ARMLLM_GROUP("0", "0", "64", "128", "192")
      ARMLLM_GROUP("32", "256", "320", "384", "448")
      ARMLLM_GROUP("64", "512", "576", "640", "704")
      ARMLLM_GROUP("96", "768", "832", "896", "960")
      "add %[lines], %[lines], #1024\n"
      "b.ne 1b\n"
      : "=w"(whole00), "=w"(whole01), "=w"(whole10), "=w"(whole11), "=w"(low00), "=w"(low01), "=w"(low10),
        "=w"(low11), "=w"(low_total00), "=w"(low_total01), "=w"(low_total10), "=w"(low_total11),
        "=w"(high_total00), "=w"(high_total01), "=w"(high_total10), "=w"(high_total11), "=w"(low_before),
        "=w"(high_before), [blocks] "+r"(blocks), [lines] "+r"(lines), [multipliers] "+r"(multipliers),
        [values] "+r"(values)
      : [lanes] "r"(lanes), [half] "i"(kFirst == 0 ? 1 : 2)
      : "v16", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31",
        "cc", "memory");
#undef ARMLLM_LINE
#undef ARMLLM_GROUP
  s.products = {{{whole00, whole01}, {whole10, whole11}}, {{low00, low01}, {low10, low11}}};
  s.low_total[0][0] = low_total00, s.low_total[0][1] = low_total01;
  s.low_total[1][0] = low_total10, s.low_total[1][1] = low_total11;
  s.high_total[0][0] = high_total00, s.high_total[0][1] = high_total01;
  s.high_total[1][0] = high_total10, s.high_total[1][1] = high_total11;
  s.low_before = low_before;
  s.high_before = high_before;
}

// g32i.  Accumulators run on over the groups: with S_g the sum of groups 0 … g,
//   Σ m_g · s_g = Σ (m_g − m_(g+1)) · S_g + m_last · S_last
// needs no zeroing, and is exact modulo 2^32.  A pass takes rows 2·kFirst … 2·kFirst + 3 of both halves.
template <int kPairs, int kFirst>
ARMLLM_IN_WRITTEN_ORDER void smmla_multiplied(const uint8_t* panel, const PanelLayout& layout,
                                              const TokenPairs& x, const int32x4_t (*low_start)[4],
                                              float* out) {
  const uint8_t* lines = panel + layout.values + 16 * kFirst;
  const uint8_t* multipliers = panel + layout.multipliers;
  const int8_t* values = x.values;
  const uint8_t* lanes = kPairLanes.of[0];
  __asm__("" : "+r"(lanes));  // one pointer instead of eight constants
  int32x4_t low_sum[kPairs][2], high_sum[kPairs][2] = {};
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) low_sum[p][v] = low_start[p][kFirst + v];
  for (int64_t begin = 0; begin < layout.groups; begin += kSegment) {
    const int64_t end = begin + kSegment < layout.groups ? begin + kSegment : layout.groups;
    RunningSums<kPairs> s;
    int64_t g = begin;
    if constexpr (kPairs == 2) {
      const int64_t blocks = (end - begin) / 4;
      if (blocks > 0) add_blocks<kFirst>(s, blocks, lines, multipliers, values, lanes);
      g += 4 * blocks;
    } else {
      for (; g + 4 <= end; g += 4) add_four<kPairs, kFirst>(s, 4, lines, multipliers, values, lanes);
    }
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
    float* to = out + 2 * p * kPanel + 2 * kFirst;
    float* second = x.second(out + 2 * kFirst, p);
    store_pairs(low_sum[p][0], low_sum[p][1], scales, to, second);
    store_pairs(high_sum[p][0], high_sum[p][1], scales + 8, to + 8, second ? second + 8 : nullptr);
  }
}

template <int kPairs>
void smmla_multiplied(const uint8_t* panel, const PanelLayout& layout, const TokenPairs& x, float* out) {
  int32x4_t low_start[kPairs][4];
  multiplied_offsets<kPairs>(panel + layout.multipliers, layout.groups, x, low_start);
  smmla_multiplied<kPairs, 0>(panel, layout, x, low_start, out);
  smmla_multiplied<kPairs, 2>(panel, layout, x, low_start, out);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
