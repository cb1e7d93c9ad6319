// Opcodes: from integers to task sets.  The order of the fields is that of torch_armllm/plan/make.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <utility>

#include "activation/activation.h"
#include "attention/check_args.h"
#include "attention/paged_attention.h"
#include "embedding/embedding.h"
#include "linear/quant_linear.h"
#include "moe/moe.h"
#include "norm/norm.h"
#include "plan/elementwise.h"
#include "plan/instruction_builders.h"
#include "plan/plan.h"
#include "rope/rope.h"
#include "sample/best_tokens.h"

namespace armllm {
namespace {

enum Opcode : int64_t {
  kEmbed,
  kRmsNorm,
  kLayerNorm,
  kLinear,
  kGatedLinear,
  kDenseLinear,
  kMoe,
  kRoute,
  kRopeTable,
  kRope,
  kKvWrite,
  kAttention,
  kGatedAct,
  kAdd,
  kSplitEmbed,
  kNormLinear,
  kNormGatedLinear,
  kInt8Heads,
  kDenseHeads,
  kMlaWrite,
  kMlaAttention,
  kReorder,
  kBestTokens,
};

template <class Args>
const int64_t* unknown_id(const Args& args) {
  return std::find_if(args.ids, args.ids + args.tokens,
                      [&](int64_t id) { return id < 0 || id >= args.vocabulary; });
}

// An embedding, which checks the ids of every step, unless instructions before it make them.
template <class Task, class Bind>
Instruction of_ids(std::unique_ptr<Task> task, const View& ids, Bind bind) {
  Task* raw = task.get();
  if (ids.space != Space::input) return simple(std::move(task), bind);
  Instruction made = simple(std::move(task), [bind](Task& t, const Frame& f) {
    bind(t, f);
    const int64_t* wrong = unknown_id(t.args);
    STD_TORCH_CHECK(wrong == t.args.ids + t.args.tokens, "token ", wrong - t.args.ids, " has id ", *wrong,
                    ", but the vocabulary is 0 to ", t.args.vocabulary - 1);
  });
  made.fits = [raw] { return unknown_id(raw->args) == raw->args.ids + raw->args.tokens; };
  return made;
}

Instruction embed(Reader& in) {
  auto task = std::make_unique<Embedding>();
  const View out = in.view(), ids = in.view(), table = in.view();
  task->args.width = in.integer();
  task->args.vocabulary = in.integer();
  return of_ids(std::move(task), ids, [=](Embedding& t, const Frame& f) {
    t.args.out = f.rows(out);
    t.args.ids = f.pointer<int64_t>(ids);
    t.args.table = f.rows(table);
    t.args.tokens = f.tokens;
  });
}

Instruction split_embed(Reader& in) {
  auto task = std::make_unique<SplitEmbedding>();
  const View out = in.view(), ids = in.view(), weight = in.view(), rest = in.view();
  SplitEmbeddingArgs& a = task->args;
  a.panel_stride = in.integer();
  a.width = in.integer();
  a.vocabulary = in.integer();
  return of_ids(std::move(task), ids, [=](SplitEmbedding& t, const Frame& f) {
    t.args.out = f.rows(out);
    t.args.ids = f.pointer<int64_t>(ids);
    t.args.weight = f.pointer<uint8_t>(weight);
    t.args.rest = f.pointer<int8_t>(rest);
    t.args.tokens = f.tokens;
  });
}

template <class Norm>
Instruction norm(Reader& in) {
  auto task = std::make_unique<Norm>();
  const View x = in.view(), out = in.view(), residual = in.view(), sum = in.view();
  const View weight = in.view(), bias = in.view();
  const int64_t per_token = in.integer();
  task->args.per_token = per_token;
  task->args.width = in.integer();
  task->args.eps = in.real();
  task->args.weight_offset = in.real();
  task->args.weight_type = static_cast<DType>(weight.type);
  return simple(std::move(task), [=](Norm& t, const Frame& f) {
    t.args.x = f.rows(x);
    t.args.out = f.rows(out);
    t.args.residual = f.rows(residual);
    t.args.sum = f.rows(sum);
    t.args.weight = f.address(weight);
    t.args.bias = f.address(bias);
    t.args.rows = f.tokens * per_token;
  });
}

Instruction linear(Reader& in) {
  auto task = std::make_unique<QuantLinear>();
  const View x = in.view(), out = in.view(), residual = in.view(), weight = in.view(), bias = in.view();
  LinearArgs& a = task->args;
  a.panel_stride = in.integer();
  a.scheme = static_cast<Scheme>(in.integer());
  a.in_features = in.integer();
  a.out_features = in.integer();
  a.bias_type = static_cast<DType>(bias.type);
  return with_scratch(
      std::move(task),
      [=](QuantLinear& t, const Frame& f) {
        t.args.x = f.rows(x);
        t.args.out = f.rows(out);
        t.args.residual = f.rows(residual);
        t.args.weight = f.pointer<uint8_t>(weight);
        t.args.bias = f.address(bias);
        t.args.tokens = f.tokens;
      },
      [](const LinearArgs& args) { return QuantLinear::scratch_bytes(args.tokens, args.in_features); });
}

Instruction gated_linear(Reader& in) {
  auto task = std::make_unique<QuantGatedLinear>();
  const View x = in.view(), out = in.view(), weight = in.view(), gate_bias = in.view(), up_bias = in.view();
  GatedLinearArgs& a = task->args;
  a.panel_stride = in.integer();
  a.scheme = static_cast<Scheme>(in.integer());
  a.in_features = in.integer();
  a.out_features = in.integer();
  a.activation = static_cast<Activation>(in.integer());
  a.bias_type = static_cast<DType>(gate_bias.type);
  return with_scratch(
      std::move(task),
      [=](QuantGatedLinear& t, const Frame& f) {
        t.args.x = f.rows(x);
        t.args.out = f.rows(out);
        t.args.weight = f.pointer<uint8_t>(weight);
        t.args.gate_bias = f.address(gate_bias);
        t.args.up_bias = f.address(up_bias);
        t.args.tokens = f.tokens;
      },
      [](const GatedLinearArgs& args) {
        return QuantGatedLinear::scratch_bytes(args.tokens, args.in_features);
      });
}

// An RMSNorm and the only layer that reads it: the rows are normalized while they are quantized, which saves writing
// and reading them, and a wait of all threads.
template <class Task>
Instruction after_norm(Reader& in, Instruction (*layer)(Reader&)) {
  const std::shared_ptr<Instruction> first = std::make_shared<Instruction>(norm<RmsNorm>(in));
  Instruction made = layer(in);
  static_cast<Task*>(made.task.get())->args.input.norm = &static_cast<RmsNorm*>(first->task.get())->args;
  made.bind = [first, second = made.bind](const Frame& frame) {
    first->bind(frame);
    second(frame);
  };
  return made;
}

Instruction dense_linear(Reader& in) {
  auto task = std::make_unique<DenseLinear>();
  const View x = in.view(), out = in.view(), weight = in.view(), bias = in.view();
  task->args.in_features = in.integer();
  task->args.out_features = in.integer();
  task->args.bias_type = static_cast<DType>(bias.type);
  return simple(std::move(task), [=](DenseLinear& t, const Frame& f) {
    t.args.x = f.rows(x);
    t.args.out = f.rows(out);
    t.args.weight = f.rows(weight);
    t.args.bias = f.address(bias);
    t.args.tokens = f.tokens;
  });
}

Instruction moe(Reader& in) {
  auto task = std::make_unique<QuantMoe>();
  const View x = in.view(), out = in.view(), ids = in.view(), weights = in.view();
  const View gate_up = in.view(), down = in.view(), gate_up_bias = in.view(), down_bias = in.view();
  MoeArgs& a = task->args;
  a.gate_up_expert_stride = in.integer();
  a.down_expert_stride = in.integer();
  a.gate_up_panel_stride = in.integer();
  a.down_panel_stride = in.integer();
  a.scheme = static_cast<Scheme>(in.integer());
  a.experts = in.integer();
  a.top_k = in.integer();
  a.hidden = in.integer();
  a.intermediate = in.integer();
  a.activation = static_cast<Activation>(in.integer());
  a.limit = in.real();
  a.gated = in.integer() != 0;
  a.weigh_input = in.integer() != 0;
  a.bias_type = static_cast<DType>(gate_up_bias.type);
  return with_scratch(
      std::move(task),
      [=](QuantMoe& t, const Frame& f) {
        t.args.x = f.rows(x);
        t.args.out = f.rows(out);
        t.args.ids = f.pointer<int32_t>(ids);
        t.args.weights = f.pointer<float>(weights);
        t.args.gate_up = f.pointer<uint8_t>(gate_up);
        t.args.down = f.pointer<uint8_t>(down);
        t.args.gate_up_bias = f.address(gate_up_bias);
        t.args.down_bias = f.address(down_bias);
        t.args.tokens = f.tokens;
      },
      [](const MoeArgs& args) { return QuantMoe::scratch_bytes(args); });
}

Instruction route(Reader& in) {
  auto task = std::make_unique<MoeRoute>();
  const View logits = in.view(), weights = in.view(), ids = in.view(), correction = in.view();
  RouteArgs& a = task->args;
  a.experts = in.integer();
  a.top_k = in.integer();
  a.groups = in.integer();
  a.top_k_groups = in.integer();
  a.scoring = static_cast<Scoring>(in.integer());
  a.renormalize = in.integer() != 0;
  a.scale = in.real();
  return simple(std::move(task), [=](MoeRoute& t, const Frame& f) {
    t.args.logits = f.rows(logits);
    t.args.weights = f.pointer<float>(weights);
    t.args.ids = f.pointer<int32_t>(ids);
    t.args.correction_bias = f.pointer<float>(correction);
    t.args.tokens = f.tokens;
  });
}

Instruction rope_table(Reader& in) {
  auto task = std::make_unique<RopeTable>();
  const View positions = in.view(), inv_freq = in.view(), cos = in.view(), sin = in.view();
  task->args.half = in.integer();
  task->args.scaling = in.real();
  return simple(std::move(task), [=](RopeTable& t, const Frame& f) {
    t.args.positions = f.pointer<int64_t>(positions);
    t.args.inv_freq = f.pointer<float>(inv_freq);
    t.args.cos = f.pointer<float>(cos);
    t.args.sin = f.pointer<float>(sin);
    t.args.tokens = f.tokens;
  });
}

Instruction rope(Reader& in) {
  auto task = std::make_unique<Rope>();
  const View q = in.view(), k = in.view(), cos = in.view(), sin = in.view();
  RopeArgs& a = task->args;
  a.q_heads = in.integer();
  a.k_heads = in.integer();
  a.head_size = in.integer();
  a.rotary = in.integer();
  a.pairs = static_cast<RopePairs>(in.integer());
  a.q_head_stride = in.integer();
  a.k_head_stride = in.integer();
  return simple(std::move(task), [=](Rope& t, const Frame& f) {
    t.args.q = f.rows(q);
    t.args.k = f.rows(k);
    t.args.cos = f.pointer<float>(cos);
    t.args.sin = f.pointer<float>(sin);
    t.args.tokens = f.tokens;
  });
}

// The caches of all layers are two tensors (layers, blocks, kv heads, …), and two more of an int8 cache's scales; a
// layer's are slices of them.
struct LayerCache {
  int64_t k, v, layer, k_scales, v_scales;  // inputs; −1: none

