// Loads and widens weight panels with AVX-512.
#pragma once

#include <immintrin.h>

#include "linear/kernels/common.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_INLINE __attribute__((always_inline)) inline

ARMLLM_INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }
ARMLLM_INLINE __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// acc += Σ of four products unsigned × signed, per lane.  Inline assembly: with the intrinsic, GCC 12 renames
// the accumulators of unrolled loops and copies them back in each iteration, a tenth of the run time.
ARMLLM_INLINE void dot(__m512i& acc, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}

// The same with the four values at `x` broadcast to every lane.
ARMLLM_INLINE void dot_broadcast4(__m512i& acc, __m512i w, const int8_t* x) {
  struct Four {
    int8_t values[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const Four*>(x)));
}

// acc += Σ of two products of words, per lane, with the two at `x` broadcast to every lane.
ARMLLM_INLINE void dot_broadcast2(__m512i& acc, __m512i w, const int16_t* x) {
  struct Two {
    int16_t values[2];
  };
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const Two*>(x)));
}

ARMLLM_INLINE __m512i broadcast4(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}

ARMLLM_INLINE __m512i broadcast8(const int8_t* x) {
  int64_t eight;
  __builtin_memcpy(&eight, x, 8);
  return _mm512_set1_epi64(eight);
}

// u of rows 0 … 7 (low_rows) or 8 … 15 (high_rows) of a line; 8 k each, one 64-bit lane per row.
ARMLLM_INLINE __m512i low_rows(__m512i line) { return _mm512_and_si512(line, _mm512_set1_epi8(15)); }
ARMLLM_INLINE __m512i high_rows(__m512i line) {
  // (line >> 4 & 15) ^ 8
  return _mm512_ternarylogic_epi32(_mm512_srli_epi16(line, 4), _mm512_set1_epi8(15), _mm512_set1_epi8(8),
                                   0x6a);
}

// gemv sums are in the lane order of VPACKSSDW: 32-bit lane 4·i + 2·h + j is row 8·h + 2·i + j.
ARMLLM_INLINE __m512i row_of_lane() {
  return _mm512_set_epi32(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0);
}
ARMLLM_INLINE __m512i lane_of_row() {
  return _mm512_set_epi32(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
}

// k = 0 … 3 (even_k4) and k = 4 … 7 (odd_k4) of all rows of a line, in that lane order.  SHUFPS, because
// VPERMT2D would take the issue slots of two dot products.
ARMLLM_INLINE __m512i even_k4(__m512i low, __m512i high) {
  return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high), 0x88));
}
ARMLLM_INLINE __m512i odd_k4(__m512i low, __m512i high) {
  return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high), 0xdd));
}

// 128 − 8 · m in both bytes of 16-bit lanes m: added to u · m, the unsigned w + 128.
ARMLLM_INLINE __m512i unsigned_bias(__m512i m) {
  const __m512i eight = _mm512_slli_epi16(m, 3);
  return _mm512_sub_epi8(_mm512_set1_epi8(-128), _mm512_or_si512(eight, _mm512_slli_epi16(eight, 8)));
}

// 128 − z · m in every byte of rows 0 … 7 (low) and 8 … 15 (high) of g32iz; factors are 16-bit lanes of m.
ARMLLM_INLINE void unsigned_biases(const uint8_t* zero_points, __m512i low_factor, __m512i high_factor,
                                   __m512i* low, __m512i* high) {
  // Bits 2·r and 16 + 2·r are those of rows r and r + 8: one product serves both.
  const __m512i shifts = _mm512_set_epi32(14, 14, 12, 12, 10, 10, 8, 8, 6, 6, 4, 4, 2, 2, 0, 0);
  int32_t bits;
  __builtin_memcpy(&bits, zero_points, 4);
  const __m512i two =
      _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(bits), shifts), _mm512_set1_epi16(3));
  const __m512i zero = _mm512_add_epi16(two, _mm512_set1_epi16(kLowestZeroPoint));
  const __m512i factor = _mm512_mask_mov_epi16(low_factor, 0xaaaaaaaa, high_factor);
  const __m512i bias = _mm512_sub_epi16(_mm512_set1_epi16(128), _mm512_mullo_epi16(zero, factor));
  *low = _mm512_shuffle_epi8(bias, _mm512_set4_epi32(0x08080808, 0x08080808, 0, 0));
  *high = _mm512_shuffle_epi8(bias, _mm512_set4_epi32(0x0a0a0a0a, 0x0a0a0a0a, 0x02020202, 0x02020202));
}

// The nibbles of 8 bytes in that lane order, repeated in both 16-bit halves of a lane.
ARMLLM_INLINE __m512i lane_nibbles(const uint8_t* p) {
  const __m512i bytes = _mm512_shuffle_epi8(
      broadcast8(reinterpret_cast<const int8_t*>(p)),
      _mm512_set_epi64(0xff07ff07ff06ff06, 0xff07ff07ff06ff06, 0xff05ff05ff04ff04, 0xff05ff05ff04ff04,
                       0xff03ff03ff02ff02, 0xff03ff03ff02ff02, 0xff01ff01ff00ff00, 0xff01ff01ff00ff00));
  const __m512i shift = _mm512_set1_epi64(0);
  const __m512i shifts = _mm512_mask_set1_epi32(shift, 0xcccc, 4);
  return _mm512_and_si512(_mm512_srlv_epi32(bytes, shifts), _mm512_set1_epi16(15));
}

// The nibbles of 8 bytes; 32-bit lane r is row r.
ARMLLM_INLINE __m512i row_nibbles_i32(const uint8_t* p) {
  const __m256i eight = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m512i low = _mm512_castsi256_si512(_mm256_and_si256(eight, _mm256_set1_epi32(15)));
  return _mm512_inserti64x4(low, _mm256_srli_epi32(eight, 4), 1);
}

ARMLLM_INLINE __m512 group_scales(const uint8_t* panel, const PanelLayout& layout, int64_t column) {
  const uint8_t* p = panel + layout.scales;
  if (!has_bf16_scales(layout.scheme)) return _mm512_loadu_ps(p + column * kPanel * 4);
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + column * kPanel * 2));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// Spreads 8 nibbles of `p` over the 16-bit lanes of rows 0 … 7 (low) or 8 … 15 (high), one 64-bit lane per
// row.
ARMLLM_INLINE void row_nibbles(const uint8_t* p, __m512i* low, __m512i* high) {
  const __m512i bytes = _mm512_shuffle_epi8(
      broadcast8(reinterpret_cast<const int8_t*>(p)),
      _mm512_set_epi64(0xff07ff07ff07ff07, 0xff06ff06ff06ff06, 0xff05ff05ff05ff05, 0xff04ff04ff04ff04,
                       0xff03ff03ff03ff03, 0xff02ff02ff02ff02, 0xff01ff01ff01ff01, 0xff00ff00ff00ff00));
  *low = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
  *high = _mm512_srli_epi16(bytes, 4);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
