// Dense products of bfloat16 rows with BFMMLA.
//
// The sum of a token and an output has two halves: over the first and over the last four of every 8 k.  One
// instruction adds one half for 2 tokens × 2 outputs or, for a single token and output, both halves on the
// diagonal of its result; the bits are the same either way.
#pragma once

#include <arm_neon.h>

#include "linear/dense.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Loads 8 values, of which `count` exist; the rest are zeros.
inline bfloat16x8_t load_k(const uint16_t* p, int64_t count) {
  if (count >= 8) return vreinterpretq_bf16_u16(vld1q_u16(p));
  uint16_t some[8] = {};
  __builtin_memcpy(some, p, size_t(count) * 2);
  return vreinterpretq_bf16_u16(vld1q_u16(some));
}

// Adds the products of 32 values, two times four per lane, and advances `row`.  Inline assembly, because GCC
// 12 emits three instructions for the load of a row and moves it twice.
__attribute__((always_inline)) inline float32x4_t add_32(float32x4_t sum, const bfloat16x8_t* x,
                                                         const uint16_t*& row) {
  __asm__(
      "ld1 {v20.8h - v23.8h}, [%[row]], #64\n"
      "bfmmla %[sum].4s, %[x0].8h, v20.8h\n"
      "bfmmla %[sum].4s, %[x1].8h, v21.8h\n"
      "bfmmla %[sum].4s, %[x2].8h, v22.8h\n"
      "bfmmla %[sum].4s, %[x3].8h, v23.8h\n"
      : [sum] "+w"(sum), [row] "+r"(row)
      : [x0] "w"(x[0]), [x1] "w"(x[1]), [x2] "w"(x[2]), [x3] "w"(x[3])
      : "v20", "v21", "v22", "v23", "memory");
  return sum;
}

// One token × all outputs of a tile.
inline void dense_bf16_bfmmla_1(const uint16_t* x, const uint16_t* const* weight, int64_t n, float* out) {
  constexpr int kOutputs = int(kDenseOutputs);
  float32x4_t sums[kOutputs];
  const uint16_t* w[kOutputs];
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) sums[o] = vdupq_n_f32(0), w[o] = weight[o];
  int64_t k = 0;
  for (; k + 32 <= n; k += 32) {
    const bfloat16x8_t values[4] = {load_k(x + k, 8), load_k(x + k + 8, 8), load_k(x + k + 16, 8),
                                    load_k(x + k + 24, 8)};
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) sums[o] = add_32(sums[o], values, w[o]);
  }
  for (; k < n; k += 8) {
    const bfloat16x8_t values = load_k(x + k, n - k);
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) sums[o] = vbfmmlaq_f32(sums[o], values, load_k(weight[o] + k, n - k));
  }
#pragma GCC unroll 16
  for (int o = 0; o < kOutputs; ++o) out[o] = vgetq_lane_f32(sums[o], 0) + vgetq_lane_f32(sums[o], 3);
}

struct Halves {
  bfloat16x8_t half[2];
  // Splits two rows into the first and the last four of 8 k.
  __attribute__((always_inline)) inline Halves(bfloat16x8_t a, bfloat16x8_t b) {
    const uint64x2_t x = vreinterpretq_u64_bf16(a), y = vreinterpretq_u64_bf16(b);
    half[0] = vreinterpretq_bf16_u64(vzip1q_u64(x, y));
    half[1] = vreinterpretq_bf16_u64(vzip2q_u64(x, y));
  }
};

// 2 · kPairs tokens × 8 outputs.
template <int kPairs>
inline void dense_bf16_bfmmla_2_4(const uint16_t* const* x, const uint16_t* const* w, int64_t n, int first,
                                  float (&out)[kDenseTokens][kDenseOutputs]) {
  float32x4_t sums[2][kPairs][4];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) sums[h][p][r] = vdupq_n_f32(0);
  const auto add = [&](int64_t k, int64_t count) __attribute__((always_inline)) {
    bfloat16x8_t tokens[2][kPairs];
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      const Halves halves(load_k(x[2 * p] + k, count), load_k(x[2 * p + 1] + k, count));
      tokens[0][p] = halves.half[0], tokens[1][p] = halves.half[1];
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Halves rows(load_k(w[2 * r] + k, count), load_k(w[2 * r + 1] + k, count));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
        for (int p = 0; p < kPairs; ++p)
          sums[h][p][r] = vbfmmlaq_f32(sums[h][p][r], tokens[h][p], rows.half[h]);
    }
  };
  int64_t k = 0;
  for (; k + 8 <= n; k += 8) add(k, 8);
  if (k < n) add(k, n - k);
#pragma GCC unroll 2
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const float32x4_t sum = vaddq_f32(sums[0][p][r], sums[1][p][r]);
      vst1_f32(&out[2 * p][first + 2 * r], vget_low_f32(sum));
      vst1_f32(&out[2 * p + 1][first + 2 * r], vget_high_f32(sum));
    }
}

// Products of bfloat16 rows.  Missing rows at the edge repeat the last one.
void dense_bf16_bfmmla(const DenseLinearArgs& args, int64_t first_token, int tokens, int64_t first_output,
                       int outputs, float (&out)[kDenseTokens][kDenseOutputs]) {
  const uint16_t *x[kDenseTokens], *weight[kDenseOutputs];
  for (int t = 0; t < kDenseTokens; ++t)
    x[t] = reinterpret_cast<const uint16_t*>(args.x.row(first_token + (t < tokens ? t : tokens - 1)));
  for (int o = 0; o < kDenseOutputs; ++o)
    weight[o] =
        reinterpret_cast<const uint16_t*>(args.weight.row(first_output + (o < outputs ? o : outputs - 1)));
  if (tokens == 1) return dense_bf16_bfmmla_1(x[0], weight, args.in_features, out[0]);
  for (int o = 0; o < outputs; o += 8) {
    if (tokens == 2) {
      dense_bf16_bfmmla_2_4<1>(x, weight + o, args.in_features, o, out);
    } else {
      dense_bf16_bfmmla_2_4<2>(x, weight + o, args.in_features, o, out);
    }
  }
}

static_assert(kDenseTokens == 4 && kDenseOutputs == 16);

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
