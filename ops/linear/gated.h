// The end of a gate-and-up product: activation scale, biases, act(gate) · up.
#pragma once

#include <algorithm>

#include "activation/activation.h"
#include "common/types.h"
#include "common/variants.h"
#include "linear/linear.h"

namespace armllm {

// Element `index` of a bias, or nullptr where there is none.
inline const void* bias_at(const void* bias, DType type, int64_t index) {
  return bias == nullptr ? nullptr : static_cast<const char*>(bias) + index * size_of(type);
}

struct GatedEpilogue {
  const void* gate_bias;
  const void* up_bias;
  DType bias_type;
  Activation activation;
  float limit;  // of swiglu_clamped
  int64_t out_features;
  Rows out;
};

// One row of `panels` alternating gate and up panels, the first of them panel `panel` of the weight.
inline void finish_gated(const LinearKernels& kernels, const GatedEpilogue& e, const float* acc,
                         int64_t panel, int64_t panels, float x_scale, int64_t row) {
  constexpr int64_t kMost = 16;  // panels of each finished at a time
  alignas(64) float gate[kMost * kPanel], up[kMost * kPanel];
  for (int64_t p = 0; p < panels / 2; p += kMost) {
    const int64_t count = std::min(kMost, panels / 2 - p), first = (panel / 2 + p) * kPanel;
    const int64_t n = std::min(count * kPanel, e.out_features - first);
    // Panel by panel straight from the kernel's own stores: a copy in narrower pieces would make every load of a whole
    // register wait until the pieces have reached the cache.
    for (int64_t i = 0; i < count; ++i) {
      const int64_t column = first + i * kPanel, width = std::min(kPanel, e.out_features - column);
      const float* pair = acc + (p + i) * 2 * kPanel;
      kernels.finish(pair, width, x_scale, bias_at(e.gate_bias, e.bias_type, column), e.bias_type, nullptr,
                     gate + i * kPanel, DType::f32);
      kernels.finish(pair + kPanel, width, x_scale, bias_at(e.up_bias, e.bias_type, column), e.bias_type,
                     nullptr, up + i * kPanel, DType::f32);
    }
    variant().activation->gated_f32(gate, up, n, e.activation, e.limit);
    kernels.finish(gate, n, 1.0f, nullptr, e.bias_type, nullptr, e.out.at(row, first), e.out.type);
  }
}

}  // namespace armllm
