// The linear kernels with AVX-512 VNNI.
//
// VPDPBUSD multiplies unsigned by signed bytes.  Weights are the unsigned operand: nibbles are stored as q +
// 8, and INT8 weights become w + 128.  The resulting error is an integer that depends on the activations
// only.  It is subtracted per group by Activations::group_sums (gemv) and per token by Σ x (gemm).
#include "linear/kernels/x86/gemv_avx512.h"
#include "linear/kernels/x86/gemv_wide_avx512.h"
#include "linear/kernels/x86/unpack_avx512.h"

namespace armllm::avx512 {
namespace {

constexpr int kBlock = 8;  // tokens of a register tile
// Panels of a register tile: 8 × 3 accumulators, 3 weights and one activation register.
constexpr int kWide = 3;
constexpr int kTokens = 64;
constexpr int kPanels = 2 * kWide;

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w, int32_t*,
            float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p) {
    const int first = p / kWide * kWide, wide = panels - first < kWide ? panels - first : kWide;
    _mm512_storeu_ps(row_scales + p * kPanel, _mm512_loadu_ps(panel_scales(panel[p])));
    unpack_panel<false>(panel[p], layout, w + first * groups * 512 + (p - first) * 64, wide * 64);
  }
}

// corrections[t] = −128 · Σ x for each token of a block.
void token_corrections(const int8_t* x, int64_t chunks, int32_t* corrections) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t c = 0; c < chunks; c += 2) {  // a group has four chunks
    dot(sums[0], ones, load(x + c * 64));
    dot(sums[1], ones, load(x + c * 64 + 64));
  }
  alignas(64) int32_t halves[16];
  _mm512_store_si512(halves, _mm512_add_epi32(sums[0], sums[1]));
  for (int t = 0; t < kBlock; ++t) corrections[t] = -128 * (halves[2 * t] + halves[2 * t + 1]);
}

// Register tile of T ≤ kBlock tokens × P panels over all of K.
template <int T, int P>
void gemm_i8_vpdpbusd(const int8_t* w, const int8_t* x, int64_t groups, const int32_t* corrections,
                      const float* row_scales, int tokens, Prefetcher& prefetcher, float* out,
                      int64_t out_stride) {
  __m512i acc[T][P];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p) acc[t][p] = _mm512_set1_epi32(corrections[t]);
  Prefetcher fetch = prefetcher;
  for (int64_t g = 0; g < groups; ++g) {
    fetch.group();
#pragma GCC unroll 8
    for (int h = 0; h < 8; ++h) {
      __m512i lines[P];
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) lines[p] = load(w + (h * P + p) * 64);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i four = broadcast4(x + h / 2 * kBlock * 8 + t * 8 + h % 2 * 4);
#pragma GCC unroll 3
        for (int p = 0; p < P; ++p) dot(acc[t][p], lines[p], four);
      }
      // Loads hoisted from the next step would spill accumulators.
      asm volatile("" ::: "memory");
    }
    w += 8 * P * 64;
    x += 4 * kBlock * 8;
  }
  prefetcher = fetch;
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    if (t >= tokens) break;
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p)
      _mm512_storeu_ps(
          out + t * out_stride + p * kPanel,
          _mm512_mul_ps(_mm512_cvtepi32_ps(acc[t][p]), _mm512_loadu_ps(row_scales + p * kPanel)));
  }
}

template <int P>
void gemm_panels_i8_vpdpbusd(const int8_t* w, const float* row_scales, const Activations& x,
                             int64_t first_token, int tokens, const int32_t* corrections,
                             Prefetcher& prefetcher, float* out, int64_t out_stride) {
  for (int t = 0; t < tokens; t += kBlock) {
    const int8_t* values = x.values + (first_token + t) * x.row_bytes();
    const int left = tokens - t;
    float* to = out + t * out_stride;
    // Experts have few rows, so the last block is often ragged.
    if (left > 6) {
      gemm_i8_vpdpbusd<8, P>(w, values, x.groups, corrections + t, row_scales, left, prefetcher, to,
                             out_stride);
    } else if (left > 4) {
      gemm_i8_vpdpbusd<6, P>(w, values, x.groups, corrections + t, row_scales, left, prefetcher, to,
                             out_stride);
    } else if (left > 2) {
      gemm_i8_vpdpbusd<4, P>(w, values, x.groups, corrections + t, row_scales, left, prefetcher, to,
                             out_stride);
    } else {
      gemm_i8_vpdpbusd<2, P>(w, values, x.groups, corrections + t, row_scales, left, prefetcher, to,
                             out_stride);
    }
  }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  int32_t corrections[kTokens];
  for (int t = 0; t < tokens; t += kBlock)
    token_corrections(x.values + (first_token + t) * x.row_bytes(), x.groups * 4, corrections + t);
  Prefetcher prefetcher(x, w);
  for (int p = 0; p < panels; p += kWide) {
    const int8_t* group = w + p * x.groups * 512;
    const float* scales = row_scales + p * kPanel;
    float* to = out + p * kPanel;
    switch (panels - p) {
      case 1:
        gemm_panels_i8_vpdpbusd<1>(group, scales, x, first_token, tokens, corrections, prefetcher, to,
                                   out_stride);
        break;
      case 2:
        gemm_panels_i8_vpdpbusd<2>(group, scales, x, first_token, tokens, corrections, prefetcher, to,
                                   out_stride);
        break;
      default:
        gemm_panels_i8_vpdpbusd<kWide>(group, scales, x, first_token, tokens, corrections, prefetcher, to,
                                       out_stride);
    }
  }
}

}  // namespace

extern const LinearKernels linear;
constexpr LinearKernels linear = [] {
  LinearKernels k = common_kernels();
  k.gemm_block = kBlock;
  k.gemm_tokens = kTokens;
  k.gemm_panels = kPanels;
  k.gemv = gemv;
  k.unpack = unpack;
  k.gemm = gemm;
  k.gemv_tokens = kMaxGemvTokens;
  k.gemv_wide = gemv_wide;
  k.int6_gemv_tokens = kMaxGemvTokens;
  k.int3_gemv_tokens = kGemvTokens;
  return k;
}();

}  // namespace armllm::avx512
