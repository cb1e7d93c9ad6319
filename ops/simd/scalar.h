// Sixteen lanes as a plain array: the reference that the other variants are tested against.
#pragma once

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_SIMD __attribute__((always_inline)) inline
#define ARMLLM_EACH(i) for (int i = 0; i < kLanes; ++i)

struct F32 {
  float v[kLanes];
};
struct I32 {
  int32_t v[kLanes];
};

ARMLLM_SIMD uint32_t word_of(float x) {
  uint32_t word;
  __builtin_memcpy(&word, &x, 4);
  return word;
}
ARMLLM_SIMD float float_of(uint32_t word) {
  float x;
  __builtin_memcpy(&x, &word, 4);
  return x;
}

ARMLLM_SIMD float widen(float x) { return x; }
ARMLLM_SIMD float widen(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = x.bits & 0x7c00u, mantissa = x.bits & 0x3ffu;
  if (exponent == 0x7c00u)
    return float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
  if (exponent == 0) return float_of(sign | word_of(static_cast<float>(mantissa) * 0x1p-24f));
  return float_of(sign | ((exponent << 13) + (112u << 23)) | (mantissa << 13));
}

ARMLLM_SIMD void narrow(float* to, float x) { *to = x; }
ARMLLM_SIMD void narrow(bf16* to, float x) {
  const uint32_t word = word_of(x);
  const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
  const uint32_t bits = nan ? (word >> 16) | 0x40u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  to->bits = static_cast<uint16_t>(bits);
}
inline void narrow(f16* to, float x) {
  const uint32_t word = word_of(x), sign = (word >> 16) & 0x8000u, size = word & 0x7fffffffu;
  uint32_t bits;
  if (size > 0x7f800000u) {
    bits = 0x7e00u | ((size >> 13) & 0x3ffu);
  } else if (size >= 0x477ff000u) {  // 65520 and more round to infinity
    bits = 0x7c00u;
  } else if (size < 0x38800000u) {  // below 2^-14: 0.5 has the spacing of f16's denormals
    bits = word_of(float_of(size) + 0.5f) - 0x3f000000u;
  } else {
    bits = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | bits);
}

#define ARMLLM_MAKE(type, expression)        \
  type result;                               \
  ARMLLM_EACH(i) result.v[i] = (expression); \
  return result

ARMLLM_SIMD F32 set1(float x) { ARMLLM_MAKE(F32, x); }
ARMLLM_SIMD F32 zero() { return set1(0.0f); }
ARMLLM_SIMD I32 set1i(int32_t x) { ARMLLM_MAKE(I32, x); }

ARMLLM_SIMD F32 load(const int8_t* p) { ARMLLM_MAKE(F32, static_cast<float>(p[i])); }
ARMLLM_SIMD F32 repeat4(const float* p) { ARMLLM_MAKE(F32, p[i % 4]); }
ARMLLM_SIMD F32 repeat8(const float* p) { ARMLLM_MAKE(F32, p[i % 8]); }
template <typename T>
ARMLLM_SIMD F32 load(const T* p) {
  ARMLLM_MAKE(F32, widen(p[i]));
}
template <typename T>
ARMLLM_SIMD F32 load_partial(const T* p, int n) {
  ARMLLM_MAKE(F32, i < n ? widen(p[i]) : 0.0f);
}
template <typename T>
ARMLLM_SIMD void store(T* p, F32 x) {
  ARMLLM_EACH(i) narrow(p + i, x.v[i]);
}
template <typename T>
ARMLLM_SIMD void store_partial(T* p, F32 x, int n) {
  for (int i = 0; i < n && i < kLanes; ++i) narrow(p + i, x.v[i]);
}

