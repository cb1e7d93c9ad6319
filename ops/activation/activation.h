// act(gate) · up, element by element.
#pragma once

#include "common/tasks.h"
#include "common/types.h"

namespace armllm {

struct GatedActArgs {
  Rows gate, up, out;
  int64_t rows = 0, width = 0;
  Activation activation = Activation::silu;
};

struct ActivationKernels {
  // One row in memory types.
  void (*gated)(const void* gate, const void* up, void* out, DType type, int64_t n, Activation activation);
  // One row of float32, in place on `gate`; limit is swiglu_clamped's.
  void (*gated_f32)(float* gate, const float* up, int64_t n, Activation activation, float limit);
  // y = a + b, rounded to type
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
