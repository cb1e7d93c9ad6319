// Epilogue of a gate-and-up product: activation scale, biases, act(gate) · up.
#pragma once

#include <algorithm>

#include "activation/activation.h"
#include "dispatch/variants.h"
#include "linear/quant_linear.h"
#include "runtime/types.h"

namespace armllm {

// Pointer to element `index` of a bias; nullptr without a bias.
inline const void* bias_at(const void* bias, DType type, int64_t index) {
  return bias == nullptr ? nullptr : static_cast<const char*>(bias) + index * size_of(type);
}

struct GatedEpilogue {
  const void* gate_bias;
  const void* up_bias;
  DType bias_type;
  Activation activation;
  float limit;     // of swiglu_clamped, silu_clamped, and of gates of silu_softcapped
  float up_limit;  // of silu_softcapped
  int64_t out_features;
  Rows out;
};

// Processes one row of `panels` alternating gate and up panels, starting at panel `panel` of the weight.
inline void apply_gated_epilogue(const GatedEpilogue& e, const float* acc, int64_t panel, int64_t panels,
                                 float x_scale, int64_t row) {
  const int64_t first = panel / 2 * kPanel;
  GatedPanels p;
  p.acc = acc;
  p.n = std::min(panels / 2 * kPanel, e.out_features - first);
  p.scale = x_scale;
  p.gate_bias = bias_at(e.gate_bias, e.bias_type, first);
  p.up_bias = bias_at(e.up_bias, e.bias_type, first);
  p.bias_type = e.bias_type;
  p.activation = e.activation;
  p.limit = e.limit;
  p.up_limit = e.up_limit;
  variant().activation->gated_panels(p, e.out.at(row, first), e.out.type);
}

}  // namespace armllm
