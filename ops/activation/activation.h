// act(gate) · up, element by element.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

struct GatedActArgs {
  Rows gate, up, out;
  int64_t rows = 0, width = 0;
  Activation activation = Activation::silu;
};

// A row in which panels of gate and up, 16 floats each, alternate: g0 u0 g1 u1 …
//   out[i] = act(gate[i] · scale + gate_bias[i]) · (up[i] · scale + up_bias[i])
struct GatedPanels {
  const float* acc = nullptr;
  int64_t n = 0;  // number of output values
  float scale = 1.0f;
  const void* gate_bias = nullptr;
  const void* up_bias = nullptr;
  DType bias_type = DType::f32;
  Activation activation = Activation::silu;
  float limit = 7.0f;     // of swiglu_clamped, silu_clamped, and of gates of silu_softcapped
  float up_limit = 7.0f;  // of silu_softcapped
};

struct ActivationKernels {
  // Computes one row of act(gate) · up; inputs and output have type `type`.
  void (*gated)(const void* gate, const void* up, void* out, DType type, int64_t n, Activation activation);
  // Finishes one row of a gate-and-up product from its accumulators.
  void (*gated_panels)(const GatedPanels& panels, void* out, DType type);
  // y = a + b, rounded to `type`.
  void (*add)(const void* a, const void* b, void* y, DType type, int64_t n);
};

class GatedAct final : public TaskSet {
 public:
  GatedActArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
