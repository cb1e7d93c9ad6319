// Linear kernels for Armv8-A without the dot product extension: SMULL and SMLAL, exact at every step.
#include "linear/kernels/arm/unpack.h"

namespace armllm::neon {
namespace {

constexpr int kTokens = 4;      // a tile is 4 tokens × 4 rows: 8 loads for 48 multiplies and adds
constexpr int kStepBytes = 64;  // panel bytes per step of 16 k
constexpr int64_t kCallTokens = 32;
constexpr int64_t kCallPanels = 2;

// Panel order that gemm reads: [4 quads][k / 16][4 rows][16].
struct RowOrder {
  static ARMLLM_INLINE void put(int8_t* w, int64_t groups, int64_t step, int first, int8x16_t rows01,
                                int8x16_t rows23) {
    int8_t* rows = w + first / 4 * groups * 128 + step / 2 * kStepBytes + step % 2 * 8;
    vst1_s8(rows, vget_low_s8(rows01));
    vst1_s8(rows + 16, vget_high_s8(rows01));
    vst1_s8(rows + 32, vget_low_s8(rows23));
    vst1_s8(rows + 48, vget_high_s8(rows23));
  }
};

ARMLLM_INLINE int32x4_t add_across(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
  return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}

ARMLLM_INLINE int16x8_t add_across(const int16x8_t* r) {
  return vpaddq_s16(vpaddq_s16(vpaddq_s16(r[0], r[1]), vpaddq_s16(r[2], r[3])),
                    vpaddq_s16(vpaddq_s16(r[4], r[5]), vpaddq_s16(r[6], r[7])));
}

// Σ u·x over one group for 8 rows, u = 0 … 15 (low nibbles) or −8 … 7 (high nibbles), modulo 2^16.
template <bool kHigh>
ARMLLM_INLINE int16x8_t dot_group_smull(const uint8_t* group, const int8_t* x) {
  int16x8_t rows[8];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const int8x8_t chunk = vld1_s8(x + 8 * j);
    const int8x16_t both = vcombine_s8(chunk, chunk);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const int8x16_t bytes = load_values(group + 64 * j + 16 * v);
      const int8x16_t u = kHigh ? vshrq_n_s8(bytes, 4) : low_nibbles(bytes);
      int16x8_t* sum = rows + 2 * v;
      sum[0] = j == 0 ? vmull_s8(vget_low_s8(u), chunk) : vmlal_s8(sum[0], vget_low_s8(u), chunk);
      sum[1] = j == 0 ? vmull_high_s8(u, both) : vmlal_high_s8(sum[1], u, both);
    }
  }
  return add_across(rows);
}

enum class SumKind { g32i, g32iz, row, groups };

