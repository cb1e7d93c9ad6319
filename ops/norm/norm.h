// RMSNorm and LayerNorm, optionally after a residual add.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

struct NormArgs {
  Rows x, out;
  // Both or neither, and only where rows_per_token is 1: sum = round(x + residual), and sum is normalized.
  Rows residual, sum;
  const void* weight = nullptr;  // width values; nullptr for a layer norm without affine part
  const void* bias = nullptr;    // layer norm only
  DType weight_type = DType::f32;
  int64_t rows = 0, width = 0;
  int64_t rows_per_token = 1;  // norm rows per row of x and out, such as the heads of queries and keys
  float eps = 1e-6f;
  float weight_offset = 0.0f;  // 1 for Gemma's x · (1 + w)

  char* part(const Rows& matrix, int64_t row) const {
    return matrix.at(row / rows_per_token, row % rows_per_token * width);
  }
};

struct NormKernels {
  void (*rms)(const NormArgs& args, int64_t row);
  void (*layer)(const NormArgs& args, int64_t row);
};

class RmsNorm final : public TaskSet {
 public:
  NormArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

class LayerNorm final : public TaskSet {
 public:
  NormArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
