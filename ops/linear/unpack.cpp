// Unpacks panels of quantized weights to float32.  packed_panel.h specifies the layout.
#include <algorithm>
#include <cstring>
#include <vector>

#include "linear/quant_linear.h"
#include "linear/scheme_arg.h"
#include "linear/value_positions.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

float float_at(const uint8_t* section, int64_t column, int64_t row) {
  float value;
  std::memcpy(&value, section + (column * kPanel + row) * 4, 4);
  return value;
}

float int8_value(const PanelLayout& layout, const uint8_t* panel, int64_t column, int64_t r, int64_t k) {
  const int64_t step = groups_per_scale(layout.scheme);
  const uint8_t* part = panel + (step ? layout.values + column * int8_panel_bytes(step) : 0);
  return float(int8_t(part[kPanel * 4 + int8_position(r, k - column * step * kGroup)])) *
         float_at(part, 0, r);
}

float wide_value(const PanelLayout& layout, const uint8_t* panel, int64_t, int64_t r, int64_t k) {
  const int bits = traits_of(layout.scheme).bits;
  const int m = plane_multiplier(panel + layout.multipliers, bits, k / kGroup, r);
  const uint8_t* group = panel + layout.values + k / kGroup * group_value_bytes(layout.scheme);
  return float((wide_bits(group, bits, r, k % kGroup) - value_bias(layout.scheme)) * m) *
         float_at(panel, 0, r);
}

float int3_value(const PanelLayout& layout, const uint8_t* panel, int64_t, int64_t r, int64_t k) {
  const int m = nibble_of(panel + layout.multipliers, k / kGroup, r) + 1;
  const uint8_t* group = panel + layout.values + k / kGroup * group_value_bytes(Scheme::int3);
  const int q = int3_bits(group, r, k % kGroup) - 4 + int3_negative(panel + layout.signs, k / kGroup, r);
  return float(q * m) * float_at(panel, 0, r);
}

float int4_value(const PanelLayout& layout, const uint8_t* panel, int64_t column, int64_t r, int64_t k) {
  const NibblePosition p = nibble_position(r, k);
  const uint8_t byte = panel[layout.values + p.byte];
  const int u = p.high ? (byte >> 4) ^ 8 : byte & 15;
  const uint8_t* zero_points = panel + layout.zero_points;
  int q = u - (has_narrow_zero_points(layout.scheme) ? narrow_zero_point(zero_points, k / kGroup, r)
               : has_zero_points(layout.scheme)      ? nibble_of(zero_points, column, r)
                                                     : 8);
  if (has_multipliers(layout.scheme)) q *= nibble_of(panel + layout.multipliers, k / kGroup, r) + 1;
  if (!has_float_groups(layout.scheme)) return float(q) * float_at(panel, 0, r);
  if (!has_bf16_scales(layout.scheme)) return float(q) * float_at(panel + layout.scales, column, r);
  uint16_t bits;
  std::memcpy(&bits, panel + layout.scales + (column * kPanel + r) * 2, 2);
  return float(q) * widen(bits);
}

void unpack_panel(const PanelLayout& layout, const uint8_t* panel, int64_t rows, int64_t in_features,
                  float* out) {
  const int64_t step = groups_per_scale(layout.scheme);
  const auto value_of = is_wide(layout.scheme)          ? wide_value
                        : layout.scheme == Scheme::int3 ? int3_value
                        : is_int8(layout.scheme)        ? int8_value
                                                        : int4_value;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < in_features; ++k) {
      const int64_t column = step ? k / kGroup / step : 0;
      const float value = value_of(layout, panel, column, r, k);
      out[r * in_features + k] =
          has_offsets(layout.scheme) ? value + float_at(panel + layout.offsets, column, r) : value;
    }
  }
}

Tensor unpack_weight(Tensor weight, int64_t out_features, int64_t in_features, std::string scheme) {
  const Scheme kind = scheme_of(scheme);
  constexpr int64_t kMost = int64_t{1} << 40;  // sizes in bytes fit 64 bits
  STD_TORCH_CHECK(in_features >= 1 && out_features >= 1 && in_features <= kMost && out_features <= kMost,
                  "out_features and in_features must be positive sizes of a weight, not ", out_features,
                  " and ", in_features);
  const PanelLayout layout = panel_layout(kind, in_features);
  const int64_t dims = weight.dim(), panels = ceil_div(out_features, kPanel);
  STD_TORCH_CHECK(type_of(weight) == ScalarType::Byte && (dims == 2 || dims == 3),
                  "weight must be uint8 of shape (panels, panel_bytes), or (E, panels, panel_bytes)");
  STD_TORCH_CHECK(weight.size(dims - 2) == panels && weight.size(dims - 1) == layout.bytes &&
                      weight.stride(dims - 1) == 1,
                  "weight has ", weight.size(dims - 2), " panels of ", weight.size(dims - 1), " bytes; (",
                  out_features, ", ", in_features, ") in scheme ", scheme, " needs ", panels, " of ",
                  layout.bytes);
  const int64_t experts = dims == 3 ? weight.size(0) : 1, expert_stride = dims == 3 ? weight.stride(0) : 0;
  const int64_t panel_stride = panel_stride_of(weight, dims - 2, layout.bytes, "weight");
  std::vector<int64_t> sizes{out_features, in_features};
  if (dims == 3) sizes.insert(sizes.begin(), experts);
  Tensor result = new_tensor(weight, sizes, ScalarType::Float);
  const uint8_t* in = static_cast<const uint8_t*>(weight.data_ptr());
  float* out = static_cast<float*>(result.data_ptr());
  torch::stable::parallel_for(0, experts * panels, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t expert = i / panels, panel = i % panels;
      unpack_panel(layout, in + expert * expert_stride + panel * panel_stride,
                   std::min(kPanel, out_features - panel * kPanel), in_features,
                   out + (expert * out_features + panel * kPanel) * in_features);
    }
  });
  return result;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("unpack_weight", TORCH_BOX(&armllm::unpack_weight)); }
