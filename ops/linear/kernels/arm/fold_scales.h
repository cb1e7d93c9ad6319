// Unpacks panels with float group scales to INT8, with the scales folded into the weights.
#pragma once

#include "linear/kernels/arm/read_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// An Order stores 4 rows, given as two pairs, from row `first` (0, 4, 8, 12) on at chunk `step` of 8 k:
//   static void put(int8_t* w, int64_t groups, int64_t step, int first, int8x16_t rows01, int8x16_t rows23);

// linear_fold_factors() for rows 8 · half … 8 · half + 7.  The clamps are implicit: the conversion turns a
// NaN quotient into 0 and saturates a large one, and both occur only with all-zero weights.
ARMLLM_INLINE int16x8_t fold_factors(const uint8_t* scales, bool halves, const float* row_scales, int half) {
  int32x4_t factor[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const int row = 8 * half + 4 * i;
    const float32x4_t ratio = vdivq_f32(group_scales(scales, halves, row), vld1q_f32(row_scales + row));
    factor[i] = vcvtnq_s32_f32(vmulq_n_f32(ratio, kFoldOne));
  }
  return vqmovn_high_s32(vqmovn_s32(factor[0]), factor[1]);
}

// The 16 folded weights of row kRow of 8, indexed by nibble code: (q · factor + 128) >> 8.  SQRDMULH computes
// it: doubling q · 128 · factor and keeping the rounded high half is the same.  `codes` are q · 128; zero
// points add `zeros`.
template <int kRow, bool kZeros>
ARMLLM_INLINE int8x16_t fold_table(int16x8_t codes0, int16x8_t codes1, int16x8_t factors, int16x8_t zeros) {
  if constexpr (kZeros) {
    const int16x8_t zero = vdupq_laneq_s16(zeros, kRow);
    codes0 = vaddq_s16(codes0, zero);
    codes1 = vaddq_s16(codes1, zero);
  }
  const int16x8_t w0 = vqrdmulhq_laneq_s16(codes0, factors, kRow);
  const int16x8_t w1 = vqrdmulhq_laneq_s16(codes1, factors, kRow);
  return vuzp1q_s8(vreinterpretq_s8_s16(w0), vreinterpretq_s8_s16(w1));
}

// Looks up two rows at a time in the tables of 16 rows.  TBL with two tables needs consecutive registers, so
// the tables are pinned.
template <typename Order, bool kZeros>
ARMLLM_IN_WRITTEN_ORDER void unpack_groups(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
  const int64_t groups = layout.groups, step_groups = groups_per_scale(layout.scheme);
  const bool halves = has_bf16_scales(layout.scheme);
  const uint8_t* scales = panel + layout.scales;
  const uint8_t* zero_points = panel + layout.zero_points;
  const uint8_t* lines = panel + layout.values;
  const int16x8_t up = {0, 128, 256, 384, 512, 640, 768, 896};
  const int16x8_t down = vsubq_s16(up, vdupq_n_s16(1024));
  const int8x16_t second = vcombine_s8(vdup_n_s8(0), vdup_n_s8(16));  // table entries of the second row
  int16x8_t low_zeros = vdupq_n_s16(0), high_zeros = low_zeros;
  int64_t step = 0;
  for (int64_t begin = 0; begin < groups; begin += step_groups) {
    const int16x8_t low = fold_factors(scales, halves, panel_scales(panel), 0);
    const int16x8_t high = fold_factors(scales, halves, panel_scales(panel), 1);
    scales += kPanel * (halves ? 2 : 4);
    if constexpr (kZeros) {
      const int8x16_t z = vsubq_s8(vdupq_n_s8(8), vreinterpretq_s8_u8(row_nibbles(zero_points)));
      low_zeros = vshll_n_s8(vget_low_s8(z), 7);
      high_zeros = vshll_n_s8(vget_high_s8(z), 7);
      zero_points += 8;
    }
#define ARMLLM_TABLE(row, low_register, high_register)                                                   \
  register int8x16_t low##row __asm__(low_register) = fold_table<row, kZeros>(down, up, low, low_zeros); \
  register int8x16_t high##row __asm__(high_register) = fold_table<row, kZeros>(up, down, high, high_zeros);
    ARMLLM_TABLE(0, "v16", "v24")
    ARMLLM_TABLE(1, "v17", "v25")
    ARMLLM_TABLE(2, "v18", "v26")
    ARMLLM_TABLE(3, "v19", "v27")
    ARMLLM_TABLE(4, "v20", "v28")
    ARMLLM_TABLE(5, "v21", "v29")
    ARMLLM_TABLE(6, "v22", "v30")
    ARMLLM_TABLE(7, "v23", "v31")
#undef ARMLLM_TABLE
    const int64_t end = 4 * (begin + step_groups < groups ? begin + step_groups : groups);
    for (; step < end; ++step, lines += 64) {
      int8x16_t bytes[4], l[4], h[4];
      load_two(lines, bytes[0], bytes[1]);
      load_two(lines + 32, bytes[2], bytes[3]);
#define ARMLLM_LOOK_UP(v, a, b)                                                                              \
  {                                                                                                          \
    const uint8x16_t code = vshrq_n_u8(vreinterpretq_u8_s8(bytes[v]), 4);                                    \
    const int8x16_t high_index = vorrq_s8(vreinterpretq_s8_u8(code), second);                                \
    const int8x16_t low_index = vbslq_s8(vdupq_n_u8(15), bytes[v], second);                                  \
    __asm__("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(l[v]) : "w"(low##a), "w"(low##b), "w"(low_index)); \
    __asm__("tbl %0.16b, {%1.16b, %2.16b}, %3.16b"                                                           \
            : "=w"(h[v])                                                                                     \
            : "w"(high##a), "w"(high##b), "w"(high_index));                                                  \
  }
      ARMLLM_LOOK_UP(0, 0, 1)
      ARMLLM_LOOK_UP(1, 2, 3)
      ARMLLM_LOOK_UP(2, 4, 5)
      ARMLLM_LOOK_UP(3, 6, 7)
#undef ARMLLM_LOOK_UP
#pragma GCC unroll 2
      for (int i = 0; i < 4; i += 2) {
        Order::put(w, groups, step, 2 * i, l[i], l[i + 1]);
        Order::put(w, groups, step, 8 + 2 * i, h[i], h[i + 1]);
      }
    }
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
