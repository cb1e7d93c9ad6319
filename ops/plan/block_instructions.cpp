// Instructions for attention to chosen blocks of positions.
#include "attention/block_attention.h"
#include "plan/instruction_builders.h"
#include "plan/layer_cache.h"
#include "select/select_blocks.h"

namespace armllm {

Instruction build(const fields::select_blocks& op) {
  auto task = std::make_unique<SelectBlocks>();
  SelectBlocks* set = task.get();
  BlockSelectArgs& args = set->args;
  args.heads = op.heads;
  args.head_size = op.head_size;
  args.head_stride = op.head_stride;
  args.span = op.span;
  args.most = op.top_k;
  args.nearest = op.nearest;
  Instruction instruction = with_scratch(
      std::move(task),
      [op](SelectBlocks& t, const Frame& frame) {
        BlockSelectArgs& a = t.args;
        const Tensor& cache = frame.input(op.cache);
        a.q = frame.rows(op.q);
        a.out = frame.pointer<int32_t>(op.out);
        a.keys = layer_of(cache, op.layer);
        a.key_type = dtype_of(cache, "cache");
        a.block_size = cache.size(2);
        bind_sequences(frame, op, a);
      },
      [](const BlockSelectArgs& a) { return SelectBlocks::scratch_bytes(a); });
  instruction.still_valid = [set] { return set->args.max_seq_len == length_bound(set->args); };
  return instruction;
}

Instruction build(const fields::block_attention& op) {
  auto task = std::make_unique<BlockAttention>();
  BlockAttention* set = task.get();
  AttentionArgs& args = set->attention.args;
  args.q_heads = op.q_heads;
  args.head_size = op.head_size;
  args.scale = op.scale;
  set->choice.heads = op.choosers;
  set->choice.span = op.span;
  set->choice.most = op.top_k;
  Instruction instruction =
      simple(std::move(task), [op, cache = LayerCache(op)](BlockAttention& t, const Frame& frame) {
        AttentionArgs& a = t.attention.args;
        a.q = frame.rows(op.q);
        a.out = frame.rows(op.out);
        cache.bind(frame, a);
        bind_sequences(frame, op, a);
        a.threads = team_size();
        t.choose(frame.pointer<int32_t>(op.chosen));
      });
  instruction.still_valid = [set] {
    AttentionArgs given = set->attention.args;
    given.sequences = set->choice.sequences;
    return set->choice.max_seq_len == length_bound(given);
  };
  instruction.scratch_bytes = [set] { return set->scratch_bytes(); };
  instruction.set_scratch = [set](void* scratch) { set->set_scratch(scratch); };
  return instruction;
}

}  // namespace armllm
