// Softmax weights 2^(t − n) as bfloat16 bits, eight at a time.
//
// Adding t to the rounder leaves a fixed-point number in the low half of the float32 sum: eight bits of
// exponent and eight bits of fraction f.  Read as float16, the fraction bits are f · 256 in units of 2^−24.
// The float16 multiply-adds compute 1 + c(f) in the same units, where c(f) = f · (K + (R + S · f)²)
// approximates 2^f − 1 − f.  The 1 is the last step to the exponent's bias of 127: kSteps is 126.  The
// halving addition adds both and rounds to the fraction bits of bfloat16.
//
// The sum of a row adds the rounded weights, so relative errors that are the same for all keys cancel out.
// The remaining error is 1.8e-3 of a weight on average; rounding exact weights would have an error of 1.7e-3.
#pragma once

#include "attention/kernels/arm/pairs_of_rows.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

class Bf16Weights {
 public:
  explicit Bf16Weights(const Reference& of) : rounder_(&of.rounder), factor_(of.factor), lowest_(of.lowest) {
    // Hides the constants, so that they stay in registers.
    __asm__("" : "+w"(fraction_), "+w"(slope_), "+w"(ones_));
  }
  // The low halves of the lanes of two pairs of columns, ordered by row.
  static uint16x8_t rows_of(uint32x4_t x, uint32x4_t y) {
    return vreinterpretq_u16_u8(
        vqtbl2q_u8(uint8x16x2_t{{vreinterpretq_u8_u32(x), vreinterpretq_u8_u32(y)}}, vld1q_u8(kRows)));
  }
  ARMLLM_INLINE uint16x8_t operator()(const float* scores) const {
    const float32x4_t x = vmaxq_f32(vld1q_f32(scores), lowest_),
                      y = vmaxq_f32(vld1q_f32(scores + 4), lowest_);
    uint16x8_t z;
    // FMLA overwrites its accumulator, so the rounder is loaded into it each time.  Copying a register
    // instead would take a slot of the vector pipes.
    __asm__(
        "ldr q30, %1\n\tldr q31, %1\n\t"
        "fmla v30.4s, %2.4s, %4.4s\n\tfmla v31.4s, %3.4s, %4.4s\n\t"
        "tbl %0.16b, {v30.16b, v31.16b}, %5.16b"
        : "=w"(z)
        : "m"(*rounder_), "w"(x), "w"(y), "w"(factor_), "w"(rows_)
        : "v30", "v31");
    const float16x8_t f = vreinterpretq_f16_u16(vandq_u16(z, fraction_)), g = vfmaq_f16(start(kR), f, slope_),
                      c = vfmaq_f16(start(kK), g, g);
    return vrhaddq_u16(z, vreinterpretq_u16_f16(vfmaq_f16(start(kOne), f, c)));
  }
  ARMLLM_INLINE float32x4_t add(float32x4_t sum, uint16x8_t w) const {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u16(w), vreinterpretq_bf16_u16(ones_));
  }

 private:
  using Halves = uint16_t[8];
  alignas(16) static constexpr uint8_t kRows[16] = {0, 1, 4, 5, 16, 17, 20, 21, 8, 9, 12, 13, 24, 25, 28, 29};
  // In float16: R = 0.3982, K = −0.4636, and 1, a step of the exponent, in units of the fraction.
  alignas(16) static constexpr Halves kR = {0x365f, 0x365f, 0x365f, 0x365f, 0x365f, 0x365f, 0x365f, 0x365f},
                                      kK = {0xb76b, 0xb76b, 0xb76b, 0xb76b, 0xb76b, 0xb76b, 0xb76b, 0xb76b},
                                      kOne = {0x100, 0x100, 0x100, 0x100, 0x100, 0x100, 0x100, 0x100};
  // Loads the constant into a register that an FMLA then overwrites.
  ARMLLM_INLINE static float16x8_t start(const Halves& from) {
    float16x8_t x;
    __asm__ volatile("ldr %q0, %1" : "=w"(x) : "m"(from));
    return x;
  }

  const float32x4_t* rounder_;
  float32x4_t factor_, lowest_;
  uint8x16_t rows_ = vld1q_u8(kRows);
  uint16x8_t fraction_ = vdupq_n_u16(0xff), ones_ = vdupq_n_u16(0x3f80);
  float16x8_t slope_ = vdupq_n_f16(static_cast<float16_t>(18528.0f));  // S, for f in units of the fraction
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
