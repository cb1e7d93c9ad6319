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

// Rounds to bfloat16, in the upper half of each lane.  Integer arithmetic, because VCVTNEPS2BF16 flushes
// denormals.
ARMLLM_SIMD __m512i rounded_upper(F32 x) {
  const __m512i word = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, word, _mm512_set1_epi32(0x400000));
}
ARMLLM_SIMD __m256i narrow(F32 x, const bf16*) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_upper(x), 16));
}
ARMLLM_SIMD F32 round_to_bf16(F32 x) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_and_si512(rounded_upper(x), upper))};
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
ARMLLM_SIMD F32 fnma(F32 a, F32 b, F32 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
ARMLLM_SIMD F32 reciprocal_step(F32 a, F32 b) { return fnma(a, b, set1(2.0f)); }
ARMLLM_SIMD F32 abs(F32 a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
ARMLLM_SIMD F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
ARMLLM_SIMD F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
ARMLLM_SIMD F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
// VMAXPS returns its second operand if either is NaN.
ARMLLM_SIMD F32 at_least(F32 x, F32 bound) { return {_mm512_max_ps(bound.v, x.v)}; }
ARMLLM_SIMD F32 at_most(F32 x, F32 bound) { return {_mm512_min_ps(bound.v, x.v)}; }

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

struct I8 {
  __m128i v;
};
ARMLLM_SIMD I8 round_to_i8(F32 a) { return {_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))}; }
ARMLLM_SIMD void store_i8(int8_t* p, I8 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a.v); }
ARMLLM_SIMD void store_halves(int8_t* p, int8_t* q, I8 a) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), a.v);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(q), _mm_unpackhi_epi64(a.v, a.v));
}
ARMLLM_SIMD int32_t reduce_add_i8(I8 a, I8 b) {
  const __m128i offset = _mm_set1_epi8(-128), none = _mm_setzero_si128();
  const __m128i two = _mm_add_epi64(_mm_sad_epu8(_mm_xor_si128(a.v, offset), none),
                                    _mm_sad_epu8(_mm_xor_si128(b.v, offset), none));
  return _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))) - 2 * kLanes * 128;
}

ARMLLM_SIMD int32_t largest_magnitude(const float* p, int64_t n) {
  const __m512i sign = _mm512_set1_epi32(INT32_MIN);
  __m512i top = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    top = _mm512_max_epi32(top, _mm512_andnot_si512(sign, _mm512_loadu_si512(p + i)));
  const __m512i last = _mm512_maskz_loadu_epi32(first_lanes(static_cast<int>(n - i)), p + i);
  return _mm512_reduce_max_epi32(_mm512_max_epi32(top, _mm512_andnot_si512(sign, last)));
}
template <typename T>
ARMLLM_SIMD int32_t largest_magnitude(const T* p, int64_t n) {
  const __m512i sign = _mm512_set1_epi16(INT16_MIN);
  __m512i top = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes)
    top = _mm512_max_epi16(top, _mm512_andnot_si512(sign, _mm512_loadu_si512(p + i)));
  const __m512i last = _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << (n - i)) - 1), p + i);
  top = _mm512_max_epi16(top, _mm512_andnot_si512(sign, last));
  const __m512i low = _mm512_and_si512(top, _mm512_set1_epi32(0xffff));
  return _mm512_reduce_max_epi32(_mm512_max_epi32(low, _mm512_srli_epi32(top, 16)));
}

ARMLLM_SIMD void load_pairs(const bf16* p, F32& even, F32& odd) {
  const __m512i both = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
}
ARMLLM_SIMD void store_pairs(bf16* p, F32 even, F32 odd) {
  _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded_upper(even), 16),
                                                 rounded_upper(odd)));
}
template <typename T>
ARMLLM_SIMD void load_pairs(const T* p, F32& even, F32& odd) {
  const __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const F32 a = load(p), b = load(p + kLanes);
  even.v = _mm512_permutex2var_ps(a.v, index, b.v);
  odd.v = _mm512_permutex2var_ps(a.v, _mm512_add_epi32(index, _mm512_set1_epi32(1)), b.v);
}
template <typename T>
ARMLLM_SIMD void store_pairs(T* p, F32 even, F32 odd) {
  const __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  store(p, F32{_mm512_permutex2var_ps(even.v, index, odd.v)});
  store(p + kLanes,
        F32{_mm512_permutex2var_ps(even.v, _mm512_add_epi32(index, _mm512_set1_epi32(8)), odd.v)});
}

ARMLLM_SIMD int32_t greater_equal_mask(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

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
