// Builds instructions from their fields: a task set, and the function that binds it to a step's data.
#include <algorithm>
#include <utility>

#include "activation/activation.h"
#include "attention/check_args.h"
#include "attention/paged_attention.h"
#include "collective/communicators.h"
#include "collective/gather_columns.h"
#include "collective/meeting.h"
#include "embedding/embedding.h"
#include "linear/quant_linear.h"
#include "lora/lora.h"
#include "moe/moe.h"
#include "norm/norm.h"
#include "plan/elementwise.h"
#include "plan/instruction_builders.h"
#include "plan/layer_cache.h"
#include "plan/operand_checks.h"
#include "plan/plan.h"
#include "pointwise/pointwise.h"
#include "rope/rope.h"
#include "sample/best_tokens.h"

namespace armllm {
namespace {

template <class Args>
const int64_t* unknown_id(const Args& args) {
  return std::find_if(args.ids, args.ids + args.tokens,
                      [&](int64_t id) { return id < 0 || id >= args.vocab_size; });
}

// An embedding lookup.  Ids that are an input of the plan are checked in every step.
template <class Task, class Bind>
Instruction embedding_of(std::unique_ptr<Task> task, const View& ids, Bind bind) {
  Task* raw = task.get();
  if (ids.space != Space::input) return simple(std::move(task), bind);
  Instruction instruction = simple(std::move(task), [bind](Task& t, const Frame& frame) {
    bind(t, frame);
    const int64_t* wrong = unknown_id(t.args);
    STD_TORCH_CHECK(wrong == t.args.ids + t.args.tokens, "token ", wrong - t.args.ids, " has id ", *wrong,
                    ", but the vocabulary is 0 to ", t.args.vocab_size - 1);
  });
  instruction.still_valid = [raw] { return unknown_id(raw->args) == raw->args.ids + raw->args.tokens; };
  return instruction;
}

template <class Task, class Fields>
Instruction norm(const Fields& op) {
  auto task = std::make_unique<Task>();
  task->args.rows_per_token = op.rows_per_token;
  task->args.width = op.width;
  task->args.eps = op.eps;
  task->args.weight_offset = op.weight_offset;
  task->args.weight_type = op.weight.dtype();
  return simple(std::move(task), [op](Task& t, const Frame& frame) {
    t.args.x = frame.rows(op.x);
    t.args.out = frame.rows(op.out);
    t.args.residual = frame.rows(op.residual);
    t.args.sum = frame.rows(op.sum);
    t.args.weight = frame.address(op.weight);
    t.args.bias = frame.address(op.bias);
    t.args.rows = frame.tokens * op.rows_per_token;
  });
}

// Additions whose parts share their scratch memory.
template <class Bind>
Instruction additions(std::unique_ptr<Lora> task, Bind bind) {
  Lora* raw = task.get();
  Instruction instruction = simple(std::move(task), bind);
  instruction.scratch_bytes = [raw] { return Lora::scratch_bytes(raw->parts); };
  instruction.set_scratch = [raw](void* scratch) { raw->set_scratch(scratch); };
  return instruction;
}

}  // namespace

Instruction build(const fields::embed& op) {
  auto task = std::make_unique<Embedding>();
  task->args.width = op.width;
  task->args.vocab_size = op.vocab_size;
  return embedding_of(std::move(task), op.ids, [op](Embedding& t, const Frame& frame) {
    t.args.out = frame.rows(op.out);
    t.args.ids = frame.pointer<int64_t>(op.ids);
    t.args.table = frame.rows(op.table);
    t.args.tokens = frame.tokens;
  });
}

Instruction build(const fields::split_embed& op) {
  auto task = std::make_unique<SplitEmbedding>();
  task->args.panel_stride = op.panel_stride;
  task->args.scheme = op.scheme;
  task->args.width = op.width;
  task->args.vocab_size = op.vocab_size;
  task->args.rotated = op.rotated;
  return embedding_of(std::move(task), op.ids, [op](SplitEmbedding& t, const Frame& frame) {
    t.args.out = frame.rows(op.out);
    t.args.ids = frame.pointer<int64_t>(op.ids);
    t.args.weight = frame.pointer<uint8_t>(op.weight);
    t.args.rest = frame.pointer<int8_t>(op.rest);
    t.args.tokens = frame.tokens;
  });
}

Instruction build(const fields::rms_norm& op) { return norm<RmsNorm>(op); }

Instruction build(const fields::layer_norm& op) { return norm<LayerNorm>(op); }

Instruction build(const fields::linear& op) {
  auto task = std::make_unique<QuantLinear>();
  LinearArgs& a = task->args;
  a.panel_stride = op.panel_stride;
  a.scheme = op.scheme;
  a.in_features = op.in_features;
  a.out_features = op.out_features;
  a.digits = op.digits;
  a.rotated = op.rotated;
  a.bias_type = op.bias.dtype();
  return with_scratch(
      std::move(task),
      [op](QuantLinear& t, const Frame& frame) {
        t.args.x = frame.rows(op.x);
        t.args.out = frame.rows(op.out);
        t.args.residual = frame.rows(op.residual);
        t.args.weight = frame.pointer<uint8_t>(op.weight);
        t.args.bias = frame.address(op.bias);
        t.args.tokens = frame.tokens;
      },
      [](const LinearArgs& args) {
        return QuantLinear::scratch_bytes(args.tokens, args.in_features, args.digits);
      });
}

Instruction build(const fields::gated_linear& op) {
  auto task = std::make_unique<QuantGatedLinear>();
  GatedLinearArgs& a = task->args;
  a.panel_stride = op.panel_stride;
  a.scheme = op.scheme;
  a.in_features = op.in_features;
  a.out_features = op.out_features;
  a.digits = op.digits;
  a.rotated = op.rotated;
  a.activation = op.activation;
  a.bias_type = op.gate_bias.dtype();
  return with_scratch(
      std::move(task),
      [op](QuantGatedLinear& t, const Frame& frame) {
        t.args.x = frame.rows(op.x);
        t.args.out = frame.rows(op.out);
        t.args.weight = frame.pointer<uint8_t>(op.weight);
        t.args.gate_bias = frame.address(op.gate_bias);
        t.args.up_bias = frame.address(op.up_bias);
        t.args.tokens = frame.tokens;
      },
      [](const GatedLinearArgs& args) {
        return QuantGatedLinear::scratch_bytes(args.tokens, args.in_features, args.digits);
      });
}

// An RMSNorm and the only layer that reads it: the rows are normalized while they are quantized.  This saves
// a write and a read of the rows, and one barrier of all threads.
template <class Task, class Fields>
Instruction norm_and_layer(const Fields& op) {
  const std::shared_ptr<Instruction> norm = std::make_shared<Instruction>(build(op.norm));
  Instruction layer = build(op.layer);
  static_cast<Task*>(layer.task.get())->args.input.norm = &static_cast<RmsNorm*>(norm->task.get())->args;
  layer.bind = [norm, bind_layer = layer.bind](const Frame& frame) {
    norm->bind(frame);
    bind_layer(frame);
  };
  return layer;
}

Instruction build(const fields::norm_linear& op) { return norm_and_layer<QuantLinear>(op); }

Instruction build(const fields::norm_gated_linear& op) { return norm_and_layer<QuantGatedLinear>(op); }

Instruction build(const fields::dense_linear& op) {
  auto task = std::make_unique<DenseLinear>();
  task->args.in_features = op.in_features;
  task->args.out_features = op.out_features;
  task->args.bias_type = op.bias.dtype();
  return simple(std::move(task), [op](DenseLinear& t, const Frame& frame) {
    t.args.x = frame.rows(op.x);
    t.args.out = frame.rows(op.out);
    t.args.weight = frame.rows(op.weight);
    t.args.bias = frame.address(op.bias);
    t.args.tokens = frame.tokens;
  });
}

Instruction build(const fields::lora& op) {
  auto task = std::make_unique<Lora>();
  for (const fields::adapted_layer& layer : op.layers) {
    LoraArgs a;
    a.integers = op.integers;
    if (!op.integers) a.type = layer.a.dtype();
    a.slots = op.slots;
    a.most_rank = op.most_rank;
    a.listed = op.listed;
    a.in_features = layer.in_features;
    a.out_features = layer.out_features;
    task->parts.push_back(a);
  }
  return additions(std::move(task), [op](Lora& t, const Frame& frame) {
    for (size_t i = 0; i < op.layers.size(); ++i) {
      const fields::adapted_layer& layer = op.layers[i];
      LoraArgs& a = t.parts[i];
      a.x = frame.rows(layer.x);
      a.out = frame.rows(layer.out);
      a.a = frame.address(layer.a);
      a.b = frame.address(layer.b);
      a.ranks = frame.pointer<int32_t>(layer.ranks);
      a.adapters = frame.pointer<int32_t>(op.adapters);
      a.tokens = frame.tokens;
    }
  });
}

Instruction build(const fields::lora_embed& op) {
  auto task = std::make_unique<Lora>();
  LoraArgs a;
  a.integers = op.integers;
  if (!op.integers) a.type = op.b.dtype();
  a.table_type = op.table.dtype();
  a.slots = op.slots;
  a.most_rank = op.most_rank;
  a.listed = op.listed;
  a.vocab_size = op.vocab_size;
  a.out_features = op.width;
  task->parts.push_back(a);
  return additions(std::move(task), [op](Lora& t, const Frame& frame) {
    LoraArgs& a = t.parts[0];
    a.ids = frame.pointer<int64_t>(op.ids);
    a.out = frame.rows(op.out);
    a.table = frame.address(op.table);
    a.b = frame.address(op.b);
    a.ranks = frame.pointer<int32_t>(op.ranks);
    a.adapters = frame.pointer<int32_t>(op.adapters);
    a.tokens = frame.tokens;
  });
}

Instruction build(const fields::meet& op) {
  auto task = std::make_unique<Meeting>();
  task->communicator = communicator_of(op.communicator);
  return simple(std::move(task), [](Meeting&, const Frame&) {});
}

Instruction build(const fields::gather_columns& op) {
  if (op.out.space == Space::shared) {
    auto meeting = std::make_unique<Meeting>();
    meeting->communicator = communicator_of(op.communicator);
    return simple(std::move(meeting), [](Meeting&, const Frame&) {});
  }
  auto task = std::make_unique<GatherColumns>();
  task->args.communicator = communicator_of(op.communicator);
  for (const fields::rank_part& part : op.parts) task->args.columns.push_back(part.columns);
  return simple(std::move(task), [op](GatherColumns& t, const Frame& frame) {
    t.args.x = frame.rows(op.x);
    t.args.out = frame.rows(op.out);
    t.args.rows = frame.tokens;
  });
}

Instruction build(const fields::moe& op) {
  auto task = std::make_unique<QuantMoe>();
  MoeArgs& a = task->args;
  a.gate_up_expert_stride = op.gate_up_expert_stride;
  a.down_expert_stride = op.down_expert_stride;
  a.gate_up_panel_stride = op.gate_up_panel_stride;
  a.down_panel_stride = op.down_panel_stride;
  a.scheme = op.scheme;
  if (op.communicator != 0) a.communicator = communicator_of(op.communicator);
  for (const fields::expert_part& part : op.ranks) {
    a.inner_columns.push_back(part.inner);
    a.outer_columns.push_back(part.outer);
  }
  for (const fields::expert_count& part : op.rank_experts) a.rank_experts.push_back(part.experts);
  a.experts = op.experts;
  a.identity_experts = op.identity_experts;
  a.top_k = op.top_k;
  a.hidden = op.hidden;
  a.intermediate = op.intermediate;
  a.activation = op.activation;
  a.limit = op.limit;
  a.up_limit = op.up_limit;
  a.gated = op.gated;
  a.weigh_input = op.weigh_input;
  a.rotated = op.rotated;
  a.bias_type = op.gate_up_bias.dtype();
  for (const fields::adapted_experts& lora : op.lora) {
    a.lora.slots = lora.slots;
    a.lora.experts = op.experts;
    a.lora.listed = lora.listed;
    a.lora.integers = lora.integers;
    if (!lora.integers) a.lora.type = lora.inner_a.dtype();
    a.lora.inner.most_rank = lora.inner_rank;
    a.lora.outer.most_rank = lora.outer_rank;
    a.lora.inner.in_features = a.lora.outer.out_features = op.hidden;
    a.lora.inner.out_features = a.lora.outer.in_features = op.intermediate;
    a.lora.inner.parts = op.gated ? 2 : 1;
  }
  return with_scratch(
      std::move(task),
      [op](QuantMoe& t, const Frame& frame) {
        t.args.x = frame.rows(op.x);
        t.args.out = frame.rows(op.out);
        t.args.ids = frame.pointer<int32_t>(op.ids);
        t.args.weights = frame.pointer<float>(op.weights);
        t.args.gate_up = frame.pointer<uint8_t>(op.gate_up);
        t.args.down = frame.pointer<uint8_t>(op.down);
        t.args.gate_up_bias = frame.address(op.gate_up_bias);
        t.args.down_bias = frame.address(op.down_bias);
        t.args.tokens = frame.tokens;
        for (const fields::adapted_experts& lora : op.lora) {
          ExpertAdapters& to = t.args.lora;
          to.adapters = frame.pointer<int32_t>(lora.adapters);
          to.inner.a = frame.address(lora.inner_a);
          to.inner.b = frame.address(lora.inner_b);
          to.inner.ranks = frame.pointer<int32_t>(lora.inner_ranks);
          to.outer.a = frame.address(lora.outer_a);
          to.outer.b = frame.address(lora.outer_b);
          to.outer.ranks = frame.pointer<int32_t>(lora.outer_ranks);
        }
      },
      [](const MoeArgs& args) { return QuantMoe::scratch_bytes(args); });
}

Instruction build(const fields::route& op) {
  auto task = std::make_unique<MoeRoute>();
  RouteArgs& a = task->args;
  a.experts = op.experts;
  a.top_k = op.top_k;
  a.groups = op.groups;
  a.top_k_groups = op.top_k_groups;
  a.scoring = op.scoring;
  a.renormalize = op.renormalize;
  a.scale = op.scale;
  a.epsilon = op.epsilon;
  a.vocabulary = op.vocabulary;
  return simple(std::move(task), [op](MoeRoute& t, const Frame& frame) {
    t.args.logits = frame.rows(op.logits);
    t.args.weights = frame.pointer<float>(op.weights);
    t.args.ids = frame.pointer<int32_t>(op.ids);
    t.args.correction_bias = frame.pointer<float>(op.correction_bias);
    t.args.choices = frame.pointer<int32_t>(op.choices);
    t.args.token_ids = frame.pointer<int64_t>(op.token_ids);
    t.args.tokens = frame.tokens;
  });
}

Instruction build(const fields::rope_table& op) {
  auto task = std::make_unique<RopeTable>();
  task->args.half = op.half;
  task->args.numbers = op.numbers;
  task->args.scaling = op.scaling;
  task->args.offset = -op.before;
  return simple(std::move(task), [op](RopeTable& t, const Frame& frame) {
    t.args.positions = frame.pointer<int64_t>(op.positions);
    t.args.inv_freq = frame.pointer<float>(op.inv_freq);
    t.args.axes = frame.pointer<int64_t>(op.axes);
    t.args.cos = frame.pointer<float>(op.cos);
    t.args.sin = frame.pointer<float>(op.sin);
    t.args.tokens = frame.tokens;
  });
}

Instruction build(const fields::rope& op) {
  auto task = std::make_unique<Rope>();
  RopeArgs& a = task->args;
  a.q_heads = op.q_heads;
  a.k_heads = op.k_heads;
  a.head_size = op.head_size;
  a.rotary = op.rotary;
  a.pairs = op.pairs;
  a.q_head_stride = op.q_head_stride;
  a.k_head_stride = op.k_head_stride;
  return simple(std::move(task), [op](Rope& t, const Frame& frame) {
    t.args.q = frame.rows(op.q);
    t.args.k = frame.rows(op.k);
    t.args.cos = frame.pointer<float>(op.cos);
    t.args.sin = frame.pointer<float>(op.sin);
    t.args.tokens = frame.tokens;
  });
}

Instruction build(const fields::kv_write& op) {
  auto task = std::make_unique<KvWrite>();
  task->args.head_size = op.head_size;
  return simple(std::move(task), [op, cache = LayerCache(op)](KvWrite& t, const Frame& frame) {
    KvWriteArgs& a = t.args;
    a.k = frame.rows(op.k);
    a.v = frame.rows(op.v);
    cache.bind(frame, a);
    a.slots = frame.pointer<int64_t>(op.slots);
    a.tokens = frame.tokens;
  });
}

Instruction build(const fields::attention& op) {
  auto task = std::make_unique<PagedAttention>();
  AttentionArgs& a = task->args;
  a.q_heads = op.q_heads;
  a.groups = {op.group_size, op.skipped_heads};
  a.head_size = op.head_size;
  a.window = op.window;
  a.ahead = op.ahead;
  a.scale = op.scale;
  a.softcap = op.softcap;
  a.rank = op.rank;
  a.extent = op.extent;
  a.reach = op.reach;
  Instruction instruction = with_scratch(
      std::move(task),
      [op, cache = LayerCache(op)](PagedAttention& t, const Frame& frame) {
        AttentionArgs& a = t.args;
        a.q = frame.rows(op.q);
        a.out = frame.rows(op.out);
        a.sinks = frame.pointer<float>(op.sinks);
        a.sink_stride = op.sinks.space == Space::constant ? 0 : op.sinks.stride;
        a.relative = frame.pointer<float>(op.relative);
        a.relative_stride = op.relative.stride;
        a.profiles = frame.pointer<float>(op.profiles);
        a.biases = frame.pointer<float>(op.biases);
#define ARGUMENT(name) a.name = frame.pointer<float>(op.name);
        ARMLLM_PER_HEAD(ARGUMENT)
#undef ARGUMENT
        a.later = frame.pointer<int64_t>(op.later);
        cache.bind(frame, a);
        bind_sequences(frame, op, a);
        a.threads = team_size();
      },
      [](const AttentionArgs& args) { return PagedAttention::scratch_bytes(args); });
  instruction.still_valid = [&a] { return a.max_seq_len == length_bound(a); };
  return instruction;
}

Instruction build(const fields::gated_act& op) {
  auto task = std::make_unique<GatedAct>();
  task->args.width = op.width;
  task->args.activation = op.activation;
  return simple(std::move(task), [op](GatedAct& t, const Frame& frame) {
    t.args.gate = frame.rows(op.gate);
    t.args.up = frame.rows(op.up);
    t.args.out = frame.rows(op.out);
    t.args.rows = frame.tokens;
  });
}

Instruction build(const fields::add& op) {
  auto task = std::make_unique<Add>();
  task->args.width = op.width;
  task->args.factor = op.factor;
  return simple(std::move(task), [op](Add& t, const Frame& frame) {
    t.args.a = frame.rows(op.a);
    t.args.b = frame.rows(op.b);
    t.args.row_factor = frame.rows(op.row_factor);
    t.args.out = frame.rows(op.out);
    t.args.rows = frame.tokens;
  });
}

Instruction build(const fields::pointwise& op) {
  auto task = std::make_unique<Pointwise>();
  PointwiseArgs& args = task->args;
  for (const fields::operand& x : op.operands) {
    PointwiseOperand operand;
    operand.whole_numbers = x.x.type == ElementType::i64;
    if (!operand.whole_numbers) operand.type = x.x.dtype();
    operand.token_stride = x.by_token ? x.x.stride : 0;
    operand.head_stride = x.head_stride;
    operand.column_stride = x.column_stride;
    args.operands.push_back(operand);
  }
  for (const fields::step& s : op.steps) args.steps.push_back({s.op, s.a, s.b, s.c, s.number});
  args.out_type = op.out.dtype();
  args.out_stride = op.out.stride;
  args.out_head_stride = op.out_head_stride;
  args.out_column_stride = op.out_column_stride;
  args.heads = op.heads;
  args.width = op.width;
  return simple(std::move(task), [op](Pointwise& t, const Frame& frame) {
    for (size_t i = 0; i < op.operands.size(); ++i) t.args.operands[i].data = frame.address(op.operands[i].x);
    t.args.out = frame.address(op.out);
    t.args.tokens = frame.tokens;
  });
}

Instruction build(const fields::sinkhorn& op) {
  auto task = std::make_unique<Sinkhorn>();
  task->args.size = op.size;
  task->args.rounds = op.rounds;
  task->args.eps = op.eps;
  return simple(std::move(task), [op](Sinkhorn& t, const Frame& frame) {
    t.args.x = frame.rows(op.x);
    t.args.out = frame.rows(op.out);
    t.args.tokens = frame.tokens;
  });
}

Instruction build(const fields::reorder& op) {
  auto task = std::make_unique<Reorder>();
  task->args.width = op.width;
  return simple(std::move(task), [op](Reorder& t, const Frame& frame) {
    t.args.in = frame.rows(op.x);
    t.args.permutation = frame.pointer<int32_t>(op.permutation);
    t.args.out = frame.rows(op.out);
    t.args.rows = frame.tokens;
  });
}

Instruction build(const fields::best_tokens& op) {
  auto task = std::make_unique<BestTokens>();
  task->args.vocab_size = op.vocab_size;
  task->args.first = op.first;
  if (op.communicator != 0) task->args.communicator = communicator_of(op.communicator);
  return simple(std::move(task), [op](BestTokens& t, const Frame& frame) {
    t.args.logits = frame.rows(op.logits);
    t.args.ids = frame.pointer<int64_t>(op.ids);
    t.args.rows = frame.tokens;
    t.resize();
  });
}

Instruction decode(int64_t opcode, Reader& reader) {
  switch (static_cast<Opcode>(opcode)) {
#define INSTRUCTION(opcode, members)           \
  case Opcode::opcode: {                       \
    fields::opcode op;                         \
    read(reader, op);                          \
    check_fields(Checks(reader.bounds()), op); \
    return build(op);                          \
  }
#include "plan/instructions.def"
  }
  STD_TORCH_CHECK(false, "plan: unknown opcode ", opcode);
}

}  // namespace armllm
