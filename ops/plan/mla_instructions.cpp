// Instructions of latent attention, and of linear layers with a weight of each head's own.
#include "attention/check_args.h"
#include "linear/heads.h"
#include "mla/mla.h"
#include "plan/instruction_builders.h"

namespace armllm {
namespace {

template <class Task>
void read_heads(Task& task, Reader& in) {
  task.args.heads = in.integer();
  task.args.in_features = in.integer();
  task.args.out_features = in.integer();
  task.args.x_head_stride = in.integer();
}

template <class Task>
void bind_heads(Task& task, const Frame& f, const View& x, const View& out) {
  task.args.x = f.rows(x);
  task.args.out = f.rows(out);
  task.args.tokens = f.tokens;
}

char* layer_of(const Tensor& all, int64_t layer) {
  return static_cast<char*>(all.data_ptr()) + layer * all.stride(0) * size_of(dtype_of(all, "cache"));
}

}  // namespace

Instruction int8_heads_linear(Reader& in) {
  auto task = std::make_unique<QuantHeads>();
  const View x = in.view(), out = in.view(), weight = in.view();
  read_heads(*task, in);
  task->args.head_stride = in.integer();
  task->args.panel_stride = in.integer();
  return with_scratch(
      std::move(task),
      [=](QuantHeads& t, const Frame& f) {
        bind_heads(t, f, x, out);
        t.args.weight = f.pointer<uint8_t>(weight);
      },
      [](const QuantHeadsArgs& args) { return QuantHeads::scratch_bytes(args); });
}

Instruction dense_heads_linear(Reader& in) {
  auto task = std::make_unique<DenseHeads>();
  const View x = in.view(), out = in.view(), weight = in.view();
  read_heads(*task, in);
  return simple(std::move(task), [=](DenseHeads& t, const Frame& f) {
    bind_heads(t, f, x, out);
    t.args.weight = f.rows(weight);
  });
}

Instruction mla_write(Reader& in) {
  auto task = std::make_unique<LatentWrite>();
  const View latent = in.view(), rope = in.view(), slots = in.view();
  const int64_t cache = in.integer(), layer = in.integer();
  task->args.rank = in.integer();
  task->args.rope_size = in.integer();
  return simple(std::move(task), [=](LatentWrite& t, const Frame& f) {
    LatentWriteArgs& a = t.args;
    a.latent = f.rows(latent);
    a.rope = f.rows(rope);
    a.cache = layer_of(f.input(cache), layer);
    a.cache_type = dtype_of(f.input(cache), "cache");
    a.slots = f.pointer<int64_t>(slots);
    a.tokens = f.tokens;
  });
}

Instruction mla_attention(Reader& in) {
  auto task = std::make_unique<LatentAttention>();
  LatentAttention* set = task.get();
  const View latent = in.view(), rope = in.view(), out = in.view();
  const int64_t cache = in.integer(), layer = in.integer();
  const int64_t table = in.integer(), starts = in.integer(), lengths = in.integer();
  AttentionArgs& args = set->attention.args;
  args.q_heads = in.integer();
  set->latent.size = in.integer();
  set->rope.size = in.integer();
  set->latent.head_stride = in.integer();
  set->rope.head_stride = in.integer();
  args.scale = in.real();
  args.latent = true;
  args.kv_heads = 1;
  args.value_size = set->latent.size;
  args.head_size = set->latent.size + set->rope.size;
  Instruction made = simple(std::move(task), [=](LatentAttention& t, const Frame& f) {
    AttentionArgs& a = t.attention.args;
    const Tensor& latents = f.input(cache);
    t.latent.data = f.address(latent);
    t.latent.token_stride = latent.stride;
    t.rope.data = f.address(rope);
    t.rope.token_stride = rope.stride;
    a.out = f.rows(out);
    a.k_cache = layer_of(latents, layer);
    a.cache_type = cache_type_of(latents);
    a.block_size = latents.size(2);
    a.block_table = static_cast<const int32_t*>(f.input(table).data_ptr());
    a.block_table_stride = f.input(table).size(1);
    a.query_start = static_cast<const int32_t*>(f.input(starts).data_ptr());
    a.seq_lens = static_cast<const int32_t*>(f.input(lengths).data_ptr());
    a.sequences = f.input(lengths).numel();
    a.max_seq_len = length_bound(a);
    a.tokens = f.tokens;
    a.threads = team_size();
  });
  made.fits = [set] { return set->attention.args.max_seq_len == length_bound(set->attention.args); };
  // The two parts of a query are made by two instructions and never lie side by side: they are joined in scratch.
  const DType type = static_cast<DType>(latent.type);
  made.scratch_bytes = [set, type] {
    const AttentionArgs& a = set->attention.args;
    return round_up(PagedAttention::scratch_bytes(a), 64) +
           a.tokens * a.q_heads * a.head_size * size_of(type);
  };
  made.set_scratch = [set, type](void* scratch) {
    AttentionArgs& a = set->attention.args;
    a.scratch = scratch;
    set->joined = static_cast<char*>(scratch) + round_up(PagedAttention::scratch_bytes(a), 64);
    a.q = Rows{set->joined, a.q_heads * a.head_size, type};
  };
  return made;
}

}  // namespace armllm
