// Linear kernels with SDOT.
#include "linear/arm_sdot.h"

#if !defined(__ARM_FEATURE_DOTPROD)
#error "linear_dotprod.cpp needs the dot product extension: -march=armv8.2-a+dotprod"
#endif

namespace armllm::dotprod {
namespace {

constexpr int kTokens = 8;      // a tile is 8 tokens × 8 rows: 8 loads for 32 SDOT, 16 accumulators
constexpr int kStepBytes = 64;  // of the panel and of the activations, 8 k
constexpr int64_t kCallTokens = 64;
constexpr int64_t kCallPanels = 4;

// Panel order of gemm: [half of 8 rows][k / 8][2][2 quads][4 rows][4].
struct QuadOrder {
  static ARMLLM_INLINE void put(int8_t* w, int64_t groups, int64_t step, const Line<4>& line) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      int8_t* quads = w + (i / 2) * groups * 256 + step * kStepBytes + (i % 2) * 16;
      vst1q_s8(quads, line.low[i]);
      vst1q_s8(quads + 32, line.high[i]);
    }
  }
};

// kCount tokens against 4 · kQuads rows.
template <Scheme kScheme, int kCount, int kQuads>
ARMLLM_IN_WRITTEN_ORDER void gemv_block(const uint8_t* panel, const PanelLayout& layout,
                                        const int8_t* const* x, int first, float* out) {
  Int8Lines<kScheme, kQuads> lines(panel, layout, first);
  int32x4_t sums[kCount][kQuads] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    lines.enter(g);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Line<kQuads> line = lines.line(j);
#pragma GCC unroll 8
      for (int t = 0; t < kCount; ++t) {
        const int8x8_t chunk = vld1_s8(x[t] + kGroup * g + 8 * j);
#pragma GCC unroll 4
        for (int i = 0; i < kQuads; ++i) {
          sums[t][i] = vdotq_lane_s32(sums[t][i], line.low[i], chunk, 0);
          sums[t][i] = vdotq_lane_s32(sums[t][i], line.high[i], chunk, 1);
        }
      }
    }
  }
  const float* scales = panel_scales(panel) + 4 * first;
#pragma GCC unroll 8
  for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
    for (int i = 0; i < kQuads; ++i)
      store_scaled(out + t * kPanel + 4 * (first + i), sums[t][i], scales + 4 * i);
}

template <Scheme kScheme>
void gemv_tokens(const uint8_t* panel, const Activations& x, int64_t first_token, int tokens, float* out) {
  const PanelLayout layout = panel_layout(kScheme, x.groups * kGroup);
  const int8_t* rows[kGemvTokens];
  for (int t = 0; t < tokens; ++t) rows[t] = token_values(x, first_token + t);
  int t = 0;
  if (tokens == kGemvTokens) {
    gemv_block<kScheme, 8, 2>(panel, layout, rows, 0, out);
    return gemv_block<kScheme, 8, 2>(panel, layout, rows, 2, out);
  }
  for (; tokens - t >= 4; t += 4) gemv_block<kScheme, 4, 4>(panel, layout, rows + t, 0, out + t * kPanel);
  if (tokens - t == 3) return gemv_block<kScheme, 3, 4>(panel, layout, rows + t, 0, out + t * kPanel);
  if (tokens - t == 2) return sdot_tokens<2>(kScheme, panel, x, first_token + t, out + t * kPanel);
  if (tokens - t == 1) sdot_tokens<1>(kScheme, panel, x, first_token + t, out + t * kPanel);
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  if (tokens <= 2 || scheme == Scheme::g32) {
    int t = 0;
    for (; t + 2 <= tokens; t += 2) sdot_tokens<2>(scheme, panel, x, first_token + t, out + t * kPanel);
    if (t < tokens) sdot_tokens<1>(scheme, panel, x, first_token + t, out + t * kPanel);
  } else if (scheme == Scheme::g32i) {
    gemv_tokens<Scheme::g32i>(panel, x, first_token, tokens, out);
  } else if (scheme == Scheme::row) {
    gemv_tokens<Scheme::row>(panel, x, first_token, tokens, out);
  } else {
    gemv_tokens<Scheme::i8>(panel, x, first_token, tokens, out);
  }
}

// 2 · kPairs tokens × 8 rows over all of K.
template <int kPairs>
void gemm_tile(const int8_t* w, const int8_t* x, int64_t steps, const float* scales, int tokens, float* out,
               int64_t out_stride) {
  int32x4_t sums[2 * kPairs][2] = {};
#pragma GCC unroll 2
  for (int64_t s = 0; s < steps; ++s, w += kStepBytes, x += kStepBytes) {
    int8x16_t rows[4], columns[kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) rows[r] = vld1q_s8(w + 16 * r);
#pragma GCC unroll 4
    for (int q = 0; q < kPairs; ++q) columns[q] = vld1q_s8(x + 16 * q);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
      for (int q = 0; q < kPairs; ++q) {
        sums[2 * q][i] = vdotq_laneq_s32(sums[2 * q][i], rows[i], columns[q], 0);
        sums[2 * q + 1][i] = vdotq_laneq_s32(sums[2 * q + 1][i], rows[i], columns[q], 2);
      }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
      for (int q = 0; q < kPairs; ++q) {
        sums[2 * q][i] = vdotq_laneq_s32(sums[2 * q][i], rows[2 + i], columns[q], 1);
        sums[2 * q + 1][i] = vdotq_laneq_s32(sums[2 * q + 1][i], rows[2 + i], columns[q], 3);
      }
  }
#pragma GCC unroll 8
  for (int t = 0; t < 2 * kPairs; ++t) {
    if (t >= tokens) break;
    store_scaled(out + t * out_stride, sums[t][0], scales);
    store_scaled(out + t * out_stride + 4, sums[t][1], scales + 4);
  }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  const int64_t steps = x.groups * 4, half_bytes = steps * kStepBytes;
  for (int half = 0; half < 2 * panels; ++half, w += half_bytes) {
    const float* scales = row_scales + 8 * half;
    for (int t = 0; t < tokens; t += kTokens) {
      const int8_t* values = x.values + (first_token + t) * x.groups * kGroup;
      float* target = out + t * out_stride + 8 * half;
      const int count = tokens - t < kTokens ? tokens - t : kTokens;
      if (count > 4) {
        gemm_tile<4>(w, values, steps, scales, count, target, out_stride);
      } else {
        gemm_tile<2>(w, values, steps, scales, count, target, out_stride);
      }
    }
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {kTokens, kCallTokens,       kCallPanels, linear_quantize,
                              gemv,    unpack<QuadOrder>, gemm,        linear_finish};

}  // namespace armllm::dotprod
