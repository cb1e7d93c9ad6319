#include "sample/best_tokens.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "dispatch/variants.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

bool lighter(const Candidate& a, const Candidate& b) { return a.weight < b.weight; }

}  // namespace

int64_t BestTokens::tiles(int phase) const {
  if (args.rows == 0) return 0;
  return phase == 0 ? args.rows * chunks() : 1;
}

void BestTokens::tile(int phase, int64_t index) {
  const int64_t each = chunks();
  if (phase == 0) {
    const SampleKernels& kernels = *variant().sample;
    const int64_t first = index % each * kSampleChunk;
    const int64_t n = std::min(kSampleChunk, args.vocab_size - first);
    const void* x = args.logits.at(index / each, first);
    const float top = kernels.largest(x, args.logits.type, n);
    const bool any = top > -std::numeric_limits<float>::infinity();
    const int64_t id = any ? first + kernels.first_at_least(x, args.logits.type, n, top) : -1;
    best_[index] = {top, static_cast<int32_t>(id)};
    return;
  }
  if (args.communicator != nullptr) {
    best_of_ranks();
    return;
  }
  for (int64_t row = 0; row < args.rows; ++row) args.ids[row] = best_of_row(row).id;
}

Candidate BestTokens::best_of_row(int64_t row) const {
  const Candidate* chunk = best_.data() + row * chunks();
  return *std::max_element(chunk, chunk + chunks(), lighter);
}

// All ranks find the same tokens: they compare the same candidates in the same order.
void BestTokens::best_of_ranks() {
  Communicator& ranks = *args.communicator;
  const int64_t rows_per_round = ranks.buffer_bytes() / int64_t(sizeof(Candidate));
  for (int64_t begin = 0; begin < args.rows; begin += rows_per_round) {
    const int64_t rows = std::min(rows_per_round, args.rows - begin), number = ranks.begin();
    Candidate* own = reinterpret_cast<Candidate*>(ranks.buffer(ranks.rank(), number));
    for (int64_t row = 0; row < rows; ++row) {
      own[row] = best_of_row(begin + row);
      if (own[row].id >= 0) own[row].id += static_cast<int32_t>(args.first);
    }
    ranks.publish(number, rows * int64_t(sizeof(Candidate)));
    std::vector<Candidate> best(size_t(rows), {-std::numeric_limits<float>::infinity(), -1});
    for (int64_t rank = 0; rank < ranks.ranks(); ++rank) {
      if (rank != ranks.rank()) ranks.wait_for(rank, number);
      const Candidate* theirs = reinterpret_cast<const Candidate*>(ranks.buffer(rank, number));
      for (int64_t row = 0; row < rows; ++row) best[row] = std::max(best[row], theirs[row], lighter);
    }
    for (int64_t row = 0; row < rows; ++row) args.ids[begin + row] = best[row].id;
  }
}

namespace {

Tensor best_tokens(Tensor given) {
  STD_TORCH_CHECK(given.dim() == 2 && given.size(1) >= 1, "logits must have shape (rows, vocabulary)");
  const Tensor logits = as_rows(given);
  Tensor ids = new_tensor(logits, std::vector<int64_t>{given.size(0)}, ScalarType::Long);
  BestTokens set;
  set.args.logits = rows_of(logits, "logits");
  set.args.rows = given.size(0);
  set.args.vocab_size = given.size(1);
  set.args.ids = static_cast<int64_t*>(ids.data_ptr());
  set.resize();
  run(set);
  return ids;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("best_tokens", TORCH_BOX(&armllm::best_tokens)); }
