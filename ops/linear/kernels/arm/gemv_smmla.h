// gemv with SMMLA for 2 to 8 tokens.
#pragma once

#include "linear/kernels/arm/gemv_smmla_2_tokens.h"
#include "linear/kernels/arm/gemv_smmla_3_4_tokens.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// g32i, and g32iz with kZeros, 5 to 8 tokens: weights are unpacked to INT8 in registers, 8 rows at a time.
// Sums begin with those of `start`, by pairs of rows.
template <bool kHigh, int kPairs, bool kZeros>
ARMLLM_IN_WRITTEN_ORDER void gemv_g32i_smmla_5_8(const uint8_t* panel, const PanelLayout& layout,
                                                 const TokenPairs& x, const int32x4_t (*start)[8],
                                                 float* out) {
  Int8Pairs<Scheme::g32i, kHigh, 4> rows(panel, layout, 0);
  const int8_t* values = x.values;
  int32x4_t sums[kPairs][4] = {};
  if constexpr (kZeros)
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[p][v] = start[p][4 * kHigh + v];
  for (int64_t g = 0; g < layout.groups; ++g) {
    rows.enter(g);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const TokenChunks<kPairs> columns(values + 64 * kPairs * g + 16 * kPairs * j);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const int8x16_t w = rows.at(j, v);
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) sums[p][v] = vmmlaq_s32(sums[p][v], columns.chunk[0][p], w);
      }
    }
  }
  const float* scales = panel_scales(panel) + 8 * kHigh;
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      float* to = out + 8 * kHigh + 4 * i;
      store_pairs(sums[p][2 * i], sums[p][2 * i + 1], scales + 4 * i, to + 2 * p * x.stride, x.second(to, p));
    }
}

// Σ x of a token pair (given as −8 · Σ x) times the zero points minus `bias` of rows `row` and `row` + 1.
ARMLLM_INLINE int32x4_t zero_products(uint8x16_t zeros, int row, int bias, int32_t first, int32_t second) {
  const uint8x16_t lanes = vld1q_u8(kPairLanes.index[row / 2]);
  const int32x4_t z = vsubq_s32(broadcast_pair<0>(zeros, vdupq_n_u8(0), lanes), vdupq_n_s32(bias));
  const int32x4_t sums = vcombine_s32(vdup_n_s32(first / 8), vdup_n_s32(second / 8));
  return vmulq_s32(z, sums);
}

// row, rowz
template <int kPairs, int kVectors>
ARMLLM_IN_WRITTEN_ORDER void gemv_row_smmla_2_8(const uint8_t* panel, const PanelLayout& layout,
                                                const TokenPairs& x, float* out) {
  int32_t correction[2 * kPairs] = {};
  for (int t = 0; t < 2 * kPairs; ++t)
    for (int64_t g = 0; g < layout.groups; ++g) correction[t] += x.group_sums_of(t)[g];
  const uint8x16_t zeros =
      has_zero_points(layout.scheme) ? row_nibbles(panel + layout.zero_points) : vdupq_n_u8(8);
  for (int first = 0; first < 4; first += kVectors) {
    Products<kPairs, kVectors> sums;
    const int8_t* values = x.values;
    for (int64_t g = 0; g < layout.groups; ++g)
      sums.add_group(panel + layout.values + 256 * g + 16 * first, values + 64 * kPairs * g);
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; i += 2) {
        const int row = 2 * (first + i);
        const float* scales = panel_scales(panel) + row;
        float* to = out + 2 * p * x.stride + row;
        float* second = x.second(out + row, p);
        int32x4_t low[2], high[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int32_t a = correction[2 * p], b = correction[2 * p + 1];
          low[v] = vaddq_s32(sums.low[p][i + v], zero_products(zeros, row + 2 * v, 0, a, b));
          high[v] = vaddq_s32(vshrq_n_s32(sums.high16(p, i + v), 4),
                              zero_products(zeros, row + 8 + 2 * v, 8, a, b));
        }
        store_pairs(low[0], low[1], scales, to, second);
        store_pairs(high[0], high[1], scales + 8, to + 8, second ? second + 8 : nullptr);
      }
  }
}

