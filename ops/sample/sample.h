// Sampling of one token per row: penalties, temperature, min-p, top-k, top-p, then the draw.
//
// The weights of a row with largest logit m are e^((x − m) / temperature), in 0 … 1, and every filter is a
// lower bound of the weights.  The vocabulary is never sorted: the largest weight of each block of 64 selects
// the few blocks that can hold weights that pass.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kSampleBlock = 64;        // weights per block; each block has a largest value and a sum
constexpr int64_t kSampleChunk = 128 * 64;  // values of a row per tile

struct Candidate {
  float weight;
  int32_t id;
};

struct SampleKernels {
  // The largest of n values; NaN counts as −∞.
  float (*largest)(const void* x, DType type, int64_t n);
  // Index of the first value that is at least `bound`; n if there is none.
  int64_t (*first_at_least)(const void* x, DType type, int64_t n, float bound);
  // Σ e^(x − top); NaN counts as −∞.
  float (*sum_of_exponentials)(const void* x, DType type, int64_t n, float top);
  // weights[i] = e^((x[i] − top) · inverse_temperature), or 0 if that is less than `least`.  Also writes the
  // largest weight and the sum of each block.  `weights` has room for whole blocks, and the last block is
  // filled up with zeros.  `weights` may be x.
  void (*weigh)(const void* x, DType type, int64_t n, float top, float inverse_temperature, float least,
                float* weights, float* block_largest, float* block_sums);
  // Copies the weights of at least `bound` to `found`, in order, and returns their number.  `bound` must be
  // above 0; `found` has room for all weights.
  int64_t (*gather)(const float* weights, const float* block_largest, int64_t blocks, float bound,
                    Candidate* found);
  // Number of values larger than `bound`; NaN never counts.
  int64_t (*count_above)(const void* x, DType type, int64_t n, float bound);
  // Converts n values to float32.
  void (*widen)(const void* x, DType type, int64_t n, float* out);
};

// Lists of tokens, one per row: row r has ids[offsets[r]] … ids[offsets[r + 1] − 1].
struct TokenLists {
  const int64_t* ids = nullptr;
  const int64_t* offsets = nullptr;

  const int64_t* begin(int64_t row) const { return ids == nullptr ? nullptr : ids + offsets[row]; }
  const int64_t* end(int64_t row) const { return ids == nullptr ? nullptr : ids + offsets[row + 1]; }
};

struct SampleArgs {
  Rows logits;
  int64_t rows = 0, vocab_size = 0;
  // Each has one value per row; the penalties may be nullptr.
  const float *temperature = nullptr, *top_p = nullptr, *min_p = nullptr;
  const float *repetition = nullptr, *presence = nullptr, *frequency = nullptr;
  const int64_t *top_k = nullptr, *seeds = nullptr, *steps = nullptr;
  TokenLists prompt, output;
  int64_t* ids = nullptr;     // the drawn token, or −1 where no logit is a number above −∞
  float* logprobs = nullptr;  // its log-probability under the unmodified logits; nullptr if not requested
  // [rows][vocab_size], initially zero: the probability of each token; nullptr if not requested.  If set, no
  // token is drawn, and `ids` is only valid as a check for −1.
  float* probabilities = nullptr;
  void* scratch = nullptr;  // scratch_bytes(), 64-byte aligned
};

class Sample final : public TaskSet {
 public:
  SampleArgs args;
  static int64_t scratch_bytes(int64_t rows, int64_t vocab_size);
  int phases() const override { return 3; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// Weights of a row with the largest value and the sum of each block; `count` is the vocabulary size.
struct Weights {
  const float* values;
  const float* block_largest;
  const float* block_sums;
  int64_t count;

  int64_t blocks() const { return ceil_div(count, kSampleBlock); }
};

// A bound that at least `count` weights reach, provided that many are not zero: the count-th largest among
// the blocks' largest weights.  0 if there are fewer blocks.
float reached_by(const Weights& weights, int64_t count);

// Draws the token at fraction 0 ≤ `at` < 1 of the cumulative weights that pass both filters, in the order of
// the vocabulary.  top_k ≤ 0 and top_p ≥ 1 pass everything.  All weights equal to the k-th pass; among equal
// weights at the end of top_p's set, lower ids pass first.  At least one weight passes.
int64_t draw(const Weights& weights, int64_t top_k, float top_p, double at);

// Writes the probability with which `draw` returns each token, except zeros.
void probabilities(const Weights& weights, int64_t top_k, float top_p, float* out);

// Returns a uniform number in 0 … 1 from Philox4x32-10 (Salmon et al., 2011) with the seed as key and the
// step as counter.
double uniform_at(int64_t seed, int64_t step);

}  // namespace armllm
