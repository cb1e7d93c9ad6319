#include "sample/best_tokens.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "dispatch/variants.h"
#include "runtime/tensor_args.h"

namespace armllm {

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
  const auto lighter = [](const Candidate& a, const Candidate& b) { return a.weight < b.weight; };
  for (int64_t row = 0; row < args.rows; ++row) {
    const Candidate* chunk = best_.data() + row * each;
    args.ids[row] = std::max_element(chunk, chunk + each, lighter)->id;
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
