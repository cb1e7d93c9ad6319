// Activations to INT8 before a quantised linear, and the epilogue after it.
#include <cstring>

#include "common/simd.h"
#include "linear/kernels_common.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr float kSmallestAmax = 1e-30f;  // 127 / amax stays finite above it

template <typename T>
float quantize_row(const T* x, int64_t n, int64_t groups, int8_t* q, int64_t chunk_stride,
                   int32_t* group_offsets) {
  // As integers, NaN > infinity > every finite magnitude: one maximum finds both amax and what must not pass.
  const I32 magnitude = set1i(0x7fffffff);
  I32 top = set1i(0);
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) top = max_i32(top, bits(load(x + i)) & magnitude);
  if (whole < n) top = max_i32(top, bits(load_partial(x + whole, int(n - whole))) & magnitude);
  const int32_t top_bits = reduce_max_i32(top);
  float amax;
  std::memcpy(&amax, &top_bits, 4);
  if (top_bits >= kInfinityBits || amax < kSmallestAmax) {
    for (int64_t c = 0; c < groups * 4; ++c) std::memset(q + c * chunk_stride, 0, 8);
    if (group_offsets != nullptr)
      for (int64_t g = 0; g < groups; ++g) group_offsets[g] = 0;
    return top_bits >= kInfinityBits ? __builtin_nanf("") : 0.0f;
  }
  const F32 inverse = set1(127.0f / amax);
  for (int64_t g = 0; g < groups; ++g) {
    I32 sum = set1i(0);
    for (int half = 0; half < 2; ++half) {
      const int64_t i = g * kGroup + half * kLanes;
      F32 v = zero();
      if (i + kLanes <= n) {
        v = load(x + i);
      } else if (i < n) {
        v = load_partial(x + i, int(n - i));
      }
      const I32 value = round_to_int(v * inverse);
      sum = sum + value;
      int8_t* chunk = q + (g * 4 + half * 2) * chunk_stride;
      if (chunk_stride == 8) {
        store_i8(chunk, value);
      } else {
        alignas(16) int8_t both[16];
        store_i8(both, value);
        std::memcpy(chunk, both, 8);
        std::memcpy(chunk + chunk_stride, both + 8, 8);
      }
    }
    if (group_offsets != nullptr) group_offsets[g] = -8 * reduce_add_i32(sum);
  }
  return amax / 127.0f;
}

inline F32 load_as(const void* p, DType type, int64_t i, int64_t n) {
  const int count = int(n - i);
  switch (type) {
    case DType::bf16: {
      const bf16* x = static_cast<const bf16*>(p) + i;
      return count >= kLanes ? load(x) : load_partial(x, count);
    }
    case DType::f16: {
      const f16* x = static_cast<const f16*>(p) + i;
      return count >= kLanes ? load(x) : load_partial(x, count);
    }
    default: {
      const float* x = static_cast<const float*>(p) + i;
      return count >= kLanes ? load(x) : load_partial(x, count);
    }
  }
}

template <typename T>
void finish_row(const float* acc, int64_t n, float x_scale, const void* bias, DType bias_type,
                const T* residual, T* y) {
  const F32 scale = set1(x_scale);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = int(n - i);
    F32 v = (count >= kLanes ? load(acc + i) : load_partial(acc + i, count)) * scale;
    if (bias != nullptr) v = v + load_as(bias, bias_type, i, n);
    if (residual != nullptr)
      v = v + (count >= kLanes ? load(residual + i) : load_partial(residual + i, count));
    if (count >= kLanes) {
      store(y + i, v);
    } else {
      store_partial(y + i, v, count);
    }
  }
}

}  // namespace

float linear_quantize(const void* x, DType type, int64_t n, int64_t groups, int8_t* q, int64_t chunk_stride,
                      int32_t* group_offsets) {
  switch (type) {
    case DType::bf16:
      return quantize_row(static_cast<const bf16*>(x), n, groups, q, chunk_stride, group_offsets);
    case DType::f16:
      return quantize_row(static_cast<const f16*>(x), n, groups, q, chunk_stride, group_offsets);
    default:
      return quantize_row(static_cast<const float*>(x), n, groups, q, chunk_stride, group_offsets);
  }
}

void linear_finish(const float* acc, int64_t n, float x_scale, const void* bias, DType bias_type,
                   const void* residual, void* y, DType type) {
  switch (type) {
    case DType::bf16:
      return finish_row(acc, n, x_scale, bias, bias_type, static_cast<const bf16*>(residual),
                        static_cast<bf16*>(y));
    case DType::f16:
      return finish_row(acc, n, x_scale, bias, bias_type, static_cast<const f16*>(residual),
                        static_cast<f16*>(y));
    default:
      return finish_row(acc, n, x_scale, bias, bias_type, static_cast<const float*>(residual),
                        static_cast<float*>(y));
  }
}

}  // namespace armllm::ARMLLM_VARIANT