// A group's sum of q·x with q = −8 … 7 is at most 32512 in magnitude, so 16 bits hold it exactly.
template <SumKind kSum>
ARMLLM_IN_WRITTEN_ORDER void gemv_i4_smull(const uint8_t* panel, const PanelLayout& layout, const int8_t* x,
                                           const int32_t* group_sums, float* out) {
  const bool zeros = has_zero_points(layout.scheme), halves = has_bf16_scales(layout.scheme);
  const int64_t step = kSum == SumKind::groups ? groups_per_scale(layout.scheme) : layout.groups;
  const float* scales = panel_scales(panel);
  int32x4_t total[4] = {};
  float32x4_t scaled[4] = {};
  int32_t correction = 0;
  int64_t left = step, column = 0;
  for (int64_t g = 0; g < layout.groups; ++g) {
    const uint8_t* group = panel + layout.values + 256 * g;
    const int16x8_t sums[2] = {
        vaddq_s16(dot_group_smull<false>(group, x + kGroup * g), vdupq_n_s16(int16_t(group_sums[g]))),
        dot_group_smull<true>(group, x + kGroup * g)};
    if constexpr (kSum == SumKind::g32i || kSum == SumKind::g32iz) {
      const uint8x16_t rows = vaddq_u8(row_nibbles(panel + layout.multipliers + 8 * g), vdupq_n_u8(1));
      const int16x8_t m[2] = {vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(rows))),
                              vreinterpretq_s16_u16(vmovl_high_u8(rows))};
      for (int h = 0; h < 2; ++h) {
        total[2 * h] = vmlal_s16(total[2 * h], vget_low_s16(sums[h]), vget_low_s16(m[h]));
        total[2 * h + 1] = vmlal_high_s16(total[2 * h + 1], sums[h], m[h]);
      }
      if constexpr (kSum == SumKind::g32iz) {  // the sums assume a zero point of 8
        const uint8x16_t zeros8 =
            vsubq_u8(narrow_zero_points(panel + layout.zero_points + 4 * g), vdupq_n_u8(8));
        const int8x16_t products = vreinterpretq_s8_u8(vmulq_u8(rows, zeros8));
        const int16x8_t wide[2] = {vmovl_s8(vget_low_s8(products)), vmovl_high_s8(products)};
        const int16_t sum = int16_t(group_sums[g] / 8);
        for (int h = 0; h < 2; ++h) {
          total[2 * h] = vmlal_n_s16(total[2 * h], vget_low_s16(wide[h]), sum);
          total[2 * h + 1] = vmlal_high_n_s16(total[2 * h + 1], wide[h], sum);
        }
      }
      continue;
    }
    for (int h = 0; h < 2; ++h) {
      total[2 * h] = vaddw_s16(total[2 * h], vget_low_s16(sums[h]));
      total[2 * h + 1] = vaddw_high_s16(total[2 * h + 1], sums[h]);
    }
    correction += group_sums[g];
    if (--left != 0 && g + 1 != layout.groups) continue;
    if (zeros) {  // the sums assume a zero point of 8
      const uint8x16_t rows = row_nibbles(panel + layout.zero_points + 8 * column);
      for (int i = 0; i < 4; ++i)
        total[i] = vmlaq_n_s32(total[i], vsubq_s32(widen4(rows, 4 * i), vdupq_n_s32(8)), correction / 8);
    }
    if constexpr (kSum == SumKind::groups) {
      const uint8_t* scale_column = panel + layout.scales + column * kPanel * (halves ? 2 : 4);
      for (int i = 0; i < 4; ++i) {
        scaled[i] = vaddq_f32(scaled[i],
                              vmulq_f32(group_scales(scale_column, halves, 4 * i), vcvtq_f32_s32(total[i])));
        total[i] = vdupq_n_s32(0);
      }
    }
    correction = 0;
    left = step;
    ++column;
  }
  for (int i = 0; i < 4; ++i) {
    if constexpr (kSum == SumKind::groups) {
      vst1q_f32(out + 4 * i, scaled[i]);
    } else {
      store_scaled(out + 4 * i, total[i], scales + 4 * i);
    }
  }
}

// Rows 0, 1 or 2, 3 of a quad × 8 k.
ARMLLM_INLINE int8x16_t zip_words(const int8_t* quad, bool second) {
  const int8x16_t a = vld1q_s8(quad), b = vld1q_s8(quad + 64);
  return second ? zip2_words(a, b) : zip1_words(a, b);
}

