// The most probable token of each row: what greedy sampling takes where nothing else is asked for.
#include <algorithm>
#include <limits>
#include <vector>

#include "common/tensors.h"
#include "common/variants.h"
#include "sample/sample.h"

namespace armllm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The best of a chunk is found while it lies in the cache; whoever calls takes the best of a row's chunks.
class BestTokens final : public TaskSet {
 public:
  Rows logits;
  int64_t rows, vocabulary, chunks;
  std::vector<Candidate> best;  // [rows][chunks]

  BestTokens(const Tensor& given)
      : logits(rows_of(given, "logits")),
        rows(given.size(0)),
        vocabulary(given.size(1)),
        chunks(ceil_div(vocabulary, kSampleChunk)),
        best(rows * chunks) {}

  int phases() const override { return 1; }
  int64_t tiles(int) const override { return rows * chunks; }

  void tile(int, int64_t index) override {
    const SampleKernels& kernels = *variant().sample;
    const int64_t row = index / chunks, first = index % chunks * kSampleChunk;
    const int64_t n = std::min(kSampleChunk, vocabulary - first);
    const void* x = logits.at(row, first);
    const float top = kernels.largest(x, logits.type, n);
    const int64_t id = top == -kInfinity ? -1 : first + kernels.first_at_least(x, logits.type, n, top);
    best[index] = {top, static_cast<int32_t>(id)};
  }

  int32_t of_row(int64_t row) const {
    const Candidate* first = best.data() + row * chunks;
    return std::max_element(first, first + chunks,
                            [](const Candidate& a, const Candidate& b) { return a.weight < b.weight; })
        ->id;
  }
};

Tensor best_tokens(Tensor given) {
  STD_TORCH_CHECK(given.dim() == 2 && given.size(1) >= 1, "logits must have shape (rows, vocabulary)");
  const Tensor logits = as_rows(given);
  BestTokens set(logits);
  Tensor ids = torch::stable::new_empty(logits, std::vector<int64_t>{set.rows}, ScalarType::Long);
  if (set.rows == 0) return ids;
  run(set);
  int64_t* out = static_cast<int64_t*>(ids.data_ptr());
  for (int64_t r = 0; r < set.rows; ++r) out[r] = set.of_row(r);
  return ids;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("best_tokens", TORCH_BOX(&armllm::best_tokens)); }
