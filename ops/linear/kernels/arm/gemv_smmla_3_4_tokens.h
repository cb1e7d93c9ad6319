// gemv_panels with SMMLA for schemes g32i and g32iz and 3 or 4 tokens, typical of Mixture-of-Experts experts.
// In assembly, because the tile uses every register.
//
// Accumulators run over all groups without a reset.  With S_g the sum of groups 0 … g,
//
//   Σ m_g · s_g = Σ (m_g − m_(g+1)) · S_g + m_last · S_last
//
// which is exact modulo 2^32.
#pragma once

#include "linear/kernels/arm/narrow_zero_points_smmla.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Low nibbles are stored as q + 8.  With u = m − 1 as stored, their excess is Σ (u + 1) · group_sum.  Group
// sums are split into two bytes.  Covers one segment and serves all panels.
struct GroupSumBytes {
  alignas(16) int8_t bytes[kSegment / 8][2][2][16];  // [8 groups][pair of tokens][high, low][token][group]
  int32x4_t sums[2];                                 // Σ group_sum of a token pair: a a b b

  void set(const TokenPairs& x, int64_t begin, int64_t groups) {
    const int64_t whole = groups / 8;
    for (int p = 0; p < 2; ++p) {
      const int32_t* from[2] = {x.group_sums_of(2 * p) + begin, x.group_sums_of(2 * p + 1) + begin};
      int32x4_t sum[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
      for (int64_t i = 0; i < whole; ++i, from[0] += 8, from[1] += 8) put(from[0], from[1], bytes[i][p], sum);
      if (groups % 8 != 0) {
        int32_t rest[2][8] = {};
        for (int64_t g = 0; g < groups % 8; ++g) rest[0][g] = from[0][g], rest[1][g] = from[1][g];
        put(rest[0], rest[1], bytes[whole][p], sum);
      }
      const int32x4_t both = vpaddq_s32(sum[0], sum[1]);  // a a' b b'
      sums[p] = vaddq_s32(both, vrev64q_s32(both));
    }
  }

 private:
  static ARMLLM_INLINE void put(const int32_t* first, const int32_t* second, int8_t (*to)[16],
                                int32x4_t* sum) {
    const int32x4_t a0 = vld1q_s32(first), a1 = vld1q_s32(first + 4);
    const int32x4_t b0 = vld1q_s32(second), b1 = vld1q_s32(second + 4);
    sum[0] = vaddq_s32(sum[0], vaddq_s32(a0, a1));
    sum[1] = vaddq_s32(sum[1], vaddq_s32(b0, b1));
    const int8x16_t a =
        vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(a0), vreinterpretq_s16_s32(a1)));
    const int8x16_t b =
        vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(b0), vreinterpretq_s16_s32(b1)));
    vst1q_s8(to[0], vuzp2q_s8(a, b));
    vst1q_s8(to[1], vuzp1q_s8(a, b));
  }
};

// TBL indices that gather the bytes of two rows from eight groups (64 bytes).
struct RowLanes {
  alignas(16) uint8_t index[4][16];
};
constexpr RowLanes row_lanes() {
  RowLanes lanes{};
  for (int v = 0; v < 4; ++v)
    for (int b = 0; b < 16; ++b) lanes.index[v][b] = uint8_t(8 * (b % 8) + 2 * v + b / 8);
  return lanes;
}
constexpr RowLanes kRowLanes = row_lanes();

