// Linear kernels with SVE's SMMLA. gemv and unpack are those of the variant i8mm: on existing CPUs, NEON's
// pipes together are as wide as SVE's, and its 128-bit instructions waste no lanes on half a line.
#include <arm_sve.h>

#include "linear/kernels/common.h"

#if !defined(__ARM_FEATURE_SVE_MATMUL_INT8)
#error "linear_svei8mm.cpp needs SVE with the Int8 matrix multiply extension: -march=armv8.2-a+sve+i8mm"
#endif

namespace armllm::i8mm {
extern const LinearKernels linear;
}

namespace armllm::svei8mm {
namespace {

#define ARMLLM_INLINE __attribute__((always_inline)) inline
#define ARMLLM_EACH(M) M(0) M(1) M(2) M(3)

// A tile is 8 tokens × 4 vectors (2 of 512 bits): 8 loads for 16 SMMLA, 16 accumulators.
constexpr int kTokens = 8;
constexpr int64_t kLine = 64;  // bytes of 8 rows × 8 k; unpacked weights are [half of 8 rows][k / 8][row][8]
constexpr int64_t kCallTokens = 64;
constexpr int64_t kCallPanels = 4;

// Each 128-bit segment of `a`, then of `b`, is 2 tokens × 2 rows.
ARMLLM_INLINE void store_rows(svint64_t rows, const float* scale, float* out) {
  const svbool_t all = svptrue_b32();
  svst1_f32(all, out, svmul_f32_x(all, svcvt_f32_s32_x(all, svreinterpret_s32(rows)), svld1_f32(all, scale)));
}
ARMLLM_INLINE void store_pair(svint32_t a, svint32_t b, const float* scale, float* first, float* second) {
  const svint64_t x = svreinterpret_s64(a), y = svreinterpret_s64(b);
  store_rows(svuzp1_s64(x, y), scale, first);
  if (second != nullptr) store_rows(svuzp2_s64(x, y), scale, second);
}

// Register tile of 2 · kPairs tokens of a block × V vectors of rows over all of K.  Vector i starts i vectors
// after `w`, in the next half past the end of a line.
template <int V, int kPairs>
void gemm_i8_sve_smmla(const int8_t* w, const int8_t* x, int64_t steps, const float* scales, int tokens,
                       float* out, int64_t out_stride) {
  const svbool_t all = svptrue_b8();
  const int64_t length = int64_t(svcntb()), half = steps * kLine;
  const auto at = [&](int64_t i) { return w + i * length / kLine * half + i * length % kLine; };
  const int8_t *w0 = w, *w1 = at(1), *w2 = at(2), *w3 = at(3);
#define ARMLLM_BEGIN(p) \
  [[maybe_unused]] svint32_t a##p = svdup_n_s32(0), b##p = a##p, c##p = a##p, d##p = a##p;
  ARMLLM_EACH(ARMLLM_BEGIN)
  for (int64_t s = 0; s < steps * kLine; s += kLine, x += kTokens * 8) {
    const svint8_t first = svld1_s8(all, w0 + s), second = svld1_s8(all, w1 + s);
    const svint8_t third = V == 4 ? svld1_s8(all, w2 + s) : first;
    const svint8_t fourth = V == 4 ? svld1_s8(all, w3 + s) : first;
#define ARMLLM_MULTIPLY(p)                                       \
  if constexpr (p < kPairs) {                                    \
    const svint8_t pair = svld1rq_s8(all, x + 16 * p);           \
    a##p = svmmla_s32(a##p, pair, first);                        \
    b##p = svmmla_s32(b##p, pair, second);                       \
    if constexpr (V == 4) c##p = svmmla_s32(c##p, pair, third);  \
    if constexpr (V == 4) d##p = svmmla_s32(d##p, pair, fourth); \
  }
    ARMLLM_EACH(ARMLLM_MULTIPLY)
  }
  const int64_t rows = length / 4;  // rows of two vectors
#define ARMLLM_STORE(p)                                                                                   \
  if constexpr (p < kPairs) {                                                                             \
    float* const to = out + 2 * p * out_stride;                                                           \
    float* const next = 2 * p + 1 < tokens ? to + out_stride : nullptr;                                   \
    store_pair(a##p, b##p, scales, to, next);                                                             \
    if constexpr (V == 4) store_pair(c##p, d##p, scales + rows, to + rows, next ? next + rows : nullptr); \
  }
  ARMLLM_EACH(ARMLLM_STORE)
}

template <int V>
void gemm_i8_sve_smmla_by_tokens(const int8_t* w, const float* row_scales, int panels, const Activations& x,
                                 int64_t first_token, int tokens, float* out, int64_t out_stride) {
  const int64_t steps = x.groups * 4, rows = V * int64_t(svcntb()) / 8;
  for (int64_t row = 0; row < panels * kPanel; row += rows, w += steps * rows * 8)
    for (int t = 0; t < tokens; t += kTokens) {
      const int8_t* values = x.values + (first_token + t) * x.row_bytes();
      const float* scales = row_scales + row;
      float* target = out + t * out_stride + row;
      const int left = tokens - t;
      if (left > 6) {
        gemm_i8_sve_smmla<V, 4>(w, values, steps, scales, left, target, out_stride);
      } else if (left > 4) {
        gemm_i8_sve_smmla<V, 3>(w, values, steps, scales, left, target, out_stride);
      } else if (left > 2) {
        gemm_i8_sve_smmla<V, 2>(w, values, steps, scales, left, target, out_stride);
      } else {
        gemm_i8_sve_smmla<V, 1>(w, values, steps, scales, left, target, out_stride);
      }
    }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  if (svcntb() < kLine)
    return gemm_i8_sve_smmla_by_tokens<4>(w, row_scales, panels, x, first_token, tokens, out, out_stride);
  gemm_i8_sve_smmla_by_tokens<2>(w, row_scales, panels, x, first_token, tokens, out, out_stride);
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* row_info, float* row_scales) {
  i8mm::linear.unpack(scheme, panel, panels, groups, w, row_info, row_scales);
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  i8mm::linear.gemv(scheme, panel, x, first_token, tokens, out);
}

void gemv_panels(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
                 const Activations& x, int64_t first_token, int tokens, float* out, int64_t out_stride) {
  i8mm::linear.gemv_panels(scheme, panel, panel_stride, panels, x, first_token, tokens, out, out_stride);
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
  k.gemv_interleaves = true;
  k.gemv_panels = gemv_panels;
  k.int6_gemv_tokens = k.int3_gemv_tokens = kSdotTokens;
  return k;
}();

}  // namespace armllm::svei8mm
