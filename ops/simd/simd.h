// Sixteen float lanes with the same results on every CPU.
//
// `F32` and `I32` are 16 lanes on any register size: one AVX-512 register, two AVX2, four NEON, an array in
// the scalar variant.  Kernels written with them (`*.simd.cpp`, compiled once per variant) sum in the same
// order everywhere and so return the same bits.  Products and sums are fused only by an explicit `fma`.
//
//   F32 zero(), set1(float);  I32 set1i(int32_t)
//   F32 load(const float*|const bf16*|const f16*), load_partial(p, n)   lanes ≥ n: 0, not read
//   F32 load(const int8_t*), repeat4(const float*), repeat8(const float*)   4 or 8 floats, repeated
//   void store(float*|bf16*|f16*, F32), store_partial(p, v, n)          rounds to nearest even; NaN stays NaN
//   F32 round_to_bf16(F32)        the nearest bfloat16, ties to even; NaN stays NaN
//   F32 + - * /  and unary -;  F32 fma(a, b, c) = a·b + c rounded once;  F32 abs(F32), sqrt(F32)
//   F32 fnma(a, b, c) = c − a·b rounded once
//   F32 reciprocal_step(a, b) = 2 − a·b rounded once
//   F32 max(a, b), min(a, b)      a > b ? a : b   and   a < b ? a : b  (NaN in either operand returns b)
//   F32 at_least(x, bound), at_most(x, bound)   max and min in one instruction, bounds ≠ 0; NaN stays NaN
//   I32 round_to_int(F32)         to nearest even;  F32 to_float(I32)
//   I32 load_i32(const int32_t*), store_i32(int32_t*, I32), + - * & |, shift_left<N>(I32)
//   I32 shift_right<N>(I32)       arithmetic
//   I32 bits(F32), F32 from_bits(I32); I32 max_i32(I32, I32)  signed
//   void store_i8(int8_t*, I32)   low bytes of lanes that are within −128 … 127
//   I8 round_to_i8(F32)           to nearest even, |x| < 128.5; store_i8(int8_t*, I8)
//   int32_t reduce_add_i8(I8, I8)
//   store_halves(p, q, I8)        8 bytes to each pointer
//   int32_t largest_magnitude(const float*|bf16*|f16*, n)   maximum of x & ~sign as an integer:
//                                 NaN > infinity > every finite value
//   load_pairs(p, F32& even, F32& odd), store_pairs(p, even, odd)   32 values, even and odd elements
//   add_squares(p, F32& even, F32& odd), add_values(p, even, odd)   even = fma(x, x, even), even + x
//   multiply_pairs(const bf16* x, const bf16* w, F32& even, F32& odd)   even = fma(x, w, +0)
//   sum_pairs(const bf16* x, const bf16* y, F32& even, F32& odd)        even = (x + +0) + y
//   int32_t greater_equal_mask(F32 a, F32 b)                bit i: a[i] ≥ b[i]
//   F32 select_first(int n, F32 a, F32 b)   lanes < n of a, the remaining lanes of b
//   F32 select_greater(F32 x, F32 y, F32 a, F32 b)   x > y ? a : b, per lane
//   F32 add_pairs(F32 a, F32 b)   a0 + a1, a2 + a3, … a14 + a15, b0 + b1, … b14 + b15
//   float reduce_add(F32), reduce_max(F32); int32_t reduce_add_i32(I32), reduce_max_i32(I32)
//       always as a tree: lane i with i + 8, then + 4, + 2, + 1
#pragma once

#include <cstdint>

#ifndef ARMLLM_VARIANT
#error "simd.h is for kernel variants: compile with -DARMLLM_VARIANT=<name>"
#endif

namespace armllm {
constexpr int kLanes = 16;
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
}  // namespace armllm

#if defined(ARMLLM_VARIANT_avx512)
#include "simd/avx512.h"
#elif defined(ARMLLM_VARIANT_avx2)
#include "simd/avx2.h"
#elif defined(ARMLLM_VARIANT_scalar)
#include "simd/scalar.h"
#else
#include "simd/neon.h"
#endif
#include "simd/pairs.h"
