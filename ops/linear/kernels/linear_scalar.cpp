// The linear kernels in plain C++: the reference that the other variants are tested against.
#include "linear/kernels/common.h"

namespace armllm::scalar {
namespace {

constexpr int kTokens = 16;

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* row_info, float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p) {
    for (int r = 0; r < kPanel; ++r) row_scales[p * kPanel + r] = panel_scales(panel[p])[r];
    for (int r = 0; r < kPanel; ++r) row_info[p * kPanel + r] = 0;
    for (int64_t g = 0; g < groups; ++g)
      linear_group_int8(panel[p], layout, g, true, w + (p * groups + g) * 512);
  }
}

void gemm(const int8_t* w, const int32_t* row_info, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  for (int p = 0; p < panels; ++p) {
    for (int t = 0; t < tokens; ++t) {
      int32_t sums[kPanel];
      for (int r = 0; r < kPanel; ++r) sums[r] = row_info[p * kPanel + r];
      const int8_t* values = token_values(x, first_token + t);
      for (int64_t c = 0; c < x.groups * 8; ++c) {
        const int8_t* line = w + p * x.groups * 512 + c * 64;
        const int8_t* four = values + c / 2 * x.block * 8 + c % 2 * 4;
        for (int r = 0; r < kPanel; ++r)
          for (int i = 0; i < 4; ++i) sums[r] += int32_t(line[r * 4 + i]) * four[i];
      }
      for (int r = 0; r < kPanel; ++r)
        out[t * out_stride + p * kPanel + r] = float(sums[r]) * row_scales[p * kPanel + r];
    }
  }
}

}  // namespace

extern const LinearKernels linear;
constexpr LinearKernels linear = [] {
  LinearKernels k = common_kernels();
  k.gemm_tokens = kTokens;
  k.gemm_panels = 1;
  k.gemv = linear_gemv;
  k.unpack = unpack;
  k.gemm = gemm;
  return k;
}();

}  // namespace armllm::scalar
