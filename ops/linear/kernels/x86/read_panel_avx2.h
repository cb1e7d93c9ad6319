// Loads and widens weight panels with AVX2.
#pragma once

#include <immintrin.h>

#include "linear/kernels/common.h"

namespace armllm::avx2 {
namespace {

#define ARMLLM_INLINE __attribute__((always_inline)) inline

ARMLLM_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
ARMLLM_INLINE void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

ARMLLM_INLINE __m256i broadcast4(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

ARMLLM_INLINE __m256i broadcast8(const int8_t* x) {
  int64_t eight;
  __builtin_memcpy(&eight, x, 8);
  return _mm256_set1_epi64x(eight);
}

// Half a line, 32 bytes: u of rows 4·h … 4·h + 3 (low_rows) or 8 + 4·h … (high_rows); 8 k each, one 64-bit
// lane per row.
ARMLLM_INLINE __m256i low_rows(__m256i half) { return _mm256_and_si256(half, _mm256_set1_epi8(15)); }
ARMLLM_INLINE __m256i high_rows(__m256i half) {
  return low_rows(_mm256_xor_si256(_mm256_srli_epi16(half, 4), _mm256_set1_epi8(8)));
}

// Spreads the nibbles of four rows (bytes 4·h … of 8) likewise, over the 16-bit lanes of each 64-bit lane.
ARMLLM_INLINE void row_nibbles(const uint8_t* p, __m256i* low, __m256i* high) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const __m256i bytes = _mm256_shuffle_epi8(
      _mm256_set1_epi32(four), _mm256_set_epi64x(int64_t(0xff03ff03ff03ff03), int64_t(0xff02ff02ff02ff02),
                                                 int64_t(0xff01ff01ff01ff01), int64_t(0xff00ff00ff00ff00)));
  *low = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
  *high = _mm256_srli_epi16(bytes, 4);
}

// Adds the 32-bit halves of rows 4·h … and 8 + 4·h …: one lane per row, four of each.
ARMLLM_INLINE __m256i row_sums(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
}

// Four values at `p` and the four values 8 rows later.
ARMLLM_INLINE __m256 row_floats(const float* p) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 8), 1);
}

ARMLLM_INLINE __m256 group_scales(const uint8_t* panel, const PanelLayout& layout, int64_t column, int h) {
  const uint8_t* p = panel + layout.scales;
  if (!has_bf16_scales(layout.scheme))
    return row_floats(reinterpret_cast<const float*>(p) + column * kPanel + 4 * h);
  p += (column * kPanel + 4 * h) * 2;
  const __m128i high = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)),
                                          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 16)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16));
}

ARMLLM_INLINE void store_rows(float* out, __m256 v) {
  _mm_storeu_ps(out, _mm256_castps256_ps128(v));
  _mm_storeu_ps(out + 8, _mm256_extractf128_ps(v, 1));
}

// −z · Σ x for the rows of row_sums().
ARMLLM_INLINE __m256i zero_term(const uint8_t* zero_points, int h, int32_t correction) {
  __m256i low, high;
  row_nibbles(zero_points + 4 * h, &low, &high);
  const __m256i minus = _mm256_set1_epi32(correction / 8), words = _mm256_set1_epi64x(0xffff);
  return row_sums(_mm256_mullo_epi32(_mm256_and_si256(low, words), minus),
                  _mm256_mullo_epi32(_mm256_and_si256(high, words), minus));
}

// Additions as inline assembly: GCC would reassociate the products of several steps and keep all of them in
// memory until then.
ARMLLM_INLINE void add_words(__m256i& acc, __m256i words) {
  asm("vpaddw %1, %0, %0" : "+x"(acc) : "x"(words));
}
ARMLLM_INLINE void add_lanes(__m256i& acc, __m256i lanes) {
  asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(lanes));
}

ARMLLM_INLINE void dot_signed(__m256i& acc, __m256i w, __m256i magnitude, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
  add_lanes(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Compiler barrier: loads hoisted and shared between steps would spill accumulators.
ARMLLM_INLINE void in_written_order() { asm volatile("" ::: "memory"); }

}  // namespace
}  // namespace armllm::avx2
