// Linear kernels with SVE's SDOT, for CPUs whose vectors are longer than NEON's but which may lack NEON's dot
// product extension.
#include "linear/kernels/arm/gemv_sve.h"

#if !defined(__ARM_FEATURE_SVE)
#error "linear_sve.cpp needs the Scalable Vector Extension: -march=armv8.2-a+sve"
#endif

namespace armllm::sve {
namespace {

constexpr int kTokens = 8;  // a tile is 8 tokens × 2 vectors: 10 loads for 16 SDOT, 16 accumulators
constexpr int64_t kCallTokens = 64;
constexpr int64_t kCallPanels = 4;

// Lanes are (row, half of 8 k), so two vectors hold one vector of rows.
ARMLLM_INLINE int64_t tile_rows() { return int64_t(svcntb()) / 4; }

// Register tile of kCount tokens of a block × tile_rows() rows over all of K.
template <int kCount>
void gemm_i8_sve_sdot(const int8_t* w, const int8_t* x, int64_t steps, const float* scales, int tokens,
                      float* out, int64_t out_stride) {
  const svbool_t all = svptrue_b8();
  const int64_t length = int64_t(svcntb());
#define ARMLLM_EACH_TOKEN(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)
#define ARMLLM_BEGIN_TOKEN(t) [[maybe_unused]] svint32_t a##t = svdup_n_s32(0), b##t = a##t;
  ARMLLM_EACH_TOKEN(ARMLLM_BEGIN_TOKEN)
  for (int64_t s = 0; s < steps; ++s, w += 2 * length, x += kTokens * 8) {
    const svint8_t first = svld1_s8(all, w), second = svld1_s8(all, w + length);
#define ARMLLM_DOT_TOKEN(t)                                         \
  if constexpr (t < kCount) {                                       \
    const svint8_t token = svreinterpret_s8(broadcast8(x + 8 * t)); \
    a##t = svdot_s32(a##t, first, token);                           \
    b##t = svdot_s32(b##t, second, token);                          \
  }
    ARMLLM_EACH_TOKEN(ARMLLM_DOT_TOKEN)
  }
#define ARMLLM_STORE_TOKEN(t) \
  if constexpr (t < kCount)   \
    if (t < tokens) store_rows(a##t, b##t, scales, out + t * out_stride);
  ARMLLM_EACH_TOKEN(ARMLLM_STORE_TOKEN)
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* row_info, float* row_scales) {
  unpack_tiles(scheme, panel, panels, groups, tile_rows(), w, row_info, row_scales);
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  const int64_t steps = x.groups * 4, rows = tile_rows();
  for (int64_t row = 0; row < panels * kPanel; row += rows, w += steps * rows * 8)
    for (int t = 0; t < tokens; t += kTokens) {
      const int8_t* values = x.values + (first_token + t) * x.row_bytes();
      float* target = out + t * out_stride + row;
      if (tokens - t > kTokens / 2) {
        gemm_i8_sve_sdot<kTokens>(w, values, steps, row_scales + row, tokens - t, target, out_stride);
      } else {
        gemm_i8_sve_sdot<kTokens / 2>(w, values, steps, row_scales + row, tokens - t, target, out_stride);
      }
    }
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  if (scheme == Scheme::i8) return gemv_i8_sve_sdot_by_length(panel, x, first_token, tokens, out);
  gemv_i4_sve_sdot_by_length(scheme, panel, x, first_token, tokens, out);
}

}  // namespace

extern const LinearKernels linear;
constexpr LinearKernels linear = [] {
  LinearKernels k = common_kernels();
  k.gemm_block = kTokens;
  k.gemm_tokens = kCallTokens;
  k.gemm_panels = kCallPanels;
  k.gemv = gemv;
  k.unpack = unpack;
  k.gemm = gemm;
  return k;
}();

}  // namespace armllm::sve
