// The registered op paged_attention: checks its arguments and runs the task set.
#include "attention/check_args.h"
#include "attention/paged_attention.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

// The numbers of an argument that has one for each query head.
const float* per_head(std::optional<Tensor>& numbers, const Tensor& q, const char* name) {
  if (!numbers) return nullptr;
  STD_TORCH_CHECK(numbers->numel() == q.size(1) && type_of(*numbers) == ScalarType::Float, name,
                  " must be float32, one for each of the ", q.size(1), " q heads");
  numbers = as_contiguous(*numbers);
  return static_cast<const float*>(numbers->data_ptr());
}

Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                       Tensor seq_lens, int64_t max_seq_len, double scale, int64_t window, double softcap,
                       std::optional<Tensor> sinks, std::optional<Tensor> k_scales,
                       std::optional<Tensor> v_scales, std::optional<Tensor> alibi_slopes,
                       std::optional<Tensor> relative, std::optional<Tensor> profiles, int64_t ahead,
                       std::optional<Tensor> biases, std::optional<Tensor> later, int64_t group_size,
                       int64_t skipped_heads) {
  STD_TORCH_CHECK(q.dim() == 3, "q must have the shape (tokens, q heads, head size), not ", shape_of(q));
  q = with_whole_tokens(q);
  const CacheShape cache = check_cache(k_cache, v_cache, q.size(2), k_scales, v_scales);
  const HeadGroups groups{group_size, skipped_heads};
  STD_TORCH_CHECK(q.size(1) > 0 && (group_size != 0 || q.size(1) % cache.kv_heads == 0),
                  "the number of q heads, ", q.size(1), ", must be a multiple of the number of kv heads, ",
                  cache.kv_heads);
  STD_TORCH_CHECK(groups.fit(q.size(1), cache.kv_heads), q.size(1), " q heads in groups of ", group_size,
                  " without the first ", skipped_heads, " do not read ", cache.kv_heads, " kv heads");
  const int64_t sequences = seq_lens.numel();
  seq_lens = int32_vector(seq_lens, sequences, "seq_lens", "one length per sequence");
  query_start = int32_vector(query_start, sequences + 1, "query_start", "one start per sequence and the end");
  block_table = int32_table(block_table, sequences);

  PagedAttention set;
  AttentionArgs& a = set.args;
  if (sinks) {
    const bool by_token = sinks->dim() == 2 && sinks->size(0) == q.size(0) && sinks->size(1) == q.size(1);
    STD_TORCH_CHECK((by_token || sinks->numel() == q.size(1)) && type_of(*sinks) == ScalarType::Float,
                    "sinks must be float32, one for each of the ", q.size(1),
                    " q heads, or such rows of each token, not of shape ", shape_of(*sinks));
    sinks = as_contiguous(*sinks);
    a.sink_stride = by_token ? q.size(1) : 0;
    a.sinks = static_cast<const float*>(sinks->data_ptr());
  }
  a.slopes = per_head(alibi_slopes, q, "alibi_slopes");
  STD_TORCH_CHECK(ahead >= 0, "ahead is ", ahead, "; it must be 0 or more");
  STD_TORCH_CHECK((ahead == 0 && !later) || !(alibi_slopes || relative),
                  "attention to later positions (ahead = ", ahead, ") has neither slopes nor profiles");
  if (later) {
    STD_TORCH_CHECK(type_of(*later) == ScalarType::Long && later->dim() == 1 && later->size(0) == q.size(0),
                    "later must be int64 of shape (", q.size(0), "), one number per token, not of shape ",
                    shape_of(*later));
    later = as_contiguous(*later);
    a.later = static_cast<const int64_t*>(later->data_ptr());
  }
  STD_TORCH_CHECK(relative.has_value() == profiles.has_value(), "relative and profiles belong together");
  if (relative) {
    STD_TORCH_CHECK(type_of(*profiles) == ScalarType::Float && profiles->dim() == 2 && profiles->numel() > 0,
                    "profiles must be float32 of shape (rank, extent), not of shape ", shape_of(*profiles));
    a.rank = profiles->size(0);
    a.extent = profiles->size(1);
    STD_TORCH_CHECK(type_of(*relative) == ScalarType::Float && relative->dim() == 3 &&
                        relative->size(0) == q.size(0) && relative->size(1) == q.size(1) &&
                        relative->size(2) == a.rank,
                    "relative must be float32 of shape (", q.size(0), ", ", q.size(1), ", ", a.rank,
                    "), not of shape ", shape_of(*relative));
    profiles = as_contiguous(*profiles);
    relative = with_whole_tokens(*relative);
    a.profiles = static_cast<const float*>(profiles->data_ptr());
    a.relative = static_cast<const float*>(relative->data_ptr());
    a.relative_stride = relative->stride(0);
  }
  if (biases) {
    STD_TORCH_CHECK(type_of(*biases) == ScalarType::Float && biases->dim() == 2 &&
                        biases->size(0) == q.size(1) && biases->size(1) % 2 == 1,
                    "biases must be float32 of shape (", q.size(1), ", 2 · reach + 1), not of shape ",
                    shape_of(*biases));
    biases = as_contiguous(*biases);
    a.biases = static_cast<const float*>(biases->data_ptr());
    a.reach = biases->size(1) / 2;
  }
  Tensor out = new_tensor(q, {q.size(0), q.size(1), cache.value_size});
  set_queries_and_cache(a, q, out, k_cache, v_cache, cache);
  set_sequences(a, block_table, query_start, seq_lens);
  a.scale = static_cast<float>(scale);
  a.groups = groups;
  a.window = window;
  a.ahead = ahead;
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
