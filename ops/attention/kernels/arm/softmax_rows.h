// Softmax for the Arm kernels that store scores row by row.
#pragma once

#include "attention/kernels/arm/pairs_of_rows.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// The positions that a row sees, in groups of eight.
struct Eights {
  Span span{0, 0};
  Span all{0, 0}, inner{0, 0};  // groups that the row sees at least in part; groups that it sees whole

  Eights() = default;
  explicit Eights(Span of)
      : span(of), all{of.begin / 8 * 8, round_up(of.end, 8)}, inner{round_up(of.begin, 8), of.end / 8 * 8} {
    if (span.empty()) all = {0, 0};
    if (inner.empty()) inner = {all.end, all.end};
  }

  // Mask of the four lanes at `i`: all ones where the row sees the position.
  uint32x4_t seen(int64_t i) const {
    static const int32_t kLane[4] = {0, 1, 2, 3};
    const int32x4_t c = vaddq_s32(vld1q_s32(kLane), vdupq_n_s32(static_cast<int32_t>(i)));
    return vandq_u32(vcgeq_s32(c, vdupq_n_s32(static_cast<int32_t>(span.begin))),
                     vcltq_s32(c, vdupq_n_s32(static_cast<int32_t>(span.end))));
  }
  // x in visible lanes, 0 in the others.
  ARMLLM_INLINE float32x4_t kept(int64_t i, float32x4_t x) const {
    return vreinterpretq_f32_u32(vandq_u32(seen(i), vreinterpretq_u32_f32(x)));
  }

  // Calls part(i) for groups that the row sees in part, whole(i) for those that it sees whole.
  template <typename Part, typename Whole>
  ARMLLM_INLINE void each(Part part, Whole whole) const {
    for (int64_t i = all.begin; i < inner.begin; i += 8) part(i);
    for (int64_t i = inner.begin; i < inner.end; i += 8) whole(i);
    for (int64_t i = inner.end; i < all.end; i += 8) part(i);
  }
  // Calls blank(i) for each group of eight of `around` in which the row sees no position.
  template <typename Blank>
  ARMLLM_INLINE void outside(Span around, Blank blank) const {
    const int64_t end = round_up(around.end, 8);
    int64_t i = around.begin / 8 * 8;
    for (; i < smaller(all.begin, end); i += 8) blank(i);
    for (i = larger(i, all.end); i < end; i += 8) blank(i);
  }

  // The highest visible score; NaN if one is NaN.
  float highest(const float* scores) const {
    const float32x4_t nothing = vdupq_n_f32(-__builtin_inff());
    float32x4_t top[4] = {nothing, nothing, nothing, nothing};
    const auto part = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 4)
        top[0] = vmaxq_f32(top[0], vbslq_f32(seen(i), vld1q_f32(scores + i), nothing));
    };
    part(all.begin, inner.begin);
    int64_t i = inner.begin;
    for (; i + 32 <= inner.end; i += 32)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        top[j] =
            vmaxq_f32(top[j], vmaxq_f32(vld1q_f32(scores + i + 8 * j), vld1q_f32(scores + i + 8 * j + 4)));
    for (; i < inner.end; i += 4) top[1] = vmaxq_f32(top[1], vld1q_f32(scores + i));
    part(inner.end, all.end);
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(top[0], top[1]), vmaxq_f32(top[2], top[3])));
  }
};

// The reference of a row's weights.  t = score · factor is an exponent of two; n is the highest t, rounded
// up.
struct RowReference {
  static constexpr float kOffset = 4.48746802f;  // 11 ln 2 − ln 23.0381
  float factor, n;
  // The weight is exp(scaled score − maximum).  kNothing if the row sees only −∞; NaN if it sees a NaN or ∞.
  float maximum;

  RowReference() = default;
  // If |t| is too large for exact steps of one, the scores are replaced by t − the highest t.
  RowReference(const Eights& row, float* scores, float of_scores) : factor(of_scores) {
    const float highest = row.highest(scores), t = highest * factor;
    n = __builtin_ceilf(t);
    maximum = n * kLn2 + kOffset;
    if (highest == -__builtin_inff()) {
      maximum = kNothing;
    } else if (!(__builtin_fabsf(t) < Reference::kLimit)) {
      for (int64_t i = row.all.begin; i < row.all.end; ++i) scores[i] = __builtin_fmaf(scores[i], factor, -t);
      maximum = t < __builtin_inff() ? t * kLn2 + kOffset : __builtin_nanf("");
      factor = 1.0f;
      n = 0.0f;
    }
  }
  bool has_weight() const { return maximum != kNothing; }
  float sum_of(float32x4_t a, float32x4_t b) const {
    return maximum == maximum ? vaddvq_f32(vaddq_f32(a, b)) : maximum;
  }
};

// Weights of four scores: 23.0381 · 2^(t − n − 11), by a cubic polynomial with a relative error of 4.1e-4.
struct RowWeight {
  static constexpr float kRounder = 12582912.0f;
  float32x4_t a = vdupq_n_f32(2.78338261f), b = vdupq_n_f32(8.27720894f), factor, rounder, lowest;
  int32x4_t exponent = vdupq_n_s32(1 << 23);

  explicit RowWeight(const RowReference& r)
      : factor(vdupq_n_f32(r.factor)),
        rounder(vdupq_n_f32(kRounder - 11.0f - r.n)),
        lowest(vdupq_n_f32((r.n - 100.0f) / r.factor)) {
    // Hides the constant, or the multiply-add would become a shift and an addition.
    __asm__("" : "+w"(exponent));
  }
  ARMLLM_INLINE float32x4_t operator()(float32x4_t score) const {
    score = vmaxq_f32(score, lowest);
    const float32x4_t z = vfmaq_f32(rounder, score, factor);
    const float32x4_t f = vfmaq_f32(vsubq_f32(rounder, z), score, factor);
    const float32x4_t u = vaddq_f32(f, a);
    const float32x4_t y = vmulq_f32(vaddq_f32(vmulq_f32(u, f), b), u);  // (f + a) (f² + a f + b)
    return vreinterpretq_f32_s32(vmlaq_s32(vreinterpretq_s32_f32(y), vreinterpretq_s32_f32(z), exponent));
  }
};

// Multiplies the scores of a row by `scale` and applies the softcap.
inline void shape_row(float scale, float softcap, float* scores, Span span) {
  for (int64_t i = span.begin / kLanes * kLanes; i < span.end; i += kLanes) {
    F32 x = load(scores + i) * set1(scale);
    if (softcap > 0.0f) {
      const F32 cap = set1(softcap);
      x = cap * tanh(x / cap);
    }
    store(scores + i, x);
  }
}

// Calls f(Constant<N>()) with N = n, but at most `kMost`.
template <int kMost, typename F>
ARMLLM_INLINE void by_count(int64_t n, F f) {
  if constexpr (kMost > 1)
    if (n < kMost) return by_count<kMost - 1>(n, f);
  f(Constant<kMost>());
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
