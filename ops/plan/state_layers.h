// States of recurrent layers among a step's inputs.
#pragma once

#include "plan/plan.h"
#include "recurrent/recurrent.h"
#include "recurrent/state_slots.h"

namespace armllm {

// States of all layers are one tensor (layers, slots, …); a layer's are a slice of it.
inline char* state_layer(const Tensor& all, int64_t layer, int64_t size) {
  return static_cast<char*>(all.data_ptr()) + layer * all.stride(0) * size;
}

template <class Fields>
StateSlots state_slots_of(const Frame& frame, const Fields& op) {
  StateSlots steps;
  steps.slots = static_cast<const int64_t*>(frame.input(op.state_slots).data_ptr());
  steps.query_start = static_cast<const int32_t*>(frame.input(op.query_start).data_ptr());
  steps.seq_lens = static_cast<const int32_t*>(frame.input(op.seq_lens).data_ptr());
  steps.saves = saves_of(frame.input(op.save_slots), frame.tokens);
  steps.sequences = frame.input(op.state_slots).numel();
  return steps;
}

template <class Fields>
StateNeed state_need(const Fields& op) {
  StateNeed need;
  need.state = op.state, need.layer = op.layer, need.state_slots = op.state_slots;
  need.save_slots = op.save_slots;
  need.query_start = op.query_start, need.seq_lens = op.seq_lens;
  return need;
}

}  // namespace armllm
