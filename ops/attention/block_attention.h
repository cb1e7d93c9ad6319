// Block-sparse attention: in long sequences, each token and kv head attends to chosen blocks of positions.
#pragma once

#include "attention/paged_attention.h"

namespace armllm {

// The blocks of positions that tokens of long sequences attend to.
struct BlockChoice {
  const int32_t* blocks = nullptr;  // [tokens][heads][most] in ascending order, then −1
  int64_t heads = 1;                // divides the kv heads, which share a head's choice evenly
  int64_t most = 0;                 // sequences of up to this many blocks are attended to as a whole
  int64_t span = 0;                 // positions of a block; a multiple of the cache's block size
  int64_t sequences = 0;            // those of the step, which attention divides into parts
  int64_t max_seq_len = 0;          // upper bound of their lengths
  SequencePart* parts = nullptr;    // scratch for `most_parts`
  int32_t* tables = nullptr;        // scratch: cache blocks of the chosen blocks of each token and kv head

  int64_t dense_length() const { return most * span; }
  // True if sequences may be longer than what is attended to as a whole.
  bool is_needed() const { return max_seq_len > dense_length(); }
};

// Makes each token and kv head of a long sequence a part with a block table of its own, then computes paged
// attention.  Chosen blocks are in order, so a token that chooses all has the bits of dense attention.
class BlockAttention final : public TaskSet {
 public:
  PagedAttention attention;
  BlockChoice choice;

  // Sets the chosen blocks, [tokens][heads][most], once the step's sequences are set.
  void choose(const int32_t* blocks);
  int64_t scratch_bytes() const;
  void set_scratch(void* scratch);

  int phases() const override { return 1 + attention.phases(); }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
  void abandon() override { attention.abandon(); }

 private:
  int64_t most_parts() const;
  int64_t table_size() const;
  void divide();
  SequencePart part_of(int64_t sequence, int64_t token, int64_t kv_head, int64_t end, int32_t* table) const;
};

}  // namespace armllm
