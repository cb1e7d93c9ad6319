// gemm with AMX: tiles of 16 tokens × 64 k and 64 k × 16 rows.  Few tokens go through AVX-512.
#include "linear/kernels/x86/unpack_avx512.h"
#include "simd/amx_tiles.h"

namespace armllm::avx512 {
extern const LinearKernels linear;
}

namespace armllm::amx {
namespace {

constexpr int kTokens = 64;     // per call of gemm
constexpr int kPanels = 8;      // per call of gemm
constexpr int64_t kTile = 16;   // tokens, or rows
constexpr int64_t kDepth = 64;  // k

// Tiles 0 … 3 are accumulators, [tokens][panel]; 4 and 5 hold tokens, 6 and 7 weights.
void configure_tiles(int first_tokens, int second_tokens) {
  TileConfig config;
  const int tokens[2] = {first_tokens, second_tokens};
  for (int i = 0; i < 8; ++i) config.set(i, i >= 6 ? kTile : tokens[i < 4 ? i / 2 : i - 4]);
  config.use();
}

// One step of 64 k for up to two tiles of tokens and two panels.
template <int T, int P>
ARMLLM_INLINE void gemm_step_i8_tdpbssd(const int8_t* x, int64_t x_stride, int64_t second_tokens,
                                        const int8_t* w, int64_t second_panel) {
  ARMLLM_TILE_LOAD(6, w, 64);
  ARMLLM_TILE_LOAD(4, x, x_stride);
  ARMLLM_TILE_DOT_INT8(0, 4, 6);
  if constexpr (P == 2) {
    ARMLLM_TILE_LOAD(7, w + second_panel, 64);
    ARMLLM_TILE_DOT_INT8(1, 4, 7);
  }
  if constexpr (T == 2) {
    ARMLLM_TILE_LOAD(5, x + second_tokens, x_stride);
    ARMLLM_TILE_DOT_INT8(2, 5, 6);
    if constexpr (P == 2) ARMLLM_TILE_DOT_INT8(3, 5, 7);
  }
}

// The last 32 k of an odd group count: operands padded with zeros to 64 k.
struct PaddedLastGroup {
  alignas(64) int8_t x[2 * kTile][kDepth] = {};
  alignas(64) int8_t w[2][kDepth * kPanel] = {};

  PaddedLastGroup(const int8_t* tokens_x, int64_t x_stride, int tokens, const int8_t* panels_w,
                  int64_t panel_bytes, int panels) {
    for (int t = 0; t < tokens; ++t) __builtin_memcpy(x[t], tokens_x + t * x_stride, kGroup);
    for (int p = 0; p < panels; ++p) __builtin_memcpy(w[p], panels_w + p * panel_bytes, kGroup * kPanel);
  }
};

// Up to 16·T tokens × P panels; `out` receives `tokens` rows.
template <int T, int P>
void gemm_i8_tdpbssd(const int8_t* w, const Activations& x, const int8_t* values, const float* row_scales,
                     int tokens, Prefetcher& prefetcher, float* out, int64_t out_stride) {
  const int64_t stride = x.row_bytes(), panel_bytes = x.groups * kGroup * kPanel;
  ARMLLM_TILE_ZERO(0);
  if constexpr (P == 2) ARMLLM_TILE_ZERO(1);
  if constexpr (T == 2) ARMLLM_TILE_ZERO(2);
  if constexpr (T == 2 && P == 2) ARMLLM_TILE_ZERO(3);
  const int8_t* lines = w;
  for (int64_t g = 0; g + 2 <= x.groups; g += 2, values += kDepth, lines += kDepth * kPanel) {
    prefetcher.group();
    gemm_step_i8_tdpbssd<T, P>(values, stride, kTile * stride, lines, panel_bytes);
  }
  if (x.groups % 2 != 0) {
    const PaddedLastGroup last(values, stride, tokens, lines, panel_bytes, P);
    gemm_step_i8_tdpbssd<T, P>(last.x[0], kDepth, kTile * kDepth, last.w[0], kDepth * kPanel);
  }
  alignas(64) int32_t sums[T][P][kTile][kPanel];
  ARMLLM_TILE_STORE(0, sums[0][0], 64);
  if constexpr (P == 2) ARMLLM_TILE_STORE(1, sums[0][1], 64);
  if constexpr (T == 2) ARMLLM_TILE_STORE(2, sums[1][0], 64);
  if constexpr (T == 2 && P == 2) ARMLLM_TILE_STORE(3, sums[1][1], 64);
  for (int t = 0; t < tokens; ++t)
    for (int p = 0; p < P; ++p) {
      const __m512 sum = _mm512_cvtepi32_ps(load(sums[t / kTile][p][t % kTile]));
      _mm512_storeu_ps(out + t * out_stride + p * kPanel,
                       _mm512_mul_ps(sum, _mm512_loadu_ps(row_scales + p * kPanel)));
    }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  Prefetcher prefetcher(x, w);
  int configured = 0;
  for (int t = 0; t < tokens; t += 2 * kTile) {
    const int left = tokens - t < 2 * kTile ? tokens - t : 2 * kTile;
    const int first = left < kTile ? left : kTile;
    if (left != configured) configure_tiles(first, left - first);
    configured = left;
    const int8_t* values = x.values + (first_token + t) * x.row_bytes();
    for (int p = 0; p < panels; p += 2) {
      const auto multiply = left > kTile ? (panels - p > 1 ? gemm_i8_tdpbssd<2, 2> : gemm_i8_tdpbssd<2, 1>)
                                         : (panels - p > 1 ? gemm_i8_tdpbssd<1, 2> : gemm_i8_tdpbssd<1, 1>);
      multiply(w + p * x.groups * kGroup * kPanel, x, values, row_scales + p * kPanel, left, prefetcher,
               out + t * out_stride + p * kPanel, out_stride);
    }
  }
  release_tiles();
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w, int32_t*,
            float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p) {
    _mm512_storeu_ps(row_scales + p * kPanel, _mm512_loadu_ps(panel_scales(panel[p])));
    unpack_panel<true>(panel[p], layout, w + p * groups * kGroup * kPanel, 64);
  }
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  avx512::linear.gemv(scheme, panel, x, first_token, tokens, out);
}

void gemv_wide(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
               const Activations& x, int tokens, float* out, int64_t out_stride) {
  avx512::linear.gemv_wide(scheme, panel, panel_stride, panels, x, tokens, out, out_stride);
}

}  // namespace

extern const LinearKernels linear;
constexpr LinearKernels linear = [] {
  LinearKernels k = common_kernels();
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

}  // namespace armllm::amx
