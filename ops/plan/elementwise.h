// Embedding look-up, scaling, addition and the order of columns, for the plan alone: outside it torch's own operators do these.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

struct EmbeddingArgs {
  Rows table, out;
  const int64_t* ids = nullptr;  // [tokens]
  int64_t tokens = 0, width = 0, vocab_size = 0;
};

// An id outside the vocabulary gives a row of zeros; callers check ids before a step.
class Embedding final : public TaskSet {
 public:
  EmbeddingArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// out = a + factor · by · b, where a may be missing, and by is one value a row or missing.
struct AddArgs {
  Rows a, b, out, row_factor;
  float factor = 1.0f;
  int64_t rows = 0, width = 0;
};

// out = a + factor · by · b of one row, rounded to type; without a: the product alone; without by: 1.
void add_scaled(const void* a, const void* b, const void* by, float factor, void* out, DType type, int64_t n);

class Add final : public TaskSet {
 public:
  AddArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// out[r][c] = in[r][order[c]], for layers whose weights lie in another order than their inputs.
struct ReorderArgs {
  Rows in, out;
  const int32_t* permutation = nullptr;  // [width], each in 0 … width − 1
  int64_t rows = 0, width = 0;
};

class Reorder final : public TaskSet {
 public:
  ReorderArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
