// Sixteen lanes as two AVX2 registers.
#pragma once

#include <immintrin.h>

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_SIMD __attribute__((always_inline)) inline

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};

ARMLLM_SIMD F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ARMLLM_SIMD F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
ARMLLM_SIMD I32 set1i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

// All ones in lanes < n.
ARMLLM_SIMD I32 first_lanes(int n) {
  const __m256i limit = _mm256_set1_epi32(n);
  return {_mm256_cmpgt_epi32(limit, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(limit, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

ARMLLM_SIMD __m256 widen(__m128i x, const bf16*) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
ARMLLM_SIMD __m256 widen(__m128i x, const f16*) { return _mm256_cvtph_ps(x); }

// Rounds to bfloat16, in the upper half of each lane.
ARMLLM_SIMD __m256i rounded_upper(__m256 x) {
  const __m256i word = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(word, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}
ARMLLM_SIMD __m128i narrow(__m256 x, const bf16*) {
  const __m256i top = _mm256_srli_epi32(rounded_upper(x), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
}
ARMLLM_SIMD F32 round_to_bf16(F32 x) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(rounded_upper(x.lo), upper)),
          _mm256_castsi256_ps(_mm256_and_si256(rounded_upper(x.hi), upper))};
}
ARMLLM_SIMD __m128i narrow(__m256 x, const f16*) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

ARMLLM_SIMD F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ARMLLM_SIMD F32 load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
ARMLLM_SIMD F32 repeat4(const float* p) {
  const __m256 part = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  return {part, part};
}
ARMLLM_SIMD F32 repeat8(const float* p) {
  const __m256 part = _mm256_loadu_ps(p);
  return {part, part};
}
ARMLLM_SIMD F32 load_partial(const float* p, int n) {
  const I32 mask = first_lanes(n);
  return {_mm256_maskload_ps(p, mask.lo), _mm256_maskload_ps(p + 8, mask.hi)};
}
ARMLLM_SIMD void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
ARMLLM_SIMD void store_partial(float* p, F32 x, int n) {
  const I32 mask = first_lanes(n);
  _mm256_maskstore_ps(p, mask.lo, x.lo);
  _mm256_maskstore_ps(p + 8, mask.hi, x.hi);
}

template <typename T>
ARMLLM_SIMD F32 load(const T* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), p),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)), p)};
}
template <typename T>
ARMLLM_SIMD void store(T* p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x.lo, p));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow(x.hi, p));
}
// AVX2 cannot mask 16-bit elements, so partial loads and stores go through a buffer.
ARMLLM_SIMD int lanes_of(int n) { return n < 0 ? 0 : n > kLanes ? kLanes : n; }
template <typename T>
ARMLLM_SIMD F32 load_partial(const T* p, int n) {
  T buffer[kLanes] = {};
  __builtin_memcpy(buffer, p, lanes_of(n) * sizeof(T));
  return load(buffer);
}
template <typename T>
ARMLLM_SIMD void store_partial(T* p, F32 x, int n) {
  T buffer[kLanes];
  store(buffer, x);
  __builtin_memcpy(p, buffer, lanes_of(n) * sizeof(T));
}

