// Scaled addition of a plan.  It is a small part of a step, so all variants share one portable kernel.
#define ARMLLM_VARIANT portable
#define ARMLLM_VARIANT_scalar 1

#include "plan/elementwise.h"
#include "simd/ragged_blocks.h"

namespace armllm {
namespace {

using namespace portable;

template <typename T>
void rows(const void* a, const void* b, const void* by, float factor, void* out, int64_t n) {
  const T *first = static_cast<const T*>(a), *second = static_cast<const T*>(b);
  F32 scale = set1(factor);
  if (by != nullptr) {
    float one[kLanes];
    store(one, load_lanes(static_cast<const T*>(by), 1));
    scale = scale * set1(one[0]);
  }
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE {
    const F32 scaled = load_lanes(second + i, lanes) * scale;
    store_lanes(static_cast<T*>(out) + i, first == nullptr ? scaled : load_lanes(first + i, lanes) + scaled,
                lanes);
  });
}

}  // namespace

void add_scaled(const void* a, const void* b, const void* by, float factor, void* out, DType type,
                int64_t n) {
  switch (type) {
    case DType::f32:
      return rows<float>(a, b, by, factor, out, n);
    case DType::bf16:
      return rows<bf16>(a, b, by, factor, out, n);
    case DType::f16:
      return rows<f16>(a, b, by, factor, out, n);
  }
}

}  // namespace armllm
