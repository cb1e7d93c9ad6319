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

// Spelled out rather than looped: the compiler then keeps the four parts in registers.
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

ARMLLM_SIMD float32x4_t widen(uint16x4_t x, const bf16*) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
ARMLLM_SIMD float32x4_t widen(uint16x4_t x, const f16*) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
ARMLLM_SIMD uint16x4_t narrow(float32x4_t x, const bf16*) { return vreinterpret_u16_bf16(vcvt_bf16_f32(x)); }
#else
ARMLLM_SIMD uint16x4_t narrow(float32x4_t x, const bf16*) {
  const uint32x4_t word = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(word, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(word, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(word, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}
#endif
ARMLLM_SIMD uint16x4_t narrow(float32x4_t x, const f16*) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

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
  const uint16x8_t a = vld1q_u16(words), b = vld1q_u16(words + 8);
  return {{widen(vget_low_u16(a), p), widen(vget_high_u16(a), p), widen(vget_low_u16(b), p),
           widen(vget_high_u16(b), p)}};
}
template <typename T>
ARMLLM_SIMD void store(T* p, F32 x) {
  uint16_t* words = reinterpret_cast<uint16_t*>(p);
  vst1q_u16(words, vcombine_u16(narrow(x.v[0], p), narrow(x.v[1], p)));
  vst1q_u16(words + 8, vcombine_u16(narrow(x.v[2], p), narrow(x.v[3], p)));
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
ARMLLM_SIMD F32 abs(F32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vabsq_f32, a); }
ARMLLM_SIMD F32 sqrt(F32 a) { return ARMLLM_FOUR(ARMLLM_UNARY, vsqrtq_f32, a); }
// fmax and fmin would keep a NaN of either side.
ARMLLM_SIMD float32x4_t greater(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
ARMLLM_SIMD float32x4_t less(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
ARMLLM_SIMD F32 max(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, greater, a, b); }
ARMLLM_SIMD F32 min(F32 a, F32 b) { return ARMLLM_FOUR(ARMLLM_BINARY, less, a, b); }

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
