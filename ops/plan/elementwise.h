// Embedding look-up and plain addition, for the plan alone: outside it torch's own operators do these.
#pragma once

#include "common/tasks.h"
#include "common/types.h"

namespace armllm {

struct EmbeddingArgs {
  Rows table, out;
  const int64_t* ids = nullptr;  // [tokens]
  int64_t tokens = 0, width = 0, vocabulary = 0;
};

// An id outside the vocabulary gives a row of zeros; callers check ids before a step.
class Embedding final : public TaskSet {
 public:
  EmbeddingArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

struct AddArgs {
  Rows a, b, out;
  int64_t rows = 0, width = 0;
};

class Add final : public TaskSet {
 public:
  AddArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
