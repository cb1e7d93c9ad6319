// Rotates activations by a Hadamard matrix before they are quantized.
#include <cstring>

#include "linear/kernels/common.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

using Four = float __attribute__((vector_size(16)));

constexpr int kParts = kGroup / 4;

// (a, b, c, d) to (a + c, b + d, a - c, b - d).  Products with ones are exact, contracted or not.
inline Four mix_halves(Four x) {
  return __builtin_shufflevector(x, x, 2, 3, 0, 1) + x * Four{1.0f, 1.0f, -1.0f, -1.0f};
}

// (a, b, c, d) to (a + b, a - b, c + d, c - d)
inline Four mix_neighbors(Four x) {
  return __builtin_shufflevector(x, x, 1, 0, 3, 2) + x * Four{1.0f, -1.0f, 1.0f, -1.0f};
}

// Multiplies a group by the Hadamard matrix: elements 16, 8, 4, 2 and 1 apart become sums and differences.
inline void rotate_group(float* group) {
  Four parts[kParts];
  for (int i = 0; i < kParts; ++i) std::memcpy(&parts[i], group + 4 * i, sizeof(Four));
  for (int apart = kParts / 2; apart > 0; apart /= 2)
    for (int i = 0; i < kParts; ++i) {
      if ((i & apart) != 0) continue;
      const Four low = parts[i], high = parts[i + apart];
      parts[i] = low + high;
      parts[i + apart] = low - high;
    }
  for (int i = 0; i < kParts; ++i) {
    const Four mixed = mix_neighbors(mix_halves(parts[i]));
    std::memcpy(group + 4 * i, &mixed, sizeof(Four));
  }
}

template <typename T>
void rotate_row(const T* x, int64_t n, float* out) {
  const F32 small = set1(1.0f / kGroup);  // finite rows stay finite
  for (int64_t i = 0; i < n; i += kGroup) {
    store(out + i, load(x + i) * small);
    store(out + i + kLanes, load(x + i + kLanes) * small);
    rotate_group(out + i);
  }
}

}  // namespace

void linear_rotate(const void* x, DType type, int64_t n, float* out) {
  switch (type) {
    case DType::bf16:
      return rotate_row(static_cast<const bf16*>(x), n, out);
    case DType::f16:
      return rotate_row(static_cast<const f16*>(x), n, out);
    default:
      return rotate_row(static_cast<const float*>(x), n, out);
  }
}

}  // namespace armllm::ARMLLM_VARIANT
