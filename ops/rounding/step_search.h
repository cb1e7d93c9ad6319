// Search for the step of each group of weights, among candidates, with the least squared error of rounding.
#pragma once

#include <cstdint>

namespace armllm {

struct StepSearchArgs {
  const float* values = nullptr;   // [rows][groups][size]
  const float* steps = nullptr;    // [candidates][rows][groups]
  const float* zeros = nullptr;    // [candidates][rows][groups]
  const float* factors = nullptr;  // [groups][size] of the errors; null: 1
  int32_t* best = nullptr;         // [rows][groups]: a candidate, or -1 if no error is finite
  int64_t candidates = 0, rows = 0, groups = 0, size = 0;
  float lowest = 0.0f, highest = 0.0f;  // of an integer and its zero point together
};

struct RoundingKernels {
  void (*search_steps)(const StepSearchArgs& args);
};

}  // namespace armllm
