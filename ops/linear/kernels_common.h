// What all variants of the linear kernels share: quantising a row, finishing a row, reading a panel.
#pragma once

#include "common/types.h"
#include "linear/linear.h"

#ifndef ARMLLM_VARIANT
#error "kernels_common.h is for kernel variants: compile with -DARMLLM_VARIANT=<name>"
#endif

namespace armllm::ARMLLM_VARIANT {

// LinearKernels::quantize and LinearKernels::finish (quantize.simd.cpp)
float linear_quantize(const void* x, DType type, int64_t n, int64_t groups, int8_t* q, int64_t chunk_stride,
                      int32_t* group_offsets);
void linear_finish(const float* acc, int64_t n, float x_scale, const void* bias, DType bias_type,
                   const void* residual, void* y, DType type);

// How scheme g32 becomes one scale a row: row_scales[r] = max |q · s_group| / 127 over the row.
void linear_fold_scales(const uint8_t* panel, const PanelLayout& layout, float* row_scales);

// One group of a panel as INT8 in the order of scheme i8 (8 lines of 64 bytes), for schemes of 4 bits.
// `row_scales` is read for g32 only, where w = round_half_even(q · (s_group / row_scale)).
void linear_group_int8(Scheme scheme, const uint8_t* panel, const PanelLayout& layout, int64_t group,
                       const float* row_scales, int8_t* lines);

static inline const float* panel_scales(const uint8_t* panel) {
  return reinterpret_cast<const float*>(panel);
}

static inline int panel_multiplier(const uint8_t* panel, const PanelLayout& layout, int64_t group, int row) {
  const uint8_t pair = panel[layout.multipliers + group * 8 + row / 2];
  return ((row & 1 ? pair >> 4 : pair & 15)) + 1;
}

// First byte of token `m` in quantised activations; its chunks of 8 bytes lie block · 8 apart.
static inline const int8_t* token_values(const Activations& x, int64_t token) {
  return x.values + (token / x.block) * x.block * x.groups * kGroup + (token % x.block) * 8;
}

// Runs ahead of gemv through the bytes of this panel and the next strictly in order: a weight is read once, and the
// CPU's own prefetcher loses its way between two streams, values here and scales or multipliers there.
template <Scheme scheme>
struct PanelPrefetch {
  const uint8_t* at;

  PanelPrefetch(const uint8_t* panel, const PanelLayout& layout, int64_t bytes_ahead)
      : at(panel + layout.values + bytes_ahead) {}

  inline void line() {
    __builtin_prefetch(at, 0, 3);
    at += 64;
  }

  // Called once a group, in order.
  inline void group(int64_t g) {
#pragma GCC unroll 8
    for (int i = 0; i < (scheme == Scheme::i8 ? 8 : 4); ++i) line();
    if (scheme == Scheme::g32 || (scheme == Scheme::g32i && g % 8 == 0)) line();
    if (scheme != Scheme::g32 && g == 0) line();
  }
};

}  // namespace armllm::ARMLLM_VARIANT
