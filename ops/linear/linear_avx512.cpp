// The linear kernels with AVX-512 VNNI.
//
// VPDPBUSD multiplies unsigned by signed bytes.  The weights are the unsigned side: nibbles are stored as q + 8, and
// INT8 weights are taken as w + 128.  What that adds to a sum depends on the activations alone, is an integer, and is
// taken away again: per group by Activations::group_offsets (gemv), per token by Σ x (gemm).
#include "linear/avx512_gemv.h"
#include "linear/avx512_wide.h"

namespace armllm::avx512 {
namespace {

constexpr int kBlock = 8;  // tokens of a register tile
constexpr int kWide =
    3;  // panels of a register tile: 8 × 3 accumulators, 3 weights and one activation register
constexpr int kTokens = 64;
constexpr int kPanels = 2 * kWide;

// Lines of rows × 8 k become the lines of gemm: 16 rows × 4 k.
ARMLLM_INLINE void store_lines(int8_t* w, int64_t step, __m512i low, __m512i high) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  _mm512_storeu_si512(w, _mm512_permutex2var_epi32(low, even, high));
  _mm512_storeu_si512(w + step, _mm512_permutex2var_epi32(low, odd, high));
}

// The fold factors of a scale group (linear_fold_factors) in the 16-bit lanes of rows 0 … 7 and 8 … 15.
ARMLLM_INLINE void fold_factors(const uint8_t* panel, const PanelLayout& layout, int64_t column, __m512i* low,
                                __m512i* high) {
  const __m512 row_scale = _mm512_loadu_ps(panel_scales(panel));
  const __mmask16 some = _mm512_cmp_ps_mask(row_scale, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __m512 quotient = _mm512_maskz_div_ps(some, group_scales(panel, layout, column), row_scale);
  const __m512 ratio = _mm512_mul_ps(quotient, _mm512_set1_ps(kFoldOne));
  const __m512 limit = _mm512_set1_ps(kFoldLimit);
  const __m512 clamped =
      _mm512_max_ps(_mm512_min_ps(ratio, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
  const __m512i both = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_cvtps_epi32(clamped)));
  const __m512i index =
      _mm512_set_epi64(0x0007000700070007, 0x0006000600060006, 0x0005000500050005, 0x0004000400040004,
                       0x0003000300030003, 0x0002000200020002, 0x0001000100010001, 0);
  *low = _mm512_permutexvar_epi16(index, both);
  *high = _mm512_permutexvar_epi16(_mm512_add_epi16(index, _mm512_set1_epi16(8)), both);
}

ARMLLM_INLINE __m512i both_bytes(__m512i words) {
  return _mm512_or_si512(words, _mm512_slli_epi16(words, 8));
}

// (u − z) · factor rounded, + 128, for the bytes of a line's rows: each half of them in 16 bits.
ARMLLM_INLINE __m512i folded(__m512i u, __m512i zero, __m512i factor) {
  const __m512i half = _mm512_set1_epi16(128);
  const __m512i even = _mm512_sub_epi16(_mm512_and_si512(u, _mm512_set1_epi16(255)), zero);
  const __m512i odd = _mm512_sub_epi16(_mm512_srli_epi16(u, 8), zero);
  const __m512i a = _mm512_srli_epi16(_mm512_add_epi16(_mm512_mullo_epi16(even, factor), half), 8);
  const __m512i b = _mm512_add_epi16(_mm512_mullo_epi16(odd, factor), half);
  // the high byte of b, and a in the low byte
  const __m512i both = _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi16(int16_t(0xff00)), 0xd8);
  return _mm512_xor_si512(both, _mm512_set1_epi8(-128));
}

// One panel to w + 128; its lines lie `step` bytes apart.
void unpack_panel(const uint8_t* panel, const PanelLayout& layout, int8_t* w, int64_t step) {
  const Scheme scheme = layout.scheme;
  const uint8_t* values = panel + layout.values;
  if (scheme == Scheme::i8) {
    for (int64_t c = 0; c < layout.groups * 8; ++c, values += 64, w += step)
      _mm512_storeu_si512(w, _mm512_xor_si512(load(values), _mm512_set1_epi8(-128)));
    return;
  }
  const __m512i top = _mm512_set1_epi8(-128);
  if (has_float_groups(scheme)) {
    const int64_t span = groups_per_scale(scheme);
    __m512i zero[2], factor[2];
    zero[0] = zero[1] = _mm512_set1_epi16(8);
    for (int64_t g = 0; g < layout.groups; ++g) {
      if (g % span == 0) {
        fold_factors(panel, layout, g / span, &factor[0], &factor[1]);
        if (has_zero_points(scheme))
          row_nibbles(panel + layout.zero_points + g / span * 8, &zero[0], &zero[1]);
      }
      for (int j = 0; j < 4; ++j, values += 64, w += 2 * step) {
        const __m512i line = load(values);
        store_lines(w, step, folded(low_rows(line), zero[0], factor[0]),
                    folded(high_rows(line), zero[1], factor[1]));
      }
    }
    return;
  }
  __m512i less[2];
  less[0] = less[1] = _mm512_set1_epi8(120);
  if (scheme == Scheme::rowz) {
    __m512i zero[2];
    row_nibbles(panel + layout.zero_points, &zero[0], &zero[1]);
    for (int h = 0; h < 2; ++h) less[h] = _mm512_sub_epi8(top, both_bytes(zero[h]));
  }
  for (int64_t g = 0; g < layout.groups; ++g) {
    __m512i factor[2];
    if (scheme == Scheme::g32i) {
      row_nibbles(panel + layout.multipliers + g * 8, &factor[0], &factor[1]);
      for (int h = 0; h < 2; ++h) {
        factor[h] = _mm512_add_epi16(factor[h], _mm512_set1_epi16(1));
        less[h] = _mm512_sub_epi8(top, both_bytes(_mm512_slli_epi16(factor[h], 3)));
      }
    }
    for (int j = 0; j < 4; ++j, values += 64, w += 2 * step) {
      const __m512i line = load(values);
      __m512i low = low_rows(line), high = high_rows(line);
      if (scheme == Scheme::g32i) {
        // u times m stays below 256: one 16-bit product multiplies both bytes, nothing crosses between them.
        low = _mm512_mullo_epi16(low, factor[0]);
        high = _mm512_mullo_epi16(high, factor[1]);
      }
      store_lines(w, step, _mm512_add_epi8(low, less[0]), _mm512_add_epi8(high, less[1]));
    }
  }
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w, int32_t*,
            float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p) {
    const int first = p / kWide * kWide, wide = panels - first < kWide ? panels - first : kWide;
    _mm512_storeu_ps(row_scales + p * kPanel, _mm512_loadu_ps(panel_scales(panel[p])));
    unpack_panel(panel[p], layout, w + first * groups * 512 + (p - first) * 64, wide * 64);
  }
}

