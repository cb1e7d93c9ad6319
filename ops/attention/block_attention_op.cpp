// The registered op block_attention: checks its arguments and runs the task set.
#include "attention/block_attention.h"
#include "attention/check_args.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

// Checks that tokens of long sequences choose blocks that they see, in ascending order.
void check_chosen(const AttentionArgs& a, const BlockChoice& choice, const int32_t* chosen) {
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int64_t end = a.query_start[b + 1], length = a.seq_lens[b];
    if (length <= choice.dense_length()) continue;
    for (int64_t t = a.query_start[b]; t < end; ++t) {
      const int64_t seen = ceil_div(length - end + t + 1, choice.span);
      const int64_t count = seen < choice.most ? seen : choice.most;
      for (int64_t h = 0; h < choice.heads; ++h)
        for (int64_t i = 0, least = 0; i < count; ++i) {
          const int64_t block = chosen[(t * choice.heads + h) * choice.most + i];
          STD_TORCH_CHECK(block >= least && block < seen, "chosen has block ", block, " for token ", t,
                          " and head ", h, ", which must choose ", count, " of its ", seen,
                          " blocks in ascending order");
          least = block + 1;
        }
    }
  }
}

Tensor block_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor chosen, int64_t span,
                       Tensor block_table, Tensor query_start, Tensor seq_lens, int64_t max_seq_len,
                       double scale, std::optional<Tensor> k_scales, std::optional<Tensor> v_scales) {
  STD_TORCH_CHECK(q.dim() == 3, "q must have the shape (tokens, q heads, head size), not ", shape_of(q));
  q = with_whole_tokens(q);
  const CacheShape cache = check_cache(k_cache, v_cache, q.size(2), k_scales, v_scales);
  STD_TORCH_CHECK(q.size(1) > 0 && q.size(1) % cache.kv_heads == 0, "the number of q heads, ", q.size(1),
                  ", must be a multiple of the number of kv heads, ", cache.kv_heads);
  STD_TORCH_CHECK(span > 0 && span % cache.block_size == 0 && span <= kMostSpan, "span is ", span,
                  "; it must be a multiple of the cache's block size, ", cache.block_size, ", of at most ",
                  kMostSpan);
  STD_TORCH_CHECK(type_of(chosen) == ScalarType::Int && chosen.dim() == 3 && chosen.size(0) == q.size(0) &&
                      chosen.size(1) > 0 && cache.kv_heads % chosen.size(1) == 0 && chosen.size(2) > 0,
                  "chosen must be int32 of shape (", q.size(0), ", heads, blocks) with heads that divide ",
                  cache.kv_heads, ", the number of kv heads, not of shape ", shape_of(chosen));
  const int64_t sequences = seq_lens.numel();
  seq_lens = int32_vector(seq_lens, sequences, "seq_lens", "one length per sequence");
  query_start = int32_vector(query_start, sequences + 1, "query_start", "one start per sequence and the end");
  block_table = int32_table(block_table, sequences);
  chosen = as_contiguous(chosen);

  BlockAttention set;
  set.choice.heads = chosen.size(1);
  set.choice.most = chosen.size(2);
  set.choice.span = span;
  AttentionArgs& a = set.attention.args;
  Tensor out = new_tensor(q, {q.size(0), q.size(1), cache.value_size});
  set_queries_and_cache(a, q, out, k_cache, v_cache, cache);
  set_sequences(a, block_table, query_start, seq_lens);
  a.scale = static_cast<float>(scale);
  a.threads = team_size();
  a.max_seq_len = max_seq_len;
  check_sequences(a, cache.blocks);
  if (a.tokens == 0) return out;
  const int32_t* blocks = static_cast<const int32_t*>(chosen.data_ptr());
  check_chosen(a, set.choice, blocks);
  set.choose(blocks);
  const Scratch scratch(set.scratch_bytes());
  set.set_scratch(scratch.data());
  run(set);
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("block_attention", TORCH_BOX(&armllm::block_attention)); }