ARMLLM_SIMD float rounded_to_bf16(float x) {
  bf16 nearest;
  narrow(&nearest, x);
  return widen(nearest);
}
ARMLLM_SIMD F32 round_to_bf16(F32 a) { ARMLLM_MAKE(F32, rounded_to_bf16(a.v[i])); }
ARMLLM_SIMD F32 operator+(F32 a, F32 b) { ARMLLM_MAKE(F32, a.v[i] + b.v[i]); }
ARMLLM_SIMD F32 operator-(F32 a, F32 b) { ARMLLM_MAKE(F32, a.v[i] - b.v[i]); }
ARMLLM_SIMD F32 operator*(F32 a, F32 b) { ARMLLM_MAKE(F32, a.v[i] * b.v[i]); }
ARMLLM_SIMD F32 operator/(F32 a, F32 b) { ARMLLM_MAKE(F32, a.v[i] / b.v[i]); }
ARMLLM_SIMD F32 operator-(F32 a) { ARMLLM_MAKE(F32, -a.v[i]); }
ARMLLM_SIMD F32 fma(F32 a, F32 b, F32 c) { ARMLLM_MAKE(F32, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
ARMLLM_SIMD F32 fnma(F32 a, F32 b, F32 c) { ARMLLM_MAKE(F32, __builtin_fmaf(-a.v[i], b.v[i], c.v[i])); }
ARMLLM_SIMD F32 reciprocal_step(F32 a, F32 b) { return fnma(a, b, set1(2.0f)); }
ARMLLM_SIMD F32 abs(F32 a) { ARMLLM_MAKE(F32, float_of(word_of(a.v[i]) & 0x7fffffffu)); }
ARMLLM_SIMD F32 sqrt(F32 a) { ARMLLM_MAKE(F32, __builtin_sqrtf(a.v[i])); }
ARMLLM_SIMD F32 max(F32 a, F32 b) { ARMLLM_MAKE(F32, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
ARMLLM_SIMD F32 min(F32 a, F32 b) { ARMLLM_MAKE(F32, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
ARMLLM_SIMD F32 at_least(F32 x, F32 bound) { ARMLLM_MAKE(F32, x.v[i] < bound.v[i] ? bound.v[i] : x.v[i]); }
ARMLLM_SIMD F32 at_most(F32 x, F32 bound) { ARMLLM_MAKE(F32, x.v[i] > bound.v[i] ? bound.v[i] : x.v[i]); }

// NaN and values outside of int32 have no specified result, but must not be undefined behavior.
ARMLLM_SIMD I32 round_to_int(F32 a) {
  ARMLLM_MAKE(I32, __builtin_fabsf(a.v[i]) < 2147483648.0f ? static_cast<int32_t>(__builtin_rintf(a.v[i]))
                                                           : INT32_MIN);
}
ARMLLM_SIMD F32 to_float(I32 a) { ARMLLM_MAKE(F32, static_cast<float>(a.v[i])); }

ARMLLM_SIMD uint32_t unsigned_of(int32_t x) { return static_cast<uint32_t>(x); }
ARMLLM_SIMD I32 load_i32(const int32_t* p) { ARMLLM_MAKE(I32, p[i]); }
ARMLLM_SIMD void store_i32(int32_t* p, I32 a) { ARMLLM_EACH(i) p[i] = a.v[i]; }
ARMLLM_SIMD I32 operator+(I32 a, I32 b) {
  ARMLLM_MAKE(I32, static_cast<int32_t>(unsigned_of(a.v[i]) + unsigned_of(b.v[i])));
}
ARMLLM_SIMD I32 operator-(I32 a, I32 b) {
  ARMLLM_MAKE(I32, static_cast<int32_t>(unsigned_of(a.v[i]) - unsigned_of(b.v[i])));
}
ARMLLM_SIMD I32 operator*(I32 a, I32 b) {
  ARMLLM_MAKE(I32, static_cast<int32_t>(unsigned_of(a.v[i]) * unsigned_of(b.v[i])));
}
ARMLLM_SIMD I32 operator&(I32 a, I32 b) { ARMLLM_MAKE(I32, a.v[i] & b.v[i]); }
ARMLLM_SIMD I32 operator|(I32 a, I32 b) { ARMLLM_MAKE(I32, a.v[i] | b.v[i]); }
template <int N>
ARMLLM_SIMD I32 shift_left(I32 a) {
  ARMLLM_MAKE(I32, static_cast<int32_t>(unsigned_of(a.v[i]) << N));
}
template <int N>
ARMLLM_SIMD I32 shift_right(I32 a) {
  ARMLLM_MAKE(I32, a.v[i] >> N);
}
ARMLLM_SIMD I32 max_i32(I32 a, I32 b) { ARMLLM_MAKE(I32, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
ARMLLM_SIMD I32 bits(F32 a) { ARMLLM_MAKE(I32, static_cast<int32_t>(word_of(a.v[i]))); }
ARMLLM_SIMD F32 from_bits(I32 a) { ARMLLM_MAKE(F32, float_of(unsigned_of(a.v[i]))); }
ARMLLM_SIMD void store_i8(int8_t* p, I32 a) { ARMLLM_EACH(i) p[i] = static_cast<int8_t>(a.v[i]); }

struct I8 {
  int8_t v[kLanes];
};
ARMLLM_SIMD I8 round_to_i8(F32 a) { ARMLLM_MAKE(I8, static_cast<int8_t>(__builtin_rintf(a.v[i]))); }
ARMLLM_SIMD void store_i8(int8_t* p, I8 a) { __builtin_memcpy(p, a.v, kLanes); }
ARMLLM_SIMD void store_halves(int8_t* p, int8_t* q, I8 a) {
  __builtin_memcpy(p, a.v, kLanes / 2);
  __builtin_memcpy(q, a.v + kLanes / 2, kLanes / 2);
}
ARMLLM_SIMD int32_t reduce_add_i8(I8 a, I8 b) {
  int32_t sum = 0;
  ARMLLM_EACH(i) sum += a.v[i] + b.v[i];
  return sum;
}

ARMLLM_SIMD int32_t magnitude_of(float x) { return static_cast<int32_t>(word_of(x) & 0x7fffffffu); }
ARMLLM_SIMD int32_t magnitude_of(bf16 x) { return x.bits & 0x7fff; }
ARMLLM_SIMD int32_t magnitude_of(f16 x) { return x.bits & 0x7fff; }
template <typename T>
ARMLLM_SIMD int32_t largest_magnitude(const T* p, int64_t n) {
  int32_t top = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t size = magnitude_of(p[i]);
    top = size > top ? size : top;
  }
  return top;
}

template <typename T>
ARMLLM_SIMD void load_pairs(const T* p, F32& even, F32& odd) {
  ARMLLM_EACH(i) even.v[i] = widen(p[2 * i]), odd.v[i] = widen(p[2 * i + 1]);
}
template <typename T>
ARMLLM_SIMD void store_pairs(T* p, F32 even, F32 odd) {
  ARMLLM_EACH(i) narrow(p + 2 * i, even.v[i]), narrow(p + 2 * i + 1, odd.v[i]);
}

ARMLLM_SIMD int32_t greater_equal_mask(F32 a, F32 b) {
  int32_t mask = 0;
  ARMLLM_EACH(i) mask |= (a.v[i] >= b.v[i] ? 1 : 0) << i;
  return mask;
}

ARMLLM_SIMD F32 select_first(int n, F32 a, F32 b) { ARMLLM_MAKE(F32, i < n ? a.v[i] : b.v[i]); }
ARMLLM_SIMD F32 select_greater(F32 x, F32 y, F32 a, F32 b) {
  ARMLLM_MAKE(F32, x.v[i] > y.v[i] ? a.v[i] : b.v[i]);
}

ARMLLM_SIMD F32 add_pairs(F32 a, F32 b) {
  ARMLLM_MAKE(F32, i < 8 ? a.v[2 * i] + a.v[2 * i + 1] : b.v[2 * i - 16] + b.v[2 * i - 15]);
}
ARMLLM_SIMD float reduce_add(F32 a) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}
ARMLLM_SIMD float reduce_max(F32 a) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
ARMLLM_SIMD int32_t reduce_add_i32(I32 a) {
  uint32_t sum = 0;
  ARMLLM_EACH(i) sum += unsigned_of(a.v[i]);
  return static_cast<int32_t>(sum);
}
ARMLLM_SIMD int32_t reduce_max_i32(I32 a) {
  int32_t best = a.v[0];
  ARMLLM_EACH(i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}

#undef ARMLLM_MAKE
#undef ARMLLM_EACH
#undef ARMLLM_SIMD

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
