// The linear kernels with AVX-512 VNNI.
//
// VPDPBUSD multiplies unsigned by signed bytes.  The weights are the unsigned side: nibbles are stored as q + 8, and
// INT8 weights are taken as w + 128.  What that adds to a sum depends on the activations alone, is an integer, and is
// taken away again: per group by Activations::group_offsets (gemv), per token by Σ x (gemm).
#include <immintrin.h>

#include "linear/kernels_common.h"

namespace armllm::avx512 {
namespace {

constexpr int kBlock = 8;  // tokens of a register tile
constexpr int kWide =
    3;  // panels of a register tile: 8 × 3 accumulators, 3 weights and one activation register
constexpr int kTokens = 64;
constexpr int kPanels = 2 * kWide;
constexpr int kAhead = 4096;  // bytes that gemv's prefetch runs ahead of its loads

#define ARMLLM_INLINE __attribute__((always_inline)) inline

ARMLLM_INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }

ARMLLM_INLINE __m512i spread(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}

ARMLLM_INLINE __m512i low_nibbles(__m512i line) { return _mm512_and_si512(line, _mm512_set1_epi8(15)); }
ARMLLM_INLINE __m512i high_nibbles(__m512i line) { return low_nibbles(_mm512_srli_epi16(line, 4)); }

// The 16 multipliers of a group, one a lane.
ARMLLM_INLINE __m512i multipliers(const uint8_t* p) {
  int64_t nibbles;
  __builtin_memcpy(&nibbles, p, 8);
  const __m512i half = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i shift = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
  const __m512i both = _mm512_permutexvar_epi32(half, _mm512_castsi128_si512(_mm_cvtsi64_si128(nibbles)));
  const __m512i less_one = _mm512_and_si512(_mm512_srlv_epi32(both, shift), _mm512_set1_epi32(15));
  return _mm512_add_epi32(less_one, _mm512_set1_epi32(1));
}

template <Scheme scheme, int T>
void gemv_tokens(const uint8_t* panel, const Activations& x, int64_t first_token, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const int64_t groups = x.groups, row_bytes = groups * kGroup;
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* offsets = x.group_offsets + first_token * groups;
  const uint8_t* w = panel + layout.values;
  const __m512i flip = _mm512_set1_epi8(-128);
  PanelPrefetch<scheme> prefetch(panel, layout, kAhead);
  __m512i total[T];
  __m512 total_f[T];
  for (int t = 0; t < T; ++t) total[t] = _mm512_setzero_si512();
  for (int t = 0; t < T; ++t) total_f[t] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i acc[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      acc[t] =
          _mm512_set1_epi32(scheme == Scheme::i8 ? 16 * offsets[t * groups + g] : offsets[t * groups + g]);
    const int8_t* xg = values + g * kGroup;
    prefetch.group(g);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i first, second;
      if constexpr (scheme == Scheme::i8) {
        first = _mm512_xor_si512(load(w), flip);
        second = _mm512_xor_si512(load(w + 64), flip);
        w += 128;
      } else {
        const __m512i line = load(w);
        first = low_nibbles(line);
        second = high_nibbles(line);
        w += 64;
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t)
        acc[t] = _mm512_dpbusd_epi32(acc[t], first, spread(xg + t * row_bytes + j * 8));
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t)
        acc[t] = _mm512_dpbusd_epi32(acc[t], second, spread(xg + t * row_bytes + j * 8 + 4));
    }
    if constexpr (scheme == Scheme::g32i) {
      // |Σ q·x| of a group is at most 32·8·127, so the low half of each lane holds it and VPDPWSSD multiplies it.
      const __m512i m = multipliers(panel + layout.multipliers + g * 8);
      for (int t = 0; t < T; ++t) total[t] = _mm512_dpwssd_epi32(total[t], acc[t], m);
    } else if constexpr (scheme == Scheme::g32) {
      const __m512 scale = _mm512_loadu_ps(panel_scales(panel) + g * kPanel);
      for (int t = 0; t < T; ++t)
        total_f[t] = _mm512_add_ps(total_f[t], _mm512_mul_ps(scale, _mm512_cvtepi32_ps(acc[t])));
    } else {
      for (int t = 0; t < T; ++t) total[t] = _mm512_add_epi32(total[t], acc[t]);
    }
  }
  for (int t = 0; t < T; ++t) {
    if constexpr (scheme != Scheme::g32)
      total_f[t] = _mm512_mul_ps(_mm512_cvtepi32_ps(total[t]), _mm512_loadu_ps(panel_scales(panel)));
    _mm512_storeu_ps(out + t * kPanel, total_f[t]);
  }
}