// out[pair of tokens][pair of low rows] = Σ (u + 1) · group_sum.  Reads `multipliers` 64 bytes at a time.
ARMLLM_INLINE void multiply_group_sums(const uint8_t* multipliers, int64_t groups,
                                       const GroupSumBytes& group_sums, int32x4_t (*out)[4]) {
  const int8_t* from = group_sums.bytes[0][0][0];
  int64_t eights = ceil_div(groups, 8);
// v0 … v7: sums of high bytes; v8 … v15: sums of low bytes
#define ARMLLM_ROWS(v, a, b, c, d)         \
  "tbl v25.16b, {v16.16b - v19.16b}, v" #v \
  ".16b\n"                                 \
  "and v25.16b, v25.16b, v24.16b\n"        \
  "smmla v" #a                             \
  ".4s, v28.16b, v25.16b\n"                \
  "ummla v" #b                             \
  ".4s, v29.16b, v25.16b\n"                \
  "smmla v" #c                             \
  ".4s, v30.16b, v25.16b\n"                \
  "ummla v" #d ".4s, v31.16b, v25.16b\n"
#define ARMLLM_END(high, low) "mla v" #low ".4s, v" #high ".4s, v24.4s\n"
  __asm__ volatile(
      "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n"
      "movi v4.4s, #0\n movi v5.4s, #0\n movi v6.4s, #0\n movi v7.4s, #0\n"
      "ldp q8, q12, [%[sums]]\n"
      "mov v9.16b, v8.16b\n mov v10.16b, v8.16b\n mov v11.16b, v8.16b\n"
      "mov v13.16b, v12.16b\n mov v14.16b, v12.16b\n mov v15.16b, v12.16b\n"
      "ld1 {v20.16b - v23.16b}, [%[lanes]]\n"
      "movi v24.16b, #15\n"
      "1:\n"
      "ld1 {v16.16b - v19.16b}, [%[multipliers]], #64\n"
      "ld1 {v28.16b - v31.16b}, [%[from]], #64\n"
      "subs %[eights], %[eights], #1\n"
      ARMLLM_ROWS(20, 0, 8, 4, 12)
      ARMLLM_ROWS(21, 1, 9, 5, 13)
      ARMLLM_ROWS(22, 2, 10, 6, 14)
      ARMLLM_ROWS(23, 3, 11, 7, 15)
      "b.ne 1b\n"
      "movi v24.4s, #1, lsl #8\n"
      ARMLLM_END(0, 8) ARMLLM_END(1, 9) ARMLLM_END(2, 10) ARMLLM_END(3, 11)
      ARMLLM_END(4, 12) ARMLLM_END(5, 13) ARMLLM_END(6, 14) ARMLLM_END(7, 15)
      "stp q8, q9, [%[out]]\n stp q10, q11, [%[out], #32]\n"
      "stp q12, q13, [%[out], #64]\n stp q14, q15, [%[out], #96]\n"
      : [multipliers] "+r"(multipliers), [from] "+r"(from), [eights] "+r"(eights)
      : [sums] "r"(group_sums.sums), [lanes] "r"(kRowLanes.index[0]), [out] "r"(out)
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15",
        "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v28", "v29", "v30", "v31",
        "cc", "memory");
#undef ARMLLM_ROWS
#undef ARMLLM_END
}

struct RowTotals {
  int32x4_t low[2][2], high[2][2];  // [pair of tokens][pair of rows]; high is scaled by 16
};

