// Linear kernels with SMMLA, and SDOT for a single token.
#include "linear/kernels/arm/gemv_sdot.h"
#include "linear/kernels/arm/gemv_smmla.h"
#include "linear/kernels/arm/unpack.h"

#if !defined(__ARM_FEATURE_MATMUL_INT8)
#error "linear_i8mm.cpp needs the Int8 matrix multiply extension: -march=armv8.2-a+dotprod+i8mm"
#endif

namespace armllm::i8mm {
namespace {

constexpr int kTokens = 8;      // a tile is 8 tokens × 8 rows: 8 loads for 16 SMMLA, 16 accumulators
constexpr int kStepBytes = 64;  // bytes of the panel, and of the activations, per step of 8 k
constexpr int64_t kCallTokens = 64;
constexpr int64_t kCallPanels = 4;

// Panel order that gemm reads: [half of 8 rows][k / 8][4 row pairs][2][8].
struct PairOrder {
  static ARMLLM_INLINE void put(int8_t* w, int64_t groups, int64_t step, int first, int8x16_t rows01,
                                int8x16_t rows23) {
    int8_t* pairs = w + first / 8 * groups * 256 + step * kStepBytes + first % 8 * 8;
    vst1q_s8(pairs, rows01);
    vst1q_s8(pairs + 16, rows23);
  }
};

void gemv_smmla_by_tokens(const PanelLayout& layout, const uint8_t* panel, const Activations& x,
                          int64_t first_token, const TokenPairs& pairs, float* out) {
  if (pairs.tokens == 1) return gemv_sdot_by_scheme<1>(layout.scheme, panel, x, first_token, out);
  switch ((pairs.tokens + 1) / 2) {
    case 1:
      return gemv_smmla_2_8_by_scheme<1>(layout, panel, pairs, out);
    case 2:
      return gemv_smmla_2_8_by_scheme<2>(layout, panel, pairs, out);
    case 3:
      return gemv_smmla_2_8_by_scheme<3>(layout, panel, pairs, out);
    default:
      return gemv_smmla_2_8_by_scheme<4>(layout, panel, pairs, out);
  }
}

void gemv_panels(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
                 const Activations& x, int64_t first_token, int tokens, float* out, int64_t out_stride) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  TokenPairs pairs(x, first_token, tokens, out_stride);
  SplitPairs split;
  if (scheme == Scheme::g32iz && tokens > 1 && layout.groups <= kSegment) {
    split.set(pairs, 0, layout.groups);
    pairs.split = &split;
  }
  if (scheme == Scheme::g32i && (tokens + 1) / 2 == 2)
    return gemv_panels_g32i_smmla_3_4<false>(panel, panel_stride, panels, layout, pairs, out);
  if (scheme == Scheme::g32iz && (tokens + 1) / 2 == 2)
    return gemv_panels_g32i_smmla_3_4<true>(panel, panel_stride, panels, layout, pairs, out);
  for (int64_t p = 0; p < panels; ++p)
    gemv_smmla_by_tokens(layout, panel + p * panel_stride, x, first_token, pairs, out + p * kPanel);
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  gemv_panels(scheme, panel, 0, 1, x, first_token, tokens, out, kPanel);
}

// Dot products of 2 · kPairs tokens × 8 rows over all of K.
template <int kPairs>
ARMLLM_INLINE void dot_i8_smmla(const int8_t* w, const int8_t* x, int64_t steps, int32x4_t (*sums)[4]) {
#pragma GCC unroll 4
  for (int q = 0; q < kPairs; ++q)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) sums[q][r] = vdupq_n_s32(0);
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
}

