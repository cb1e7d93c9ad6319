// select_tokens, select_entries
#include "select/select.h"
#include "select/selection_args.h"

namespace armllm {
namespace {

// `places` are those of entries; a rate of 0: keys of single positions.
Tensor select(Tensor q, Tensor weights, Tensor keys, Tensor block_table, Tensor query_start, Tensor seq_lens,
              int64_t max_seq_len, double scale, int64_t most, EntryPlaces places) {
  SelectTokens set;
  SelectArgs& a = set.args;
  SelectionTensors tensors{q, keys, block_table, query_start, seq_lens};
  set_selection_args(a, tensors, max_seq_len, most, places);
  STD_TORCH_CHECK(weights.dim() == 2 && weights.size(0) == a.tokens && weights.size(1) == a.heads,
                  "weights must have shape (", a.tokens, ", ", a.heads,
                  "), one for each token and head, not ", shape_of(weights));
  weights = as_rows(weights);
  a.weights = rows_of(weights, "weights");
  a.scale = static_cast<float>(scale);
  Tensor out = new_tensor(q, {a.tokens, most}, ScalarType::Int);
  if (a.tokens == 0) return out;
  a.out = static_cast<int32_t*>(out.data_ptr());
  const Scratch scratch(SelectTokens::scratch_bytes(a));
  a.scratch = scratch.data();
  run(set);
  return out;
}

Tensor select_tokens(Tensor q, Tensor weights, Tensor keys, Tensor block_table, Tensor query_start,
                     Tensor seq_lens, int64_t max_seq_len, double scale, int64_t most) {
  return select(q, weights, keys, block_table, query_start, seq_lens, max_seq_len, scale, most, {});
}

Tensor select_entries(Tensor q, Tensor weights, Tensor keys, Tensor block_table, Tensor query_start,
                      Tensor seq_lens, int64_t max_seq_len, int64_t block_size, int64_t rate, double scale,
                      int64_t most) {
  STD_TORCH_CHECK(rate > 0 && block_size > 0, "rate is ", rate, " and block_size is ", block_size,
                  "; they must be positive");
  return select(q, weights, keys, block_table, query_start, seq_lens, max_seq_len, scale, most,
                {rate, block_size, EntryPlaces::most_per_block(block_size, rate)});
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("select_entries", TORCH_BOX(&armllm::select_entries));
  m.impl("select_tokens", TORCH_BOX(&armllm::select_tokens));
}
