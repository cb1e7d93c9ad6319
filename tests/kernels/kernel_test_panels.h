// Random weight panels and quantized rows.
#pragma once

#include "kernel_test.h"
#include "linear/quant_linear.h"

namespace armllm_test {

using namespace armllm;

// Schemes with kernels of their own: INT8 groups are passed to kernels as panels of scheme i8, and int6 and
// int3 are expanded.
inline std::vector<SchemeName> kernel_schemes() {
  std::vector<SchemeName> schemes;
  for (const SchemeName& one : kSchemeNames)
    if (!has_int8_groups(one.scheme) && computed_as(one.scheme) == one.scheme) schemes.push_back(one);
  return schemes;
}

// Random bytes are a valid panel, except for the scales.
inline std::vector<uint8_t> random_panel(Scheme scheme, int64_t groups, bool extreme, Random& random) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  std::vector<uint8_t> panel(size_t(layout.bytes));
  // 0x80 is −128; or u = 0 in both nibbles, which is −8, or −15 with zero points of 15.  0xff is 4 as int3.
  const uint8_t largest = scheme == Scheme::int3 ? 0xff : 0x80;
  for (uint8_t& byte : panel) byte = extreme ? largest : uint8_t(random.bits());
  if (extreme)
    for (int64_t i = layout.multipliers; i < layout.values; ++i) panel[size_t(i)] = 0xff;
  if (scheme == Scheme::g32iz)  // multipliers up to 14
    for (int64_t i = layout.multipliers; i < layout.zero_points; ++i) {
      uint8_t& pair = panel[size_t(i)];
      pair = uint8_t(std::min(pair & 15, 13) | std::min(pair >> 4, 13) << 4);
    }
  float row_scales[kPanel];
  for (float& scale : row_scales) scale = random.uniform(0.001f, 0.1f);
  if (has_float_groups(scheme)) {
    for (float& scale : row_scales) scale = 0.0f;
    for (int64_t i = 0; i < layout.scale_groups * kPanel; ++i) {
      float scale = random.uniform(-0.1f, 0.1f);
      uint32_t bits;
      std::memcpy(&bits, &scale, 4);
      if (has_bf16_scales(scheme)) {
        const uint16_t high = uint16_t(bits >> 16);
        std::memcpy(&panel[size_t(layout.scales + i * 2)], &high, 2);
        bits &= 0xffff0000u;
        std::memcpy(&scale, &bits, 4);
      } else {
        std::memcpy(&panel[size_t(layout.scales + i * 4)], &scale, 4);
      }
      float& row_scale = row_scales[i % kPanel];
      row_scale = std::max(row_scale, std::fabs(scale) * 15.0f / 127.0f);
    }
  }
  std::memcpy(panel.data(), row_scales, sizeof(row_scales));
  return panel;
}

struct QuantizedRows {
  std::vector<int8_t> values;  // row-major
  std::vector<int32_t> group_sums;
  std::vector<int8_t> blocked;
  int64_t tokens, groups;

  QuantizedRows(int64_t tokens, int64_t groups, bool extreme, Random& random)
      : values(size_t(tokens * groups * kGroup)),
        group_sums(size_t(tokens * groups)),
        tokens(tokens),
        groups(groups) {
    for (int8_t& v : values) v = extreme ? int8_t(127) : int8_t(random.below(255) - 127);
    for (int64_t i = 0; i < tokens * groups; ++i) {
      int32_t sum = 0;
      for (int64_t k = 0; k < kGroup; ++k) sum += values[size_t(i * kGroup + k)];
      group_sums[size_t(i)] = -8 * sum;
    }
  }
  Activations in_blocks(int64_t block) {
    const int64_t bytes = groups * kGroup;
    blocked.assign(size_t(round_up(tokens, block) * bytes), 0);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t k = 0; k < bytes; ++k)
        blocked[size_t(t / block * block * bytes + k / 8 * block * 8 + t % block * 8 + k % 8)] =
            values[size_t(t * bytes + k)];
    return {blocked.data(), nullptr, group_sums.data(), groups, block};
  }
};

inline bool same_floats(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

}  // namespace armllm_test
