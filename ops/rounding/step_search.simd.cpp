#include "rounding/step_search.h"

#include "simd/ragged_blocks.h"

namespace armllm::ARMLLM_VARIANT {

extern const RoundingKernels rounding;

namespace {

constexpr float kOnes[kLanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// The nearest integers, and even ones of two equally near, of values up to 2^22: beyond 2^23 floats have no
// fractions.
ARMLLM_INLINE inline F32 nearest(F32 x) {
  const F32 integers = set1(0x1.8p23f);
  return x + integers - integers;
}

// Σ ((step · q − value) · factor)²
ARMLLM_INLINE inline float squared_error(const StepSearchArgs& a, const float* values, const float* factors,
                                         float step, float zero_point) {
  const F32 per_step = set1(1.0f / step), steps = set1(step);
  const F32 lowest = set1(a.lowest - zero_point), highest = set1(a.highest - zero_point);
  F32 sum = zero();
  for_blocks(a.size, [&](int64_t i, int lanes) ARMLLM_INLINE {
    const F32 value = load_lanes(values + i, lanes);
    const F32 q = nearest(at_most(at_least(value * per_step, lowest), highest));
    F32 error = fma(q, steps, -value);
    if (factors) error = error * load_lanes(factors + i, lanes);
    if (lanes < kLanes) error = error * load_lanes(kOnes, lanes);
    sum = fma(error, error, sum);
  });
  return reduce_add(sum);
}

void search_steps(const StepSearchArgs& a) {
  const int64_t all = a.rows * a.groups;
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t at = row * a.groups + group;
      const float* factors = a.factors ? a.factors + group * a.size : nullptr;
      float least = __builtin_inff();
      int32_t best = -1;
      for (int64_t c = 0; c < a.candidates; ++c) {
        const int64_t candidate = c * all + at;
        const float error =
            squared_error(a, a.values + at * a.size, factors, a.steps[candidate], a.zeros[candidate]);
        if (error < least) least = error, best = static_cast<int32_t>(c);
      }
      a.best[at] = best;
    }
}

}  // namespace

const RoundingKernels rounding = {search_steps};

}  // namespace armllm::ARMLLM_VARIANT