// A full tile, one group of 32 k per iteration.  Inline assembly, because GCC 12 emits three instructions for
// a 64-byte load.
template <>
ARMLLM_INLINE void dot_i8_smmla<4>(const int8_t* w, const int8_t* x, int64_t steps, int32x4_t (*sums)[4]) {
#define ARMLLM_PAIR(x, a, b, c, d) \
  "smmla v" #a ".4s, v" #x         \
  ".16b, v24.16b\n"                \
  "smmla v" #b ".4s, v" #x         \
  ".16b, v25.16b\n"                \
  "smmla v" #c ".4s, v" #x         \
  ".16b, v26.16b\n"                \
  "smmla v" #d ".4s, v" #x ".16b, v27.16b\n"
#define ARMLLM_STEP                                                                     \
  "ld1 {v24.16b, v25.16b, v26.16b, v27.16b}, [%[w]], #64\n"                             \
  "ld1 {v28.16b, v29.16b, v30.16b, v31.16b}, [%[x]], #64\n" ARMLLM_PAIR(28, 0, 1, 2, 3) \
      ARMLLM_PAIR(29, 4, 5, 6, 7) ARMLLM_PAIR(30, 8, 9, 10, 11) ARMLLM_PAIR(31, 12, 13, 14, 15)
#define ARMLLM_SUM(i) register int32x4_t sum##i __asm__("v" #i)
  ARMLLM_SUM(0);
  ARMLLM_SUM(1);
  ARMLLM_SUM(2);
  ARMLLM_SUM(3);
  ARMLLM_SUM(4);
  ARMLLM_SUM(5);
  ARMLLM_SUM(6);
  ARMLLM_SUM(7);
  ARMLLM_SUM(8);
  ARMLLM_SUM(9);
  ARMLLM_SUM(10);
  ARMLLM_SUM(11);
  ARMLLM_SUM(12);
  ARMLLM_SUM(13);
  ARMLLM_SUM(14);
  ARMLLM_SUM(15);
  __asm__ volatile(
      "movi v0.4s, #0\n movi v1.4s, #0\n movi v2.4s, #0\n movi v3.4s, #0\n"
      "movi v4.4s, #0\n movi v5.4s, #0\n movi v6.4s, #0\n movi v7.4s, #0\n"
      "movi v8.4s, #0\n movi v9.4s, #0\n movi v10.4s, #0\n movi v11.4s, #0\n"
      "movi v12.4s, #0\n movi v13.4s, #0\n movi v14.4s, #0\n movi v15.4s, #0\n"
      "1:\n" ARMLLM_STEP ARMLLM_STEP "subs %[steps], %[steps], #4\n" ARMLLM_STEP ARMLLM_STEP "b.ne 1b\n"
      : "=w"(sum0), "=w"(sum1), "=w"(sum2), "=w"(sum3), "=w"(sum4), "=w"(sum5), "=w"(sum6), "=w"(sum7),
        "=w"(sum8), "=w"(sum9), "=w"(sum10), "=w"(sum11), "=w"(sum12), "=w"(sum13), "=w"(sum14),
        "=w"(sum15), [w] "+r"(w), [x] "+r"(x), [steps] "+r"(steps)
      :
      : "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "cc", "memory");
#undef ARMLLM_PAIR
#undef ARMLLM_STEP
#undef ARMLLM_SUM
  const int32x4_t all[4][4] = {{sum0, sum1, sum2, sum3},
                               {sum4, sum5, sum6, sum7},
                               {sum8, sum9, sum10, sum11},
                               {sum12, sum13, sum14, sum15}};
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) sums[q][r] = all[q][r];
}

// Register tile of 2 · kPairs tokens × 8 rows over all of K.
template <int kPairs>
void gemm_i8_smmla(const int8_t* w, const int8_t* x, int64_t steps, const float* scales, int tokens,
                   float* out, int64_t out_stride) {
  int32x4_t sums[kPairs][4];
  dot_i8_smmla<kPairs>(w, x, steps, sums);
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
      const int8_t* values = x.values + (first_token + t) * x.row_bytes();
      float* target = out + t * out_stride + 8 * half;
      const int count = tokens - t < kTokens ? tokens - t : kTokens;
      if (count > 6) {
        gemm_i8_smmla<4>(w, values, steps, scales, count, target, out_stride);
      } else if (count > 4) {
        gemm_i8_smmla<3>(w, values, steps, scales, count, target, out_stride);
      } else if (count > 2) {
        gemm_i8_smmla<2>(w, values, steps, scales, count, target, out_stride);
      } else {
        gemm_i8_smmla<1>(w, values, steps, scales, count, target, out_stride);
      }
    }
  }
}

}  // namespace

extern const LinearKernels linear;
constexpr LinearKernels linear = [] {
  LinearKernels k = common_kernels();
  k.gemm_block = kTokens;
  k.gemm_tokens = kCallTokens;
  k.gemm_panels = kCallPanels;
  k.gemv = gemv;
  k.unpack = unpack<PairOrder>;
  k.gemm = gemm;
  k.gemv_interleaves = true;
  k.gemv_panels = gemv_panels;
  k.int6_gemv_tokens = k.int3_gemv_tokens = kSdotTokens;
  return k;
}();

}  // namespace armllm::i8mm