template <Scheme scheme>
void gemv_scheme(const uint8_t* panel, const Activations& x, int64_t first, int tokens, float* out) {
  switch (tokens) {
    case 1:
      return gemv_tokens<scheme, 1>(panel, x, first, out);
    case 2:
      return gemv_tokens<scheme, 2>(panel, x, first, out);
    case 3:
      return gemv_tokens<scheme, 3>(panel, x, first, out);
    case 4:
      return gemv_tokens<scheme, 4>(panel, x, first, out);
    case 5:
      return gemv_tokens<scheme, 5>(panel, x, first, out);
    case 6:
      return gemv_tokens<scheme, 6>(panel, x, first, out);
    case 7:
      return gemv_tokens<scheme, 7>(panel, x, first, out);
    case 8:
      return gemv_tokens<scheme, 8>(panel, x, first, out);
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

// One panel to w + 128; its lines lie `step` bytes apart.
template <Scheme scheme>
void unpack_panel(const uint8_t* panel, int64_t groups, int8_t* w, int64_t step, const float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  const uint8_t* values = panel + layout.values;
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (scheme == Scheme::i8) {
      for (int j = 0; j < 8; ++j, values += 64, w += step)
        _mm512_storeu_si512(w, _mm512_xor_si512(load(values), _mm512_set1_epi8(-128)));
      continue;
    }
    if constexpr (scheme == Scheme::g32) {
      alignas(64) int8_t lines[512];
      linear_group_int8(scheme, panel, layout, g, row_scales, lines);
      for (int j = 0; j < 8; ++j, w += step)
        _mm512_storeu_si512(w, _mm512_xor_si512(load(lines + j * 64), _mm512_set1_epi8(-128)));
      continue;
    }
    __m512i factor = _mm512_set1_epi16(1), offset = _mm512_set1_epi8(120);
    if constexpr (scheme == Scheme::g32i) {
      // A nibble times m stays below 256: one 16-bit product multiplies both bytes, nothing crosses between them.
      const __m512i m = multipliers(panel + layout.multipliers + g * 8);
      factor = _mm512_or_si512(m, _mm512_slli_epi32(m, 16));
      const __m512i two = _mm512_sub_epi16(_mm512_set1_epi16(128), _mm512_slli_epi16(factor, 3));
      offset = _mm512_or_si512(two, _mm512_slli_epi16(two, 8));
    }
    for (int j = 0; j < 4; ++j, values += 64) {
      const __m512i line = load(values);
      __m512i both[2] = {low_nibbles(line), high_nibbles(line)};
      for (int h = 0; h < 2; ++h, w += step) {
        if constexpr (scheme == Scheme::g32i) both[h] = _mm512_mullo_epi16(both[h], factor);
        _mm512_storeu_si512(w, _mm512_add_epi8(both[h], offset));
      }
    }
  }
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w, int32_t*,
            float* row_scales) {
  for (int p = 0; p < panels; ++p) {
    const int first = p / kWide * kWide, wide = panels - first < kWide ? panels - first : kWide;
    int8_t* to = w + first * groups * 512 + (p - first) * 64;
    float* scales = row_scales + p * kPanel;
    if (scheme == Scheme::g32) {
      linear_fold_scales(panel[p], panel_layout(scheme, groups * kGroup), scales);
    } else {
      _mm512_storeu_ps(scales, _mm512_loadu_ps(panel_scales(panel[p])));
    }
    switch (scheme) {
      case Scheme::g32i:
        unpack_panel<Scheme::g32i>(panel[p], groups, to, wide * 64, scales);
        break;
      case Scheme::row:
        unpack_panel<Scheme::row>(panel[p], groups, to, wide * 64, scales);
        break;
      case Scheme::g32:
        unpack_panel<Scheme::g32>(panel[p], groups, to, wide * 64, scales);
        break;
      case Scheme::i8:
        unpack_panel<Scheme::i8>(panel[p], groups, to, wide * 64, scales);
        break;
    }
  }
}

// −128 · Σ x of each of a block's tokens.
void token_offsets(const int8_t* x, int64_t chunks, int32_t* offsets) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t c = 0; c < chunks; c += 2) {  // groups have four chunks
    sums[0] = _mm512_dpbusd_epi32(sums[0], ones, load(x + c * 64));
    sums[1] = _mm512_dpbusd_epi32(sums[1], ones, load(x + c * 64 + 64));
  }
  alignas(64) int32_t halves[16];
  _mm512_store_si512(halves, _mm512_add_epi32(sums[0], sums[1]));
  for (int t = 0; t < kBlock; ++t) offsets[t] = -128 * (halves[2 * t] + halves[2 * t + 1]);
}

