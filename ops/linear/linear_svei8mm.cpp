// Linear kernels with SVE's SMMLA (and SDOT for one or two tokens).
#include "linear/sve_gemv.h"

#if !defined(__ARM_FEATURE_SVE_MATMUL_INT8)
#error "linear_svei8mm.cpp needs SVE with the Int8 matrix multiply extension: -march=armv8.2-a+sve+i8mm"
#endif

namespace armllm::i8mm {
extern const LinearKernels linear;
}

namespace armllm::svei8mm {
namespace {

constexpr int kTokens =
    8;  // a tile is 8 tokens × 4 vectors (2 of 512 bits): 8 loads for 16 SMMLA, 16 accumulators
constexpr int64_t kCallTokens = 64;
constexpr int64_t kCallPanels = 4;

constexpr int64_t kGemvBlock = 2;  // as in the variant i8mm, whose gemv takes the other schemes

// Every 128 bits are 2 tokens × 2 rows.
struct PairLanes {
  static constexpr int kTokens = 2;
  static ARMLLM_INLINE svint8_t operand(const int8_t* x, int64_t k) {
    return svld1rq_s8(svptrue_b8(), x + kGemvBlock * k);
  }
  static ARMLLM_INLINE svint32_t multiply(svint32_t sum, svint8_t w, svint8_t x) {
    return svmmla_s32(sum, x, w);
  }
  static ARMLLM_INLINE svint32_t offset(const int32_t* const* offsets, int64_t group) {
    return svreinterpret_s32(svzip1_s64(svreinterpret_s64(svdup_n_s32(offsets[0][group])),
                                        svreinterpret_s64(svdup_n_s32(offsets[1][group]))));
  }
  static ARMLLM_INLINE svuint8_t rows(int64_t v) {
    const svbool_t all = svptrue_b32();
    const svuint32_t lane = svindex_u32(uint32_t(v * int64_t(svcntw())), 1);
    const svuint32_t pair = svlsl_n_u32_x(all, svlsr_n_u32_x(all, lane, 2), 1);
    const svuint32_t row = svorr_u32_x(all, pair, svand_n_u32_x(all, lane, 1));
    return svreinterpret_u8(svorr_n_u32_x(all, row, 0xffffff00u));
  }
  static ARMLLM_INLINE void store(svint32_t a, svint32_t b, const float* scale, float* out, int tokens) {
    store_pair(a, b, scale, out, tokens > 1 ? out + kPanel : nullptr);
  }
  static ARMLLM_INLINE void store_pair(svint32_t a, svint32_t b, const float* scale, float* first,
                                       float* second) {
    const svint64_t x = svreinterpret_s64(a), y = svreinterpret_s64(b);
    store_scaled(svreinterpret_s32(svuzp1_s64(x, y)), scale, first);
    if (second != nullptr) store_scaled(svreinterpret_s32(svuzp2_s64(x, y)), scale, second);
  }
};

// Rows of a tile: of four vectors, or of two where those are a panel.
ARMLLM_INLINE int64_t tile_rows() { return svcntb() < kLine ? int64_t(svcntb()) / 2 : kPanel; }

// 2 · kPairs tokens of a block × tile_rows() rows over all of K.
template <int V, int kPairs>
void gemm_tile(const int8_t* w, const int8_t* x, int64_t steps, const float* scales, int tokens, float* out,
               int64_t out_stride) {
  const svbool_t all = svptrue_b8();
  const int64_t length = int64_t(svcntb());
#define ARMLLM_BEGIN_PAIR(p) \
  [[maybe_unused]] svint32_t a##p = svdup_n_s32(0), b##p = a##p, c##p = a##p, d##p = a##p;
  ARMLLM_EACH(ARMLLM_BEGIN_PAIR)
  for (int64_t s = 0; s < steps; ++s, w += V * length, x += kTokens * 8) {
    const svint8_t first = svld1_s8(all, w), second = svld1_s8(all, w + length);
    const svint8_t third = V == 4 ? svld1_s8(all, w + 2 * length) : first;
    const svint8_t fourth = V == 4 ? svld1_s8(all, w + 3 * length) : first;
#define ARMLLM_MULTIPLY_PAIR(p)                                  \
  if constexpr (p < kPairs) {                                    \
    const svint8_t pair = svld1rq_s8(all, x + 16 * p);           \
    a##p = svmmla_s32(a##p, pair, first);                        \
    b##p = svmmla_s32(b##p, pair, second);                       \
    if constexpr (V == 4) c##p = svmmla_s32(c##p, pair, third);  \
    if constexpr (V == 4) d##p = svmmla_s32(d##p, pair, fourth); \
  }
    ARMLLM_EACH(ARMLLM_MULTIPLY_PAIR)
  }
  const int64_t rows = length / 4;  // of two vectors
#define ARMLLM_STORE_PAIR(p)                                                                       \
  if constexpr (p < kPairs) {                                                                      \
    float* const to = out + 2 * p * out_stride;                                                    \
    float* const next = 2 * p + 1 < tokens ? to + out_stride : nullptr;                            \
    if (2 * p < tokens) {                                                                          \
      PairLanes::store_pair(a##p, b##p, scales, to, next);                                         \
      if constexpr (V == 4)                                                                        \
        PairLanes::store_pair(c##p, d##p, scales + rows, to + rows, next ? next + rows : nullptr); \
    }                                                                                              \
  }
  ARMLLM_EACH(ARMLLM_STORE_PAIR)
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* offsets, float* row_scales) {
  unpack_tiles(scheme, panel, panels, groups, tile_rows(), w, offsets, row_scales);
}

template <int V>
void gemm_vectors(const int8_t* w, const float* row_scales, int panels, const Activations& x,
                  int64_t first_token, int tokens, float* out, int64_t out_stride) {
  const int64_t steps = x.groups * 4, rows = tile_rows();
  for (int64_t row = 0; row < panels * kPanel; row += rows, w += steps * rows * 8)
    for (int t = 0; t < tokens; t += kTokens) {
      const int8_t* values = x.values + (first_token + t) * x.groups * kGroup;
      float* target = out + t * out_stride + row;
      if (tokens - t > kTokens / 2) {
        gemm_tile<V, 4>(w, values, steps, row_scales + row, tokens - t, target, out_stride);
      } else {
        gemm_tile<V, 2>(w, values, steps, row_scales + row, tokens - t, target, out_stride);
      }
    }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  if (svcntb() < kLine)
    return gemm_vectors<4>(w, row_scales, panels, x, first_token, tokens, out, out_stride);
  gemm_vectors<2>(w, row_scales, panels, x, first_token, tokens, out, out_stride);
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  if (has_float_groups(scheme) || (scheme == Scheme::i8 && tokens > 1))
    return i8mm::linear.gemv(scheme, panel, x, first_token, tokens, out);
  if (scheme == Scheme::i8) return gemv_int8(panel, x, first_token, tokens, out);
  if (tokens == 1) return gemv_rows<DotLanes>(scheme, panel, x, first_token, tokens, out);
  gemv_rows<PairLanes>(scheme, panel, x, first_token, tokens, out);
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {kTokens, kCallTokens, kCallPanels,   linear_quantize, gemv,
                              unpack,  gemm,        linear_finish, kGemvBlock};

}  // namespace armllm::svei8mm
