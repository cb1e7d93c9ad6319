// select_blocks
#include "attention/check_args.h"
#include "runtime/tensor_args.h"
#include "select/select_blocks.h"

namespace armllm {
namespace {

Tensor select_blocks(Tensor q, Tensor keys, Tensor block_table, Tensor query_start, Tensor seq_lens,
                     int64_t max_seq_len, int64_t span, int64_t most, int64_t nearest) {
  STD_TORCH_CHECK(q.dim() == 3 && q.size(1) > 0 && q.size(2) > 0,
                  "q must have shape (tokens, heads, head size) with at least one head and element, not ",
                  shape_of(q));
  const int64_t tokens = q.size(0), heads = q.size(1), head_size = q.size(2);
  STD_TORCH_CHECK(keys.dim() == 3 && keys.size(2) == head_size && keys.is_contiguous(),
                  "keys must be contiguous of shape (blocks, block size, ", head_size, "), not ",
                  shape_of(keys));
  const int64_t block_size = keys.size(1);
  STD_TORCH_CHECK(block_size > 0 && block_size % kKeyLanes == 0 && kSplit % block_size == 0, "block size ",
                  block_size, " is not one of 16, 32, 64, 128, 256");
  STD_TORCH_CHECK(span > 0 && span % kKeyRows == 0 && span <= kMostSpan, "span is ", span,
                  "; it must be a multiple of ", kKeyRows, ", of at most ", kMostSpan);
  STD_TORCH_CHECK(most > 0, "top_k is ", most, "; it must be at least 1");
  STD_TORCH_CHECK(nearest >= 0, "nearest is ", nearest, "; it must not be negative");
  const int64_t sequences = seq_lens.numel();
  seq_lens = int32_vector(seq_lens, sequences, "seq_lens", "one per sequence");
  query_start = int32_vector(query_start, sequences + 1, "query_start", "one per sequence and the end");
  block_table = int32_table(block_table, sequences);
  if (head_size > 1 && q.stride(2) != 1) q = as_contiguous(q);

  SelectBlocks set;
  BlockSelectArgs& a = set.args;
  a.q = Rows{q.data_ptr(), q.stride(0), dtype_of(q, "q")};
  a.head_stride = q.stride(1);
  a.keys = keys.data_ptr();
  a.key_type = dtype_of(keys, "keys");
  a.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  a.block_table_stride = block_table.size(1);
  a.query_start = static_cast<const int32_t*>(query_start.data_ptr());
  a.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  a.sequences = sequences;
  a.tokens = tokens;
  a.heads = heads;
  a.head_size = head_size;
  a.block_size = block_size;
  a.most = most;
  a.span = span;
  a.nearest = nearest;
  AttentionArgs steps;
  steps.block_table = a.block_table;
  steps.block_table_stride = a.block_table_stride;
  steps.query_start = a.query_start;
  steps.seq_lens = a.seq_lens;
  steps.sequences = sequences;
  steps.tokens = tokens;
  steps.block_size = block_size;
  steps.max_seq_len = max_seq_len;
  check_sequences(steps, keys.size(0));
  a.max_seq_len = steps.max_seq_len;
  Tensor out = new_tensor(q, {tokens, heads, most}, ScalarType::Int);
  if (tokens == 0) return out;
  a.out = static_cast<int32_t*>(out.data_ptr());
  const Scratch scratch(SelectBlocks::scratch_bytes(a));
  a.scratch = scratch.data();
  run(set);
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("select_blocks", TORCH_BOX(&armllm::select_blocks)); }
