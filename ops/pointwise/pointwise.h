// Elementwise programs: out[token][head][column] = f(operands), in steps of one operator each.  All values
// are float32; operands and the result are converted once.  Sinkhorn normalization is an op of its own.
#pragma once

#include <vector>

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int kMostValues = 24;         // operands and steps of a program
constexpr int64_t kProgramBlock = 256;  // columns that run through all steps together

// A value that one operator computes from earlier ones: operands come first, then steps, in order.
struct PointwiseStep {
  PointwiseOp op = PointwiseOp::number;
  int64_t a = 0, b = 0, c = 0;  // earlier values; operators with fewer inputs ignore the others
  float number = 0.0f;          // of PointwiseOp::number
};

struct PointwiseOperand {
  const char* data = nullptr;
  DType type = DType::f32;
  bool whole_numbers = false;                 // int64 instead of `type`, such as positions
  int64_t token_stride = 0, head_stride = 0;  // in elements; 0 repeats
  int64_t column_stride = 1;                  // in elements; 0: one element for all columns of a head

  int64_t element_size() const { return whole_numbers ? sizeof(int64_t) : size_of(type); }
};

struct PointwiseArgs {
  std::vector<PointwiseOperand> operands;
  std::vector<PointwiseStep> steps;
  char* out = nullptr;
  DType out_type = DType::f32;
  int64_t out_stride = 0, out_head_stride = 0, out_column_stride = 1;
  int64_t tokens = 0, heads = 0, width = 0;
};

// Adjacent values: columns of a head, or a buffer of several heads.
struct PointwiseBlock {
  const PointwiseArgs* args = nullptr;
  const char* operands[kMostValues];
  bool repeated[kMostValues];  // operands with one element for all columns
  char* out = nullptr;
  int64_t columns = 0;
};

constexpr int64_t kMostMatrixRows = 8;
constexpr int64_t kMostRounds = 1024;

// Sinkhorn normalization of a square matrix of each token: columns, and then `rounds` times rows and columns,
// are divided by their sum + eps.
struct SinkhornArgs {
  Rows x, out;  // float32, rows of a matrix one after the other
  int64_t tokens = 0, size = 0, rounds = 0;
  float eps = 0.0f;
};

struct PointwiseKernels {
  void (*run)(const PointwiseBlock& block);
  // Normalizes the matrices of up to 16 tokens.
  void (*sinkhorn)(const SinkhornArgs& args, int64_t first, int64_t tokens);
};

class Pointwise final : public TaskSet {
 public:
  PointwiseArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

class Sinkhorn final : public TaskSet {
 public:
  SinkhornArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
