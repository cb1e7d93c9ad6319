// Sixteen lanes as four NEON registers; the same for every aarch64 variant.
#pragma once

#include <arm_neon.h>

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_SIMD __attribute__((always_inline)) inline

struct F32 {
  float32x4_t v[4];
};
struct I32 {
  int32x4_t v[4];
};

// Written out instead of a loop, so that compilers keep the four parts in registers.
#define ARMLLM_FOUR(f, ...)                                                      \
  {                                                                              \
    {                                                                            \
      f(0, __VA_ARGS__), f(1, __VA_ARGS__), f(2, __VA_ARGS__), f(3, __VA_ARGS__) \
    }                                                                            \
  }
#define ARMLLM_UNARY(i, op, a) op(a.v[i])
#define ARMLLM_BINARY(i, op, a, b) op(a.v[i], b.v[i])

ARMLLM_SIMD F32 set1(float x) {
  const float32x4_t part = vdupq_n_f32(x);
  return {{part, part, part, part}};
}
ARMLLM_SIMD F32 zero() { return set1(0.0f); }
ARMLLM_SIMD I32 set1i(int32_t x) {
  const int32x4_t part = vdupq_n_s32(x);
  return {{part, part, part, part}};
}

struct Wide {
  float32x4_t low, high;
};
// ZIP with zero runs on every vector pipe of Neoverse; shifts run on half of them.
ARMLLM_SIMD Wide widen(uint16x8_t x, const bf16*) {
  const uint16x8_t none = vdupq_n_u16(0);
  return {vreinterpretq_f32_u16(vzip1q_u16(none, x)), vreinterpretq_f32_u16(vzip2q_u16(none, x))};
}
ARMLLM_SIMD Wide widen(uint16x8_t x, const f16*) {
  const float16x8_t half = vreinterpretq_f16_u16(x);
  return {vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
ARMLLM_SIMD uint16x8_t narrow(float32x4_t low, float32x4_t high, const bf16*) {
  return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
#else
// Rounds to bfloat16, in the upper half of each lane.
ARMLLM_SIMD uint32x4_t rounded_upper(float32x4_t x) {
  const uint32x4_t word = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vtstq_u32(word, vdupq_n_u32(0x10000));  // all ones, i.e.  −1
  const uint32x4_t rounded = vaddq_u32(word, vsubq_u32(vdupq_n_u32(0x7fff), odd));
  const uint32x4_t quiet = vorrq_u32(word, vdupq_n_u32(0x400000));
  return vbslq_u32(vceqq_f32(x, x), rounded, quiet);
}
ARMLLM_SIMD uint16x8_t narrow(float32x4_t low, float32x4_t high, const bf16*) {
  return vuzp2q_u16(vreinterpretq_u16_u32(rounded_upper(low)), vreinterpretq_u16_u32(rounded_upper(high)));
}
#endif
ARMLLM_SIMD F32 round_to_bf16(F32 x) {
  const bf16* type = nullptr;
  const Wide a = widen(narrow(x.v[0], x.v[1], type), type), b = widen(narrow(x.v[2], x.v[3], type), type);
  return {{a.low, a.high, b.low, b.high}};
}
ARMLLM_SIMD uint16x8_t narrow(float32x4_t low, float32x4_t high, const f16*) {
  return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(low), high));
}

ARMLLM_SIMD F32 load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
ARMLLM_SIMD void store(float* p, F32 x) {
  vst1q_f32(p, x.v[0]);
  vst1q_f32(p + 4, x.v[1]);
  vst1q_f32(p + 8, x.v[2]);
  vst1q_f32(p + 12, x.v[3]);
}
ARMLLM_SIMD F32 load(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
ARMLLM_SIMD F32 repeat4(const float* p) {
  const float32x4_t part = vld1q_f32(p);
  return {{part, part, part, part}};
}
ARMLLM_SIMD F32 repeat8(const float* p) {
  const float32x4_t low = vld1q_f32(p), high = vld1q_f32(p + 4);
  return {{low, high, low, high}};
}
template <typename T>
ARMLLM_SIMD F32 load(const T* p) {
  const uint16_t* words = reinterpret_cast<const uint16_t*>(p);
  const Wide a = widen(vld1q_u16(words), p), b = widen(vld1q_u16(words + 8), p);
  return {{a.low, a.high, b.low, b.high}};
}
template <typename T>
ARMLLM_SIMD void store(T* p, F32 x) {
  uint16_t* words = reinterpret_cast<uint16_t*>(p);
  vst1q_u16(words, narrow(x.v[0], x.v[1], p));
  vst1q_u16(words + 8, narrow(x.v[2], x.v[3], p));
}
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

ARMLLM_SIMD F32 operator+(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vaddq_f32, a, b); }
ARMLLM_SIMD F32 operator-(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vsubq_f32, a, b); }
ARMLLM_SIMD F32 operator*(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vmulq_f32, a, b); }
ARMLLM_SIMD F32 operator/(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vdivq_f32, a, b); }
ARMLLM_SIMD F32 operator-(F32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vnegq_f32, a); }
ARMLLM_SIMD F32 fma(F32 a, F32 b, F32 c) {
  return {{vfmaq_f32(c.v[0], a.v[0], b.v[0]), vfmaq_f32(c.v[1], a.v[1], b.v[1]),
           vfmaq_f32(c.v[2], a.v[2], b.v[2]), vfmaq_f32(c.v[3], a.v[3], b.v[3])}};
}
ARMLLM_SIMD F32 fnma(F32 a, F32 b, F32 c) {
  return {{vfmsq_f32(c.v[0], a.v[0], b.v[0]), vfmsq_f32(c.v[1], a.v[1], b.v[1]),
           vfmsq_f32(c.v[2], a.v[2], b.v[2]), vfmsq_f32(c.v[3], a.v[3], b.v[3])}};
}
ARMLLM_SIMD F32 reciprocal_step(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vrecpsq_f32, a, b); }
ARMLLM_SIMD F32 abs(F32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vabsq_f32, a); }
ARMLLM_SIMD F32 sqrt(F32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vsqrtq_f32, a); }
// FMAX and FMIN would propagate a NaN of either operand.
ARMLLM_SIMD float32x4_t greater(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
ARMLLM_SIMD float32x4_t less(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
ARMLLM_SIMD F32 max(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, greater, a, b); }
ARMLLM_SIMD F32 min(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, less, a, b); }
ARMLLM_SIMD F32 at_least(F32 x, F32 bound) { return ARMLLM_FOUR(ARMLLM_BINARY, vmaxq_f32, x, bound); }
ARMLLM_SIMD F32 at_most(F32 x, F32 bound) { return ARMLLM_FOUR(ARMLLM_BINARY, vminq_f32, x, bound); }

