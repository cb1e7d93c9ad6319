// Reading weight panels with NEON: lines of 16 rows × 8 k, as nibbles or as signed INT8.
#pragma once

#include <arm_neon.h>

#include "linear/kernels_common.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_INLINE __attribute__((always_inline)) inline

// For tiles that use nearly every register: GCC's scheduler before register allocation moves loads up until
// accumulators spill.
#if defined(__GNUC__) && !defined(__clang__)
#define ARMLLM_IN_WRITTEN_ORDER __attribute__((optimize("no-schedule-insns")))
#else
#define ARMLLM_IN_WRITTEN_ORDER
#endif

// Quads (4 rows × 4 k) of a line: `low` holds k 8j … 8j + 3, `high` k 8j + 4 … 8j + 7.
template <int kQuads>
struct Line {
  int8x16_t low[kQuads], high[kQuads];
};

// 1 … 16 for each of the 16 rows of a g32i panel.  Reads 16 bytes for 8: whole registers zip in one instruction,
// and a panel's nibbles follow its multipliers.
ARMLLM_INLINE uint8x16_t row_multipliers(const uint8_t* group) {
  const uint8x16_t pairs = vld1q_u8(group);
  return vaddq_u8(vzip1q_u8(vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8(pairs, 4)), vdupq_n_u8(1));
}

// The multipliers of rows 4·quad … 4·quad + 3, each four times, as the bytes of a quad lie.
ARMLLM_INLINE int8x16_t quad_multipliers(uint8x16_t rows, int quad) {
  const uint8x16_t first = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  return vreinterpretq_s8_u8(vqtbl1q_u8(rows, vaddq_u8(first, vdupq_n_u8(uint8_t(4 * quad)))));
}

// 0 … 15: the value plus 8.
template <int kQuads>
ARMLLM_INLINE Line<kQuads> load_nibbles(const uint8_t* line) {
  Line<kQuads> out;
#pragma GCC unroll 4
  for (int i = 0; i < kQuads; ++i) {
    const uint8x16_t bytes = vld1q_u8(line + 16 * i);
    out.low[i] = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
    out.high[i] = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
  }
  return out;
}

// Quads [first, first + kQuads) of a panel as signed INT8, group by group: g32i multiplied out, row, i8.
template <Scheme kScheme, int kQuads>
class Int8Lines {
 public:
  ARMLLM_INLINE Int8Lines(const uint8_t* panel, const PanelLayout& layout, int first)
      : values_(panel + layout.values + 16 * first),
        multipliers_(panel + layout.multipliers),
        first_(first) {}

  ARMLLM_INLINE void enter(int64_t group) {
    if constexpr (kScheme == Scheme::g32i) {
      const uint8x16_t rows = row_multipliers(multipliers_ + 8 * group);
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) factor_[i] = quad_multipliers(rows, first_ + i);
    }
    group_ = values_ + group * (kScheme == Scheme::i8 ? 512 : 256);
  }

  ARMLLM_INLINE Line<kQuads> line(int j) const {
    if constexpr (kScheme == Scheme::i8) {
      Line<kQuads> out;
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) {
        out.low[i] = vreinterpretq_s8_u8(vld1q_u8(group_ + 128 * j + 16 * i));
        out.high[i] = vreinterpretq_s8_u8(vld1q_u8(group_ + 128 * j + 64 + 16 * i));
      }
      return out;
    } else {
      Line<kQuads> out = load_nibbles<kQuads>(group_ + 64 * j);
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) {
        out.low[i] = vsubq_s8(out.low[i], vdupq_n_s8(8));
        out.high[i] = vsubq_s8(out.high[i], vdupq_n_s8(8));
        if constexpr (kScheme == Scheme::g32i) {
          out.low[i] = vmulq_s8(out.low[i], factor_[i]);
          out.high[i] = vmulq_s8(out.high[i], factor_[i]);
        }
      }
      return out;
    }
  }

 private:
  const uint8_t* values_;
  const uint8_t* multipliers_;
  const uint8_t* group_ = nullptr;
  int first_;
  int8x16_t factor_[kQuads];
};

// out[0 … 3] = float(sum) · scale
ARMLLM_INLINE void store_scaled(float* out, int32x4_t sum, const float* scale) {
  vst1q_f32(out, vmulq_f32(vcvtq_f32_s32(sum), vld1q_f32(scale)));
}

// Unpacks panels group by group; `Order::put(w, groups, j, line)` stores line j of the panel at w.
template <typename Order, Scheme kScheme>
void unpack_panel(const uint8_t* panel, int64_t groups, int8_t* w) {
  Int8Lines<kScheme, 4> lines(panel, panel_layout(kScheme, groups * kGroup), 0);
  for (int64_t g = 0; g < groups; ++g) {
    lines.enter(g);
    for (int j = 0; j < 4; ++j) Order::put(w, groups, 4 * g + j, lines.line(j));
  }
}

template <typename Order>
void unpack_folded(const uint8_t* panel, int64_t groups, int8_t* w, float* scales) {
  const PanelLayout layout = panel_layout(Scheme::g32, groups * kGroup);
  linear_fold_scales(panel, layout, scales);
  for (int64_t g = 0; g < groups; ++g) {
    int8_t bytes[512];
    linear_group_int8(Scheme::g32, panel, layout, g, scales, bytes);
    for (int j = 0; j < 4; ++j) {
      Line<4> line;
      for (int i = 0; i < 4; ++i) {
        line.low[i] = vld1q_s8(bytes + 128 * j + 16 * i);
        line.high[i] = vld1q_s8(bytes + 128 * j + 64 + 16 * i);
      }
      Order::put(w, groups, 4 * g + j, line);
    }
  }
}

// LinearKernels::unpack.  Signed dot products need no correction: the offsets are zero, and no gemm reads them.
template <typename Order>
void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* offsets, float* row_scales) {
  for (int p = 0; p < panels; ++p, w += groups * 512, row_scales += kPanel, offsets += kPanel) {
    for (int r = 0; r < kPanel; ++r) offsets[r] = 0;
    if (scheme == Scheme::g32) {
      unpack_folded<Order>(panel[p], groups, w, row_scales);
      continue;
    }
    for (int r = 0; r < kPanel; ++r) row_scales[r] = panel_scales(panel[p])[r];
    if (scheme == Scheme::g32i) unpack_panel<Order, Scheme::g32i>(panel[p], groups, w);
    if (scheme == Scheme::row) unpack_panel<Order, Scheme::row>(panel[p], groups, w);
    if (scheme == Scheme::i8) unpack_panel<Order, Scheme::i8>(panel[p], groups, w);
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
