// The linear kernels in plain C++: the truth that the other variants are tested against.
#include "linear/kernels_common.h"

namespace armllm::scalar {
namespace {

constexpr int kTokens = 16;

void int8_group(Scheme scheme, const uint8_t* panel, const PanelLayout& layout, int64_t group,
                const float* row_scales, int8_t* lines) {
  if (scheme != Scheme::i8) return linear_group_int8(scheme, panel, layout, group, row_scales, lines);
  const uint8_t* values = panel + layout.values + group * 512;
  for (int b = 0; b < 512; ++b) lines[b] = int8_t(values[b]);
}

// Σ over one group for each of 16 rows.
void group_sums(const int8_t* lines, const int8_t* x, int64_t chunk_stride, int32_t* sums) {
  for (int line = 0; line < 8; ++line) {
    const int8_t* values = x + line / 2 * chunk_stride + (line & 1) * 4;
    for (int r = 0; r < kPanel; ++r)
      for (int i = 0; i < 4; ++i) sums[r] += int32_t(lines[line * 64 + r * 4 + i]) * values[i];
  }
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
          float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  int8_t lines[512];
  int32_t sums[kGemvTokens][kPanel] = {};
  float total[kGemvTokens][kPanel] = {};
  for (int64_t g = 0; g < x.groups; ++g) {
    int8_group(scheme == Scheme::g32 ? Scheme::row : scheme, panel, layout, g, nullptr, lines);
    for (int t = 0; t < tokens; ++t) {
      group_sums(lines, token_values(x, first_token + t) + g * 4 * x.block * 8, x.block * 8, sums[t]);
      if (scheme != Scheme::g32) continue;
      for (int r = 0; r < kPanel; ++r) {
        total[t][r] += panel_scales(panel)[g * kPanel + r] * float(sums[t][r]);
        sums[t][r] = 0;
      }
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < kPanel; ++r)
      out[t * kPanel + r] = scheme == Scheme::g32 ? total[t][r] : float(sums[t][r]) * panel_scales(panel)[r];
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* offsets, float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p) {
    float* scales = row_scales + p * kPanel;
    if (scheme == Scheme::g32) {
      linear_fold_scales(panel[p], layout, scales);
    } else {
      for (int r = 0; r < kPanel; ++r) scales[r] = panel_scales(panel[p])[r];
    }
    for (int r = 0; r < kPanel; ++r) offsets[p * kPanel + r] = 0;
    for (int64_t g = 0; g < groups; ++g)
      int8_group(scheme, panel[p], layout, g, scales, w + (p * groups + g) * 512);
  }
}

void gemm(const int8_t* w, const int32_t* offsets, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  for (int p = 0; p < panels; ++p) {
    for (int t = 0; t < tokens; ++t) {
      int32_t sums[kPanel];
      for (int r = 0; r < kPanel; ++r) sums[r] = offsets[p * kPanel + r];
      const int8_t* values = token_values(x, first_token + t);
      for (int64_t g = 0; g < x.groups; ++g)
        group_sums(w + (p * x.groups + g) * 512, values + g * 4 * x.block * 8, x.block * 8, sums);
      for (int r = 0; r < kPanel; ++r)
        out[t * out_stride + p * kPanel + r] = float(sums[r]) * row_scales[p * kPanel + r];
    }
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {1, kTokens, 1, linear_quantize, gemv, unpack, gemm, linear_finish};

}  // namespace armllm::scalar