ARMLLM_SIMD I32 round_to_int(F32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vcvtnq_s32_f32, a); }
ARMLLM_SIMD F32 to_float(I32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vcvtq_f32_s32, a); }

ARMLLM_SIMD I32 load_i32(const int32_t* p) {
  return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
}
ARMLLM_SIMD void store_i32(int32_t* p, I32 a) {
  vst1q_s32(p, a.v[0]);
  vst1q_s32(p + 4, a.v[1]);
  vst1q_s32(p + 8, a.v[2]);
  vst1q_s32(p + 12, a.v[3]);
}
ARMLLM_SIMD I32 operator+(I32 a, I32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vaddq_s32, a, b); }
ARMLLM_SIMD I32 operator-(I32 a, I32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vsubq_s32, a, b); }
ARMLLM_SIMD I32 operator*(I32 a, I32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vmulq_s32, a, b); }
ARMLLM_SIMD I32 operator&(I32 a, I32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vandq_s32, a, b); }
ARMLLM_SIMD I32 operator|(I32 a, I32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vorrq_s32, a, b); }
template <int N>
ARMLLM_SIMD I32 shift_left(I32 a) {
  return {{vshlq_n_s32(a.v[0], N), vshlq_n_s32(a.v[1], N), vshlq_n_s32(a.v[2], N), vshlq_n_s32(a.v[3], N)}};
}
template <int N>
ARMLLM_SIMD I32 shift_right(I32 a) {
  return {{vshrq_n_s32(a.v[0], N), vshrq_n_s32(a.v[1], N), vshrq_n_s32(a.v[2], N), vshrq_n_s32(a.v[3], N)}};
}
ARMLLM_SIMD I32 max_i32(I32 a, I32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, vmaxq_s32, a, b); }
ARMLLM_SIMD I32 bits(F32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vreinterpretq_s32_f32, a); }
ARMLLM_SIMD F32 from_bits(I32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vreinterpretq_f32_s32, a); }
ARMLLM_SIMD void store_i8(int8_t* p, I32 a) {
  const int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

struct I8 {
  int8x16_t v;
};
// Adding 1.5 · 2^23 rounds to an integer in the low bytes; conversions (FCVTNS) run on fewer pipes.
ARMLLM_SIMD I8 round_to_i8(F32 a) {
  const float32x4_t shift = vdupq_n_f32(0x1.8p23f);
#define ARMLLM_WORDS(x) vreinterpretq_s16_f32(vaddq_f32(x, shift))
  const int16x8_t low = vuzp1q_s16(ARMLLM_WORDS(a.v[0]), ARMLLM_WORDS(a.v[1]));
  const int16x8_t high = vuzp1q_s16(ARMLLM_WORDS(a.v[2]), ARMLLM_WORDS(a.v[3]));
#undef ARMLLM_WORDS
  return {vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high))};
}
ARMLLM_SIMD void store_i8(int8_t* p, I8 a) { vst1q_s8(p, a.v); }
ARMLLM_SIMD void store_halves(int8_t* p, int8_t* q, I8 a) {
  vst1_s8(p, vget_low_s8(a.v));
  vst1_s8(q, vget_high_s8(a.v));
}
ARMLLM_SIMD int32_t reduce_add_i8(I8 a, I8 b) {
#if defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t ones = vdupq_n_s8(1);
  return vaddvq_s32(vdotq_s32(vdotq_s32(vdupq_n_s32(0), a.v, ones), b.v, ones));
#else
  return vaddlvq_s16(vpadalq_s8(vpaddlq_s8(a.v), b.v));
#endif
}

