// Unquantized linear layers with few outputs, such as routers.
#pragma once

#include "linear/quant_linear.h"

namespace armllm {

constexpr int64_t kDenseTokens = 4;    // most tokens per tile
constexpr int64_t kDenseOutputs = 16;  // most outputs per tile

struct DenseKernels {
  // Computes the dot products of `tokens` rows of x and `outputs` rows of the weight: 16 float32 lanes over
  // k, reduced as a tree, plus the bias, rounded once.  A result depends on its own two rows only.
  void (*tile)(const DenseLinearArgs& args, int64_t first_token, int tokens, int64_t first_output,
               int outputs);
};

}  // namespace armllm
