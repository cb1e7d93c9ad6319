// Task sets of a plan for embedding lookup, scaled addition and permutation of columns.  Without a plan,
// torch's own operators compute them.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

struct EmbeddingArgs {
  Rows table, out;
  const int64_t* ids = nullptr;  // [tokens]
  int64_t tokens = 0, width = 0, vocab_size = 0;
};

// An id outside the vocabulary produces a row of zeros; callers check ids before a step.
class Embedding final : public TaskSet {
 public:
  EmbeddingArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// out = a + factor · row_factor · b, where a and row_factor are optional; row_factor has one value per row.
struct AddArgs {
  Rows a, b, out, row_factor;
  float factor = 1.0f;
  int64_t rows = 0, width = 0;
};

// Computes one row of Add, rounded to `type`.  `a` is null for the product alone.  `by` points to the row's
// factor; null means 1.
void add_scaled(const void* a, const void* b, const void* by, float factor, void* out, DType type, int64_t n);

class Add final : public TaskSet {
 public:
  AddArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// out[r][c] = in[r][permutation[c]].  Layers with permuted input columns need this.
struct ReorderArgs {
  Rows in, out;
  const int32_t* permutation = nullptr;  // [width], values in 0 … width − 1
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
