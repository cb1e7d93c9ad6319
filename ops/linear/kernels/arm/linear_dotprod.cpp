// Linear kernels with SDOT.
#include "linear/kernels/arm/gemv_sdot.h"
#include "linear/kernels/arm/unpack.h"

#if !defined(__ARM_FEATURE_DOTPROD)
#error "linear_dotprod.cpp needs the dot product extension: -march=armv8.2-a+dotprod"
#endif

namespace armllm::dotprod {
namespace {

constexpr int kTokens = 8;      // a tile is 8 tokens × 8 rows: 8 loads for 32 SDOT, 16 accumulators
constexpr int kStepBytes = 64;  // bytes of the panel, and of the activations, per step of 8 k
constexpr int64_t kCallTokens = 64;
constexpr int64_t kCallPanels = 4;

// Panel order that gemm reads: [half of 8 rows][k / 8][2][2 quads][4 rows][4].
struct QuadOrder {
  static ARMLLM_INLINE void put(int8_t* w, int64_t groups, int64_t step, int first, int8x16_t rows01,
                                int8x16_t rows23) {
    int8_t* quads = w + first / 8 * groups * 256 + step * kStepBytes + first % 8 * 4;
    const int32x4_t a = vreinterpretq_s32_s8(rows01), b = vreinterpretq_s32_s8(rows23);
    vst1q_s8(quads, vreinterpretq_s8_s32(vuzp1q_s32(a, b)));
    vst1q_s8(quads + 32, vreinterpretq_s8_s32(vuzp2q_s32(a, b)));
  }
};

// kCount tokens × 2 · kPairs rows of one half of a panel, weights unpacked to INT8 in registers.  g32iz is
// unpacked with zero points of 8; `start` holds the rest, four rows at a time.
template <Scheme kScheme, bool kHigh, int kCount, int kPairs>
ARMLLM_IN_WRITTEN_ORDER void gemv_rows_i4_sdot_3_8(const uint8_t* panel, const PanelLayout& layout,
                                                   const int8_t* const* x, const int32x4_t (*start)[4],
                                                   int first, float* out) {
  Int8Pairs<kScheme == Scheme::g32iz ? Scheme::g32i : kScheme, kHigh, kPairs> rows(panel, layout, first);
  int32x4_t sums[kCount][kPairs] = {};
  if constexpr (kScheme == Scheme::g32iz)
#pragma GCC unroll 8
    for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        const int32x4_t four = start[t][2 * kHigh + (first + p) / 2], none = vdupq_n_s32(0);
        sums[t][p] = p % 2 ? vzip2q_s32(four, none) : vzip1q_s32(four, none);
      }
  for (int64_t g = 0; g < layout.groups; ++g) {
    rows.enter(g);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      int8x16_t w[kPairs];
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) w[p] = rows.at(j, p);
#pragma GCC unroll 8
      for (int t = 0; t < kCount; ++t) {
        const int8x16_t chunk = broadcast8(x[t] + kGroup * g + 8 * j);
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) sums[t][p] = vdotq_s32(sums[t][p], w[p], chunk);
      }
    }
  }
  const int row = 8 * kHigh + 2 * first;
#pragma GCC unroll 8
  for (int t = 0; t < kCount; ++t)
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; p += 2)
      store_scaled(out + t * kPanel + row + 2 * p, vpaddq_s32(sums[t][p], sums[t][p + 1]),
                   panel_scales(panel) + row + 2 * p);
}

