// Rotates activations by a Hadamard matrix before they are quantized.
#include <cstdint>
#include <cstring>

#include "linear/kernels/common.h"
#include "simd/simd.h"
#if defined(__ARM_NEON)
#include <arm_neon.h>  // the scalar variant does not include it
#endif

namespace armllm::ARMLLM_VARIANT {
namespace {

#if defined(__AVX512F__)
constexpr int kPartLanes = 16;
#elif defined(__AVX__)
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif

using Part = float __attribute__((vector_size(4 * kPartLanes)));
using PartIndex = int32_t __attribute__((vector_size(4 * kPartLanes)));

constexpr int kParts = kGroup / kPartLanes;

// Elements `kApart` apart become their sum and their difference: (a, b) to (a + b, a - b).
// Products with ones are exact: fused or not, the sums are the same.
template <int kApart>
inline Part mix(Part x) {
  PartIndex partner;
  Part sign;
  for (int i = 0; i < kPartLanes; ++i) {
    partner[i] = i ^ kApart;
    sign[i] = (i & kApart) != 0 ? -1.0f : 1.0f;
  }
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, sign, __builtin_shuffle(x, partner));
#elif defined(__AVX__)
  return _mm256_fmadd_ps(x, sign, __builtin_shuffle(x, partner));
#elif defined(__ARM_NEON)
  return vfmaq_f32(__builtin_shuffle(x, partner), x, sign);
#else
  return __builtin_shuffle(x, partner) + x * sign;
#endif
}

// Multiplies a group by the Hadamard matrix: elements 16, 8, 4, 2 and 1 apart become sums and differences.
inline void rotate_group(float* group) {
  Part parts[kParts];
  for (int i = 0; i < kParts; ++i) std::memcpy(&parts[i], group + kPartLanes * i, sizeof(Part));
  for (int apart = kParts / 2; apart > 0; apart /= 2)
    for (int i = 0; i < kParts; ++i) {
      if ((i & apart) != 0) continue;
      const Part low = parts[i], high = parts[i + apart];
      parts[i] = low + high;
      parts[i + apart] = low - high;
    }
  for (int i = 0; i < kParts; ++i) {
    Part mixed = parts[i];
    if constexpr (kPartLanes > 8) mixed = mix<8>(mixed);
    if constexpr (kPartLanes > 4) mixed = mix<4>(mixed);
    mixed = mix<1>(mix<2>(mixed));
    std::memcpy(group + kPartLanes * i, &mixed, sizeof(Part));
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
