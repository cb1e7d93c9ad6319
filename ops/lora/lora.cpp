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
    if (args.ids != nullptr)
      STD_TORCH_CHECK(args.ids[row] >= 0 && args.ids[row] < args.vocab_size, "token ", row, " has id ",
                      args.ids[row], ", but the vocabulary is 0 to ", args.vocab_size - 1);
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

const char* Lora::Work::factor(int phase, int64_t tile) const {
  const LoraArgs& a = *args;
  if (phase == 0 && a.ids != nullptr) return nullptr;  // rows of a table are anywhere
  if (phase == 0) return a.a + (group.slot * a.most_rank + tile * kLoraRanks) * a.row_bytes(a.in_features);
  const int64_t blocks =
      group.slot * ceil_div(a.out_features, kLoraBlock) + tile * (kLoraColumns / kLoraBlock);
  return a.b + blocks * a.most_rank * a.row_bytes(kLoraBlock);
}

int64_t Lora::tiles(int phase) const {
  if (phase == 0) {
    rows_.clear();
    work_.clear();
    int64_t most = 0;
    for (const LoraArgs& args : parts) most += std::min(args.tokens, args.listed);
    rows_.reserve(most);  // groups keep pointers to it
    for (const LoraArgs& args : parts) group_rows(args);
    int64_t ends[2] = {};
    for (Work& work : work_) {
      const bool looks_up = work.args->ids != nullptr;
      work.ends[0] = ends[0] += looks_up ? 1 : ceil_div(work.args->ranks[work.group.slot], kLoraRanks);
      work.ends[1] = ends[1] += ceil_div(work.args->out_features, kLoraColumns);
    }
  }
  return work_.empty() ? 0 : work_.back().ends[phase];
}

void Lora::tile(int phase, int64_t index) {
  const auto work = std::upper_bound(work_.begin(), work_.end(), index,
                                     [&](int64_t tile, const Work& w) { return tile < w.ends[phase]; });
  const LoraArgs& args = *work->args;
  const LoraGroup& group = work->group;
  const bool is_last = index + 1 == work->ends[phase];
  if (work != work_.begin()) index -= (work - 1)->ends[phase];
  const char* ahead = !is_last                  ? work->factor(phase, index + 1)
                      : work + 1 != work_.end() ? (work + 1)->factor(phase, 0)
                                                : nullptr;
  if (phase == 0 && args.ids != nullptr) {
    variant().lora->look_up(args, group);
  } else if (phase == 0) {
    const int64_t first = index * kLoraRanks, left = args.ranks[group.slot] - first;
    variant().lora->shrink(args, group, first, std::min(left, kLoraRanks), ahead);
  } else {
    const int64_t first = index * kLoraColumns, left = args.out_features - first;
    variant().lora->expand(args, group, first, std::min(left, kLoraColumns), ahead);
  }
}

}  // namespace armllm
