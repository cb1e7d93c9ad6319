// The linear kernels with AVX2 alone (no VNNI), exact all the same.
//
// VPMADDUBSW multiplies unsigned by signed bytes and adds pairs to 16 bits, saturating.  Nibbles are small enough that
// a whole group of 32 stays within 16 bits (gemv); INT8 weights go in as |w| against x with w's sign (gemm), where a
// pair is at most 2·128·127 = 32512.
#include <immintrin.h>

#include "linear/kernels_common.h"

namespace armllm::avx2 {
namespace {

constexpr int kBlock = 4;  // tokens of a register tile: 4 × 2 accumulators beside |w| and w
constexpr int kTokens = 64;
constexpr int kPanels = 2;
constexpr int kAhead = 4096;  // bytes that gemv's prefetch runs ahead of its loads

#define ARMLLM_INLINE __attribute__((always_inline)) inline

ARMLLM_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
ARMLLM_INLINE void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

ARMLLM_INLINE __m256i spread(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

ARMLLM_INLINE __m256i low_nibbles(__m256i line) { return _mm256_and_si256(line, _mm256_set1_epi8(15)); }
ARMLLM_INLINE __m256i high_nibbles(__m256i line) { return low_nibbles(_mm256_srli_epi16(line, 4)); }

// The multipliers of 8 rows of a group, each in both halves of a 32-bit lane.
ARMLLM_INLINE __m256i multipliers(const uint8_t* p) {
  int32_t nibbles;
  __builtin_memcpy(&nibbles, p, 4);
  const __m256i shift = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
  const __m256i less_one =
      _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(nibbles), shift), _mm256_set1_epi32(15));
  const __m256i m = _mm256_add_epi32(less_one, _mm256_set1_epi32(1));
  return _mm256_or_si256(m, _mm256_slli_epi32(m, 16));
}

ARMLLM_INLINE __m256i dot_signed(__m256i acc, __m256i w, __m256i magnitude, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <Scheme scheme, int T>
void gemv_tokens(const uint8_t* panel, const Activations& x, int64_t first_token, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const int64_t groups = x.groups, row_bytes = groups * kGroup;
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* offsets = x.group_offsets + first_token * groups;
  const uint8_t* w = panel + layout.values;
  PanelPrefetch<scheme> prefetch(panel, layout, kAhead);
  __m256i total[2][T];
  __m256 total_f[2][T];
  for (int h = 0; h < 2; ++h) {
    for (int t = 0; t < T; ++t) total[h][t] = _mm256_setzero_si256();
    for (int t = 0; t < T; ++t) total_f[h][t] = _mm256_setzero_ps();
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int8_t* xg = values + g * kGroup;
    prefetch.group(g);
    if constexpr (scheme == Scheme::i8) {
      for (int j = 0; j < 8; ++j, w += 64) {
        for (int h = 0; h < 2; ++h) {
          const __m256i line = load(w + h * 32), magnitude = _mm256_abs_epi8(line);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t)
            total[h][t] = dot_signed(total[h][t], line, magnitude, spread(xg + t * row_bytes + j * 4));
        }
      }
      continue;
    }
    for (int h = 0; h < 2; ++h) {
      // A 16-bit lane sums 16 products q·x, and one of each two takes the whole group's offset: at most 32512 in
      // the end, whatever wraps on the way.
      __m256i acc[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[t] = _mm256_set1_epi32(offsets[t * groups + g] & 0xffff);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m256i line = load(w + j * 64 + h * 32);
        const __m256i first = low_nibbles(line), second = high_nibbles(line);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const int8_t* xt = xg + t * row_bytes + j * 8;
          acc[t] = _mm256_add_epi16(acc[t], _mm256_maddubs_epi16(first, spread(xt)));
          acc[t] = _mm256_add_epi16(acc[t], _mm256_maddubs_epi16(second, spread(xt + 4)));
        }
      }
      __m256i factor = _mm256_set1_epi16(1);
      if constexpr (scheme == Scheme::g32i) factor = multipliers(panel + layout.multipliers + g * 8 + h * 4);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m256i sum = _mm256_madd_epi16(acc[t], factor);
        if constexpr (scheme == Scheme::g32) {
          const __m256 scale = _mm256_loadu_ps(panel_scales(panel) + g * kPanel + h * 8);
          total_f[h][t] = _mm256_add_ps(total_f[h][t], _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum)));
        } else {
          total[h][t] = _mm256_add_epi32(total[h][t], sum);
        }
      }
    }
    w += 256;
  }
  for (int h = 0; h < 2; ++h) {
    for (int t = 0; t < T; ++t) {
      if constexpr (scheme != Scheme::g32)
        total_f[h][t] =
            _mm256_mul_ps(_mm256_cvtepi32_ps(total[h][t]), _mm256_loadu_ps(panel_scales(panel) + h * 8));
      _mm256_storeu_ps(out + t * kPanel + h * 8, total_f[h][t]);
    }
  }
}