// Rows 2·kFirst … 2·kFirst + 3 of both halves over `groups` groups.  The low sums start from `low_start`.
template <int kFirst>
ARMLLM_INLINE RowTotals dot_rows_g32i_smmla_3_4(const uint8_t* lines, const uint8_t* multipliers,
                                                const int8_t* values, int64_t groups,
                                                const int32x4_t* low_start) {
//   v0 … v3: products of whole bytes; v4 … v7: of low nibbles
//   v8 … v11 and v12 … v15: totals of low and high rows; v16: 15
//   v17: previous multipliers; v18, v23: lane indices of the first of four groups
//   v28, v29 and v30, v31: multiplier differences of the low and high rows, each with its signs
#define ARMLLM_LINE(x0, x1)         \
  "ldp q21, q22, [%[lines]], #64\n" \
  "and v19.16b, v21.16b, v16.16b\n" \
  "smmla v0.4s, v" #x0              \
  ".16b, v21.16b\n"                 \
  "smmla v2.4s, v" #x1              \
  ".16b, v21.16b\n"                 \
  "and v20.16b, v22.16b, v16.16b\n" \
  "smmla v1.4s, v" #x0              \
  ".16b, v22.16b\n"                 \
  "smmla v3.4s, v" #x1              \
  ".16b, v22.16b\n"                 \
  "smmla v4.4s, v" #x0              \
  ".16b, v19.16b\n"                 \
  "smmla v6.4s, v" #x1              \
  ".16b, v19.16b\n"                 \
  "smmla v5.4s, v" #x0              \
  ".16b, v20.16b\n"                 \
  "smmla v7.4s, v" #x1 ".16b, v20.16b\n"
#define ARMLLM_TWO_LINES "ld1 {v24.16b - v27.16b}, [%[values]], #64\n" ARMLLM_LINE(24, 25) ARMLLM_LINE(26, 27)
#define ARMLLM_GROUP ARMLLM_TWO_LINES ARMLLM_TWO_LINES
#define ARMLLM_MULTIPLY(low, high, lane0, lane1) \
  "tbl v21.16b, " low ", v" #lane0               \
  ".16b\n"                                       \
  "tbl v24.16b, " high ", v" #lane0              \
  ".16b\n"                                       \
  "sub v26.4s, v0.4s, v4.4s\n"                   \
  "sub v27.4s, v2.4s, v6.4s\n"                   \
  "tbl v22.16b, " low ", v" #lane1               \
  ".16b\n"                                       \
  "tbl v25.16b, " high ", v" #lane1              \
  ".16b\n"                                       \
  "mla v12.4s, v26.4s, v24.4s\n"                 \
  "mla v14.4s, v27.4s, v24.4s\n"                 \
  "sub v26.4s, v1.4s, v5.4s\n"                   \
  "sub v27.4s, v3.4s, v7.4s\n"                   \
  "mla v8.4s, v4.4s, v21.4s\n"                   \
  "mla v10.4s, v6.4s, v21.4s\n"                  \
  "mla v9.4s, v5.4s, v22.4s\n"                   \
  "mla v11.4s, v7.4s, v22.4s\n"                  \
  "mla v13.4s, v26.4s, v25.4s\n"                 \
  "mla v15.4s, v27.4s, v25.4s\n"
#define ARMLLM_STEP(lane0, lane1) ARMLLM_MULTIPLY("{v28.16b, v29.16b}", "{v30.16b, v31.16b}", lane0, lane1)
#define ARMLLM_NEXT(offset) "ldp q19, q20, [%[lanes], #" #offset "]\n" ARMLLM_STEP(19, 20) ARMLLM_GROUP
#define ARMLLM_STEPS                              \
  "ld2 {v21.4s, v22.4s}, [%[multipliers]], #32\n" \
  "ext v19.16b, v17.16b, v2%c[half].16b, #12\n"   \
  "mov v17.16b, v2%c[half].16b\n"                 \
  "and v28.16b, v19.16b, v16.16b\n"               \
  "and v20.16b, v17.16b, v16.16b\n"               \
  "ushr v30.16b, v19.16b, #4\n"                   \
  "ushr v19.16b, v17.16b, #4\n"                   \
  "sub v28.16b, v28.16b, v20.16b\n"               \
  "sub v30.16b, v30.16b, v19.16b\n"               \
  "cmlt v29.16b, v28.16b, #0\n"                   \
  "cmlt v31.16b, v30.16b, #0\n"
  int64_t blocks = groups / 4, rest = groups % 4;
  const uint8_t* last = multipliers + 8 * (groups - 1);
  register int32x4_t low00 __asm__("v8");
  register int32x4_t low01 __asm__("v9");
  register int32x4_t low10 __asm__("v10");
  register int32x4_t low11 __asm__("v11");
  register int32x4_t high00 __asm__("v12");
  register int32x4_t high01 __asm__("v13");
  register int32x4_t high10 __asm__("v14");
  register int32x4_t high11 __asm__("v15");
  __asm__ volatile(
      "ldp q8, q9, [%[start]]\n ldp q10, q11, [%[start], #64]\n"
      "movi v12.4s, #0\n movi v13.4s, #0\n movi v14.4s, #0\n movi v15.4s, #0\n"
      "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n"
      "movi v4.4s, #0\n movi v5.4s, #0\n movi v6.4s, #0\n movi v7.4s, #0\n"
      "movi v16.16b, #15\n"
      "ldp q18, q23, [%[lanes]]\n"
      "cbz %[blocks], 3f\n"
      ARMLLM_STEPS
      "tbnz %[blocks], #0, 2f\n"  // skips the multiply: there are no sums yet
      "b 1f\n"
      "0:\n"
      ARMLLM_STEPS
      ARMLLM_STEP(18, 23)
      "1:\n"
      ARMLLM_GROUP
      ARMLLM_NEXT(32)
      ARMLLM_NEXT(64)
      ARMLLM_NEXT(96)
      ARMLLM_STEPS
      ARMLLM_STEP(18, 23)
      "2:\n"
      ARMLLM_GROUP
      ARMLLM_NEXT(32)
      ARMLLM_NEXT(64)
      "subs %[blocks], %[blocks], #2\n"
      ARMLLM_NEXT(96)
      "b.gt 0b\n"
      "3:\n"
      "cbz %[rest], 4f\n"
      ARMLLM_STEPS
      ARMLLM_STEP(18, 23)
      ARMLLM_GROUP
      "subs %[rest], %[rest], #1\n"
      "b.eq 4f\n"
      ARMLLM_NEXT(32)
      "subs %[rest], %[rest], #1\n"
      "b.eq 4f\n"
      ARMLLM_NEXT(64)
      "4:\n"
      "ldr d28, [%[last]]\n"
      "movi v19.16b, #1\n"
      "ushr v30.16b, v28.16b, #4\n"
      "and v28.16b, v28.16b, v16.16b\n"
      "add v30.16b, v30.16b, v19.16b\n"
      "add v28.16b, v28.16b, v19.16b\n"
      "ldp q19, q20, [%[lanes], %[rows]]\n"
      ARMLLM_MULTIPLY("{v28.16b}", "{v30.16b}", 19, 20)  // TBL reads zero past its one-register table
      : "=w"(low00), "=w"(low01), "=w"(low10), "=w"(low11), "=w"(high00), "=w"(high01), "=w"(high10),
        "=w"(high11), [blocks] "+r"(blocks), [rest] "+r"(rest), [lines] "+r"(lines),
        [multipliers] "+r"(multipliers), [values] "+r"(values)
      : [start] "r"(low_start + kFirst), [lanes] "r"(kPairLanes.index[0]), [last] "r"(last),
        [half] "i"(kFirst == 0 ? 1 : 2), [rows] "i"(16 * kFirst)
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21", "v22",
        "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "cc", "memory");
#undef ARMLLM_LINE
#undef ARMLLM_TWO_LINES
#undef ARMLLM_GROUP
#undef ARMLLM_MULTIPLY
#undef ARMLLM_STEP
#undef ARMLLM_NEXT
#undef ARMLLM_STEPS
  return {{{low00, low01}, {low10, low11}}, {{high00, high01}, {high10, high11}}};
}

// Stores rows 2·kFirst … 2·kFirst + 3 of both halves of a panel for four tokens.  The second token of a pair
// is stored first, because a missing token shares the row of the last one and must be overwritten.
template <int kFirst, bool kSixteenfold>
ARMLLM_INLINE void store_rows_3_4(const RowTotals& totals, const float* panel_scales, float* const* out) {
  const float32x4_t low_scale = vld1q_f32(panel_scales + 2 * kFirst);
  const float32x4_t high_scale = vld1q_f32(panel_scales + 8 + 2 * kFirst);
  const auto high_floats = [](int32x4_t sum) ARMLLM_INLINE_LAMBDA {
    if constexpr (kSixteenfold) {
      return vcvtq_n_f32_s32(sum, 4);
    } else {
      return vcvtq_f32_s32(sum);
    }
  };
  const auto store = [&](float* to, int32x4_t low, int32x4_t high, float32x4_t scale0, float32x4_t scale1)
                         ARMLLM_INLINE_LAMBDA {
                           vst1q_f32(to + 2 * kFirst, vmulq_f32(vcvtq_f32_s32(low), scale0));
                           vst1q_f32(to + 8 + 2 * kFirst, vmulq_f32(high_floats(high), scale1));
                         };
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    const int32x4_t *l = totals.low[p], *h = totals.high[p];
    store(out[2 * p + 1], zip2_doubles(l[0], l[1]), zip2_doubles(h[0], h[1]), low_scale, high_scale);
    store(out[2 * p], zip1_doubles(l[0], l[1]), zip1_doubles(h[0], h[1]), low_scale, high_scale);
  }
}

