// Softmax within a split: converts the scores of a row to weights of the values.
#pragma once

#include "attention/kernels/kv_split.h"
#include "simd/exp.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Selects x in the lanes of the vector at `position` that are inside the span, and y in the others.
inline F32 inside(Span span, int64_t position, F32 x, F32 y) {
  x = select_first(static_cast<int>(smaller(span.end - position, kLanes)), x, y);
  return select_first(static_cast<int>(larger(span.begin - position, 0)), y, x);
}

// Calls ends(i) for the first and the last vector of the span, which may extend past it, and whole(i) for
// those between.
template <typename Ends, typename Whole>
void each_vector(Span span, Ends ends, Whole whole) {
  if (span.empty()) return;
  const int64_t first = span.begin / kLanes * kLanes, last = (span.end - 1) / kLanes * kLanes;
  ends(first);
  for (int64_t i = first + kLanes; i < last; i += kLanes) whole(i);
  if (last > first) ends(last);
}

// Returns the same bits as exp_weight(x).
#if defined(ARMLLM_VARIANT_avx512)
inline F32 exp_below_zero(F32 x) {
  x = max(set1(-86.5f), x);
  const F32 n = {
      _mm512_roundscale_ps((x * set1(1.44269504f)).v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  return {_mm512_scalef_ps(exp_mantissa(x, n).v, n.v)};
}
#else
inline F32 exp_below_zero(F32 x) { return exp_weight(x); }
#endif

// What is added to the scores of a row: slope · (position of the key − position of the query), as in ALiBi,
// and a learned bias of distance, which is a mix of profiles or a number for each distance.
class DistanceBias {
 public:
  // Scores are in units of 1 / factor.
  DistanceBias(const AttentionArgs& args, const AttentionTile& t, int64_t row, float factor)
      : args_(args),
        weights_(t.relative == nullptr ? nullptr : t.relative[row]),
        biases_(t.biases == nullptr ? nullptr : t.biases[row]),
        has_slope_(t.slopes != nullptr),
        slope_(set1(has_slope_ ? t.slopes[row] * factor : 0.0f)),
        factor_(set1(factor)),
        first_(t.split_begin - (t.position == nullptr ? t.last[row] - 1 : t.position[row])) {}

  static bool is_part_of(const AttentionTile& t) {
    return t.slopes != nullptr || t.relative != nullptr || t.biases != nullptr;
  }

  F32 add_to(int64_t i, F32 x) const {
    static const float kLane[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (has_slope_) x = fma(set1(static_cast<float>(first_ + i)) + load(kLane), slope_, x);
    if (biases_ != nullptr) x = fma(bias(first_ + i), factor_, x);
    return weights_ == nullptr ? x : fma(mix(first_ + i + args_.extent - 1), factor_, x);
  }

 private:
  // The biases from a distance on; beyond the reach, those of the largest distance.
  F32 bias(int64_t distance) const {
    const int64_t reach = args_.reach;
    const float* from = biases_ + reach;
    if (distance >= -reach && distance + kLanes - 1 <= reach) return load(from + distance);
    if (distance >= reach) return set1(from[reach]);
    if (distance + kLanes - 1 <= -reach) return set1(from[-reach]);
    float lanes[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = from[clamp(distance + i, -reach, reach)];
    return load(lanes);
  }

  // The mix of the profiles from `column` on; 0 outside of them.
  F32 mix(int64_t column) const {
    const int64_t begin = larger(-column, 0), end = smaller(args_.extent - column, kLanes);
    F32 sum = zero();
    if (begin >= end) return sum;
    if (end - begin == kLanes) {
      const float* from = args_.profiles + column;
      for (int64_t r = 0; r < args_.rank; ++r)
        sum = fma(set1(weights_[r]), load(from + r * args_.extent), sum);
      return sum;
    }
    for (int64_t r = 0; r < args_.rank; ++r) {
      float lanes[kLanes] = {};
      const float* from = args_.profiles + r * args_.extent + column;
      for (int64_t i = begin; i < end; ++i) lanes[i] = from[i];
      sum = fma(set1(weights_[r]), load(lanes), sum);
    }
    return sum;
  }

  const AttentionArgs& args_;
  const float* weights_;  // of the profiles
  const float* biases_;   // of the row's head
  bool has_slope_;
  F32 slope_, factor_;
  int64_t first_;  // distance of the split's first position
};

// Converts the scores of a row to weights exp(score − maximum) in the format of the products of `P`.  Vectors
// of keys that another row of the group sees, but this row does not, get zeros.
template <typename P>
void soften(const AttentionArgs& args, const AttentionTile& t, const Split& split, int64_t row, Span group) {
  float* s = t.scores + row * kScoreStride;
  const Span span = visible(t, row, 1);
  const int64_t begin = span.begin / kLanes * kLanes;
  typename P::Weights weights(t, split, row);
  const bool capped = args.softcap > 0.0f;
  const F32 cap = set1(args.softcap);
  const bool biased = DistanceBias::is_part_of(t);
  const DistanceBias bias(args, t, row, 1.0f);
  const auto score = [&](int64_t i) {
    F32 x = weights.score(i, load(s + i));
    if (capped) x = cap * tanh(x / cap);
    if (biased) x = bias.add_to(i, x);
    if (capped || biased || P::Weights::kScalesScores) store(s + i, x);
    return x;
  };
  const F32 nothing = set1(kNothing);
  F32 highest = nothing, sum = zero();
  each_vector(
      span, [&](int64_t i) { highest = max(highest, inside(span, i, score(i), nothing)); },
      [&](int64_t i) { highest = max(highest, score(i)); });
  const float top = reduce_max(highest);
  const float maximum = top > kNothing ? top : kNothing;
  const auto weigh = [&](int64_t i) { return exp_below_zero(load(s + i) - set1(maximum)); };
  each_vector(
      span,
      [&](int64_t i) {
        const auto seen = [&](F32 x) { return inside(span, i, x, zero()); };
        sum = sum + weights.keep(i, weigh(i), seen);
      },
      [&](int64_t i) { sum = sum + weights.keep(i, weigh(i), [](F32 x) { return x; }); });
  const int64_t low = group.begin / kLanes * kLanes, high = round_up(group.end, kLanes);
  const int64_t end = span.empty() ? begin : round_up(span.end, kLanes);
  for (int64_t i = low; i < smaller(begin, high); i += kLanes) weights.clear(i);
  for (int64_t i = larger(end, low); i < high; i += kLanes) weights.clear(i);
  t.maximum[row] = maximum;
  t.sum[row] = reduce_add(sum);
  weights.done(Span{low, high});
}

// Softmax of the rows that the products of `P` multiply together.  A weight format that is faster to compute
// for several rows together specializes this struct.
template <typename P, typename Weights = typename P::Weights>
struct Softmax {
  static void soften_rows(const AttentionArgs& args, const AttentionTile& t, const Split& split, int64_t row,
                          int64_t rows) {
    const Span group = visible(t, row, rows);
    for (int64_t r = row; r < row + rows; ++r) soften<P>(args, t, split, r, group);
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