// T ≤ kBlock tokens × P panels in registers.
template <int T, int P>
void gemm_tile(const int8_t* w, const int8_t* x, int64_t groups, const int32_t* offsets,
               const float* row_scales, int tokens, float* out, int64_t out_stride) {
  __m512i acc[T][P];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p) acc[t][p] = _mm512_set1_epi32(offsets[t]);
  for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 8
    for (int h = 0; h < 8; ++h) {
      __m512i lines[P];
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) lines[p] = load(w + (h * P + p) * 64);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i four = spread(x + h / 2 * kBlock * 8 + t * 8 + h % 2 * 4);
#pragma GCC unroll 3
        for (int p = 0; p < P; ++p) acc[t][p] = _mm512_dpbusd_epi32(acc[t][p], lines[p], four);
      }
      asm volatile(
          "" ::
              : "memory");  // loads hoisted from the next step would push accumulators out of registers
    }
    w += 8 * P * 64;
    x += 4 * kBlock * 8;
  }
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
void gemm_panels(const int8_t* w, const float* row_scales, const Activations& x, int64_t first_token,
                 int tokens, const int32_t* offsets, float* out, int64_t out_stride) {
  for (int t = 0; t < tokens; t += kBlock) {
    const int8_t* values = x.values + (first_token + t) * x.groups * kGroup;
    const int left = tokens - t;
    float* to = out + t * out_stride;
    if (left > kBlock / 2) {
      gemm_tile<kBlock, P>(w, values, x.groups, offsets + t, row_scales, left, to, out_stride);
    } else {
      gemm_tile<kBlock / 2, P>(w, values, x.groups, offsets + t, row_scales, left, to, out_stride);
    }
  }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  int32_t offsets[kTokens];
  for (int t = 0; t < tokens; t += kBlock)
    token_offsets(x.values + (first_token + t) * x.groups * kGroup, x.groups * 4, offsets + t);
  for (int p = 0; p < panels; p += kWide) {
    const int8_t* group = w + p * x.groups * 512;
    const float* scales = row_scales + p * kPanel;
    float* to = out + p * kPanel;
    switch (panels - p) {
      case 1:
        gemm_panels<1>(group, scales, x, first_token, tokens, offsets, to, out_stride);
        break;
      case 2:
        gemm_panels<2>(group, scales, x, first_token, tokens, offsets, to, out_stride);
        break;
      default:
        gemm_panels<kWide>(group, scales, x, first_token, tokens, offsets, to, out_stride);
    }
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {kBlock, kTokens, kPanels, linear_quantize, gemv, unpack, gemm, linear_finish};

}  // namespace armllm::avx512
