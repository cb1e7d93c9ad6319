// Linear kernels with SMMLA (and SDOT for a single token).
#include "linear/arm_sdot.h"

#if !defined(__ARM_FEATURE_MATMUL_INT8)
#error "linear_i8mm.cpp needs the Int8 matrix multiply extension: -march=armv8.2-a+dotprod+i8mm"
#endif

namespace armllm::i8mm {
namespace {

constexpr int kTokens = 8;      // a tile is 8 tokens × 8 rows: 8 loads for 16 SMMLA, 16 accumulators
constexpr int kStepBytes = 64;  // of the panel and of the activations, 8 k
constexpr int64_t kCallTokens = 64;
constexpr int64_t kCallPanels = 4;

ARMLLM_INLINE int8x16_t zip1_words(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
ARMLLM_INLINE int8x16_t zip2_words(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
// Panel order of gemm: [half of 8 rows][k / 8][4 row pairs][2][8].
struct PairOrder {
  static ARMLLM_INLINE void put(int8_t* w, int64_t groups, int64_t step, const Line<4>& line) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      int8_t* pairs = w + (i / 2) * groups * 256 + step * kStepBytes + (i % 2) * 32;
      vst1q_s8(pairs, zip1_words(line.low[i], line.high[i]));
      vst1q_s8(pairs + 16, zip2_words(line.low[i], line.high[i]));
    }
  }
};

// Four accumulators of (token pair × row pair) become four rows of each token, scaled.
ARMLLM_INLINE void store_pairs(int32x4_t rows01, int32x4_t rows23, const float* scale, float* first,
                               float* second) {
  const int64x2_t a = vreinterpretq_s64_s32(rows01), b = vreinterpretq_s64_s32(rows23);
  store_scaled(first, vreinterpretq_s32_s64(vzip1q_s64(a, b)), scale);
  if (second != nullptr) store_scaled(second, vreinterpretq_s32_s64(vzip2q_s64(a, b)), scale);
}

// 2 · kPairs tokens against 4 · kQuads rows; an odd last token is computed twice and stored once.
template <Scheme kScheme, int kPairs, int kQuads>
ARMLLM_IN_WRITTEN_ORDER void gemv_pairs(const uint8_t* panel, const PanelLayout& layout,
                                        const int8_t* const* x, int tokens, int first, float* out) {
  Int8Lines<kScheme, kQuads> lines(panel, layout, first);
  int32x4_t sums[kPairs][2 * kQuads] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    lines.enter(g);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      int8x16_t columns[kPairs];
#pragma GCC unroll 4
      for (int q = 0; q < kPairs; ++q)
        columns[q] =
            vcombine_s8(vld1_s8(x[2 * q] + kGroup * g + 8 * j), vld1_s8(x[2 * q + 1] + kGroup * g + 8 * j));
      const Line<kQuads> line = lines.line(j);
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) {
        const int8x16_t w0 = zip1_words(line.low[i], line.high[i]),
                        w1 = zip2_words(line.low[i], line.high[i]);
#pragma GCC unroll 4
        for (int q = 0; q < kPairs; ++q) {
          sums[q][2 * i] = vmmlaq_s32(sums[q][2 * i], columns[q], w0);
          sums[q][2 * i + 1] = vmmlaq_s32(sums[q][2 * i + 1], columns[q], w1);
        }
      }
    }
  }
  const float* scales = panel_scales(panel) + 4 * first;
#pragma GCC unroll 4
  for (int q = 0; q < kPairs; ++q)
#pragma GCC unroll 4
    for (int i = 0; i < kQuads; ++i) {
      float* row = out + 2 * q * kPanel + 4 * (first + i);
      store_pairs(sums[q][2 * i], sums[q][2 * i + 1], scales + 4 * i, row,
                  2 * q + 1 < tokens ? row + kPanel : nullptr);
    }
}

template <Scheme kScheme>
void gemv_tokens(const uint8_t* panel, const Activations& x, int64_t first_token, int tokens, float* out) {
  const PanelLayout layout = panel_layout(kScheme, x.groups * kGroup);
  const int8_t* rows[kGemvTokens];
  for (int t = 0; t < kGemvTokens; ++t)
    rows[t] = token_values(x, first_token + (t < tokens ? t : tokens - 1));
  switch ((tokens + 1) / 2) {
    case 2:
      return gemv_pairs<kScheme, 2, 4>(panel, layout, rows, tokens, 0, out);
    case 3:
      gemv_pairs<kScheme, 3, 2>(panel, layout, rows, tokens, 0, out);
      return gemv_pairs<kScheme, 3, 2>(panel, layout, rows, tokens, 2, out);
    default:
      gemv_pairs<kScheme, 4, 2>(panel, layout, rows, tokens, 0, out);
      return gemv_pairs<kScheme, 4, 2>(panel, layout, rows, tokens, 2, out);
  }
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
  int32x4_t sums[kPairs][4] = {};
#pragma GCC unroll 2
  for (int64_t s = 0; s < steps; ++s, w += kStepBytes, x += kStepBytes) {
    int8x16_t rows[4], columns[kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) rows[r] = vld1q_s8(w + 16 * r);
#pragma GCC unroll 4
    for (int q = 0; q < kPairs; ++q) columns[q] = vld1q_s8(x + 16 * q);
#pragma GCC unroll 4
    for (int q = 0; q < kPairs; ++q)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) sums[q][r] = vmmlaq_s32(sums[q][r], columns[q], rows[r]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < kPairs; ++q) {
    float* first = out + 2 * q * out_stride;
    float* second = 2 * q + 1 < tokens ? first + out_stride : nullptr;
    store_pairs(sums[q][0], sums[q][1], scales, first, second);
    store_pairs(sums[q][2], sums[q][3], scales + 4, first + 4, second ? second + 4 : nullptr);
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
      if (count > 6) {
        gemm_tile<4>(w, values, steps, scales, count, target, out_stride);
      } else if (count > 4) {
        gemm_tile<3>(w, values, steps, scales, count, target, out_stride);
      } else if (count > 2) {
        gemm_tile<2>(w, values, steps, scales, count, target, out_stride);
      } else {
        gemm_tile<1>(w, values, steps, scales, count, target, out_stride);
      }
    }
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {kTokens, kCallTokens,       kCallPanels, linear_quantize,
                              gemv,    unpack<PairOrder>, gemm,        linear_finish};

}  // namespace armllm::i8mm
