#include "sample/sample.h"

#include "simd/exp.h"
#include "simd/ragged_blocks.h"

namespace armllm::ARMLLM_VARIANT {

extern const SampleKernels sample;

namespace {

constexpr float kInfinity = __builtin_inff();

// Replaces NaN by −∞; this depends on the order of the arguments to max.
ARMLLM_INLINE inline F32 number(F32 x) { return max(x, set1(-kInfinity)); }

// Calls run(pointer) with a pointer to elements of `type`.
template <typename Run>
ARMLLM_INLINE inline auto typed(const void* x, DType type, Run run) {
  switch (type) {
    case DType::bf16:
      return run(static_cast<const bf16*>(x));
    case DType::f16:
      return run(static_cast<const f16*>(x));
    default:
      return run(static_cast<const float*>(x));
  }
}

template <typename T>
float largest_of(const T* x, int64_t n) {
  F32 top[4] = {set1(-kInfinity), set1(-kInfinity), set1(-kInfinity), set1(-kInfinity)};
  for_blocks_in_parts(n, [&](int64_t i, int lanes, int part) ARMLLM_INLINE {
    F32 v = load_lanes(x + i, lanes);
    if (lanes != kLanes) v = select_first(lanes, v, set1(-kInfinity));
    top[part] = max(v, top[part]);
  });
  return reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
}

template <typename T>
int64_t first_of(const T* x, int64_t n, float bound) {
  const F32 least = set1(bound);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? static_cast<int>(n - i) : kLanes;
    uint32_t mask = static_cast<uint32_t>(greater_equal_mask(load_lanes(x + i, lanes), least));
    mask &= (1u << lanes) - 1u;
    if (mask != 0) return i + __builtin_ctz(mask);
  }
  return n;
}

template <typename T>
int64_t count_of(const T* x, int64_t n, float bound) {
  const F32 least = set1(bound);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? static_cast<int>(n - i) : kLanes;
    const uint32_t below = static_cast<uint32_t>(greater_equal_mask(least, number(load_lanes(x + i, lanes))));
    count += __builtin_popcount(~below & ((1u << lanes) - 1u));
  }
  return count;
}

template <typename T>
float sum_of(const T* x, int64_t n, float top) {
  const F32 highest = set1(top);
  F32 sum[4] = {zero(), zero(), zero(), zero()};
  for_blocks_in_parts(n, [&](int64_t i, int lanes, int part) ARMLLM_INLINE {
    F32 e = exp(number(load_lanes(x + i, lanes)) - highest);
    if (lanes != kLanes) e = select_first(lanes, e, zero());
    sum[part] = sum[part] + e;
  });
  return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <typename T>
void weigh_row(const T* x, int64_t n, float top, float inverse_temperature, float least, float* weights,
               float* block_largest, float* block_sums) {
  const F32 highest = set1(top), inverse = set1(inverse_temperature), bound = set1(least);
  for (int64_t first = 0; first < n; first += kSampleBlock) {
    F32 most = zero(), sum = zero();
    for (int64_t i = first; i < first + kSampleBlock; i += kLanes) {
      const int lanes = n - i < kLanes ? static_cast<int>(n - i) : kLanes;
      F32 w = zero();
      if (lanes > 0) {
        w = exp((number(load_lanes(x + i, lanes)) - highest) * inverse);
        w = select_greater(bound, w, zero(), w);
        if (lanes != kLanes) w = select_first(lanes, w, zero());
      }
      store(weights + i, w);
      most = max(most, w);
      sum = sum + w;
    }
    block_largest[first / kSampleBlock] = reduce_max(most);
    block_sums[first / kSampleBlock] = reduce_add(sum);
  }
}

float largest(const void* x, DType type, int64_t n) {
  return typed(x, type, [&](auto p) { return largest_of(p, n); });
}

int64_t first_at_least(const void* x, DType type, int64_t n, float bound) {
  return typed(x, type, [&](auto p) { return first_of(p, n, bound); });
}

float sum_of_exponentials(const void* x, DType type, int64_t n, float top) {
  return typed(x, type, [&](auto p) { return sum_of(p, n, top); });
}

void weigh(const void* x, DType type, int64_t n, float top, float inverse_temperature, float least,
           float* weights, float* block_largest, float* block_sums) {
  typed(x, type, [&](auto p) {
    weigh_row(p, n, top, inverse_temperature, least, weights, block_largest, block_sums);
  });
}

int64_t count_above(const void* x, DType type, int64_t n, float bound) {
  return typed(x, type, [&](auto p) { return count_of(p, n, bound); });
}

int64_t gather(const float* weights, const float* block_largest, int64_t blocks, float bound,
               Candidate* found) {
  const F32 least = set1(bound);
  int64_t count = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (!(block_largest[b] >= bound)) continue;
    for (int64_t i = b * kSampleBlock; i < (b + 1) * kSampleBlock; i += kLanes) {
      uint32_t mask = static_cast<uint32_t>(greater_equal_mask(load(weights + i), least));
      for (; mask != 0; mask &= mask - 1) {
        const int64_t id = i + __builtin_ctz(mask);
        found[count].weight = weights[id];
        found[count].id = static_cast<int32_t>(id);
        ++count;
      }
    }
  }
  return count;
}

void widen_values(const void* x, DType type, int64_t n, float* out) {
  typed(x, type, [&](auto p) {
    for_blocks(n, [&](int64_t i, int lanes)
                      ARMLLM_INLINE { store_lanes(out + i, load_lanes(p + i, lanes), lanes); });
  });
}

}  // namespace

const SampleKernels sample = {largest, first_at_least, sum_of_exponentials, weigh,
                              gather,  count_above,    widen_values};

}  // namespace armllm::ARMLLM_VARIANT