// −128 · Σ x of each of a block's tokens.
void token_offsets(const int8_t* x, int64_t chunks, int32_t* offsets) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t c = 0; c < chunks; c += 2) {  // groups have four chunks
    dot(sums[0], ones, load(x + c * 64));
    dot(sums[1], ones, load(x + c * 64 + 64));
  }
  alignas(64) int32_t halves[16];
  _mm512_store_si512(halves, _mm512_add_epi32(sums[0], sums[1]));
  for (int t = 0; t < kBlock; ++t) offsets[t] = -128 * (halves[2 * t] + halves[2 * t + 1]);
}

// Fetches four lines a group until it is at the end, where it stays: a branch would cost the tiles registers.
struct Ahead {
  const uint8_t *at, *end;

  Ahead(const Activations& x, const void* cached)
      : at(x.ahead_bytes > 0 ? x.ahead : static_cast<const uint8_t*>(cached)), end(at + x.ahead_bytes) {}
  ARMLLM_INLINE void group() {
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + 64, 0, 2);
    __builtin_prefetch(at + 128, 0, 2);
    __builtin_prefetch(at + 192, 0, 2);
    at = at + 256 < end ? at + 256 : end;
  }
};

// T ≤ kBlock tokens × P panels in registers.
template <int T, int P>
void gemm_tile(const int8_t* w, const int8_t* x, int64_t groups, const int32_t* offsets,
               const float* row_scales, int tokens, Ahead& ahead, float* out, int64_t out_stride) {
  __m512i acc[T][P];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p) acc[t][p] = _mm512_set1_epi32(offsets[t]);
  Ahead fetch = ahead;
  for (int64_t g = 0; g < groups; ++g) {
    fetch.group();
#pragma GCC unroll 8
    for (int h = 0; h < 8; ++h) {
      __m512i lines[P];
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) lines[p] = load(w + (h * P + p) * 64);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i four = spread(x + h / 2 * kBlock * 8 + t * 8 + h % 2 * 4);
#pragma GCC unroll 3
        for (int p = 0; p < P; ++p) dot(acc[t][p], lines[p], four);
      }
      asm volatile(
          "" ::
              : "memory");  // loads hoisted from the next step would push accumulators out of registers
    }
    w += 8 * P * 64;
    x += 4 * kBlock * 8;
  }
  ahead = fetch;
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
                 int tokens, const int32_t* offsets, Ahead& ahead, float* out, int64_t out_stride) {
  for (int t = 0; t < tokens; t += kBlock) {
    const int8_t* values = x.values + (first_token + t) * x.row_bytes();
    const int left = tokens - t;
    float* to = out + t * out_stride;
    // Experts have few rows: a last block is often ragged.
    if (left > 6) {
      gemm_tile<8, P>(w, values, x.groups, offsets + t, row_scales, left, ahead, to, out_stride);
    } else if (left > 4) {
      gemm_tile<6, P>(w, values, x.groups, offsets + t, row_scales, left, ahead, to, out_stride);
    } else if (left > 2) {
      gemm_tile<4, P>(w, values, x.groups, offsets + t, row_scales, left, ahead, to, out_stride);
    } else {
      gemm_tile<2, P>(w, values, x.groups, offsets + t, row_scales, left, ahead, to, out_stride);
    }
  }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  int32_t offsets[kTokens];
  for (int t = 0; t < tokens; t += kBlock)
    token_offsets(x.values + (first_token + t) * x.row_bytes(), x.groups * 4, offsets + t);
  Ahead ahead(x, w);
  for (int p = 0; p < panels; p += kWide) {
    const int8_t* group = w + p * x.groups * 512;
    const float* scales = row_scales + p * kPanel;
    float* to = out + p * kPanel;
    switch (panels - p) {
      case 1:
        gemm_panels<1>(group, scales, x, first_token, tokens, offsets, ahead, to, out_stride);
        break;
      case 2:
        gemm_panels<2>(group, scales, x, first_token, tokens, offsets, ahead, to, out_stride);
        break;
      default:
        gemm_panels<kWide>(group, scales, x, first_token, tokens, offsets, ahead, to, out_stride);
    }
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {
    kBlock,
    kTokens,
    kPanels,
    linear_quantize,
    gemv,
    unpack,
    gemm,
    linear_finish,
    linear_add_middles,
    linear_add,
    false,
    kMostGemvTokens,
    kPanel * kGroup,
    nullptr,
    gemv_wide,
};

}  // namespace armllm::avx512
