// Embedding lookup that shares the INT8 or 6-bit weights of the tied output layer.
//
// A weight is stored in two parts: q = round(w / s) of the output layer, and eight further bits, rest =
// round((w / s − q) · 254).  Together they are a 16-bit integer with one scale per row: |w − ŵ| ≤ s / 508,
// which is finer than bfloat16 wherever |w| > amax / 128.  For scheme int6, s is the step of the weight's
// group, at most four row scales.
#pragma once

#include "linear/packed_panel.h"
#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

struct SplitEmbeddingArgs {
  const uint8_t* weight = nullptr;  // panels of scheme i8 or int6
  Scheme scheme = Scheme::i8;
  int64_t panel_stride = 0;      // bytes
  const int8_t* rest = nullptr;  // [vocab_size][width]
  const int64_t* ids = nullptr;  // [tokens]
  Rows out;
  bool rotated = false;  // the output layer is rotated, see LinearArgs; rows are rotated back
  int64_t tokens = 0, width = 0, vocab_size = 0;
};

// An id outside the vocabulary produces a row of zeros; callers check ids before a step.
class SplitEmbedding final : public TaskSet {
 public:
  SplitEmbeddingArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