ARMLLM_SIMD int32_t largest_magnitude(const float* p, int64_t n) {
  const uint32x4_t size = vdupq_n_u32(0x7fffffff);
  uint32x4_t top[4] = {vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)};
  int64_t i = 0;
#define ARMLLM_STEP(j) \
  top[j] = vmaxq_u32(top[j], vandq_u32(size, vreinterpretq_u32_f32(vld1q_f32(p + i + 4 * j))))
  for (; i + 16 <= n; i += 16) {
    ARMLLM_STEP(0);
    ARMLLM_STEP(1);
    ARMLLM_STEP(2);
    ARMLLM_STEP(3);
  }
#undef ARMLLM_STEP
  uint32_t best = vmaxvq_u32(vmaxq_u32(vmaxq_u32(top[0], top[1]), vmaxq_u32(top[2], top[3])));
  for (; i < n; ++i) {
    uint32_t word;
    __builtin_memcpy(&word, p + i, 4);
    word &= 0x7fffffffu;
    best = word > best ? word : best;
  }
  return static_cast<int32_t>(best);
}
template <typename T>
ARMLLM_SIMD int32_t largest_magnitude(const T* p, int64_t n) {
  const uint16_t* words = reinterpret_cast<const uint16_t*>(p);
  const uint16x8_t size = vdupq_n_u16(0x7fff);
  uint16x8_t top[4] = {vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0)};
  int64_t i = 0;
#define ARMLLM_STEP(j) top[j] = vmaxq_u16(top[j], vandq_u16(size, vld1q_u16(words + i + 8 * j)))
  for (; i + 32 <= n; i += 32) {
    ARMLLM_STEP(0);
    ARMLLM_STEP(1);
    ARMLLM_STEP(2);
    ARMLLM_STEP(3);
  }
#undef ARMLLM_STEP
  int32_t best = vmaxvq_u16(vmaxq_u16(vmaxq_u16(top[0], top[1]), vmaxq_u16(top[2], top[3])));
  for (; i < n; ++i) best = (words[i] & 0x7fff) > best ? words[i] & 0x7fff : best;
  return best;
}

#define ARMLLM_EACH4(step) \
  step(0);                 \
  step(1);                 \
  step(2);                 \
  step(3)
ARMLLM_SIMD void load_pairs(const bf16* p, F32& even, F32& odd) {
  const uint16_t* words = reinterpret_cast<const uint16_t*>(p);
  const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
#define ARMLLM_STEP(j)                                                       \
  {                                                                          \
    const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(words + 8 * j)); \
    even.v[j] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));                \
    odd.v[j] = vreinterpretq_f32_u32(vandq_u32(both, upper));                \
  }
  ARMLLM_EACH4(ARMLLM_STEP);
