// Instructions of recurrent layers.
#include <memory>
#include <utility>

#include "plan/instruction_builders.h"
#include "recurrent/recurrent.h"
#include "recurrent/state_slots.h"

namespace armllm {
namespace {

// States of all layers are one tensor (layers, slots, …); a layer's are a slice of it.
char* state_of(const Tensor& all, int64_t layer, int64_t size) {
  return static_cast<char*>(all.data_ptr()) + layer * all.stride(0) * size;
}

template <class Fields>
StateSlots slots_of(const Frame& frame, const Fields& op) {
  StateSlots steps;
  steps.slots = static_cast<const int64_t*>(frame.input(op.state_slots).data_ptr());
  steps.query_start = static_cast<const int32_t*>(frame.input(op.query_start).data_ptr());
  steps.seq_lens = static_cast<const int32_t*>(frame.input(op.seq_lens).data_ptr());
  steps.saves = saves_of(frame.input(op.save_slots), frame.tokens);
  steps.sequences = frame.input(op.state_slots).numel();
  return steps;
}

}  // namespace

Instruction build(const fields::causal_conv& op) {
  auto task = std::make_unique<CausalConv>();
  task->args.channels = op.channels;
  task->args.taps = op.taps;
  task->args.silu = op.silu;
  return simple(std::move(task), [op](CausalConv& t, const Frame& frame) {
    CausalConvArgs& a = t.args;
    a.x = frame.rows(op.x);
    a.out = frame.rows(op.out);
    a.weight = frame.pointer<float>(op.weight);
    a.bias = frame.pointer<float>(op.bias);
    a.state = state_of(frame.input(op.state), op.layer, size_of(op.x.dtype()));
    a.steps = slots_of(frame, op);
    a.tokens = frame.tokens;
  });
}

Instruction build(const fields::gated_delta_rule& op) {
  auto task = std::make_unique<DeltaRule>();
  DeltaRule* rule = task.get();
  DeltaRuleArgs& args = rule->args;
  args.key_heads = op.key_heads;
  args.value_heads = op.value_heads;
  args.key_size = op.key_size;
  args.value_size = op.value_size;
  args.gate_per_channel = op.gate_per_channel;
  args.normalize = op.normalize;
  args.delta = op.delta;
  args.scale = op.scale;
  Instruction instruction = simple(std::move(task), [op](DeltaRule& t, const Frame& frame) {
    DeltaRuleArgs& a = t.args;
    a.q = frame.rows(op.q);
    a.k = frame.rows(op.k);
    a.v = frame.rows(op.v);
    a.gate = frame.rows(op.gate);
    a.beta = frame.rows(op.beta);
    a.out = frame.rows(op.out);
    a.state_type = dtype_of(frame.input(op.state), "a state");
    a.state = state_of(frame.input(op.state), op.layer, size_of(a.state_type));
    a.steps = slots_of(frame, op);
    a.tokens = frame.tokens;
  });
  instruction.scratch_bytes = [rule] { return rule->scratch_floats() * static_cast<int64_t>(sizeof(float)); };
  instruction.set_scratch = [rule](void* scratch) { rule->args.prepared = static_cast<float*>(scratch); };
  return instruction;
}

Instruction build(const fields::selective_scan& op) {
  auto task = std::make_unique<SelectiveScan>();
  task->args.channels = op.channels;
  task->args.states = op.states;
  task->args.normalize = op.normalize;
  return simple(std::move(task), [op](SelectiveScan& t, const Frame& frame) {
    SelectiveScanArgs& a = t.args;
    a.x = frame.rows(op.x);
    a.dt = frame.rows(op.dt);
    a.a = frame.pointer<float>(op.a);
    a.b = frame.rows(op.b);
    a.c = frame.rows(op.c);
    a.out = frame.rows(op.out);
    a.state_type = dtype_of(frame.input(op.state), "a state");
    a.state = state_of(frame.input(op.state), op.layer, size_of(a.state_type));
    a.steps = slots_of(frame, op);
    a.tokens = frame.tokens;
  });
}

}  // namespace armllm
