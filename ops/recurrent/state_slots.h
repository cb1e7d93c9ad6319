// Argument checks of the ops with a state of each sequence.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "recurrent/recurrent.h"
#include "runtime/tensor_args.h"

namespace armllm {

// The step's metadata, and the tensors that hold it.
struct StepTensors {
  Tensor slots, query_start, seq_lens, saves;
  StateSlots view;
};

// True if a tensor has a dtype in which states that sum over all tokens may be stored.
inline bool holds_states(const Tensor& state) {
  return type_of(state) == ScalarType::Float || type_of(state) == ScalarType::BFloat16;
}

// Throws unless the steps cover `tokens` packed tokens, and each sequence with tokens and each saved state
// has one of `slots` slots for itself.
inline void check_state_slots(const StateSlots& steps, int64_t tokens, int64_t slots) {
  STD_TORCH_CHECK(steps.query_start[0] == 0 && steps.query_start[steps.sequences] == tokens,
                  "query_start must run from 0 to the number of tokens, ", tokens, ", not from ",
                  steps.query_start[0], " to ", steps.query_start[steps.sequences]);
  std::vector<int64_t> used;
  for (int64_t sequence = 0; sequence < steps.sequences; ++sequence) {
    const int64_t count = steps.tokens(sequence), slot = steps.slots[sequence];
    STD_TORCH_CHECK(count >= 0, "query_start must not decrease: sequence ", sequence, " has ", count,
                    " tokens");
    if (count == 0) continue;
    STD_TORCH_CHECK(steps.seq_lens[sequence] >= count, "sequence ", sequence, " has ", count,
                    " new tokens, but seq_lens says ", steps.seq_lens[sequence],
                    "; seq_lens must include the new tokens");
    STD_TORCH_CHECK(slot >= 0 && slot < slots, "state_slots names slot ", slot, " for sequence ", sequence,
                    ", but the state has ", slots, " slots");
    used.push_back(slot);
  }
  const auto twice = [&used] {
    std::sort(used.begin(), used.end());
    const auto found = std::adjacent_find(used.begin(), used.end());
    return found == used.end() ? -1 : *found;
  };
  const int64_t shared = twice();
  STD_TORCH_CHECK(shared < 0, "state_slots names slot ", shared, " for two sequences");
  if (!steps.saves) return;
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t slot = steps.saves[token];
    STD_TORCH_CHECK(slot >= -1 && slot < slots, "save_slots names slot ", slot, " for token ", token,
                    ", but the state has ", slots, " slots; -1 is none");
    if (slot >= 0) used.push_back(slot);
  }
  const int64_t taken = twice();
  STD_TORCH_CHECK(taken < 0, "save_slots names slot ", taken,
                  ", which a sequence or another token of the step has");
}

// Throws unless `save_slots` is empty or has an element for each token.  Returns its elements, or null.
inline const int64_t* saves_of(const Tensor& save_slots, int64_t tokens) {
  STD_TORCH_CHECK(type_of(save_slots) == ScalarType::Long && save_slots.dim() == 1 &&
                      save_slots.is_contiguous() && (save_slots.numel() == 0 || save_slots.numel() == tokens),
                  "save_slots must be contiguous int64, empty or of shape (", tokens, "), not of shape ",
                  shape_of(save_slots));
  return save_slots.numel() == 0 ? nullptr : static_cast<const int64_t*>(save_slots.data_ptr());
}

// Throws unless the metadata describes `tokens` packed tokens whose states are among `slots` slots.
inline StepTensors check_steps(const Tensor& state_slots, const Tensor& query_start, const Tensor& seq_lens,
                               const std::optional<Tensor>& save_slots, int64_t tokens, int64_t slots) {
  STD_TORCH_CHECK(type_of(state_slots) == ScalarType::Long && state_slots.dim() == 1,
                  "state_slots must be int64 of shape (sequences), not of shape ", shape_of(state_slots));
  const int64_t sequences = state_slots.size(0);
  STD_TORCH_CHECK(type_of(query_start) == ScalarType::Int && query_start.dim() == 1 &&
                      query_start.size(0) == sequences + 1,
                  "query_start must be int32 of shape (", sequences + 1, "), not of shape ",
                  shape_of(query_start));
  STD_TORCH_CHECK(
      type_of(seq_lens) == ScalarType::Int && seq_lens.dim() == 1 && seq_lens.size(0) == sequences,
      "seq_lens must be int32 of shape (", sequences, "), not of shape ", shape_of(seq_lens));
  StepTensors found;
  found.slots = as_contiguous(state_slots);
  found.query_start = as_contiguous(query_start);
  found.seq_lens = as_contiguous(seq_lens);
  StateSlots& steps = found.view;
  steps.slots = static_cast<const int64_t*>(found.slots.data_ptr());
  steps.query_start = static_cast<const int32_t*>(found.query_start.data_ptr());
  steps.seq_lens = static_cast<const int32_t*>(found.seq_lens.data_ptr());
  steps.sequences = sequences;
  if (save_slots) {
    found.saves = as_contiguous(*save_slots);
    steps.saves = saves_of(found.saves, tokens);
  }
  check_state_slots(steps, tokens, slots);
  return found;
}

}  // namespace armllm
