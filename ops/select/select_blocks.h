// Selection of the blocks of tokens that a query attends to, by the scores of an indexer.
//
// Each head of the indexer selects blocks of `span` tokens.  The score of a query and a block is the largest
// product of the query with a key of the block that it sees; NaN counts as the largest.  The nearest blocks
// are always selected, then those of the highest scores, and of equal scores the lowest blocks.  Products are
// summed over elements in an order that all variants share, so a choice depends on neither variant nor batch.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"
#include "select/cached_keys.h"

namespace armllm {

struct BlockSelectArgs : CachedKeys {
  Rows q;                  // [tokens][heads · head size]
  int32_t* out = nullptr;  // [tokens][heads][most] selected blocks in ascending order, then −1
  int64_t heads = 0, most = 0;
  int64_t span = 0;         // tokens of a block; a multiple of kKeyRows
  int64_t nearest = 0;      // blocks up to the query's own that are always selected
  int64_t head_stride = 0;  // elements from one head of q to the next
  void* scratch = nullptr;
};

constexpr int64_t kKeyRows = 16;  // keys that are scored together; divides the block size of every cache

struct BlockSelectKernels {
  // Writes the queries of a token as floats [heads][head size rounded up to 16], with zeros behind.
  void (*load_queries)(const BlockSelectArgs& args, int64_t token, float* queries);
  // Raises `maxima`, [heads][16], to the products of the queries with the first `count` of kKeyRows adjacent
  // keys, each in a lane of its own.
  void (*raise_maxima)(const BlockSelectArgs& args, const float* queries, const void* keys, int64_t count,
                       float* maxima);
};

// Selects for waves of tokens, whose scores fit into the scratch: each wave scores, then selects.
class SelectBlocks final : public TaskSet {
 public:
  BlockSelectArgs args;
  static int64_t scratch_bytes(const BlockSelectArgs& args);  // reads sizes only, no metadata
  int phases() const override;
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
