// The arguments that the ops of selection share.
#pragma once

#include "attention/check_args.h"
#include "runtime/tensor_args.h"
#include "select/cached_keys.h"

namespace armllm {

// Tensors of a selection; each keeps the memory that the arguments point to.
struct SelectionTensors {
  Tensor q, keys, block_table, query_start, seq_lens;
};

// Refuses a number of tokens or blocks that one query is to select; messages call it `name`.
inline void check_most_selected(int64_t most, const char* name) {
  STD_TORCH_CHECK(most > 0 && most <= kMostSelected, name, " is ", most, "; it must be 1 to ", kMostSelected);
}

// Checks the tensors and sizes of a selection, and sets the members of `a` that read them.  Copies a tensor
// whose elements are not adjacent.
template <class Args>
void set_selection_args(Args& a, SelectionTensors& t, int64_t max_seq_len, int64_t most,
                        EntryPlaces places = {}) {
  STD_TORCH_CHECK(t.q.dim() == 3 && t.q.size(1) > 0 && t.q.size(2) > 0,
                  "q must have shape (tokens, heads, head size) with at least one head and element, not ",
                  shape_of(t.q));
  const int64_t head_size = t.q.size(2);
  STD_TORCH_CHECK(t.keys.dim() == 3 && t.keys.size(2) == head_size && t.keys.is_contiguous(),
                  "keys must be contiguous of shape (blocks, block size, ", head_size, "), not ",
                  shape_of(t.keys));
  const int64_t block_size = places.rate > 0 ? places.block_size : t.keys.size(1);
  STD_TORCH_CHECK(places.rate == 0 || t.keys.size(1) == places.per_block, "keys must have ", places.per_block,
                  " rows for each block of ", block_size, " positions, not ", t.keys.size(1));
  STD_TORCH_CHECK(block_size > 0 && block_size % kKeyLanes == 0 && kSplit % block_size == 0, "block size ",
                  block_size, " is not one of 16, 32, 64, 128, 256");
  check_most_selected(most, "top_k");
  const int64_t sequences = t.seq_lens.numel();
  t.seq_lens = int32_vector(t.seq_lens, sequences, "seq_lens", "one per sequence");
  t.query_start = int32_vector(t.query_start, sequences + 1, "query_start", "one per sequence and the end");
  t.block_table = int32_table(t.block_table, sequences);
  if (head_size > 1 && t.q.stride(2) != 1) t.q = as_contiguous(t.q);

  AttentionArgs steps;
  set_sequences(steps, t.block_table, t.query_start, t.seq_lens);
  steps.tokens = t.q.size(0);
  steps.block_size = block_size;
  steps.max_seq_len = max_seq_len;
  check_sequences(steps, t.keys.size(0));

  a.q = Rows{t.q.data_ptr(), t.q.stride(0), dtype_of(t.q, "q")};
  a.head_stride = t.q.stride(1);
  a.heads = t.q.size(1);
  a.head_size = head_size;
  a.most = most;
  a.keys = t.keys.data_ptr();
  a.key_type = dtype_of(t.keys, "keys");
  a.block_size = block_size;
  a.places = places;
  a.block_table = steps.block_table;
  a.block_table_stride = steps.block_table_stride;
  a.query_start = steps.query_start;
  a.seq_lens = steps.seq_lens;
  a.sequences = sequences;
  a.tokens = steps.tokens;
  a.max_seq_len = steps.max_seq_len;
}

}  // namespace armllm
