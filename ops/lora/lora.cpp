// The task set of low-rank additions.
#include "lora/lora.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "dispatch/variants.h"

namespace armllm {

namespace {

int64_t sums_of(const LoraArgs& args) { return args.tokens * args.most_rank; }

}  // namespace

int64_t Lora::scratch_bytes(const std::vector<LoraArgs>& parts) {
  int64_t floats = 0;
  for (const LoraArgs& args : parts) floats += sums_of(args);
  return floats * static_cast<int64_t>(sizeof(float));
}

void Lora::set_scratch(void* scratch) {
  float* sums = static_cast<float*>(scratch);
  for (LoraArgs& args : parts) {
    args.scratch = sums;
    sums += sums_of(args);
  }
}

// Appends the rows that have an adapter, and their groups.
void Lora::group_rows(const LoraArgs& args) const {
  const size_t before = rows_.size();
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
  const auto slot_of = [&](int32_t row) { return args.adapters[row]; };
  std::stable_sort(rows_.begin() + before, rows_.end(),
                   [&](int32_t a, int32_t b) { return slot_of(a) < slot_of(b); });
  const int32_t *row = rows_.data() + before, *end = rows_.data() + rows_.size();
  while (row < end) {
    const int32_t *first = row, slot = slot_of(*first);
    while (row < end && row < first + kLoraRows && slot_of(*row) == slot) ++row;
    work_.push_back({&args, {first, row - first, slot}});
  }
}

int64_t Lora::Work::tiles(int phase) const {
  return phase == 0 ? ceil_div(args->ranks[group.slot], kLoraRanks)
                    : ceil_div(args->out_features, kLoraColumns);
}

const char* Lora::Work::factor(int phase, int64_t tile) const {
  const int64_t slot = group.slot * args->most_rank;
  const int64_t element =
      phase == 0 ? (slot + tile * kLoraRanks) * args->in_features
                 : slot * round_up(args->out_features, kLoraBlock) + tile * kLoraColumns * args->most_rank;
  return (phase == 0 ? args->a : args->b) + element * size_of(args->type);
}

int64_t Lora::tiles(int phase) const {
  if (phase == 0) {
    rows_.clear();
    work_.clear();
    int64_t most = 0;
    for (const LoraArgs& args : parts) most += std::min(args.tokens, args.listed);
    rows_.reserve(most);  // groups keep pointers to it
    for (const LoraArgs& args : parts) group_rows(args);
  }
  int64_t tiles = 0;
  for (const Work& work : work_) tiles += work.tiles(phase);
  return tiles;
}

void Lora::tile(int phase, int64_t index) {
  size_t number = 0;
  for (int64_t count; index >= (count = work_[number].tiles(phase)); ++number) index -= count;
  const LoraArgs& args = *work_[number].args;
  const LoraGroup& group = work_[number].group;
  const char* ahead = index + 1 < work_[number].tiles(phase) ? work_[number].factor(phase, index + 1)
                      : number + 1 < work_.size()            ? work_[number + 1].factor(phase, 0)
                                                             : nullptr;
  if (phase == 0) {
    const int64_t first = index * kLoraRanks, left = args.ranks[group.slot] - first;
    variant().lora->shrink(args, group, first, std::min(left, kLoraRanks), ahead);
  } else {
    const int64_t first = index * kLoraColumns, left = args.out_features - first;
    variant().lora->expand(args, group, first, std::min(left, kLoraColumns), ahead);
  }
}

}  // namespace armllm
