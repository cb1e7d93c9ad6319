// Low-rank additions to the results of linear layers and embeddings: each row of tokens may have an adapter
// of its own.
#pragma once

#include <vector>

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kLoraRanks = 4;      // rows of A per tile
constexpr int64_t kLoraColumns = 256;  // columns of B per tile
constexpr int64_t kLoraBlock = 64;  // columns of B that are adjacent for all ranks: they are read as one run
constexpr int64_t kLoraRows = 16;   // most rows of tokens per tile

// Adjacent numbers of A or B as integers: each is its value times the scale.
struct __attribute__((packed)) LoraIntegers {  // where a tensor begins, its scale may not be aligned
  int8_t values[kLoraBlock];
  float scale;
};

// out[t] += (x[t] · A[s]ᵀ) · B[s] with s = adapters[t].  Rows of −1, and those past `listed`, stay.
//
// Of an embedding, `ids` in the place of x say which row of a table the product with A is.
struct LoraArgs {
  Rows x, out;
  const char* a = nullptr;       // [slots][most_rank][in_features]
  const char* table = nullptr;   // [slots][vocab_size][most_rank], in the place of a
  const int64_t* ids = nullptr;  // [tokens]; null: a linear layer
  DType table_type = DType::f32;
  int64_t vocab_size = 0;
  const char* b = nullptr;            // [slots][blocks of kLoraBlock columns][most_rank][kLoraBlock]
  const int32_t* ranks = nullptr;     // [slots]; 0: the adapter leaves this layer alone
  const int32_t* adapters = nullptr;  // [listed]: slot of each row
  DType type = DType::f32;            // of a and b, unless they are integers
  bool integers = false;  // rows of A, and of each block of B, are LoraIntegers; the last is zero-filled
  int64_t tokens = 0, listed = 0, slots = 0, most_rank = 0, in_features = 0, out_features = 0;
  void* scratch = nullptr;  // [tokens][most_rank] floats

  // Bytes of a row of so many numbers of A or B.
  int64_t row_bytes(int64_t columns) const {
    return integers ? ceil_div(columns, kLoraBlock) * static_cast<int64_t>(sizeof(LoraIntegers))
                    : columns * size_of(type);
  }
};

// Rows with the same adapter.
struct LoraGroup {
  const int32_t* rows = nullptr;
  int64_t count = 0, slot = 0;
  const int32_t* rows_of_sums = nullptr;  // rows of scratch; null: `rows`

  const int32_t* sums() const { return rows_of_sums == nullptr ? rows : rows_of_sums; }
};

// `ahead` is what the next tile will read of A or B, null if there is none: a kernel prefetches it.
//
// A result depends on its own row and adapter only: every sum has one order, whatever the other rows are.
struct LoraKernels {
  // scratch[row][rank] = x[row] · A[slot][rank], for `ranks` ranks; `x` may have other rows than scratch.
  void (*shrink)(const LoraArgs& args, const LoraGroup& group, int64_t first_rank, int64_t ranks,
                 const char* ahead);
  // scratch[row] = table[slot][ids[row]]
  void (*look_up)(const LoraArgs& args, const LoraGroup& group);
  // Adds scratch[row] · B[slot] to `columns` columns of out, rounded once.
  void (*expand)(const LoraArgs& args, const LoraGroup& group, int64_t first_column, int64_t columns,
                 const char* ahead);
};

// Additions to several layers' results, none of which reads or adds to what another adds to: they share
// phases.
class Lora final : public TaskSet {
 public:
  std::vector<LoraArgs> parts;
  // Bytes of scratch that all parts need together; `set_scratch` divides it among them.
  static int64_t scratch_bytes(const std::vector<LoraArgs>& parts);
  void set_scratch(void* scratch);
  int phases() const override { return 2; }
  // No tiles if no row has an adapter, which costs a look at each row's number.
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;

 private:
  struct Work {
    const LoraArgs* args = nullptr;
    LoraGroup group;
    int64_t ends[2] = {};                               // tiles of each phase up to this work and with it
    const char* factor(int phase, int64_t tile) const;  // A or B from the tile's first element on
  };
  void group_rows(const LoraArgs& args) const;

  // The work of the current run, which `tiles` finds when the run begins.
  mutable std::vector<int32_t> rows_;
  mutable std::vector<Work> work_;
};

}  // namespace armllm
