// Absorbed multi-head latent attention: paged attention in which all heads share one key, and the key's first
// part is the value.
#pragma once

#include "attention/paged_attention.h"
#include "runtime/task_set.h"

namespace armllm {

// One of the two parts of each head's query; heads may be strided.
struct QueryPart {
  const char* data = nullptr;
  int64_t token_stride = 0, head_stride = 0, size = 0;  // elements

  const char* at(int64_t token, int64_t head, int64_t element_size) const {
    return data + (token * token_stride + head * head_stride) * element_size;
  }
};

// The positions that tokens of long sequences attend to.
struct Selection {
  const int32_t* positions = nullptr;  // [tokens][most] in ascending order; nullptr: attention is dense
  int64_t most = 0;                    // sequences of up to this many positions are attended to as a whole
  int64_t sequences = 0;               // those of the step, which attention divides into parts
  int64_t max_seq_len = 0;             // upper bound of their lengths
  SequencePart* parts = nullptr;       // scratch for `most_parts`
  // Positive: tokens attend to so many last positions and to compressed entries, of which `positions` are the
  // numbers; nullptr: to all entries.
  int64_t recent = 0;

  // True if sequences may be longer than `most`.
  bool is_needed() const { return recent > 0 || (positions != nullptr && max_seq_len > most); }
};

// Joins the two parts of each query if they are not adjacent, then computes attention.
class LatentAttention final : public TaskSet {
 public:
  PagedAttention attention;
  QueryPart latent, rope;
  Selection selection;
  void* joined = nullptr;  // [tokens][heads][rank + rope size]; nullptr if attention.args.q is already joined

  // Makes the tokens of long sequences attend to `positions` only, [tokens][most].  To be called once the
  // step's sequences are set.
  void select(const int32_t* positions, int64_t most);
  // Makes tokens attend to their `recent` last positions and to compressed entries, [tokens][most], or to all
  // of them.  `args.entries` and `args.places` are set before, and so are the step's sequences.
  void select_entries(int64_t recent, const int32_t* entries, int64_t most);
  int64_t scratch_bytes() const;
  void set_scratch(void* scratch);

  int phases() const override { return 2 + attention.phases(); }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
  void abandon() override { attention.abandon(); }

 private:
  int64_t most_parts() const;
  void divide();
  void divide_entries();
};

class LatentWrite final : public TaskSet {
 public:
  LatentWriteArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