// Float group scales of rows `row` and `row` + 1 as lanes a b a b.
ARMLLM_INLINE float32x4_t scale_pair(const uint8_t* scales, bool halves, int row) {
  if (!halves) return vreinterpretq_f32_s8(broadcast8(scales + 4 * row));
  int32_t both;
  __builtin_memcpy(&both, scales + 2 * row, 4);
  return vreinterpretq_f32_s32(vshll_n_s16(vreinterpret_s16_s32(vdup_n_s32(both)), 16));
}

// Float group scales: total = total + s · float(sum) for each scale.
template <int kPairs, bool kZeros>
ARMLLM_IN_WRITTEN_ORDER void gemv_groups_smmla_2_8(const uint8_t* panel, const PanelLayout& layout,
                                                   const TokenPairs& x, float* out) {
  constexpr int kVectors = kPairs <= 2 ? 2 : 1;
  const bool halves = has_bf16_scales(layout.scheme);
  const int64_t scale_bytes = kPanel * (halves ? 2 : 4), step = groups_per_scale(layout.scheme);
  const int32_t* group_sums[2 * kPairs];
#pragma GCC unroll 8
  for (int t = 0; t < 2 * kPairs; ++t) group_sums[t] = x.group_sums_of(t);
  for (int first = 0; first < 4; first += kVectors) {
    const uint8_t* scales = panel + layout.scales;
    const uint8_t* lines = panel + layout.values + 16 * first;
    const int8_t* values = x.values;
    float32x4_t low_total[kPairs][kVectors] = {}, high_total[kPairs][kVectors] = {};
    int64_t g = 0;
    for (int64_t column = 0; column < layout.scale_groups; ++column, scales += scale_bytes) {
      int32_t correction[2 * kPairs] = {};
      const int64_t end = g + step < layout.groups ? g + step : layout.groups;
      Products<kPairs, kVectors> sums;
      for (; g < end; ++g, lines += 256) {
        sums.add_group(lines, values + 64 * kPairs * g);
#pragma GCC unroll 8
        for (int t = 0; t < 2 * kPairs; ++t) correction[t] += group_sums[t][g];
      }
      const uint8x16_t zeros = kZeros ? row_nibbles(panel + layout.zero_points + 8 * column) : vdupq_n_u8(8);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int row = 2 * (first + v);
        const float32x4_t low_scale = scale_pair(scales, halves, row);
        const float32x4_t high_scale = scale_pair(scales, halves, row + 8);
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) {
          const int32_t a = correction[2 * p], b = correction[2 * p + 1];
          int32x4_t low = sums.low[p][v], high = sums.high16(p, v);
          if constexpr (kZeros) {
            low = vaddq_s32(low, zero_products(zeros, row, 0, a, b));
            high = vaddq_s32(high, vshlq_n_s32(zero_products(zeros, row + 8, 8, a, b), 4));
          } else {
            low = vaddq_s32(low, vcombine_s32(vdup_n_s32(a), vdup_n_s32(b)));
          }
          low_total[p][v] = vaddq_f32(low_total[p][v], vmulq_f32(low_scale, vcvtq_f32_s32(low)));
          high_total[p][v] = vaddq_f32(high_total[p][v], vmulq_f32(high_scale, vcvtq_n_f32_s32(high, 4)));
        }
      }
    }
    for (int p = 0; p < kPairs; ++p)
      for (int v = 0; v < kVectors; ++v) {
        float* to = out + 2 * p * x.stride + 2 * (first + v);
        vst1_f32(to, vget_low_f32(low_total[p][v]));
        vst1_f32(to + 8, vget_low_f32(high_total[p][v]));
        if (2 * p + 1 == x.tokens) continue;
        vst1_f32(to + x.stride, vget_high_f32(low_total[p][v]));
        vst1_f32(to + x.stride + 8, vget_high_f32(high_total[p][v]));
      }
  }
}

