// top_logprobs: log-probability and rank of a given token per row, and the most probable tokens.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "dispatch/variants.h"
#include "runtime/tensor_args.h"
#include "runtime/thread_scratch.h"
#include "sample/sample.h"

namespace armllm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class TopLogprobs final : public TaskSet {
 public:
  Rows logits;
  int64_t rows = 0, vocab_size = 0, count = 0;
  const int64_t* ids = nullptr;  // [rows], the given tokens
  float* own = nullptr;          // [rows], log-probabilities of `ids`
  int64_t* ranks = nullptr;      // [rows], 1 + the number of larger logits
  int64_t* best_ids = nullptr;   // [rows][count], best first; among equal logits the lower id first
  float* best = nullptr;         // [rows][count]

  int phases() const override { return 1; }
  int64_t tiles(int) const override { return rows; }

  void tile(int, int64_t row) override {
    const SampleKernels& kernels = *variant().sample;
    const void* x = logits.at(row, 0);
    const int64_t padded = round_up(vocab_size, kSampleBlock), blocks = padded / kSampleBlock;
    char* memory = thread_memory(padded * (sizeof(Candidate) + 4) + 2 * blocks * 4);
    Candidate* found = reinterpret_cast<Candidate*>(memory);
    float* weights = reinterpret_cast<float*>(found + padded);
    float *largest = weights + padded, *sums = largest + blocks;
    const float top = kernels.largest(x, logits.type, vocab_size);
    double log_sum = 0;
    if (!std::isinf(top)) {
      kernels.weigh(x, logits.type, vocab_size, top, 1.0f, 0.0f, weights, largest, sums);
      double sum = 0;
      for (int64_t b = 0; b < blocks; ++b) sum += sums[b];
      log_sum = std::log(sum);
    }
    const auto logprob = [&](float value) {
      if (std::isinf(top)) return value == kInfinity ? 0.0f : -kInfinity;
      return value - top - static_cast<float>(log_sum);
    };
    const float value = value_at(row, ids[row]);
    own[row] = logprob(value);
    ranks[row] = 1 + kernels.count_above(x, logits.type, vocab_size, value);
    if (count == 0) return;
    int64_t among = 0;
    if (!std::isinf(top)) {
      const float bound = reached_by({weights, largest, sums, vocab_size}, count);
      if (bound > 0) among = kernels.gather(weights, largest, blocks, bound, found);
    }
    if (among < count) {  // too few weights are above zero: consider all tokens
      among = vocab_size;
      for (int64_t i = 0; i < among; ++i) found[i].id = static_cast<int32_t>(i);
    }
    for (int64_t i = 0; i < among; ++i) found[i].weight = value_at(row, found[i].id);
    std::partial_sort(found, found + count, found + among, [](const Candidate& a, const Candidate& b) {
      return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
    });
    for (int64_t i = 0; i < count; ++i) {
      best_ids[row * count + i] = found[i].id;
      best[row * count + i] = logprob(found[i].weight);
    }
  }

 private:
  float value_at(int64_t row, int64_t id) const {
    float value;
    variant().sample->widen(logits.at(row, id), logits.type, 1, &value);
    return std::isnan(value) ? -kInfinity : value;
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> top_logprobs(Tensor given, Tensor given_ids, int64_t count) {
  STD_TORCH_CHECK(given.dim() == 2 && given.size(1) >= 1, "logits must have shape (rows, vocabulary)");
  const Tensor logits = as_rows(given);
  const int64_t rows = logits.size(0), vocab_size = logits.size(1);
  STD_TORCH_CHECK(type_of(given_ids) == ScalarType::Long && given_ids.dim() == 1 && given_ids.numel() == rows,
                  "ids must be int64 with one value for each of the ", rows, " rows of logits");
  STD_TORCH_CHECK(count >= 0 && count <= vocab_size, "count is ", count, "; it must lie in 0 … ", vocab_size);
  const Tensor ids = as_contiguous(given_ids);
  const auto made = [&](std::vector<int64_t> shape, ScalarType type) {
    return new_tensor(logits, shape, type);
  };
  Tensor own = made({rows}, ScalarType::Float), ranks = made({rows}, ScalarType::Long),
         best_ids = made({rows, count}, ScalarType::Long), best = made({rows, count}, ScalarType::Float);
  TopLogprobs set;
  set.logits = rows_of(logits, "logits");
  set.rows = rows;
  set.vocab_size = vocab_size;
  set.count = count;
  set.ids = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t r = 0; r < rows; ++r)
    STD_TORCH_CHECK(set.ids[r] >= 0 && set.ids[r] < vocab_size, "ids of row ", r, " is ", set.ids[r],
                    "; the vocabulary has ", vocab_size);
  set.own = static_cast<float*>(own.data_ptr());
  set.ranks = static_cast<int64_t*>(ranks.data_ptr());
  set.best_ids = static_cast<int64_t*>(best_ids.data_ptr());
  set.best = static_cast<float*>(best.data_ptr());
  if (rows > 0) run(set);
  return {own, ranks, best_ids, best};
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("top_logprobs", TORCH_BOX(&armllm::top_logprobs)); }
