// Readers for panels of every scheme in portable code: the reference for the variants' own readers, and their
// fallback for schemes without a fast path.
#include <cassert>

#include "linear/kernels/common.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// sums[r] += Σ w[r] · x over one group, for 16 rows.
inline void add_group(const int8_t* lines, const int8_t* x, int64_t chunk_stride, int32_t* sums) {
  for (int line = 0; line < 8; ++line) {
    const int8_t* four = x + line / 2 * chunk_stride + (line & 1) * 4;
    for (int r = 0; r < kPanel; ++r)
      for (int i = 0; i < 4; ++i) sums[r] += int32_t(lines[line * 64 + r * 4 + i]) * four[i];
  }
}

}  // namespace

void linear_fold_factors(const uint8_t* panel, const PanelLayout& layout, int64_t column, int16_t* factors) {
  const F32 row_scale = load(panel_scales(panel));
  const uint8_t* scales = panel + layout.scales + column * kPanel * (has_bf16_scales(layout.scheme) ? 2 : 4);
  const F32 scale = has_bf16_scales(layout.scheme) ? load(reinterpret_cast<const bf16*>(scales))
                                                   : load(reinterpret_cast<const float*>(scales));
  const F32 ratio = select_greater(row_scale, zero(), scale / row_scale * set1(kFoldOne), zero());
  alignas(64) int32_t rounded[kLanes];
  store_i32(rounded, round_to_int(max(min(ratio, set1(kFoldLimit)), set1(-kFoldLimit))));
  for (int r = 0; r < kPanel; ++r) factors[r] = int16_t(rounded[r]);
}

void linear_group_int8(const uint8_t* panel, const PanelLayout& layout, int64_t group, bool fold,
                       int8_t* lines) {
  const Scheme scheme = layout.scheme;
  if (scheme == Scheme::i8) {
    __builtin_memcpy(lines, panel + layout.values + group * 512, 512);
    return;
  }
  assert(!is_expanded(scheme));  // expand_panel.simd.cpp
  const int64_t step = groups_per_scale(scheme), column = step ? group / step : 0;
  int zero_point[kPanel], factor[kPanel];
  int16_t folded[kPanel];
  if (fold && step) linear_fold_factors(panel, layout, column, folded);
  for (int r = 0; r < kPanel; ++r) {
    zero_point[r] = has_narrow_zero_points(scheme) ? narrow_zero_point(panel + layout.zero_points, group, r)
                    : has_zero_points(scheme)      ? panel_nibble(panel + layout.zero_points + column * 8, r)
                                                   : 8;
    factor[r] = has_multipliers(scheme) ? panel_nibble(panel + layout.multipliers + group * 8, r) + 1 : 1;
    if (fold && step) factor[r] = folded[r];
  }
  const uint8_t* values = panel + layout.values + group * 256;
  for (int k = 0; k < kGroup; ++k) {
    int8_t* to = lines + k / 4 * 64 + k % 4;
    for (int r = 0; r < kPanel; ++r) {
      const int byte = values[k / 8 * 64 + r % 8 * 8 + k % 8];
      const int q = (r >= 8 ? (byte >> 4) ^ 8 : byte & 15) - zero_point[r];
      to[r * 4] = int8_t(fold && step ? (q * factor[r] + 128) >> 8 : q * factor[r]);
    }
  }
}

void linear_gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
                 float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const int64_t step = groups_per_scale(scheme);
  int8_t lines[512];
  int32_t sums[kGemvTokens][kPanel] = {};
  float total[kGemvTokens][kPanel] = {};
  for (int64_t g = 0; g < x.groups; ++g) {
    linear_group_int8(panel, layout, g, false, lines);
    for (int t = 0; t < tokens; ++t)
      add_group(lines, token_values(x, first_token + t) + g * 4 * x.block * 8, x.block * 8, sums[t]);
    if (step == 0 || (g + 1 < x.groups && (g + 1) % step != 0)) continue;
    for (int r = 0; r < kPanel; ++r) {
      const float scale = panel_group_scale(panel, layout, g / step, r);
      for (int t = 0; t < tokens; ++t) {
        total[t][r] = total[t][r] + scale * float(sums[t][r]);
        sums[t][r] = 0;
      }
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < kPanel; ++r)
      out[t * kPanel + r] = step ? total[t][r] : float(sums[t][r]) * panel_scales(panel)[r];
}

}  // namespace armllm::ARMLLM_VARIANT
