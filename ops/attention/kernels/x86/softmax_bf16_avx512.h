// Softmax weights in bfloat16 for VDPBF16PS: 2^(score − maximum), 32 at a time.  The factor of the queries
// includes log2(e), so that scores are exponents of two.
#pragma once

#include "attention/kernels/product_grouped.h"
#include "attention/kernels/softmax.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// Adds two products per lane.  Written as assembly, because with the intrinsic GCC 12 renames accumulators
// inside unrolled loops and copies them back at the end of each iteration.
__attribute__((always_inline)) inline void add_dot(__m512& sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// 2^x with a relative error of at most 7.5e-5.  Both instructions split x at floor(x), and −∞ becomes 0.
inline F32 power_of_two(F32 x) {
  const F32 fraction = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  F32 y = fma(fraction, set1(0.0780245206f), set1(0.226067155f));  // a minimax fit, by relative error
  y = fma(y, fraction, set1(0.695833540f));
  y = fma(y, fraction, set1(0.999925220f));
  return {_mm512_scalef_ps(y.v, x.v)};
}

struct Bf16Powers {};

template <typename P>
class Softmax<P, Bf16Powers> {
 public:
  static void soften_rows(const AttentionArgs& args, const AttentionTile& t, const Split&, int64_t row,
                          int64_t rows) {
    const Span group = visible(t, row, rows);
    for (int64_t r = 0; r < rows; r += kMostRows)
      Softmax(args, t).soften(row + r, smaller(kMostRows, rows - r), group);
  }

 private:
  static constexpr int64_t kMostRows = 8, kStep = 2 * kLanes;

  Softmax(const AttentionArgs& args, const AttentionTile& t)
      : args_(args), t_(t), cap_(args.softcap * kLog2E) {}

  // A reduction is a chain of dependent instructions.  Those of all rows are grouped, so that they overlap.
  void soften(int64_t row, int64_t rows, Span group) const {
    F32 of_row[kMostRows];
    float top[kMostRows];
    for (int64_t r = 0; r < rows; ++r) of_row[r] = highest(row + r);
    for (int64_t r = 0; r < rows; ++r) top[r] = reduce_max(of_row[r]);
    for (int64_t r = 0; r < rows; ++r) {
      const bool any = top[r] > kNothing;
      t_.maximum[row + r] = any ? top[r] * kLn2 : kNothing;
      of_row[r] = weigh(row + r, group, set1(any ? top[r] : kNothing));
    }
    for (int64_t r = 0; r < rows; ++r) t_.sum[row + r] = reduce_add(of_row[r]);
  }

  float* scores(int64_t row) const { return t_.scores + row * kScoreStride; }

  F32 highest(int64_t row) const {
    float* s = scores(row);
    const Span span = visible(t_, row, 1);
    if (cap_ > 0.0f) cap(s, span);
    if (DistanceBias::is_part_of(t_)) add_bias(row, s, span);
    const F32 nothing = set1(kNothing);
    F32 top = nothing;
    each_vector(
        span, [&](int64_t i) { top = max(top, inside(span, i, load(s + i), nothing)); },
        [&](int64_t i) { top = max(top, load(s + i)); });
    return top;
  }

  void cap(float* s, Span span) const {
    const F32 cap = set1(cap_);
    for (int64_t i = span.begin / kLanes * kLanes; i < span.end; i += kLanes)
      store(s + i, cap * tanh(load(s + i) / cap));
  }

  void add_bias(int64_t row, float* s, Span span) const {
    const DistanceBias bias(args_, t_, row, kLog2E);
    for (int64_t i = span.begin / kLanes * kLanes; i < span.end; i += kLanes)
      store(s + i, bias.add_to(i, load(s + i)));
  }

  // Returns the sum of the rounded weights.  Relative errors common to all keys then cancel out.
  F32 weigh(int64_t row, Span group, F32 maximum) const {
    const float* s = scores(row);
    char* to = static_cast<char*>(t_.weights) + row * kWeightBytes;
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    __m512 sum = _mm512_setzero_ps();
    const auto step = [&](int64_t i, __mmask32 seen) {
      const F32 low = power_of_two(load(s + i) - maximum),
                high = power_of_two(load(s + i + kLanes) - maximum);
      const __m512bh rounded = _mm512_maskz_cvtne2ps_pbh(seen, high.v, low.v);
      __m512i weights;
      __builtin_memcpy(&weights, &rounded, sizeof weights);
      _mm512_storeu_si512(to + 2 * i, weights);
      add_dot(sum, weights, ones);
    };
    const Span span = visible(t_, row, 1), all = steps(span), zeros = steps(group);
    clear(to, zeros.begin, smaller(all.begin, zeros.end));
    if (!span.empty()) {
      const int64_t last = all.end - kStep;
      step(all.begin, inside_step(span, all.begin));
      for (int64_t i = all.begin + kStep; i < last; i += kStep) step(i, ~__mmask32{0});
      if (last > all.begin) step(last, inside_step(span, last));
    }
    clear(to, larger(all.end, zeros.begin), zeros.end);
    *reinterpret_cast<RowTail*>(to + kSplit * 2) = RowTail{1.0f, 0};
    return {sum};
  }

  static void clear(char* to, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kStep) _mm512_storeu_si512(to + 2 * i, _mm512_setzero_si512());
  }

  // The span extended to whole steps.
  static Span steps(Span span) {
    const int64_t begin = span.begin / kStep * kStep;
    return {begin, span.empty() ? begin : round_up(span.end, kStep)};
  }
  static __mmask32 inside_step(Span span, int64_t position) {
    const int64_t begin = larger(span.begin - position, 0), end = smaller(span.end - position, kStep);
    return static_cast<__mmask32>(~uint64_t{0} >> (64 - end) & ~uint64_t{0} << begin);
  }

  const AttentionArgs& args_;
  const AttentionTile& t_;
  float cap_;
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
