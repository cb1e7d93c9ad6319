// Selection of the tokens that a query attends to, by the scores of an indexer.
//
// The score of a query and a token is Σ_h weight[h] · relu(scale · q[h] · k): each of the indexer's heads
// compares its query with the token's one key.  A query selects the tokens of the highest scores; of equal
// scores, those of the lowest positions.  Sums run over elements and heads in order, so scores have the same
// bits on every variant, in any batch and chunk.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"
#include "select/cached_keys.h"

namespace armllm {

struct SelectArgs : CachedKeys {
  Rows q;                  // [tokens][heads · head size]
  Rows weights;            // [tokens][heads]
  int32_t* out = nullptr;  // [tokens][most] selected positions in ascending order, then −1
  int64_t heads = 0, most = 0;
  int64_t head_stride = 0;  // elements from one head of q to the next
  float scale = 1.0f;
  void* scratch = nullptr;
};

constexpr int64_t kScored = 64;  // tokens that are scored together

struct SelectKernels {
  // Writes a key as column `column` of a panel [head size][kScored].
  void (*load_key)(const SelectArgs& args, const void* key, float* panel, int64_t column);
  // Writes the queries of a token as floats [heads][head size], and the weights as floats [heads].
  void (*load_query)(const SelectArgs& args, int64_t token, float* query, float* weights);
  // Writes the kScored scores of a query and a panel of keys.
  void (*score)(const SelectArgs& args, const float* query, const float* weights, const float* panel,
                float* scores);
};

// Selects for waves of tokens, whose scores fit into the scratch: each wave scores, then selects.
class SelectTokens final : public TaskSet {
 public:
  SelectArgs args;
  static int64_t scratch_bytes(const SelectArgs& args);  // reads sizes only, no metadata
  int phases() const override;
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// Writes the positions of the `most` highest of n > most scores in ascending order.  Of equal scores, those
// of the lowest positions are selected.  NaN counts as the highest.
void select_highest(const float* scores, int64_t n, int64_t most, int32_t* positions);

}  // namespace armllm
