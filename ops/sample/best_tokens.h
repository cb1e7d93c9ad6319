// The most probable token of each row, for greedy sampling without penalties or log-probabilities.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collective/communicator.h"
#include "sample/sample.h"

namespace armllm {

// Of tensor parallel ranks, each has the logits of adjacent tokens, from `first` on.  Without ranks the
// communicator is null.
struct BestTokensArgs {
  Rows logits;
  int64_t rows = 0, vocab_size = 0;
  int64_t* ids = nullptr;  // among equal logits the lowest id; −1 where no logit is above −∞
  std::shared_ptr<Communicator> communicator;
  int64_t first = 0;
};

// Phase 0 finds the best token of each chunk, phase 1 the best among each row's chunks, and among all ranks.
class BestTokens final : public TaskSet {
 public:
  BestTokensArgs args;
  // Must be called after a change of args.rows or args.vocab_size.
  void resize() { best_.resize(args.rows * chunks()); }
  int phases() const override { return 2; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;

 private:
  Candidate best_of_row(int64_t row) const;
  void best_of_ranks();
  int64_t chunks() const { return ceil_div(args.vocab_size, kSampleChunk); }

  std::vector<Candidate> best_;  // [rows][chunks]
};

}  // namespace armllm
