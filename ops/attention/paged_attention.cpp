// The registered op: checks, then the task set.
#include "attention/attention.h"
#include "attention/checks.h"
#include "common/tensors.h"

namespace armllm {
namespace {

Tensor int32_vector(const Tensor& t, int64_t size, const char* name, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.size(0) == size, name,
                  " must be int32 of shape (", size, "), ", what, ", not of shape ", shape_of(t));
  return torch::stable::contiguous(t);
}

void check_sequences(const AttentionArgs& a, int64_t blocks) {
  STD_TORCH_CHECK(a.query_start[0] == 0 && a.query_start[a.sequences] == a.tokens,
                  "query_start must go from 0 to the number of tokens, ", a.tokens, ", not from ",
                  a.query_start[0], " to ", a.query_start[a.sequences]);
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int64_t tokens = a.query_start[b + 1] - a.query_start[b], length = a.seq_lens[b];
    STD_TORCH_CHECK(tokens >= 0, "query_start must not fall: sequence ", b, " has ", tokens, " tokens");
    if (tokens == 0) continue;
    STD_TORCH_CHECK(length >= tokens, "sequence ", b, " has ", tokens, " new tokens, but seq_lens says ",
                    length, "; it counts the new ones too");
    STD_TORCH_CHECK(length <= a.max_seq_len, "sequence ", b, " has length ", length,
                    ", over max_seq_len = ", a.max_seq_len);
    const int64_t end = ceil_div(length, a.block_size);
    STD_TORCH_CHECK(end <= a.block_table_stride, "sequence ", b, " has length ", length, " and needs ", end,
                    " blocks of ", a.block_size, ", but block_table has ", a.block_table_stride);
    int64_t first = a.window > 0 ? length - tokens - a.window + 1 : 0;
    if (first < 0) first = 0;
    for (int64_t i = first / a.block_size; i < end; ++i) {
      const int64_t block = a.block_table[b * a.block_table_stride + i];
      STD_TORCH_CHECK(block >= 0 && block < blocks, "block_table names block ", block, " for sequence ", b,
                      ", but the cache has ", blocks);
    }
  }
}

Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                       Tensor seq_lens, int64_t max_seq_len, double scale, int64_t window, double softcap,
                       std::optional<Tensor> sinks, std::optional<Tensor> k_scales,
                       std::optional<Tensor> v_scales) {
  STD_TORCH_CHECK(q.dim() == 3, "q must have the shape (tokens, q heads, head size), not ", shape_of(q));
  q = with_whole_tokens(q);
  const CacheShape cache = check_cache(k_cache, v_cache, q.size(2), k_scales, v_scales);
  STD_TORCH_CHECK(q.size(1) > 0 && q.size(1) % cache.kv_heads == 0, "the number of q heads, ", q.size(1),
                  ", must be a multiple of the number of kv heads, ", cache.kv_heads);
  const int64_t sequences = seq_lens.numel();
  seq_lens = int32_vector(seq_lens, sequences, "seq_lens", "one a sequence");
  query_start = int32_vector(query_start, sequences + 1, "query_start", "one a sequence and the end");
  STD_TORCH_CHECK(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2 &&
                      block_table.size(0) == sequences,
                  "block_table must be int32 of shape (", sequences, ", blocks), not of shape ",
                  shape_of(block_table));
  block_table = torch::stable::contiguous(block_table);

  PagedAttention set;
  AttentionArgs& a = set.args;
  if (sinks) {
    STD_TORCH_CHECK(sinks->numel() == q.size(1) && sinks->scalar_type() == ScalarType::Float,
                    "sinks must be float32, one for each of the ", q.size(1), " q heads");
    sinks = torch::stable::contiguous(*sinks);
    a.sinks = static_cast<const float*>(sinks->data_ptr());
  }
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), cache.value_size});
  a.q = Rows{q.data_ptr(), q.stride(0), dtype_of(q, "q")};
  a.out = Rows{out.data_ptr(), q.size(1) * cache.value_size, a.q.type};
  a.k_cache = k_cache.data_ptr();
  a.v_cache = v_cache.data_ptr();
  a.k_scales = cache.k_scales;
  a.v_scales = cache.v_scales;
  a.cache_type = cache.type;
  a.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  a.block_table_stride = block_table.size(1);
  a.query_start = static_cast<const int32_t*>(query_start.data_ptr());
  a.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  a.sequences = sequences;
  a.tokens = q.size(0);
  a.q_heads = q.size(1);
  a.kv_heads = cache.kv_heads;
  a.head_size = cache.head_size;
  a.value_size = cache.value_size;
  a.block_size = cache.block_size;
  a.scale = static_cast<float>(scale);
  a.window = window;
  a.softcap = static_cast<float>(softcap);
  a.threads = team_size();
  a.max_seq_len = max_seq_len;
  check_sequences(a, cache.blocks);
  if (a.tokens == 0) return out;
  const Scratch scratch(PagedAttention::scratch_bytes(a));
  a.scratch = scratch.data();
  run(set);
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("paged_attention", TORCH_BOX(&armllm::paged_attention)); }