// 16 bits hold two products of 128 · 127, so one SMULL and one SMLAL are accumulated before widening to 32
// bits.
void gemv_i8_smull(const uint8_t* panel, const PanelLayout& layout, const int8_t* x, float* out) {
  int32x4_t sums[kPanel] = {};
  const int8_t* lines = reinterpret_cast<const int8_t*>(panel + layout.values);
  for (int64_t c = 0; c < 2 * layout.groups; ++c, lines += 256) {
    const int8x16_t chunk = vld1q_s8(x + 16 * c);
    const int8x16_t even = vcombine_s8(vget_low_s8(chunk), vget_low_s8(chunk));
    const int8x16_t odd = vcombine_s8(vget_high_s8(chunk), vget_high_s8(chunk));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
      for (int second = 0; second < 2; ++second) {
        const int8x16_t w0 = zip_words(lines + 16 * i, second);
        const int8x16_t w1 = zip_words(lines + 128 + 16 * i, second);
        int32x4_t* sum = sums + 4 * i + 2 * second;
        const int16x8_t low = vmull_s8(vget_low_s8(w0), vget_low_s8(even));
        const int16x8_t high = vmull_high_s8(w0, even);
        sum[0] = vpadalq_s16(sum[0], vmlal_s8(low, vget_low_s8(w1), vget_low_s8(odd)));
        sum[1] = vpadalq_s16(sum[1], vmlal_high_s8(high, w1, odd));
      }
  }
  const float* scales = panel_scales(panel);
  for (int i = 0; i < 4; ++i)
    store_scaled(out + 4 * i, add_across(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]),
                 scales + 4 * i);
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  for (int t = 0; t < tokens; ++t, out += kPanel) {
    const int8_t* values = token_values(x, first_token + t);
    if (scheme == Scheme::i8) {
      gemv_i8_smull(panel, layout, values, out);
      continue;
    }
    const int32_t* group_sums = x.group_sums + (first_token + t) * x.row_groups();
    if (scheme == Scheme::g32i) {
      gemv_i4_smull<SumKind::g32i>(panel, layout, values, group_sums, out);
    } else if (scheme == Scheme::g32iz) {
      gemv_i4_smull<SumKind::g32iz>(panel, layout, values, group_sums, out);
    } else if (has_float_groups(scheme)) {
      gemv_i4_smull<SumKind::groups>(panel, layout, values, group_sums, out);
    } else {
      gemv_i4_smull<SumKind::row>(panel, layout, values, group_sums, out);
    }
  }
}

// Register tile of up to 4 tokens × 4 rows over all of K.
template <int kCount>
ARMLLM_IN_WRITTEN_ORDER void gemm_i8_smull(const int8_t* w, const int8_t* x, int64_t x_stride, int64_t steps,
                                           const float* scales, float* out, int64_t out_stride) {
  int32x4_t sums[kCount][4] = {};
  for (int64_t s = 0; s < steps; ++s, w += kStepBytes, x += 16) {
    int8x16_t rows[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) rows[r] = vld1q_s8(w + 16 * r);
#pragma GCC unroll 4
    for (int t = 0; t < kCount; ++t) {
      const int8x16_t token = vld1q_s8(x + t * x_stride);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const int16x8_t low = vmull_s8(vget_low_s8(rows[r]), vget_low_s8(token));
        sums[t][r] = vpadalq_s16(sums[t][r], vmlal_high_s8(low, rows[r], token));
      }
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < kCount; ++t)
    store_scaled(out + t * out_stride, add_across(sums[t][0], sums[t][1], sums[t][2], sums[t][3]), scales);
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  const int64_t bytes = x.row_bytes(), steps = x.groups * 2;
  for (int quad = 0; quad < 4 * panels; ++quad, w += steps * kStepBytes) {
    const float* scales = row_scales + 4 * quad;
    int t = 0;
    for (; tokens - t >= kTokens; t += kTokens)
      gemm_i8_smull<kTokens>(w, x.values + (first_token + t) * bytes, bytes, steps, scales,
                             out + t * out_stride + 4 * quad, out_stride);
    for (; t < tokens; ++t)
      gemm_i8_smull<1>(w, x.values + (first_token + t) * bytes, bytes, steps, scales,
                       out + t * out_stride + 4 * quad, out_stride);
  }
}

}  // namespace

extern const LinearKernels linear;
constexpr LinearKernels linear = [] {
  LinearKernels k = common_kernels();
  k.gemm_tokens = kCallTokens;
  k.gemm_panels = kCallPanels;
  k.gemv = gemv;
  k.unpack = unpack<RowOrder>;
  k.gemm = gemm;
  return k;
}();

}  // namespace armllm::neon
