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

// Joins the two parts of each query if they are not adjacent, then computes attention.
class LatentAttention final : public TaskSet {
 public:
  PagedAttention attention;
  QueryPart latent, rope;
  void* joined = nullptr;  // [tokens][heads][rank + rope size]; nullptr if attention.args.q is already joined

  int phases() const override { return 1 + attention.phases(); }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
  void abandon() override { attention.abandon(); }
};

class LatentWrite final : public TaskSet {
 public:
  LatentWriteArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
