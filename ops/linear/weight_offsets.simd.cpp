// Float terms of grouped schemes: weight offsets times activation sums, and the accumulation of group
// results.
#include "linear/kernels/common.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int kColumns = 16;  // activation sums that are buffered
constexpr int kChains = 4;    // independent FMA chains, which hide the latency of an FMA

// x[c] = Σ x over scale group first + c.
inline void sum_columns(const int32_t* group_sums, int64_t groups, int64_t step, int64_t first,
                        int64_t columns, float* x) {
  for (int64_t c = 0; step == 1 && c < columns; ++c) x[c] = float(group_sums[first + c]) * -0.125f;
  for (int64_t c = 0; step != 1 && c < columns; ++c) {
    const int64_t begin = (first + c) * step, end = begin + step < groups ? begin + step : groups;
    int32_t sum = 0;
    for (int64_t g = begin; g < end; ++g) sum += group_sums[g];
    x[c] = float(sum) * -0.125f;
  }
}

}  // namespace

void linear_add_offsets(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token,
                        int tokens, float* out, int64_t out_stride) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const int64_t step = groups_per_scale(scheme);
  const float* offsets = reinterpret_cast<const float*>(panel + layout.offsets);
  float sums[kColumns];
  for (int t = 0; t < tokens; ++t, out += out_stride) {
    const int32_t* group_sums = x.group_sums + (first_token + t) * x.row_groups();
    F32 total[kChains] = {zero(), zero(), zero(), zero()};
    for (int64_t first = 0; first < layout.scale_groups; first += kColumns) {
      const int64_t left = layout.scale_groups - first, columns = left < kColumns ? left : kColumns;
      const float* panel_offsets = offsets + first * kPanel;
      sum_columns(group_sums, x.groups, step, first, columns, sums);
      int64_t c = 0;
      for (; c + kChains <= columns; c += kChains)
#pragma GCC unroll 4
        for (int i = 0; i < kChains; ++i)
          total[i] = fma(load(panel_offsets + (c + i) * kPanel), set1(sums[c + i]), total[i]);
      for (; c < columns; ++c) total[0] = fma(load(panel_offsets + c * kPanel), set1(sums[c]), total[0]);
    }
    store(out, load(out) + ((total[0] + total[1]) + (total[2] + total[3])));
  }
}

void linear_accumulate(float* sums, const float* more, int64_t n) {
  for (int64_t i = 0; i < n; i += kPanel) store(sums + i, load(sums + i) + load(more + i));
}

}  // namespace armllm::ARMLLM_VARIANT
