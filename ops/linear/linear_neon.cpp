// Linear kernels for Armv8-A without the dot product extension: SMULL and SMLAL, exact in every step.
#include "linear/arm_panel.h"

namespace armllm::neon {
namespace {

constexpr int kTokens = 4;      // a tile is 4 tokens × 4 rows: 8 loads for 48 multiplies and adds
constexpr int kStepBytes = 64;  // of the panel, 16 k
constexpr int64_t kCallTokens = 32;
constexpr int64_t kCallPanels = 2;

ARMLLM_INLINE int8x16_t zip_words(int8x16_t a, int8x16_t b, bool second) {
  const int32x4_t x = vreinterpretq_s32_s8(a), y = vreinterpretq_s32_s8(b);
  return vreinterpretq_s8_s32(second ? vzip2q_s32(x, y) : vzip1q_s32(x, y));
}

// Panel order of gemm: [4 quads][k / 16][4 rows][16].
struct RowOrder {
  static ARMLLM_INLINE void put(int8_t* w, int64_t groups, int64_t step, const Line<4>& line) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      int8_t* rows = w + i * groups * 128 + step / 2 * kStepBytes + step % 2 * 8;
#pragma GCC unroll 2
      for (int second = 0; second < 2; ++second) {
        const int8x16_t pair = zip_words(line.low[i], line.high[i], second);
        vst1_s8(rows + 32 * second, vget_low_s8(pair));
        vst1_s8(rows + 32 * second + 16, vget_high_s8(pair));
      }
    }
  }
};

ARMLLM_INLINE int32x4_t add_across(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
  return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}

// Σ over one group for each of 16 rows: nibbles as 0 … 15, so that the sum without `offset` may wrap in 16 bits,
// but the true one, at most 32 · 8 · 127 = 32512 in size, comes out exact.
ARMLLM_INLINE void group_sums(const uint8_t* group, const int8_t* x, int32_t offset, int16x8_t* sums) {
  int16x8_t rows[kPanel];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const int8x8_t chunk = vld1_s8(x + 8 * j);
    const int8x16_t twice = vcombine_s8(chunk, chunk);
    const Line<4> line = load_nibbles<4>(group + 64 * j);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
      for (int second = 0; second < 2; ++second) {
        const int8x16_t pair = zip_words(line.low[i], line.high[i], second);
        int16x8_t* sum = rows + 4 * i + 2 * second;
        sum[0] = j == 0 ? vmull_s8(vget_low_s8(pair), chunk) : vmlal_s8(sum[0], vget_low_s8(pair), chunk);
        sum[1] = j == 0 ? vmull_high_s8(pair, twice) : vmlal_high_s8(sum[1], pair, twice);
      }
  }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const int16x8_t* r = rows + 8 * h;
    const int16x8_t first = vpaddq_s16(vpaddq_s16(r[0], r[1]), vpaddq_s16(r[2], r[3]));
    const int16x8_t second = vpaddq_s16(vpaddq_s16(r[4], r[5]), vpaddq_s16(r[6], r[7]));
    sums[h] = vaddq_s16(vpaddq_s16(first, second), vdupq_n_s16(int16_t(offset)));
  }
}

template <Scheme kScheme>
ARMLLM_IN_WRITTEN_ORDER void gemv_nibbles(const uint8_t* panel, const PanelLayout& layout, const int8_t* x,
                                          const int32_t* offsets, float* out) {
  const float* scales = panel_scales(panel);
  int32x4_t total[4] = {};
  float32x4_t scaled[4] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    int16x8_t sums[2];
    group_sums(panel + layout.values + 256 * g, x + kGroup * g, offsets[g], sums);
    if constexpr (kScheme == Scheme::g32i) {
      const uint8x16_t rows = row_multipliers(panel + layout.multipliers + 8 * g);
      const int16x8_t m[2] = {vreinterpretq_s16_u8(vzip1q_u8(rows, vdupq_n_u8(0))),
                              vreinterpretq_s16_u8(vzip2q_u8(rows, vdupq_n_u8(0)))};
      for (int h = 0; h < 2; ++h) {
        total[2 * h] = vmlal_s16(total[2 * h], vget_low_s16(sums[h]), vget_low_s16(m[h]));
        total[2 * h + 1] = vmlal_high_s16(total[2 * h + 1], sums[h], m[h]);
      }
    } else {
      for (int i = 0; i < 4; ++i) {
        const int32x4_t wide = vmovl_s16(i % 2 ? vget_high_s16(sums[i / 2]) : vget_low_s16(sums[i / 2]));
        if constexpr (kScheme == Scheme::row) total[i] = vaddq_s32(total[i], wide);
        if constexpr (kScheme == Scheme::g32)
          scaled[i] =
              vaddq_f32(scaled[i], vmulq_f32(vld1q_f32(scales + kPanel * g + 4 * i), vcvtq_f32_s32(wide)));
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    if constexpr (kScheme == Scheme::g32) {
      vst1q_f32(out + 4 * i, scaled[i]);
    } else {
      store_scaled(out + 4 * i, total[i], scales + 4 * i);
    }
  }
}

// 128 · 127 twice is the most that 16 bits hold: one SMULL, one SMLAL, then on to 32 bits.
void gemv_int8(const uint8_t* panel, const PanelLayout& layout, const int8_t* x, float* out) {
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
        const int8x16_t w0 = zip_words(vld1q_s8(lines + 16 * i), vld1q_s8(lines + 64 + 16 * i), second);
        const int8x16_t w1 =
            zip_words(vld1q_s8(lines + 128 + 16 * i), vld1q_s8(lines + 192 + 16 * i), second);
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
      gemv_int8(panel, layout, values, out);
      continue;
    }
    const int32_t* offsets = x.group_offsets + (first_token + t) * x.groups;
    if (scheme == Scheme::g32i) gemv_nibbles<Scheme::g32i>(panel, layout, values, offsets, out);
    if (scheme == Scheme::row) gemv_nibbles<Scheme::row>(panel, layout, values, offsets, out);
    if (scheme == Scheme::g32) gemv_nibbles<Scheme::g32>(panel, layout, values, offsets, out);
  }
}

// Up to 4 tokens × 4 rows over all of K.
template <int kCount>
ARMLLM_IN_WRITTEN_ORDER void gemm_tile(const int8_t* w, const int8_t* x, int64_t x_stride, int64_t steps,
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
  const int64_t bytes = x.groups * kGroup, steps = bytes / 16;
  for (int quad = 0; quad < 4 * panels; ++quad, w += steps * kStepBytes) {
    const float* scales = row_scales + 4 * quad;
    int t = 0;
    for (; tokens - t >= kTokens; t += kTokens)
      gemm_tile<kTokens>(w, x.values + (first_token + t) * bytes, bytes, steps, scales,
                         out + t * out_stride + 4 * quad, out_stride);
    for (; t < tokens; ++t)
      gemm_tile<1>(w, x.values + (first_token + t) * bytes, bytes, steps, scales,
                   out + t * out_stride + 4 * quad, out_stride);
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {1,    kCallTokens,      kCallPanels, linear_quantize,
                              gemv, unpack<RowOrder>, gemm,        linear_finish};

}  // namespace armllm::neon
