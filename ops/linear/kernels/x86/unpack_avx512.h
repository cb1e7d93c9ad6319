// Unpacks panels of any scheme to INT8 with AVX-512, in lines of 16 rows × 4 k.
#pragma once

#include "linear/kernels/x86/read_panel_avx512.h"
#include "simd/deinterleave_avx512.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Stores w + 128 as it is, or converted to w.
template <bool kSigned>
ARMLLM_INLINE void store_line(int8_t* w, __m512i line) {
  _mm512_storeu_si512(w, kSigned ? _mm512_xor_si512(line, _mm512_set1_epi8(-128)) : line);
}

// Reorders lines of rows × 8 k to the lines of gemm: 16 rows × 4 k.
template <bool kSigned>
ARMLLM_INLINE void store_lines(int8_t* w, int64_t step, __m512i low, __m512i high) {
  const EvenOdd lines = even_odd_i32(low, high);
  store_line<kSigned>(w, lines.even);
  store_line<kSigned>(w + step, lines.odd);
}

// Fold factors of a scale group (linear_fold_factors) in the 16-bit lanes of rows 0 … 7 and 8 … 15.
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

// (u − z) · factor, rounded, + 128 for the bytes of a line; even and odd bytes are multiplied in 16 bits
// each.
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

// Unpacks one panel to INT8, w or w + 128; its lines are `step` bytes apart.
template <bool kSigned>
void unpack_panel(const uint8_t* panel, const PanelLayout& layout, int8_t* w, int64_t step) {
  const Scheme scheme = layout.scheme;
  const uint8_t* values = panel + layout.values;
  if (scheme == Scheme::i8) {
    for (int64_t c = 0; c < layout.groups * 8; ++c, values += 64, w += step)
      store_line<kSigned>(w, _mm512_xor_si512(load(values), _mm512_set1_epi8(-128)));
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
        store_lines<kSigned>(w, step, folded(low_rows(line), zero[0], factor[0]),
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
  const bool multiplied = has_multipliers(scheme);
  for (int64_t g = 0; g < layout.groups; ++g) {
    __m512i factor[2];
    if (multiplied) {
      row_nibbles(panel + layout.multipliers + g * 8, &factor[0], &factor[1]);
      for (int h = 0; h < 2; ++h) {
        factor[h] = _mm512_add_epi16(factor[h], _mm512_set1_epi16(1));
        less[h] = _mm512_sub_epi8(top, both_bytes(_mm512_slli_epi16(factor[h], 3)));
      }
      if (has_narrow_zero_points(scheme)) {
        unsigned_biases(panel + layout.zero_points + g * 4, factor[0], factor[1], &less[0], &less[1]);
      }
    }
    for (int j = 0; j < 4; ++j, values += 64, w += 2 * step) {
      const __m512i line = load(values);
      __m512i low = low_rows(line), high = high_rows(line);
      if (multiplied) {
        // u · m stays below 256, so one 16-bit product multiplies both bytes without a carry between them.
        low = _mm512_mullo_epi16(low, factor[0]);
        high = _mm512_mullo_epi16(high, factor[1]);
      }
      store_lines<kSigned>(w, step, _mm512_add_epi8(low, less[0]), _mm512_add_epi8(high, less[1]));
    }
  }
}

// Prefetches four lines per group up to the end and stays there: a branch would cost the register tiles
// registers.
struct Prefetcher {
  const uint8_t *at, *end;

  Prefetcher(const Activations& x, const void* cached)
      : at(x.prefetch_bytes > 0 ? x.prefetch : static_cast<const uint8_t*>(cached)),
        end(at + x.prefetch_bytes) {}
  ARMLLM_INLINE void group() {
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + 64, 0, 2);
    __builtin_prefetch(at + 128, 0, 2);
    __builtin_prefetch(at + 192, 0, 2);
    at = at + 256 < end ? at + 256 : end;
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