// Sums of more groups than one segment holds.  High sums are returned unscaled here, not times 16 as in
// RowTotals.
template <int kFirst, bool kZeros>
RowTotals dot_segments_g32i_smmla_3_4(const uint8_t* panel, const PanelLayout& layout, const TokenPairs& x) {
  RowTotals totals{};
  if constexpr (kZeros) {
    int32x4_t sums[2][8];
    narrow_zero_point_sums<2, true>(panel, layout, x, sums);
    for (int p = 0; p < 2; ++p)
      for (int v = 0; v < 2; ++v) {
        totals.low[p][v] = sums[p][kFirst + v];
        totals.high[p][v] = sums[p][4 + kFirst + v];
      }
  }
  for (int64_t begin = 0; begin < layout.groups; begin += kSegment) {
    const int64_t left = layout.groups - begin, groups = left < kSegment ? left : kSegment;
    const uint8_t* multipliers = panel + layout.multipliers + 8 * begin;
    int32x4_t start[2][4] = {};
    if constexpr (!kZeros) {
      GroupSumBytes group_sums;
      group_sums.set(x, begin, groups);
      multiply_group_sums(multipliers, groups, group_sums, start);
    }
    const RowTotals some =
        dot_rows_g32i_smmla_3_4<kFirst>(panel + layout.values + 256 * begin + 16 * kFirst, multipliers,
                                        x.values + 128 * begin, groups, start[0]);
    for (int p = 0; p < 2; ++p)
      for (int v = 0; v < 2; ++v) {
        totals.low[p][v] = vaddq_s32(totals.low[p][v], some.low[p][v]);
        totals.high[p][v] = vsraq_n_s32(totals.high[p][v], some.high[p][v], 4);
      }
  }
  return totals;
}

