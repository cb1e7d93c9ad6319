#include "linear/linear.h"

#include <cstring>

#include "activation/activation.h"
#include "common/variants.h"
#include "linear/tiles.h"

namespace armllm {
namespace {

constexpr int64_t kPair = 2;

// Element `index` of a bias, or nullptr where there is none.
const void* bias_at(const void* bias, DType type, int64_t index) {
  return bias == nullptr ? nullptr : static_cast<const char*>(bias) + index * size_of(type);
}

TileGrid grid_of(const LinearArgs& a) {
  return TileGrid::plan(*variant().linear, ceil_div(a.out_features, kPanel), a.panel_stride, a.tokens, 1);
}

TileGrid grid_of(const GatedLinearArgs& a) {
  return TileGrid::plan(*variant().linear, kPair * ceil_div(a.out_features, kPanel), a.panel_stride, a.tokens,
                        kPair);
}

template <typename Args>
int64_t tiles_of(const Args& a, int phase) {
  if (phase == 1) return grid_of(a).count();
  return ceil_div(a.tokens,
                  quantize_step(activations_in(a.scratch, a.tokens, a.in_features, *variant().linear)));
}

}  // namespace

int64_t QuantLinear::scratch_bytes(int64_t tokens, int64_t in_features) {
  return activation_bytes(tokens, in_features);
}

int QuantLinear::phases() const { return 2; }

int64_t QuantLinear::tiles(int phase) const { return tiles_of(args, phase); }

void QuantLinear::tile(int phase, int64_t index) {
  const LinearArgs& a = args;
  const LinearKernels& kernels = *variant().linear;
  const Activations x = activations_in(a.scratch, a.tokens, a.in_features, kernels);
  if (phase == 0) return quantize_tile(kernels, x, a.x, a.tokens, a.in_features, index);
  multiply_tile(kernels, grid_of(a), a.scheme, a.weight, a.panel_stride, x, index,
                [&](int64_t token, int64_t panel, int64_t panels, const float* acc) {
                  const int64_t first = panel * kPanel, n = std::min(panels * kPanel, a.out_features - first);
                  kernels.finish(acc, n, x.scales[token], bias_at(a.bias, a.bias_type, first), a.bias_type,
                                 a.residual ? a.residual.at(token, first) : nullptr, a.out.at(token, first),
                                 a.out.type);
                });
}

int64_t QuantGatedLinear::scratch_bytes(int64_t tokens, int64_t in_features) {
  return activation_bytes(tokens, in_features);
}

int QuantGatedLinear::phases() const { return 2; }

int64_t QuantGatedLinear::tiles(int phase) const { return tiles_of(args, phase); }

void QuantGatedLinear::tile(int phase, int64_t index) {
  constexpr float kLimit = 7.0f;  // of swiglu_clamped
  constexpr int64_t kMost = 16;   // panels finished at a time
  const GatedLinearArgs& a = args;
  const LinearKernels& kernels = *variant().linear;
  const Activations x = activations_in(a.scratch, a.tokens, a.in_features, kernels);
  if (phase == 0) return quantize_tile(kernels, x, a.x, a.tokens, a.in_features, index);
  multiply_tile(kernels, grid_of(a), a.scheme, a.weight, a.panel_stride, x, index,
                [&](int64_t token, int64_t panel, int64_t panels, const float* acc) {
                  alignas(64) float gate[kMost * kPanel], up[kMost * kPanel];
                  for (int64_t p = 0; p < panels / kPair; p += kMost) {
                    const int64_t count = std::min(kMost, panels / kPair - p);
                    const int64_t first = (panel / kPair + p) * kPanel,
                                  n = std::min(count * kPanel, a.out_features - first);
                    for (int64_t i = 0; i < count; ++i) {
                      std::memcpy(gate + i * kPanel, acc + (p + i) * kPair * kPanel, kPanel * 4);
                      std::memcpy(up + i * kPanel, acc + ((p + i) * kPair + 1) * kPanel, kPanel * 4);
                    }
                    kernels.finish(gate, n, x.scales[token], bias_at(a.gate_bias, a.bias_type, first),
                                   a.bias_type, nullptr, gate, DType::f32);
                    kernels.finish(up, n, x.scales[token], bias_at(a.up_bias, a.bias_type, first),
                                   a.bias_type, nullptr, up, DType::f32);
                    variant().activation->gated_f32(gate, up, n, a.activation, kLimit);
                    kernels.finish(gate, n, 1.0f, nullptr, a.bias_type, nullptr, a.out.at(token, first),
                                   a.out.type);
                  }
                });
}

}  // namespace armllm
