// select_blocks
#include "select/select_blocks.h"
#include "select/selection_args.h"

namespace armllm {
namespace {

Tensor select_blocks(Tensor q, Tensor keys, Tensor block_table, Tensor query_start, Tensor seq_lens,
                     int64_t max_seq_len, int64_t span, int64_t most, int64_t nearest) {
  STD_TORCH_CHECK(span > 0 && span % kKeyRows == 0 && span <= kMostSpan, "span is ", span,
                  "; it must be a multiple of ", kKeyRows, ", of at most ", kMostSpan);
  STD_TORCH_CHECK(nearest >= 0, "nearest is ", nearest, "; it must not be negative");
  SelectBlocks set;
  BlockSelectArgs& a = set.args;
  SelectionTensors tensors{q, keys, block_table, query_start, seq_lens};
  set_selection_args(a, tensors, max_seq_len, most);
  a.span = span;
  a.nearest = nearest;
  Tensor out = new_tensor(q, {a.tokens, a.heads, most}, ScalarType::Int);
  if (a.tokens == 0) return out;
  a.out = static_cast<int32_t*>(out.data_ptr());
  const Scratch scratch(SelectBlocks::scratch_bytes(a));
  a.scratch = scratch.data();
  run(set);
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("select_blocks", TORCH_BOX(&armllm::select_blocks)); }
