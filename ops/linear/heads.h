// Per-head linear layers: y[t][h] = x[t][h] · W[h]ᵀ.
#pragma once

#include "linear/quant_linear.h"

namespace armllm {

// Heads of a token are `x_head_stride` elements apart in x, and adjacent in the result.
struct HeadsArgs {
  Rows x, out;
  int64_t x_head_stride = 0;
  int64_t tokens = 0, heads = 0, in_features = 0, out_features = 0;

  Rows head_of_x(int64_t head) const { return Rows{x.at(0, head * x_head_stride), x.stride, x.type}; }
  Rows head_of_out(int64_t head) const { return Rows{out.at(0, head * out_features), out.stride, out.type}; }
};

// W8A8: each head of a token is quantized on its own, and all sums are integers.
struct QuantHeadsArgs : HeadsArgs {
  const uint8_t* weight = nullptr;
  int64_t head_stride = 0, panel_stride = 0;  // bytes
  void* scratch = nullptr;                    // scratch_bytes(), 64-byte aligned
};

class QuantHeads final : public TaskSet {
 public:
  QuantHeadsArgs args;
  static int64_t scratch_bytes(const QuantHeadsArgs& args);
  int phases() const override { return 2; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// Unquantized, as DenseLinear.
struct DenseHeadsArgs : HeadsArgs {
  Rows weight;  // [heads · out_features][in_features]
};

class DenseHeads final : public TaskSet {
 public:
  DenseHeadsArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;

 private:
  DenseLinear head(int64_t index) const;
};

}  // namespace armllm