// One panel, 3, 4 or 8 tokens: from 3 tokens on, unpacking in registers pays off.
template <Scheme kScheme, int kCount>
void gemv_i4_sdot_3_8(const uint8_t* panel, const PanelLayout& layout, const int8_t* const* x,
                      const int32_t* const* group_sums, float* out) {
  int32x4_t start[kCount][4];
  if constexpr (kScheme == Scheme::g32iz) {
    for (int t = 0; t + 1 < kCount; t += 2)
      narrow_zero_point_sums<2>(panel, layout, group_sums + t, start + t);
    if constexpr (kCount % 2 != 0)
      narrow_zero_point_sums<1>(panel, layout, group_sums + kCount - 1, start + kCount - 1);
  }
  if constexpr (kCount == 8) {
    for (int first = 0; first < 4; first += 2) {
      gemv_rows_i4_sdot_3_8<kScheme, false, 8, 2>(panel, layout, x, start, first, out);
      gemv_rows_i4_sdot_3_8<kScheme, true, 8, 2>(panel, layout, x, start, first, out);
    }
  } else {
    gemv_rows_i4_sdot_3_8<kScheme, false, kCount, 4>(panel, layout, x, start, 0, out);
    gemv_rows_i4_sdot_3_8<kScheme, true, kCount, 4>(panel, layout, x, start, 0, out);
  }
}

template <int kCount>
void gemv_sdot_3_8_by_scheme(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first,
                             float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const int8_t* rows[kCount];
  const int32_t* sums[kCount];
  for (int t = 0; t < kCount; ++t) {
    rows[t] = token_values(x, first + t);
    sums[t] = x.group_sums + (first + t) * x.row_groups();
  }
  if (scheme == Scheme::g32i) return gemv_i4_sdot_3_8<Scheme::g32i, kCount>(panel, layout, rows, sums, out);
  if (scheme == Scheme::g32iz) return gemv_i4_sdot_3_8<Scheme::g32iz, kCount>(panel, layout, rows, sums, out);
  if (scheme == Scheme::row) return gemv_i4_sdot_3_8<Scheme::row, kCount>(panel, layout, rows, sums, out);
  if (scheme == Scheme::rowz) return gemv_i4_sdot_3_8<Scheme::rowz, kCount>(panel, layout, rows, sums, out);
  if constexpr (kCount == 8) {
    gemv_i8_sdot<8, 2>(panel, layout, rows, 0, out);
    gemv_i8_sdot<8, 2>(panel, layout, rows, 2, out);
  } else {
    gemv_i8_sdot<kCount, 4>(panel, layout, rows, 0, out);
  }
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  int t = 0;
  if (!has_float_groups(scheme)) {
    if (tokens == 8) return gemv_sdot_3_8_by_scheme<8>(scheme, panel, x, first_token, out);
    for (; tokens - t >= 4; t += 4)
      gemv_sdot_3_8_by_scheme<4>(scheme, panel, x, first_token + t, out + t * kPanel);
    if (tokens - t == 3)
      return gemv_sdot_3_8_by_scheme<3>(scheme, panel, x, first_token + t, out + t * kPanel);
  }
  for (; tokens - t >= 2; t += 2) gemv_sdot_by_scheme<2>(scheme, panel, x, first_token + t, out + t * kPanel);
  if (t < tokens) gemv_sdot_by_scheme<1>(scheme, panel, x, first_token + t, out + t * kPanel);
}

// Register tile of 2 · kPairs tokens × 8 rows over all of K.
template <int kPairs>
void gemm_i8_sdot(const int8_t* w, const int8_t* x, int64_t steps, const float* scales, int tokens,
                  float* out, int64_t out_stride) {
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
      const int8_t* values = x.values + (first_token + t) * x.row_bytes();
      float* target = out + t * out_stride + 8 * half;
      const int count = tokens - t < kTokens ? tokens - t : kTokens;
      if (count > 4) {
        gemm_i8_sdot<4>(w, values, steps, scales, count, target, out_stride);
      } else {
        gemm_i8_sdot<2>(w, values, steps, scales, count, target, out_stride);
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
  k.unpack = unpack<QuadOrder>;
  k.gemm = gemm;
  k.int6_gemv_tokens = k.int3_gemv_tokens = kSdotTokens;
  return k;
}();

}  // namespace armllm::dotprod