// Up to four tokens at a time: more would not stay in 16 registers.
template <Scheme scheme>
void gemv_scheme(const uint8_t* panel, const Activations& x, int64_t first, int tokens, float* out) {
  for (; tokens >= 4; tokens -= 4, first += 4, out += 4 * kPanel)
    gemv_tokens<scheme, 4>(panel, x, first, out);
  switch (tokens) {
    case 1:
      return gemv_tokens<scheme, 1>(panel, x, first, out);
    case 2:
      return gemv_tokens<scheme, 2>(panel, x, first, out);
    case 3:
      return gemv_tokens<scheme, 3>(panel, x, first, out);
  }
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  switch (scheme) {
    case Scheme::g32i:
      return gemv_scheme<Scheme::g32i>(panel, x, first_token, tokens, out);
    case Scheme::row:
      return gemv_scheme<Scheme::row>(panel, x, first_token, tokens, out);
    case Scheme::g32:
      return gemv_scheme<Scheme::g32>(panel, x, first_token, tokens, out);
    case Scheme::i8:
      return gemv_scheme<Scheme::i8>(panel, x, first_token, tokens, out);
  }
}

void unpack_group(Scheme scheme, const uint8_t* panel, const PanelLayout& layout, int64_t g,
                  const float* row_scales, int8_t* w) {
  if (scheme == Scheme::g32) return linear_group_int8(scheme, panel, layout, g, row_scales, w);
  if (scheme == Scheme::i8) {
    for (int j = 0; j < 16; ++j) store(w + j * 32, load(panel + layout.values + g * 512 + j * 32));
    return;
  }
  for (int h = 0; h < 2; ++h) {
    // A nibble times m stays below 256: one 16-bit product multiplies both bytes, nothing crosses between them.
    __m256i factor = _mm256_set1_epi16(1);
    if (scheme == Scheme::g32i) factor = multipliers(panel + layout.multipliers + g * 8 + h * 4);
    const __m256i eight = _mm256_slli_epi16(factor, 3),
                  offset = _mm256_or_si256(eight, _mm256_slli_epi16(eight, 8));
    for (int j = 0; j < 4; ++j) {
      const __m256i line = load(panel + layout.values + g * 256 + j * 64 + h * 32);
      int8_t* to = w + j * 128 + h * 32;
      store(to, _mm256_sub_epi8(_mm256_mullo_epi16(low_nibbles(line), factor), offset));
      store(to + 64, _mm256_sub_epi8(_mm256_mullo_epi16(high_nibbles(line), factor), offset));
    }
  }
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w, int32_t*,
            float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p) {
    float* scales = row_scales + p * kPanel;
    if (scheme == Scheme::g32) {
      linear_fold_scales(panel[p], layout, scales);
    } else {
      __builtin_memcpy(scales, panel[p], kPanel * sizeof(float));
    }
    for (int64_t g = 0; g < groups; ++g, w += 512) unpack_group(scheme, panel[p], layout, g, scales, w);
  }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  for (int p = 0; p < panels; ++p, w += x.groups * 512) {
    for (int t = 0; t < tokens; t += kBlock) {
      const int8_t* values = x.values + (first_token + t) * x.groups * kGroup;
      const int8_t* lines = w;
      __m256i acc[kBlock][2];
#pragma GCC unroll 4
      for (int i = 0; i < kBlock; ++i) acc[i][0] = acc[i][1] = _mm256_setzero_si256();
      for (int64_t step = 0; step < x.groups * 8; ++step, lines += 64) {
        const __m256i w0 = load(lines), w1 = load(lines + 32);
        const __m256i m0 = _mm256_abs_epi8(w0), m1 = _mm256_abs_epi8(w1);
        const int8_t* xs = values + step / 2 * kBlock * 8 + step % 2 * 4;
#pragma GCC unroll 4
        for (int i = 0; i < kBlock; ++i) {
          const __m256i four = spread(xs + i * 8);
          acc[i][0] = dot_signed(acc[i][0], w0, m0, four);
          acc[i][1] = dot_signed(acc[i][1], w1, m1, four);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kBlock; ++i) {
        if (i >= tokens - t) break;
        float* to = out + (t + i) * out_stride + p * kPanel;
        const float* scales = row_scales + p * kPanel;
        _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[i][0]), _mm256_loadu_ps(scales)));
        _mm256_storeu_ps(to + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[i][1]), _mm256_loadu_ps(scales + 8)));
      }
    }
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {kBlock, kTokens, kPanels, linear_quantize, gemv, unpack, gemm, linear_finish};

}  // namespace armllm::avx2
