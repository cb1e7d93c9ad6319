// The task set of low-rank additions.
#include "lora/lora.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "dispatch/variants.h"

namespace armllm {

void Lora::group_rows() const {
  rows_.clear();
  groups_.clear();
  const int64_t listed = std::min(args.tokens, args.listed);
  for (int64_t row = 0; row < listed; ++row) {
    const int64_t slot = args.adapters[row];
    if (slot < 0) continue;
    STD_TORCH_CHECK(slot < args.slots, "row ", row, " has the adapter ", slot, ", but there are ",
                    args.slots);
    const int64_t rank = args.ranks[slot];
    STD_TORCH_CHECK(rank >= 0 && rank <= args.most_rank, "adapter ", slot, " has the rank ", rank,
                    "; it must lie in 0 … ", args.most_rank);
    if (rank > 0) rows_.push_back(static_cast<int32_t>(row));
  }
  std::stable_sort(rows_.begin(), rows_.end(),
                   [this](int32_t a, int32_t b) { return args.adapters[a] < args.adapters[b]; });
  const int64_t count = static_cast<int64_t>(rows_.size());
  for (int64_t begin = 0, end; begin < count; begin = end) {
    const int32_t slot = args.adapters[rows_[begin]];
    for (end = begin; end < count && end < begin + kLoraRows && args.adapters[rows_[end]] == slot;) ++end;
    groups_.push_back({rows_.data() + begin, end - begin, slot});
  }
}

int64_t Lora::tiles_of(int phase, const LoraGroup& group) const {
  return phase == 0 ? ceil_div(args.ranks[group.slot], kLoraRanks)
                    : ceil_div(args.out_features, kLoraColumns);
}

int64_t Lora::tiles(int phase) const {
  if (phase == 0) group_rows();
  int64_t tiles = 0;
  for (const LoraGroup& group : groups_) tiles += tiles_of(phase, group);
  return tiles;
}

void Lora::tile(int phase, int64_t index) {
  size_t number = 0;
  for (int64_t count; index >= (count = tiles_of(phase, groups_[number])); ++number) index -= count;
  const LoraGroup& group = groups_[number];
  if (phase == 0) {
    const int64_t first = index * kLoraRanks, left = args.ranks[group.slot] - first;
    variant().lora->shrink(args, group, first, std::min(left, kLoraRanks));
  } else {
    const int64_t first = index * kLoraColumns, left = args.out_features - first;
    variant().lora->expand(args, group, first, std::min(left, kLoraColumns));
  }
}

}  // namespace armllm
