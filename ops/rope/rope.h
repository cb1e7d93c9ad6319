// Rotary position embedding: in-place rotation of the heads of queries and keys, and the cos and sin table.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

enum class RopePairs : int32_t {
#define ROPE_PAIRS(name, number) name = number,
#include "runtime/enums.def"
};

constexpr int64_t kMostUnzipped = 512;  // rotary dimensions that RopePairs::unzipped buffers on the stack

// Element (token, head, i) = at(token, head · head_stride + i).
struct RopeArgs {
  Rows q, k;  // k may be empty
  int64_t q_head_stride = 0, k_head_stride = 0;
  const float* cos = nullptr;  // [tokens][rotary / 2]
  const float* sin = nullptr;
  int64_t tokens = 0, q_heads = 0, k_heads = 0, head_size = 0;
  int64_t rotary = 0;  // leading dimensions of a head that are rotated
  RopePairs pairs = RopePairs::halves;
};

struct RopeTableArgs {
  const int64_t* positions = nullptr;  // [tokens][numbers]
  const int64_t* axes = nullptr;       // [half] which of a token's numbers turns a pair; nullptr: the first
  const float* inv_freq = nullptr;     // [half]
  float* cos = nullptr;                // [tokens][half]
  float* sin = nullptr;
  int64_t tokens = 0, half = 0, numbers = 1;
  int64_t offset = 0;  // added to the positions
  float scaling = 1.0f;
};

struct RopeKernels {
  // Rotates `heads` heads of one token.
  void (*rotate)(void* x, DType type, int64_t heads, int64_t head_stride, int64_t rotary, const float* cos,
                 const float* sin, RopePairs pairs);
};

class Rope final : public TaskSet {
 public:
  RopeArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// Computes cos and sin with libm.  The angle is rounded to float32 as in transformers, so results agree up to
// rounding.
class RopeTable final : public TaskSet {
 public:
  RopeTableArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