#undef ARMLLM_STEP
}
ARMLLM_SIMD void load_pairs(const float* p, F32& even, F32& odd) {
#define ARMLLM_STEP(j)                                                        \
  {                                                                           \
    const float32x4_t a = vld1q_f32(p + 8 * j), b = vld1q_f32(p + 8 * j + 4); \
    even.v[j] = vuzp1q_f32(a, b);                                             \
    odd.v[j] = vuzp2q_f32(a, b);                                              \
  }
  ARMLLM_EACH4(ARMLLM_STEP);
#undef ARMLLM_STEP
}
ARMLLM_SIMD void load_pairs(const f16* p, F32& even, F32& odd) {
  const uint16_t* words = reinterpret_cast<const uint16_t*>(p);
#define ARMLLM_STEP(j)                                    \
  {                                                       \
    const Wide wide = widen(vld1q_u16(words + 8 * j), p); \
    even.v[j] = vuzp1q_f32(wide.low, wide.high);          \
    odd.v[j] = vuzp2q_f32(wide.low, wide.high);           \
  }
  ARMLLM_EACH4(ARMLLM_STEP);
#undef ARMLLM_STEP
}
template <typename T>
ARMLLM_SIMD void store_pairs(T* p, F32 even, F32 odd) {
  uint16_t* words = reinterpret_cast<uint16_t*>(p);
#define ARMLLM_STEP(j)                                                \
  {                                                                   \
    const uint16x8_t a = narrow(even.v[2 * j], even.v[2 * j + 1], p), \
                     b = narrow(odd.v[2 * j], odd.v[2 * j + 1], p);   \
    vst1q_u16(words + 16 * j, vzip1q_u16(a, b));                      \
    vst1q_u16(words + 16 * j + 8, vzip2q_u16(a, b));                  \
  }
  ARMLLM_STEP(0);
  ARMLLM_STEP(1);
#undef ARMLLM_STEP
}
ARMLLM_SIMD void store_pairs(float* p, F32 even, F32 odd) {
#define ARMLLM_STEP(j)                                   \
  vst1q_f32(p + 8 * j, vzip1q_f32(even.v[j], odd.v[j])); \
  vst1q_f32(p + 8 * j + 4, vzip2q_f32(even.v[j], odd.v[j]))
  ARMLLM_EACH4(ARMLLM_STEP);
#undef ARMLLM_STEP
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Opaque to GCC 12, which would encode a bfloat16 constant 1 as float16.
ARMLLM_SIMD bfloat16x8_t bf16_one() {
  uint16x8_t word = vdupq_n_u16(0x3f80);
  __asm__("" : "+w"(word));
  return vreinterpretq_bf16_u16(word);
}
// A product of bfloat16 values is exact in float32 and the sum is rounded once, as by fma.
ARMLLM_SIMD void add_squares(const bf16* p, F32& even, F32& odd) {
  const bfloat16_t* words = reinterpret_cast<const bfloat16_t*>(p);
#define ARMLLM_STEP(j)                                \
  {                                                   \
    const bfloat16x8_t x = vld1q_bf16(words + 8 * j); \
    even.v[j] = vbfmlalbq_f32(even.v[j], x, x);       \
    odd.v[j] = vbfmlaltq_f32(odd.v[j], x, x);         \
  }
  ARMLLM_EACH4(ARMLLM_STEP);
#undef ARMLLM_STEP
}
ARMLLM_SIMD void add_values(const bf16* p, F32& even, F32& odd) {
  const bfloat16_t* words = reinterpret_cast<const bfloat16_t*>(p);
  const bfloat16x8_t one = bf16_one();
#define ARMLLM_STEP(j)                                \
  {                                                   \
    const bfloat16x8_t x = vld1q_bf16(words + 8 * j); \
    even.v[j] = vbfmlalbq_f32(even.v[j], x, one);     \
    odd.v[j] = vbfmlaltq_f32(odd.v[j], x, one);       \
  }
  ARMLLM_EACH4(ARMLLM_STEP);
#undef ARMLLM_STEP
}
// A zero without a register copy: MOVI uses no vector pipe.  The operand `after` keeps compilers from sharing
// it.
ARMLLM_SIMD float32x4_t fresh_zero(bfloat16x8_t after) {
  float32x4_t none;
  __asm__("movi %0.2d, #0" : "=w"(none) : "w"(after));
  return none;
}
ARMLLM_SIMD void multiply_pairs(const bf16* x, const bf16* w, F32& even, F32& odd) {
  const bfloat16_t *a = reinterpret_cast<const bfloat16_t*>(x), *b = reinterpret_cast<const bfloat16_t*>(w);
#define ARMLLM_STEP(j)                                                              \
  {                                                                                 \
    const bfloat16x8_t left = vld1q_bf16(a + 8 * j), right = vld1q_bf16(b + 8 * j); \
    even.v[j] = vbfmlalbq_f32(fresh_zero(left), left, right);                       \
    odd.v[j] = vbfmlaltq_f32(fresh_zero(right), left, right);                       \
  }
  ARMLLM_EACH4(ARMLLM_STEP);
#undef ARMLLM_STEP
}
ARMLLM_SIMD void sum_pairs(const bf16* x, const bf16* y, F32& even, F32& odd) {
  const bfloat16_t *a = reinterpret_cast<const bfloat16_t*>(x), *b = reinterpret_cast<const bfloat16_t*>(y);
  const bfloat16x8_t one = bf16_one();
#define ARMLLM_STEP(j)                                                                 \
  {                                                                                    \
    const bfloat16x8_t left = vld1q_bf16(a + 8 * j), right = vld1q_bf16(b + 8 * j);    \
    even.v[j] = vbfmlalbq_f32(vbfmlalbq_f32(fresh_zero(left), left, one), right, one); \
    odd.v[j] = vbfmlaltq_f32(vbfmlaltq_f32(fresh_zero(right), left, one), right, one); \
  }
  ARMLLM_EACH4(ARMLLM_STEP);
#undef ARMLLM_STEP
}
#endif
#undef ARMLLM_EACH4

ARMLLM_SIMD int32_t greater_equal_mask(F32 a, F32 b) {
#define ARMLLM_WORDS(i) vreinterpretq_u16_u32(vcgeq_f32(a.v[i], b.v[i]))
  const uint16x8_t low = vuzp1q_u16(ARMLLM_WORDS(0), ARMLLM_WORDS(1));
  const uint16x8_t high = vuzp1q_u16(ARMLLM_WORDS(2), ARMLLM_WORDS(3));
#undef ARMLLM_WORDS
  static const uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint8x16_t bits =
      vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), vld1q_u8(kBits));
  bits = vpaddq_u8(bits, bits);
  bits = vpaddq_u8(bits, bits);
  return vgetq_lane_u16(vreinterpretq_u16_u8(vpaddq_u8(bits, bits)), 0);
}

