// The most probable token of each row, for greedy sampling without penalties or log-probabilities.
#pragma once

#include <cstdint>
#include <vector>

#include "sample/sample.h"

namespace armllm {

struct BestTokensArgs {
  Rows logits;
  int64_t rows = 0, vocab_size = 0;
  int64_t* ids = nullptr;  // among equal logits the lowest id; −1 where no logit is above −∞
};

// Phase 0 finds the best token of each chunk, phase 1 the best among each row's chunks.
class BestTokens final : public TaskSet {
 public:
  BestTokensArgs args;
  // Must be called after a change of args.rows or args.vocab_size.
  void resize() { best_.resize(args.rows * chunks()); }
  int phases() const override { return 2; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;

 private:
  int64_t chunks() const { return ceil_div(args.vocab_size, kSampleChunk); }

  std::vector<Candidate> best_;  // [rows][chunks]
};

}  // namespace armllm