// i8: 4 · kQuads rows at a time.
template <int kPairs, int kQuads>
ARMLLM_IN_WRITTEN_ORDER void gemv_i8_smmla_2_8(const uint8_t* panel, const PanelLayout& layout,
                                               const TokenPairs& x, float* out) {
  for (int first = 0; first < 4; first += kQuads) {
    const uint8_t* lines = panel + layout.values + 16 * first;
    int32x4_t sums[kPairs][2 * kQuads] = {};
    const int8_t* values = x.values;
    for (int64_t k = 0; k < 4 * layout.groups; k += TokenChunks<kPairs>::kChunks) {
      const TokenChunks<kPairs> columns(values + 16 * kPairs * k);
#pragma GCC unroll 4
      for (int c = 0; c < TokenChunks<kPairs>::kChunks; ++c, lines += 128)
#pragma GCC unroll 4
        for (int i = 0; i < kQuads; ++i) {
          const int8x16_t a = load_values(lines + 16 * i), b = load_values(lines + 64 + 16 * i);
          const int8x16_t w0 = zip1_words(a, b), w1 = zip2_words(a, b);
#pragma GCC unroll 4
          for (int p = 0; p < kPairs; ++p) {
            sums[p][2 * i] = vmmlaq_s32(sums[p][2 * i], columns.chunk[c][p], w0);
            sums[p][2 * i + 1] = vmmlaq_s32(sums[p][2 * i + 1], columns.chunk[c][p], w1);
          }
        }
    }
    const float* scales = panel_scales(panel) + 4 * first;
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) {
        float* to = out + 4 * (first + i);
        store_pairs(sums[p][2 * i], sums[p][2 * i + 1], scales + 4 * i, to + 2 * p * x.stride,
                    x.second(to, p));
      }
  }
}

// g32i, and g32iz with kZeros; 3 and 4 tokens have gemv_panels_g32i_smmla_3_4.
template <int kPairs, bool kZeros>
void gemv_g32i_smmla(const uint8_t* panel, const PanelLayout& layout, const TokenPairs& pairs, float* out) {
  if constexpr (kPairs == 1) {
    gemv_g32i_smmla_2<kPairs, kZeros>(panel, layout, pairs, out);
  } else if constexpr (kPairs > 2) {
    int32x4_t start[kPairs][8];
    if constexpr (kZeros) narrow_zero_point_sums<kPairs, false>(panel, layout, pairs, start);
    gemv_g32i_smmla_5_8<false, kPairs, kZeros>(panel, layout, pairs, start, out);
    gemv_g32i_smmla_5_8<true, kPairs, kZeros>(panel, layout, pairs, start, out);
  }
}

// One panel; kPairs = ceil(tokens / 2).
template <int kPairs>
void gemv_smmla_2_8_by_scheme(const PanelLayout& layout, const uint8_t* panel, const TokenPairs& pairs,
                              float* out) {
  const Scheme scheme = layout.scheme;
  constexpr int kVectors = kPairs <= 2 ? 4 : 2;
  if (scheme == Scheme::i8) return gemv_i8_smmla_2_8<kPairs, kVectors>(panel, layout, pairs, out);
  if (scheme == Scheme::row || scheme == Scheme::rowz)
    return gemv_row_smmla_2_8<kPairs, kVectors>(panel, layout, pairs, out);
  if (scheme == Scheme::g32i) return gemv_g32i_smmla<kPairs, false>(panel, layout, pairs, out);
  if (scheme == Scheme::g32iz) return gemv_g32i_smmla<kPairs, true>(panel, layout, pairs, out);
  if (has_zero_points(scheme)) return gemv_groups_smmla_2_8<kPairs, true>(panel, layout, pairs, out);
  gemv_groups_smmla_2_8<kPairs, false>(panel, layout, pairs, out);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
