// Instructions of recurrent layers.
#include <memory>
#include <utility>

#include "plan/instruction_builders.h"
#include "plan/state_layers.h"
#include "recurrent/recurrent.h"

namespace armllm {
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
    a.state = state_layer(frame.input(op.state), op.layer, size_of(op.x.dtype()));
    a.steps = state_slots_of(frame, op);
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
    a.state = state_layer(frame.input(op.state), op.layer, size_of(a.state_type));
    a.steps = state_slots_of(frame, op);
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
    a.state = state_layer(frame.input(op.state), op.layer, size_of(a.state_type));
    a.steps = state_slots_of(frame, op);
    a.tokens = frame.tokens;
  });
}

}  // namespace armllm