ARMLLM_SIMD F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
ARMLLM_SIMD F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
ARMLLM_SIMD F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
ARMLLM_SIMD F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
ARMLLM_SIMD F32 operator-(F32 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}
ARMLLM_SIMD F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
ARMLLM_SIMD F32 fnma(F32 a, F32 b, F32 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
ARMLLM_SIMD F32 reciprocal_step(F32 a, F32 b) { return fnma(a, b, set1(2.0f)); }
ARMLLM_SIMD F32 abs(F32 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
ARMLLM_SIMD F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
ARMLLM_SIMD F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
ARMLLM_SIMD F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
// VMAXPS returns its second operand if either is NaN.
ARMLLM_SIMD F32 at_least(F32 x, F32 bound) { return max(bound, x); }
ARMLLM_SIMD F32 at_most(F32 x, F32 bound) { return min(bound, x); }

ARMLLM_SIMD I32 round_to_int(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
ARMLLM_SIMD F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

ARMLLM_SIMD I32 load_i32(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
ARMLLM_SIMD void store_i32(int32_t* p, I32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
ARMLLM_SIMD I32 operator+(I32 a, I32 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
ARMLLM_SIMD I32 operator-(I32 a, I32 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
ARMLLM_SIMD I32 operator*(I32 a, I32 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
ARMLLM_SIMD I32 operator&(I32 a, I32 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
ARMLLM_SIMD I32 operator|(I32 a, I32 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N>
ARMLLM_SIMD I32 shift_left(I32 a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
ARMLLM_SIMD I32 shift_right(I32 a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
ARMLLM_SIMD I32 max_i32(I32 a, I32 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
ARMLLM_SIMD I32 bits(F32 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
ARMLLM_SIMD F32 from_bits(I32 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
ARMLLM_SIMD void store_i8(int8_t* p, I32 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

ARMLLM_SIMD F32 select_first(int n, F32 a, F32 b) {
  const F32 mask = from_bits(first_lanes(n));
  return {_mm256_blendv_ps(b.lo, a.lo, mask.lo), _mm256_blendv_ps(b.hi, a.hi, mask.hi)};
}
ARMLLM_SIMD F32 select_greater(F32 x, F32 y, F32 a, F32 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_GT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_GT_OQ))};
}

ARMLLM_SIMD __m256 in_order(__m256 a) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xd8));
}
ARMLLM_SIMD F32 add_pairs(F32 a, F32 b) {
  return {in_order(_mm256_hadd_ps(a.lo, a.hi)), in_order(_mm256_hadd_ps(b.lo, b.hi))};
}

ARMLLM_SIMD float reduce_add(F32 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
ARMLLM_SIMD float reduce_max(F32 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
ARMLLM_SIMD int32_t reduce_add_i32(I32 a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
ARMLLM_SIMD int32_t reduce_max_i32(I32 a) {
  const __m256i eight = _mm256_max_epi32(a.lo, a.hi);
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

struct I8 {
  __m128i v;
};
ARMLLM_SIMD I8 round_to_i8(F32 a) {
  const I32 x = round_to_int(a);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8);
  return {_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1))};
}
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
  const I32 size = set1i(INT32_MAX);
  I32 top = set1i(0);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = max_i32(top, bits(load(p + i)) & size);
  if (i < n) top = max_i32(top, bits(load_partial(p + i, static_cast<int>(n - i))) & size);
  return reduce_max_i32(top);
}
template <typename T>
ARMLLM_SIMD int32_t largest_magnitude(const T* p, int64_t n) {
  const __m256i size = _mm256_set1_epi16(INT16_MAX);
  __m256i top = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    top = _mm256_max_epi16(
        top, _mm256_and_si256(size, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i))));
  if (i < n) {
    T last[kLanes] = {};
    __builtin_memcpy(last, p + i, (n - i) * sizeof(T));
    top = _mm256_max_epi16(
        top, _mm256_and_si256(size, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(last))));
  }
  const I32 low = {_mm256_and_si256(top, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(top, 16)};
  return reduce_max_i32(low);
}

ARMLLM_SIMD void load_pairs(const bf16* p, F32& even, F32& odd) {
  const I32 both = load_i32(reinterpret_cast<const int32_t*>(p));
  even = from_bits(shift_left<16>(both));
  odd = from_bits(both & set1i(static_cast<int32_t>(0xffff0000u)));
}
ARMLLM_SIMD void store_pairs(bf16* p, F32 even, F32 odd) {
  store_i32(reinterpret_cast<int32_t*>(p),
            {_mm256_blend_epi16(_mm256_srli_epi32(rounded_upper(even.lo), 16), rounded_upper(odd.lo), 0xaa),
             _mm256_blend_epi16(_mm256_srli_epi32(rounded_upper(even.hi), 16), rounded_upper(odd.hi), 0xaa)});
}
// Elements at even (or odd) positions of sixteen: shuffles within 128-bit lanes, then swaps the middle
// quadwords.
template <int order>
ARMLLM_SIMD __m256 every_other(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, order)), 0xd8));
}
template <typename T>
ARMLLM_SIMD void load_pairs(const T* p, F32& even, F32& odd) {
  const F32 a = load(p), b = load(p + kLanes);
  even = {every_other<0x88>(a.lo, a.hi), every_other<0x88>(b.lo, b.hi)};
  odd = {every_other<0xdd>(a.lo, a.hi), every_other<0xdd>(b.lo, b.hi)};
}
ARMLLM_SIMD F32 interleaved(__m256 even, __m256 odd) {
  const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
template <typename T>
ARMLLM_SIMD void store_pairs(T* p, F32 even, F32 odd) {
  store(p, interleaved(even.lo, odd.lo));
  store(p + kLanes, interleaved(even.hi, odd.hi));
}

ARMLLM_SIMD int32_t greater_equal_mask(F32 a, F32 b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ)) |
         _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)) << 8;
}

#undef ARMLLM_SIMD

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
