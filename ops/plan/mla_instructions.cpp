// Instructions for latent attention, and for linear layers in which each head has its own weight.
#include "attention/check_args.h"
#include "linear/heads.h"
#include "mla/mla.h"
#include "plan/instruction_builders.h"
#include "plan/layer_cache.h"
#include "select/select.h"

namespace armllm {
namespace {

template <class Task, class Fields>
void set_sizes(Task& task, const Fields& op) {
  task.args.heads = op.heads;
  task.args.in_features = op.in_features;
  task.args.out_features = op.out_features;
  task.args.x_head_stride = op.x_head_stride;
}

template <class Task, class Fields>
void bind_heads(Task& task, const Frame& frame, const Fields& op) {
  task.args.x = frame.rows(op.x);
  task.args.out = frame.rows(op.out);
  task.args.tokens = frame.tokens;
}

}  // namespace

Instruction build(const fields::int8_heads& op) {
  auto task = std::make_unique<QuantHeads>();
  set_sizes(*task, op);
  task->args.head_stride = op.head_stride;
  task->args.panel_stride = op.panel_stride;
  return with_scratch(
      std::move(task),
      [op](QuantHeads& t, const Frame& frame) {
        bind_heads(t, frame, op);
        t.args.weight = frame.pointer<uint8_t>(op.weight);
      },
      [](const QuantHeadsArgs& args) { return QuantHeads::scratch_bytes(args); });
}

Instruction build(const fields::dense_heads& op) {
  auto task = std::make_unique<DenseHeads>();
  set_sizes(*task, op);
  return simple(std::move(task), [op](DenseHeads& t, const Frame& frame) {
    bind_heads(t, frame, op);
    t.args.weight = frame.rows(op.weight);
  });
}

Instruction build(const fields::mla_write& op) {
  auto task = std::make_unique<LatentWrite>();
  task->args.rank = op.rank;
  task->args.rope_size = op.rope_size;
  return simple(std::move(task), [op](LatentWrite& t, const Frame& frame) {
    LatentWriteArgs& a = t.args;
    a.latent = frame.rows(op.latent);
    a.rope = frame.rows(op.rope);
    a.cache = layer_of(frame.input(op.cache), op.layer);
    a.cache_type = latent_type_of(frame.input(op.cache));
    a.slots = frame.pointer<int64_t>(op.slots);
    a.tokens = frame.tokens;
  });
}

Instruction build(const fields::mla_attention& op) {
  auto task = std::make_unique<LatentAttention>();
  LatentAttention* set = task.get();
  AttentionArgs& args = set->attention.args;
  args.q_heads = op.q_heads;
  set->latent.size = op.latent_size;
  set->rope.size = op.rope_size;
  set->latent.head_stride = op.latent_head_stride;
  set->rope.head_stride = op.rope_head_stride;
  args.scale = op.scale;
  args.window = op.window;
  args.kv_heads = 1;
  args.value_size = op.latent_size;
  args.head_size = op.latent_size + op.rope_size;
  Instruction instruction = simple(std::move(task), [op](LatentAttention& t, const Frame& frame) {
    AttentionArgs& a = t.attention.args;
    const Tensor& cache = frame.input(op.cache);
    t.latent.data = frame.address(op.latent);
    t.latent.token_stride = op.latent.stride;
    t.rope.data = frame.address(op.rope);
    t.rope.token_stride = op.rope.stride;
    a.out = frame.rows(op.out);
    a.sinks = frame.pointer<float>(op.sinks);
    a.k_cache = layer_of(cache, op.layer);
    set_latent_type(a, latent_type_of(cache));
    a.block_size = cache.size(2);
    bind_sequences(frame, op, a);
    a.threads = team_size();
    t.select(op.top_k > 0 ? frame.pointer<int32_t>(op.selected) : nullptr, op.top_k);
  });
  instruction.still_valid = [set] {
    AttentionArgs given = set->attention.args;
    given.sequences = set->selection.sequences;
    return set->selection.max_seq_len == length_bound(given);
  };
  // Two instructions compute the two parts of a query, so the parts are never adjacent.  Join them in
  // scratch.
  const DType type = op.latent.dtype();
  instruction.scratch_bytes = [set, type] {
    const AttentionArgs& a = set->attention.args;
    return round_up(set->scratch_bytes(), 64) + a.tokens * a.q_heads * a.head_size * size_of(type);
  };
  instruction.set_scratch = [set, type](void* scratch) {
    AttentionArgs& a = set->attention.args;
    set->set_scratch(scratch);
    set->joined = static_cast<char*>(scratch) + round_up(set->scratch_bytes(), 64);
    a.q = Rows{set->joined, a.q_heads * a.head_size, type};
  };
  return instruction;
}

Instruction build(const fields::select_tokens& op) {
  auto task = std::make_unique<SelectTokens>();
  SelectTokens* set = task.get();
  SelectArgs& args = set->args;
  args.heads = op.heads;
  args.head_size = op.head_size;
  args.head_stride = op.head_stride;
  args.most = op.top_k;
  args.scale = op.scale;
  Instruction instruction = with_scratch(
      std::move(task),
      [op](SelectTokens& t, const Frame& frame) {
        SelectArgs& a = t.args;
        const Tensor& cache = frame.input(op.cache);
        a.q = frame.rows(op.q);
        a.weights = frame.rows(op.weights);
        a.out = frame.pointer<int32_t>(op.out);
        a.keys = layer_of(cache, op.layer);
        a.key_type = dtype_of(cache, "cache");
        a.block_size = cache.size(2);
        bind_sequences(frame, op, a);
      },
      [](const SelectArgs& a) { return SelectTokens::scratch_bytes(a); });
  instruction.still_valid = [set] { return set->args.max_seq_len == length_bound(set->args); };
  return instruction;
}

}  // namespace armllm