ARMLLM_SIMD uint32x4_t below(int32x4_t first, int32x4_t limit, int part) {
  return vcgtq_s32(vsubq_s32(limit, vdupq_n_s32(4 * part)), first);
}
ARMLLM_SIMD F32 select_first(int n, F32 a, F32 b) {
  static const int32_t kIndex[4] = {0, 1, 2, 3};
  const int32x4_t first = vld1q_s32(kIndex), limit = vdupq_n_s32(n);
  return {
      {vbslq_f32(below(first, limit, 0), a.v[0], b.v[0]), vbslq_f32(below(first, limit, 1), a.v[1], b.v[1]),
       vbslq_f32(below(first, limit, 2), a.v[2], b.v[2]), vbslq_f32(below(first, limit, 3), a.v[3], b.v[3])}};
}
ARMLLM_SIMD F32 select_greater(F32 x, F32 y, F32 a, F32 b) {
  return {{vbslq_f32(vcgtq_f32(x.v[0], y.v[0]), a.v[0], b.v[0]),
           vbslq_f32(vcgtq_f32(x.v[1], y.v[1]), a.v[1], b.v[1]),
           vbslq_f32(vcgtq_f32(x.v[2], y.v[2]), a.v[2], b.v[2]),
           vbslq_f32(vcgtq_f32(x.v[3], y.v[3]), a.v[3], b.v[3])}};
}

ARMLLM_SIMD F32 add_pairs(F32 a, F32 b) {
  return {{vpaddq_f32(a.v[0], a.v[1]), vpaddq_f32(a.v[2], a.v[3]), vpaddq_f32(b.v[0], b.v[1]),
           vpaddq_f32(b.v[2], b.v[3])}};
}

ARMLLM_SIMD float reduce_add(F32 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
ARMLLM_SIMD float reduce_max(F32 a) {
  const float32x4_t four = greater(greater(a.v[0], a.v[2]), greater(a.v[1], a.v[3]));
  const float x = vgetq_lane_f32(four, 0), y = vgetq_lane_f32(four, 1), z = vgetq_lane_f32(four, 2),
              w = vgetq_lane_f32(four, 3);
  const float even = x > z ? x : z, odd = y > w ? y : w;
  return even > odd ? even : odd;
}
ARMLLM_SIMD int32_t reduce_add_i32(I32 a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[2]), vaddq_s32(a.v[1], a.v[3])));
}
ARMLLM_SIMD int32_t reduce_max_i32(I32 a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[2]), vmaxq_s32(a.v[1], a.v[3])));
}

#undef ARMLLM_FOUR
#undef ARMLLM_UNARY
#undef ARMLLM_BINARY
#undef ARMLLM_SIMD

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