  explicit LayerCache(Reader& in) {
    k = in.integer();
    v = in.integer();
    layer = in.integer();
    k_scales = in.integer();
    v_scales = in.integer();
  }
  static char* slice(const Tensor& all, int64_t layer, int64_t size) {
    return static_cast<char*>(all.data_ptr()) + layer * all.stride(0) * size;
  }
  template <class Args>
  void bind(const Frame& f, Args& a) const {
    const Tensor &keys = f.input(k), &values = f.input(v);
    a.cache_type = cache_type_of(keys);
    a.k_cache = slice(keys, layer, size_of(a.cache_type));
    a.v_cache = slice(values, layer, size_of(a.cache_type));
    if (k_scales >= 0) {
      a.k_scales = reinterpret_cast<float*>(slice(f.input(k_scales), layer, sizeof(float)));
      a.v_scales = reinterpret_cast<float*>(slice(f.input(v_scales), layer, sizeof(float)));
    }
    a.kv_heads = keys.size(2);
    a.block_size = keys.size(4);
    a.value_size = values.size(4);
  }
};

Instruction kv_write(Reader& in) {
  auto task = std::make_unique<KvWrite>();
  const View k = in.view(), v = in.view(), slots = in.view();
  const LayerCache cache(in);
  task->args.head_size = in.integer();
  return simple(std::move(task), [=](KvWrite& t, const Frame& f) {
    KvWriteArgs& a = t.args;
    a.k = f.rows(k);
    a.v = f.rows(v);
    cache.bind(f, a);
    a.slots = f.pointer<int64_t>(slots);
    a.tokens = f.tokens;
  });
}

Instruction attention(Reader& in) {
  auto task = std::make_unique<PagedAttention>();
  const View q = in.view(), out = in.view(), sinks = in.view();
  const LayerCache cache(in);
  const int64_t table = in.integer(), starts = in.integer(), lengths = in.integer();
  AttentionArgs& a = task->args;
  a.q_heads = in.integer();
  a.head_size = in.integer();
  a.window = in.integer();
  a.scale = in.real();
  a.softcap = in.real();
  Instruction made = with_scratch(
      std::move(task),
      [=](PagedAttention& t, const Frame& f) {
        AttentionArgs& a = t.args;
        a.q = f.rows(q);
        a.out = f.rows(out);
        a.sinks = f.pointer<float>(sinks);
        cache.bind(f, a);
        a.block_table = static_cast<const int32_t*>(f.input(table).data_ptr());
        a.block_table_stride = f.input(table).size(1);
        a.query_start = static_cast<const int32_t*>(f.input(starts).data_ptr());
        a.seq_lens = static_cast<const int32_t*>(f.input(lengths).data_ptr());
        a.sequences = f.input(lengths).numel();
        a.max_seq_len = length_bound(a);
        a.tokens = f.tokens;
        a.threads = team_size();
      },
      [](const AttentionArgs& args) { return PagedAttention::scratch_bytes(args); });
  made.fits = [&a] { return a.max_seq_len == length_bound(a); };
  return made;
}

Instruction gated_act(Reader& in) {
  auto task = std::make_unique<GatedAct>();
  const View gate = in.view(), up = in.view(), out = in.view();
  task->args.width = in.integer();
  task->args.activation = static_cast<Activation>(in.integer());
  return simple(std::move(task), [=](GatedAct& t, const Frame& f) {
    t.args.gate = f.rows(gate);
    t.args.up = f.rows(up);
    t.args.out = f.rows(out);
    t.args.rows = f.tokens;
  });
}

Instruction add(Reader& in) {
  auto task = std::make_unique<Add>();
  const View a = in.view(), b = in.view(), out = in.view(), by = in.view();
  task->args.width = in.integer();
  task->args.factor = in.real();
  return simple(std::move(task), [=](Add& t, const Frame& f) {
    t.args.a = f.rows(a);
    t.args.b = f.rows(b);
    t.args.by = f.rows(by);
    t.args.out = f.rows(out);
    t.args.rows = f.tokens;
  });
}

Instruction reorder(Reader& in) {
  auto task = std::make_unique<Reorder>();
  const View rows = in.view(), order = in.view(), out = in.view();
  task->args.width = in.integer();
  return simple(std::move(task), [=](Reorder& t, const Frame& f) {
    t.args.in = f.rows(rows);
    t.args.order = f.pointer<int32_t>(order);
    t.args.out = f.rows(out);
    t.args.rows = f.tokens;
  });
}

Instruction best_tokens(Reader& in) {
  auto task = std::make_unique<BestTokens>();
  const View logits = in.view(), ids = in.view();
  task->args.vocabulary = in.integer();
  return simple(std::move(task), [=](BestTokens& t, const Frame& f) {
    t.args.logits = f.rows(logits);
    t.args.ids = f.pointer<int64_t>(ids);
    t.args.rows = f.tokens;
    t.resize();
  });
}

}  // namespace

Instruction decode(int64_t opcode, Reader& in) {
  switch (opcode) {
    case kEmbed:
      return embed(in);
    case kRmsNorm:
      return norm<RmsNorm>(in);
    case kLayerNorm:
      return norm<LayerNorm>(in);
    case kLinear:
      return linear(in);
    case kGatedLinear:
      return gated_linear(in);
    case kNormLinear:
      return after_norm<QuantLinear>(in, linear);
    case kNormGatedLinear:
      return after_norm<QuantGatedLinear>(in, gated_linear);
    case kDenseLinear:
      return dense_linear(in);
    case kMoe:
      return moe(in);
    case kRoute:
      return route(in);
    case kRopeTable:
      return rope_table(in);
    case kRope:
      return rope(in);
    case kKvWrite:
      return kv_write(in);
    case kAttention:
      return attention(in);
    case kGatedAct:
      return gated_act(in);
    case kAdd:
      return add(in);
    case kSplitEmbed:
      return split_embed(in);
    case kInt8Heads:
      return int8_heads_linear(in);
    case kDenseHeads:
      return dense_heads_linear(in);
    case kMlaWrite:
      return mla_write(in);
    case kMlaAttention:
      return mla_attention(in);
    case kReorder:
      return reorder(in);
    case kBestTokens:
      return best_tokens(in);
    default:
      STD_TORCH_CHECK(false, "plan: unknown opcode ", opcode);
  }
}

}  // namespace armllm
