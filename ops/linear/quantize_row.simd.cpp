// Quantizes activations to INT8 before a quantized linear layer, and applies the epilogue after it.
#include <cstring>

#include "linear/kernels/common.h"
#include "simd/ragged_blocks.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr float kSmallestAmax = 1e-30f;  // 127 / amax stays finite above it

// Returns the value whose magnitude has these bits.
inline float magnitude(int32_t word, const float*) {
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}
inline float magnitude(int32_t word, const bf16*) {
  return magnitude(word << 16, static_cast<const float*>(nullptr));
}
inline float magnitude(int32_t word, const f16*) {
  const f16 one[1] = {{static_cast<uint16_t>(word)}};
  float lanes[kLanes];
  store(lanes, load_partial(one, 1));  // unlike a maximum of the lanes, the first may be NaN
  return lanes[0];
}

template <typename T>
float quantize_row(const T* x, int64_t n, int64_t groups, int8_t* q, int64_t chunk_stride,
                   int32_t* group_sums) {
  const float amax = magnitude(largest_magnitude(x, n), x);
  const bool finite = amax < __builtin_inff();
  if (!(finite && amax >= kSmallestAmax)) {
    for (int64_t c = 0; c < groups * 4; ++c) std::memset(q + c * chunk_stride, 0, 8);
    if (group_sums != nullptr)
      for (int64_t g = 0; g < groups; ++g) group_sums[g] = 0;
    return finite ? 0.0f : __builtin_nanf("");
  }
  const F32 inverse = set1(127.0f / amax);
  const auto put = [&](int64_t g, F32 low, F32 high) ARMLLM_INLINE {
    const I8 a = round_to_i8(low * inverse), b = round_to_i8(high * inverse);
    int8_t* chunk = q + g * 4 * chunk_stride;
    if (chunk_stride == 8) {
      store_i8(chunk, a);
      store_i8(chunk + kLanes, b);
    } else {
      store_halves(chunk, chunk + chunk_stride, a);
      store_halves(chunk + 2 * chunk_stride, chunk + 3 * chunk_stride, b);
    }
    if (group_sums != nullptr) group_sums[g] = -8 * reduce_add_i8(a, b);
  };
  const int64_t whole = n / kGroup;
  for (int64_t g = 0; g < whole; ++g) put(g, load(x + g * kGroup), load(x + g * kGroup + kLanes));
  for (int64_t g = whole; g < groups; ++g) {
    const int left = static_cast<int>(n > g * kGroup ? n - g * kGroup : 0);
    const T* rest = x + (left > 0 ? g * kGroup : 0);
    put(g, load_partial(rest, left), left > kLanes ? load_partial(rest + kLanes, left - kLanes) : zero());
  }
  return amax / 127.0f;
}

// Halves keep scale · q finite for every finite row.  Doubling the difference is exact.
template <typename T>
void find_rounding_errors(const T* x, int64_t n, const int8_t* q, int64_t chunk_stride, float scale,
                          float* errors) {
  const F32 half = set1(0.5f);
  for_blocks(n, [&](int64_t i, int lanes)
                    ARMLLM_INLINE { store_lanes(errors + i, load_lanes(x + i, lanes) * half, lanes); });
  const float half_scale = scale * 0.5f;
  const auto subtract = [&](int64_t chunk, int64_t count) ARMLLM_INLINE {
    const int8_t* values = q + chunk * chunk_stride;
    float* some = errors + chunk * 8;
    for (int64_t i = 0; i < count; ++i) some[i] = (some[i] - half_scale * float(values[i])) * 2.0f;
  };
  for (int64_t chunk = 0; chunk < n / 8; ++chunk) subtract(chunk, 8);
  if (n % 8 != 0) subtract(n / 8, n % 8);
}

inline F32 load_as(const void* p, DType type, int64_t i, int lanes) {
  switch (type) {
    case DType::bf16:
      return load_lanes(static_cast<const bf16*>(p) + i, lanes);
    case DType::f16:
      return load_lanes(static_cast<const f16*>(p) + i, lanes);
    default:
      return load_lanes(static_cast<const float*>(p) + i, lanes);
  }
}

// y[i] = add(acc[i] · x_scale, i, lanes), in blocks of lanes.
template <typename T, typename Add>
ARMLLM_INLINE inline void map_row(const float* acc, int64_t n, float x_scale, T* y, Add add) {
  const F32 scale = set1(x_scale);
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE {
    store_lanes(y + i, add(load_lanes(acc + i, lanes) * scale, i, lanes), lanes);
  });
}

template <typename T>
void epilogue_row(const float* acc, int64_t n, float x_scale, const void* bias, DType bias_type,
                  const T* residual, T* y) {
  if (bias == nullptr && residual == nullptr)
    return map_row(acc, n, x_scale, y, [](F32 v, int64_t, int) ARMLLM_INLINE { return v; });
  if (bias == nullptr)
    return map_row(acc, n, x_scale, y, [=](F32 v, int64_t i, int lanes) ARMLLM_INLINE {
      return v + load_lanes(residual + i, lanes);
    });
  map_row(acc, n, x_scale, y, [=](F32 v, int64_t i, int lanes) ARMLLM_INLINE {
    v = v + load_as(bias, bias_type, i, lanes);
    return residual == nullptr ? v : v + load_lanes(residual + i, lanes);
  });
}

}  // namespace

float linear_quantize(const void* x, DType type, int64_t n, int64_t groups, int8_t* q, int64_t chunk_stride,
                      int32_t* group_sums) {
  switch (type) {
    case DType::bf16:
      return quantize_row(static_cast<const bf16*>(x), n, groups, q, chunk_stride, group_sums);
    case DType::f16:
      return quantize_row(static_cast<const f16*>(x), n, groups, q, chunk_stride, group_sums);
    default:
      return quantize_row(static_cast<const float*>(x), n, groups, q, chunk_stride, group_sums);
  }
}

void linear_rounding_errors(const void* x, DType type, int64_t n, const int8_t* q, int64_t chunk_stride,
                            float scale, float* errors) {
  switch (type) {
    case DType::bf16:
      return find_rounding_errors(static_cast<const bf16*>(x), n, q, chunk_stride, scale, errors);
    case DType::f16:
      return find_rounding_errors(static_cast<const f16*>(x), n, q, chunk_stride, scale, errors);
    default:
      return find_rounding_errors(static_cast<const float*>(x), n, q, chunk_stride, scale, errors);
  }
}

void linear_add_digits(float* sums, float scale, const float* more, float more_scale, int64_t n) {
  const F32 first = set1(scale), second = set1(more_scale);
  for (int64_t i = 0; i < n; i += kLanes) store(sums + i, load(sums + i) * first + load(more + i) * second);
}

void linear_epilogue(const float* acc, int64_t n, float x_scale, const void* bias, DType bias_type,
                     const void* residual, void* y, DType type) {
  switch (type) {
    case DType::bf16:
      return epilogue_row(acc, n, x_scale, bias, bias_type, static_cast<const bf16*>(residual),
                          static_cast<bf16*>(y));
    case DType::f16:
      return epilogue_row(acc, n, x_scale, bias, bias_type, static_cast<const f16*>(residual),
                          static_cast<f16*>(y));
    default:
      return epilogue_row(acc, n, x_scale, bias, bias_type, static_cast<const float*>(residual),
                          static_cast<float*>(y));
  }
}

}  // namespace armllm::ARMLLM_VARIANT
