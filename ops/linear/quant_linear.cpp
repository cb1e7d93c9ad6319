#include "linear/quant_linear.h"

#include "dispatch/variants.h"
#include "linear/activation_input.h"
#include "linear/gated_epilogue.h"
#include "linear/tile_grid.h"

namespace armllm {
namespace {

constexpr int64_t kPair = 2;

TileGrid grid_of(const LinearArgs& a) {
  return TileGrid::plan(*variant().linear, ceil_div(a.out_features, kPanel), a.panel_stride,
                        a.tokens * a.digits, 1, a.digits);
}

TileGrid grid_of(const GatedLinearArgs& a) {
  return TileGrid::plan(*variant().linear, kPair * ceil_div(a.out_features, kPanel), a.panel_stride,
                        a.tokens * a.digits, kPair, a.digits);
}

template <typename Args>
Activations activations_of(const Args& a) {
  Activations x = activations_in(a.scratch, a.tokens * a.digits, a.in_features, a.scheme, *variant().linear);
  x.digits = a.digits;
  return x;
}

template <typename Args>
int64_t tiles_of(const Args& a, int phase) {
  if (phase == 1) return grid_of(a).count();
  const int64_t rows = a.tokens * a.digits;
  return ceil_div(rows, quantize_step(activations_of(a), rows));
}

}  // namespace

int64_t QuantLinear::scratch_bytes(int64_t tokens, int64_t in_features, int64_t digits) {
  return activation_bytes(tokens * digits, in_features);
}

int QuantLinear::phases() const { return 2; }

int64_t QuantLinear::tiles(int phase) const { return tiles_of(args, phase); }

void QuantLinear::tile(int phase, int64_t index) {
  const LinearArgs& a = args;
  const LinearKernels& kernels = *variant().linear;
  const Activations x = activations_of(a);
  if (phase == 0)
    return quantize_input_tile(kernels, x, a.x, a.input, a.tokens, a.in_features, a.rotated, index);
  multiply_token_tile(kernels, grid_of(a), a.scheme, a.weight, a.panel_stride, x, index,
                      [&](int64_t token, int64_t panel, int64_t panels, const float* acc, float scale) {
                        const int64_t first = panel * kPanel,
                                      n = std::min(panels * kPanel, a.out_features - first);
                        kernels.epilogue(acc, n, scale, bias_at(a.bias, a.bias_type, first), a.bias_type,
                                         a.residual ? a.residual.at(token, first) : nullptr,
                                         a.out.at(token, first), a.out.type);
                      });
}

int64_t QuantGatedLinear::scratch_bytes(int64_t tokens, int64_t in_features, int64_t digits) {
  return activation_bytes(tokens * digits, in_features);
}

int QuantGatedLinear::phases() const { return 2; }

int64_t QuantGatedLinear::tiles(int phase) const { return tiles_of(args, phase); }

void QuantGatedLinear::tile(int phase, int64_t index) {
  constexpr float kLimit = 7.0f;  // of swiglu_clamped, silu_clamped and silu_softcapped
  const GatedLinearArgs& a = args;
  const LinearKernels& kernels = *variant().linear;
  const Activations x = activations_of(a);
  if (phase == 0)
    return quantize_input_tile(kernels, x, a.x, a.input, a.tokens, a.in_features, a.rotated, index);
  const GatedEpilogue epilogue{a.gate_bias, a.up_bias, a.bias_type,    a.activation,
                               kLimit,      kLimit,    a.out_features, a.out};
  multiply_token_tile(kernels, grid_of(a), a.scheme, a.weight, a.panel_stride, x, index,
                      [&](int64_t token, int64_t panel, int64_t panels, const float* acc, float scale) {
                        apply_gated_epilogue(epilogue, acc, panel, panels, scale, token);
                      });
}

}  // namespace armllm
