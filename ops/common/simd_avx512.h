// Sixteen lanes as one AVX-512 register.
#pragma once

#include <immintrin.h>

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_SIMD __attribute__((always_inline)) inline

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};

ARMLLM_SIMD F32 zero() { return {_mm512_setzero_ps()}; }
ARMLLM_SIMD F32 set1(float x) { return {_mm512_set1_ps(x)}; }
ARMLLM_SIMD I32 set1i(int32_t x) { return {_mm512_set1_epi32(x)}; }

ARMLLM_SIMD __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>(n >= kLanes ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u);
}

ARMLLM_SIMD F32 widen(__m256i x, const bf16*) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
ARMLLM_SIMD F32 widen(__m256i x, const f16*) { return {_mm512_cvtph_ps(x)}; }

// Rounded as integers: vcvtneps2bf16 flushes denormals.
ARMLLM_SIMD __m256i narrow(F32 x, const bf16*) {
  const __m512i word = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, word, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}
ARMLLM_SIMD __m256i narrow(F32 x, const f16*) {
  return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

ARMLLM_SIMD F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
ARMLLM_SIMD F32 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
ARMLLM_SIMD F32 repeat4(const float* p) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))}; }
ARMLLM_SIMD F32 repeat8(const float* p) { return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))}; }
ARMLLM_SIMD F32 load_partial(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
ARMLLM_SIMD void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
ARMLLM_SIMD void store_partial(float* p, F32 x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }

template <typename T>
ARMLLM_SIMD F32 load(const T* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), p);
}
template <typename T>
ARMLLM_SIMD F32 load_partial(const T* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), p);
}
template <typename T>
ARMLLM_SIMD void store(T* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, p));
}
template <typename T>
ARMLLM_SIMD void store_partial(T* p, F32 x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x, p));
}

ARMLLM_SIMD F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
ARMLLM_SIMD F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
ARMLLM_SIMD F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
ARMLLM_SIMD F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
ARMLLM_SIMD F32 operator-(F32 a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
ARMLLM_SIMD F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ARMLLM_SIMD F32 abs(F32 a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
ARMLLM_SIMD F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
ARMLLM_SIMD F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
ARMLLM_SIMD F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }

ARMLLM_SIMD I32 round_to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
ARMLLM_SIMD F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }

ARMLLM_SIMD I32 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
ARMLLM_SIMD void store_i32(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
ARMLLM_SIMD I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
ARMLLM_SIMD I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
ARMLLM_SIMD I32 operator*(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
ARMLLM_SIMD I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
ARMLLM_SIMD I32 operator|(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
ARMLLM_SIMD I32 shift_left(I32 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
ARMLLM_SIMD I32 shift_right(I32 a) {
  return {_mm512_srai_epi32(a.v, N)};
}
ARMLLM_SIMD I32 max_i32(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
ARMLLM_SIMD I32 bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
ARMLLM_SIMD F32 from_bits(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
ARMLLM_SIMD void store_i8(int8_t* p, I32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

ARMLLM_SIMD F32 select_first(int n, F32 a, F32 b) { return {_mm512_mask_blend_ps(first_lanes(n), b.v, a.v)}; }
ARMLLM_SIMD F32 select_greater(F32 x, F32 y, F32 a, F32 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ), b.v, a.v)};
}

ARMLLM_SIMD F32 add_pairs(F32 a, F32 b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {_mm512_add_ps(_mm512_permutex2var_ps(a.v, even, b.v), _mm512_permutex2var_ps(a.v, odd, b.v))};
}

ARMLLM_SIMD float reduce_add(F32 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
ARMLLM_SIMD float reduce_max(F32 a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
ARMLLM_SIMD int32_t reduce_add_i32(I32 a) { return _mm512_reduce_add_epi32(a.v); }
ARMLLM_SIMD int32_t reduce_max_i32(I32 a) { return _mm512_reduce_max_epi32(a.v); }

#undef ARMLLM_SIMD

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
