// Panels to INT8 in the order that a variant's gemm reads.
#pragma once

#include "linear/arm_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// An Order stores 4 rows from row `first` (0, 4, 8, 12) on at chunk `step` of 8 k, given as two pairs of rows:
//   static void put(int8_t* w, int64_t groups, int64_t step, int first, int8x16_t rows01, int8x16_t rows23);

template <typename Order, Scheme kScheme>
ARMLLM_IN_WRITTEN_ORDER void unpack_exact(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
  Int8Pairs<kScheme, false, 4> low(panel, layout, 0);
  Int8Pairs<kScheme, true, 4> high(panel, layout, 0);
  const uint8_t* lines = panel + layout.values;
  for (int64_t g = 0; g < layout.groups; ++g) {
    low.enter(g);
    high.enter(g);
    for (int64_t step = 4 * g; step < 4 * g + 4; ++step, lines += 64)
#pragma GCC unroll 2
      for (int i = 0; i < 4; i += 2) {
        const int8x16_t a = load_values(lines + 16 * i), b = load_values(lines + 16 * i + 16);
        Order::put(w, layout.groups, step, 2 * i, low.low(a, i), low.low(b, i + 1));
        Order::put(w, layout.groups, step, 8 + 2 * i, high.high(a, i), high.high(b, i + 1));
      }
  }
}

template <typename Order>
void unpack_int8(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
  const uint8_t* lines = panel + layout.values;
  for (int64_t step = 0; step < 4 * layout.groups; ++step, lines += 128)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int8x16_t a = load_values(lines + 16 * i), b = load_values(lines + 64 + 16 * i);
      Order::put(w, layout.groups, step, 4 * i, zip1_words(a, b), zip2_words(a, b));
    }
}

// What each of the 16 codes of a nibble becomes in one row: (u − zero_point) · factor / 256, rounded.
ARMLLM_INLINE int8x16_t fold_table(int16x8_t codes0, int16x8_t codes1, int16_t minus_zero, int16_t factor) {
  const int16x8_t base = vdupq_n_s16(minus_zero);  // mod 2^16; every code that occurs comes out right
  return vcombine_s8(vrshrn_n_s16(vmlaq_n_s16(base, codes0, factor), 8),
                     vrshrn_n_s16(vmlaq_n_s16(base, codes1, factor), 8));
}

// Float group scales: w = (q · factor + 128) >> 8 by one table a row, looked up two rows at a time.
template <typename Order>
ARMLLM_IN_WRITTEN_ORDER void unpack_folded(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
  const int64_t step_groups = groups_per_scale(layout.scheme);
  const bool zeros = has_zero_points(layout.scheme);
  const int16x8_t up = {0, 1, 2, 3, 4, 5, 6, 7}, up8 = {8, 9, 10, 11, 12, 13, 14, 15};
  const int8x16_t second = vcombine_s8(vdup_n_s8(0), vdup_n_s8(16));  // table entries of the second row
  for (int64_t column = 0; column < layout.scale_groups; ++column) {
    alignas(16) int16_t factor[kPanel], minus_zero[kPanel];
    linear_fold_factors(panel, layout, column, factor);
    const uint8x16_t zero_points =
        zeros ? row_nibbles(panel + layout.zero_points + 8 * column) : vdupq_n_u8(8);
    vst1q_s16(minus_zero, vnegq_s16(vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(zero_points))),
                                              vld1q_s16(factor))));
    vst1q_s16(minus_zero + 8,
              vnegq_s16(vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(zero_points)), vld1q_s16(factor + 8))));
    const int64_t begin = column * step_groups;
    const int64_t end = begin + step_groups < layout.groups ? begin + step_groups : layout.groups;
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      int8x16x2_t low[2], high[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) {
          const int row = 2 * (i + v) + r;
          low[v].val[r] = fold_table(up, up8, minus_zero[row], factor[row]);
          high[v].val[r] = fold_table(up8, up, minus_zero[row + 8], factor[row + 8]);
        }
      const uint8_t* lines = panel + layout.values + 256 * begin + 16 * i;
      for (int64_t step = 4 * begin; step < 4 * end; ++step, lines += 64) {
        int8x16_t l[2], h[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int8x16_t bytes = load_values(lines + 16 * v);
          const uint8x16_t code = vshrq_n_u8(vreinterpretq_u8_s8(bytes), 4);
          l[v] = vqtbl2q_s8(low[v], vreinterpretq_u8_s8(vorrq_s8(low_nibbles(bytes), second)));
          h[v] = vqtbl2q_s8(high[v], vorrq_u8(code, vreinterpretq_u8_s8(second)));
        }
        Order::put(w, layout.groups, step, 2 * i, l[0], l[1]);
        Order::put(w, layout.groups, step, 8 + 2 * i, h[0], h[1]);
      }
    }
  }
}

// LinearKernels::unpack.  Signed dot products need no correction: the offsets are zero, and no gemm reads them.
template <typename Order>
void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* offsets, float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p, w += groups * 512, row_scales += kPanel, offsets += kPanel) {
    for (int r = 0; r < kPanel; ++r) offsets[r] = 0;
    for (int r = 0; r < kPanel; ++r) row_scales[r] = panel_scales(panel[p])[r];
    if (scheme == Scheme::g32i) {
      unpack_exact<Order, Scheme::g32i>(panel[p], layout, w);
    } else if (scheme == Scheme::row) {
      unpack_exact<Order, Scheme::row>(panel[p], layout, w);
    } else if (scheme == Scheme::rowz) {
      unpack_exact<Order, Scheme::rowz>(panel[p], layout, w);
    } else if (scheme == Scheme::i8) {
      unpack_int8<Order>(panel[p], layout, w);
    } else {
      unpack_folded<Order>(panel[p], layout, w);
    }
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
