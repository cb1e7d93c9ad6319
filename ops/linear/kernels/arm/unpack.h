// Unpacks panels to INT8 in the order that a variant's gemm reads.
#pragma once

#include "linear/kernels/arm/fold_scales.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

template <typename Order, Scheme kScheme>
ARMLLM_IN_WRITTEN_ORDER void unpack_i4(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
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
void unpack_i8(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
  const uint8_t* lines = panel + layout.values;
  for (int64_t step = 0; step < 4 * layout.groups; ++step, lines += 128)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int8x16_t a = load_values(lines + 16 * i), b = load_values(lines + 64 + 16 * i);
      Order::put(w, layout.groups, step, 4 * i, zip1_words(a, b), zip2_words(a, b));
    }
}

// LinearKernels::unpack.  Signed dot products need no correction: row_info is zero and unread.
template <typename Order>
void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* row_info, float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p, w += groups * 512, row_scales += kPanel, row_info += kPanel) {
    for (int r = 0; r < kPanel; ++r) row_info[r] = 0;
    for (int r = 0; r < kPanel; ++r) row_scales[r] = panel_scales(panel[p])[r];
    if (scheme == Scheme::g32i) {
      unpack_i4<Order, Scheme::g32i>(panel[p], layout, w);
    } else if (scheme == Scheme::g32iz) {
      unpack_i4<Order, Scheme::g32iz>(panel[p], layout, w);
    } else if (scheme == Scheme::row) {
      unpack_i4<Order, Scheme::row>(panel[p], layout, w);
    } else if (scheme == Scheme::rowz) {
      unpack_i4<Order, Scheme::rowz>(panel[p], layout, w);
    } else if (scheme == Scheme::i8) {
      unpack_i8<Order>(panel[p], layout, w);
    } else if (has_zero_points(scheme)) {
      unpack_groups<Order, true>(panel[p], layout, w);
    } else {
      unpack_groups<Order, false>(panel[p], layout, w);
    }
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
