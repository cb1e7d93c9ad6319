#include "moe/expert_adapters.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "dispatch/variants.h"

namespace armllm {

void check_adapters(const ExpertAdapters& a, int64_t tokens) {
  if (a.adapters == nullptr) return;
  for (int64_t token = 0; token < std::min(tokens, a.listed); ++token) {
    const int64_t slot = a.adapters[token];
    if (slot < 0) continue;
    STD_TORCH_CHECK(slot < a.slots, "row ", token, " has the adapter ", slot, ", but there are ", a.slots);
    for (const ExpertFactors* factors : {&a.inner, &a.outer}) {
      const int64_t rank = factors->ranks[slot];
      STD_TORCH_CHECK(rank >= 0 && rank <= factors->most_rank, "adapter ", slot, " has the rank ", rank,
                      "; it must lie in 0 … ", factors->most_rank);
    }
  }
}

LoraArgs expert_factors(const ExpertAdapters& adapters, const ExpertFactors& factors, int64_t slot,
                        int64_t expert, int64_t part) {
  LoraArgs args;
  args.type = adapters.type;
  args.integers = adapters.integers;
  args.most_rank = factors.most_rank;
  args.in_features = factors.in_features;
  args.out_features = factors.out_features;
  args.ranks = factors.ranks + slot;
  const int64_t of_all = slot * adapters.experts + expert;
  args.a = factors.a + of_all * factors.most_rank * args.row_bytes(factors.in_features);
  args.b = factors.b + (of_all * factors.parts + part) * ceil_div(factors.out_features, kLoraBlock) *
                           factors.most_rank * args.row_bytes(kLoraBlock);
  return args;
}

void add_block(LoraArgs layer, const float* sums, int64_t first, int64_t n, float* block) {
  static const int32_t only = 0;
  layer.b += first / kLoraBlock * layer.most_rank * layer.row_bytes(kLoraBlock);
  layer.scratch = const_cast<float*>(sums);
  layer.out = Rows{block, 0, DType::f32};
  variant().lora->expand(layer, {&only, 1, 0}, first % kLoraBlock, n, nullptr);
}

}  // namespace armllm