// A panel of g32iz in one segment.  Sums of high rows are scaled by 16.
ARMLLM_INLINE void gemv_g32iz_smmla_3_4(const uint8_t* panel, const PanelLayout& layout, const TokenPairs& x,
                                        float* const* rows) {
  const uint8_t *values = panel + layout.values, *multipliers = panel + layout.multipliers;
  int32x4_t sums[2][8], start[2][4];
  narrow_zero_point_sums<2, true>(panel, layout, x, sums);
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) start[p][v] = sums[p][v];
  const auto add_high = [&](RowTotals& totals, int first) ARMLLM_INLINE_LAMBDA {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        totals.high[p][v] = vaddq_s32(totals.high[p][v], vshlq_n_s32(sums[p][4 + first + v], 4));
  };
  RowTotals totals = dot_rows_g32i_smmla_3_4<0>(values, multipliers, x.values, layout.groups, start[0]);
  add_high(totals, 0);
  store_rows_3_4<0, true>(totals, panel_scales(panel), rows);
  totals = dot_rows_g32i_smmla_3_4<2>(values + 32, multipliers, x.values, layout.groups, start[0]);
  add_high(totals, 2);
  store_rows_3_4<2, true>(totals, panel_scales(panel), rows);
}

// LinearKernels::gemv_panels for 3 and 4 tokens of g32i, and of g32iz with kZeros.
template <bool kZeros>
ARMLLM_IN_WRITTEN_ORDER void gemv_panels_g32i_smmla_3_4(const uint8_t* panel, int64_t panel_stride,
                                                        int64_t panels, const PanelLayout& layout,
                                                        const TokenPairs& x, float* out) {
  const int64_t groups = layout.groups, multipliers = layout.multipliers, values = layout.values;
  const bool one_segment = groups <= kSegment;
  GroupSumBytes group_sums;
  if (one_segment && !kZeros) group_sums.set(x, 0, groups);
  float* rows[4];
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) rows[t] = out + (t < x.tokens ? t : x.tokens - 1) * x.stride;
  for (; panels > 0; --panels, panel += panel_stride) {
    const float* scales = panel_scales(panel);
    if (one_segment && kZeros) {
      gemv_g32iz_smmla_3_4(panel, layout, x, rows);
    } else if (one_segment) {
      int32x4_t start[2][4];
      multiply_group_sums(panel + multipliers, groups, group_sums, start);
      store_rows_3_4<0, true>(
          dot_rows_g32i_smmla_3_4<0>(panel + values, panel + multipliers, x.values, groups, start[0]), scales,
          rows);
      store_rows_3_4<2, true>(
          dot_rows_g32i_smmla_3_4<2>(panel + values + 32, panel + multipliers, x.values, groups, start[0]),
          scales, rows);
    } else {
      store_rows_3_4<0, false>(dot_segments_g32i_smmla_3_4<0, kZeros>(panel, layout, x), scales, rows);
      store_rows_3_4<2, false>(dot_segments_g32i_smmla_3_4<2, kZeros>(panel, layout, x), scales, rows);
    }
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) rows[t] += kPanel;
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
