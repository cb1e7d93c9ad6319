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

// A line of a panel is 16 rows of 4 bytes: one 32-bit lane a row.
inline I32 load_line(const void* p) {
  alignas(64) int32_t lanes[kLanes];
  std::memcpy(lanes, p, 64);
  return load_i32(lanes);
}

inline void store_line(void* p, I32 v) {
  alignas(64) int32_t lanes[kLanes];
  store_i32(lanes, v);
  std::memcpy(p, lanes, 64);
}

// The value q of the nibble that starts at bit `shift` of each lane.
template <int shift>
inline I32 value_at(I32 nibbles) {
  return (shift_right<shift>(nibbles) & set1i(15)) - set1i(8);
}

template <int N>
struct Shift {
  static constexpr int value = N;
};

template <typename F>
inline void for_each_byte(F f) {
  f(Shift<0>{});
  f(Shift<8>{});
  f(Shift<16>{});
  f(Shift<24>{});
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

void linear_fold_scales(const uint8_t* panel, const PanelLayout& layout, float* row_scales) {
  F32 top = zero();
  for (int64_t g = 0; g < layout.groups; ++g) {
    I32 largest = set1i(0);
    for (int line = 0; line < 4; ++line) {
      const I32 nibbles = load_line(panel + layout.values + g * 256 + line * 64);
      for_each_byte([&](auto shift) {
        const I32 low = value_at<shift.value>(nibbles), high = value_at<shift.value + 4>(nibbles);
        largest = max_i32(max_i32(largest, max_i32(low, set1i(0) - low)), max_i32(high, set1i(0) - high));
      });
    }
    top = max(abs(load(panel_scales(panel) + g * kLanes)) * to_float(largest), top);
  }
  store(row_scales, top / set1(127.0f));
}

void linear_group_int8(Scheme scheme, const uint8_t* panel, const PanelLayout& layout, int64_t group,
                       const float* row_scales, int8_t* lines) {
  F32 ratio = zero();
  I32 factor = set1i(1);
  if (scheme == Scheme::g32) {
    const F32 scale = load(row_scales);
    ratio = select_greater(scale, zero(), load(panel_scales(panel) + group * kLanes) / scale, zero());
  } else if (scheme == Scheme::g32i) {
    alignas(64) int32_t multipliers[kLanes];
    for (int r = 0; r < kLanes; ++r) multipliers[r] = panel_multiplier(panel, layout, group, r);
    factor = load_i32(multipliers);
  }
  const auto weight = [&](I32 q) {
    return (scheme == Scheme::g32 ? round_to_int(to_float(q) * ratio) : q * factor) & set1i(255);
  };
  for (int line = 0; line < 4; ++line) {
    const I32 nibbles = load_line(panel + layout.values + group * 256 + line * 64);
    I32 low = set1i(0), high = set1i(0);
    for_each_byte([&](auto shift) {
      low = low | shift_left<shift.value>(weight(value_at<shift.value>(nibbles)));
      high = high | shift_left<shift.value>(weight(value_at<shift.value + 4>(nibbles)));
    });
    store_line(lines + line * 128, low);
    store_line(lines + line * 128 + 64, high);
  }
}

}  // namespace armllm::ARMLLM_VARIANT
