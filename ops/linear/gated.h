// The end of a gate-and-up product: activation scale, biases, act(gate) · up.
#pragma once

#include <algorithm>
#include <cstring>

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
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(gate + i * kPanel, acc + (p + i) * 2 * kPanel, kPanel * 4);
      std::memcpy(up + i * kPanel, acc + ((p + i) * 2 + 1) * kPanel, kPanel * 4);
    }
    kernels.finish(gate, n, x_scale, bias_at(e.gate_bias, e.bias_type, first), e.bias_type, nullptr, gate,
                   DType::f32);
    kernels.finish(up, n, x_scale, bias_at(e.up_bias, e.bias_type, first), e.bias_type, nullptr, up,
                   DType::f32);
    variant().activation->gated_f32(gate, up, n, e.activation, e.limit);
    kernels.finish(gate, n, 1.0f, nullptr, e.bias_type, nullptr, e.out.at(row, first), e.out.type);
  }
}

}  // namespace armllm
