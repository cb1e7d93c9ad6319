// entry_attention
#include "attention/check_args.h"
#include "mla/mla.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

CacheType cache_type(const Tensor& cache) {
  switch (dtype_of(cache, "cache")) {
    case DType::f32:
      return CacheType::f32;
    case DType::bf16:
      return CacheType::bf16;
    default:
      return CacheType::f16;
  }
}

// Checks that tokens select entries that they see.
void check_entries(const AttentionArgs& a, const Tensor& selected) {
  const int64_t most = selected.size(1);
  const int32_t* row = static_cast<const int32_t*>(selected.data_ptr());
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int64_t end = a.query_start[b + 1];
    for (int64_t t = a.query_start[b]; t < end; ++t) {
      const int64_t seen = (a.seq_lens[b] - end + t + 1) / a.places.rate, count = seen < most ? seen : most;
      for (int64_t i = 0, least = 0; i < count; ++i) {
        const int64_t entry = row[t * most + i];
        STD_TORCH_CHECK(entry >= least && entry < seen, "selected has entry ", entry, " for token ", t,
                        ", which must select ", count, " of its ", seen, " entries in ascending order");
        least = entry + 1;
      }
    }
  }
}

Tensor entry_attention(Tensor q, Tensor cache, std::optional<Tensor> entries, Tensor block_table,
                       Tensor query_start, Tensor seq_lens, int64_t max_seq_len, double scale, int64_t window,
                       int64_t rate, std::optional<Tensor> sinks, std::optional<Tensor> selected) {
  STD_TORCH_CHECK(q.dim() == 3 && q.size(1) > 0 && q.size(2) > 0,
                  "q must have shape (tokens, heads, size) with at least one head and element, not ",
                  shape_of(q));
  const int64_t tokens = q.size(0), heads = q.size(1), size = q.size(2);
  STD_TORCH_CHECK(cache.dim() == 3 && cache.size(2) == size && cache.is_contiguous(),
                  "cache must be contiguous of shape (blocks, block size, ", size, "), not ",
                  shape_of(cache));
  const int64_t block_size = cache.size(1);
  STD_TORCH_CHECK(block_size > 0 && block_size % kKeyLanes == 0 && kSplit % block_size == 0, "block size ",
                  block_size, " is not one of 16, 32, 64, 128, 256");
  STD_TORCH_CHECK(window > 0, "window is ", window, "; it must be positive");
  const int64_t sequences = seq_lens.numel();
  seq_lens = int32_vector(seq_lens, sequences, "seq_lens", "one per sequence");
  query_start = int32_vector(query_start, sequences + 1, "query_start", "one per sequence and the end");
  block_table = int32_table(block_table, sequences);
  q = as_contiguous(q);
  Tensor out = new_tensor(q, {tokens, heads, size});

  LatentAttention set;
  AttentionArgs& a = set.attention.args;
  const DType type = dtype_of(q, "q");
  a.q = Rows{q.data_ptr(), heads * size, type};
  a.out = Rows{out.data_ptr(), heads * size, type};
  a.k_cache = cache.data_ptr();
  a.cache_type = cache_type(cache);
  a.latent = true;
  set_sequences(a, block_table, query_start, seq_lens);
  a.tokens = tokens;
  a.q_heads = heads;
  a.kv_heads = 1;
  a.head_size = a.value_size = size;
  a.block_size = block_size;
  a.scale = static_cast<float>(scale);
  if (sinks) {
    STD_TORCH_CHECK(sinks->numel() == heads && type_of(*sinks) == ScalarType::Float,
                    "sinks must be float32, one for each of the ", heads, " heads");
    sinks = as_contiguous(*sinks);
    a.sinks = static_cast<const float*>(sinks->data_ptr());
  }
  a.threads = team_size();
  a.max_seq_len = max_seq_len;
  if (!entries) {
    STD_TORCH_CHECK(!selected, "selected names entries, but entries are None");
    a.window = window;
  }
  check_sequences(a, cache.size(0));
  if (entries) {
    STD_TORCH_CHECK(rate > 0, "rate is ", rate, "; it must be positive");
    a.places = {rate, block_size, EntryPlaces::most_per_block(block_size, rate)};
    STD_TORCH_CHECK(type_of(*entries) == type_of(cache) && entries->dim() == 3 &&
                        entries->size(0) == cache.size(0) && entries->size(1) == a.places.per_block &&
                        entries->size(2) == size && entries->is_contiguous(),
                    "entries must be contiguous, of the dtype of cache and of shape (", cache.size(0), ", ",
                    a.places.per_block, ", ", size, "), not of shape ", shape_of(*entries));
    a.entries = entries->data_ptr();
  }
  if (tokens == 0) return out;
  if (selected) {
    STD_TORCH_CHECK(type_of(*selected) == ScalarType::Int && selected->dim() == 2 &&
                        selected->size(0) == tokens && selected->size(1) > 0,
                    "selected must be int32 of shape (", tokens, ", entries), not of shape ",
                    shape_of(*selected));
    selected = as_contiguous(*selected);
    check_entries(a, *selected);
  }
  if (entries)
    set.select_entries(window, selected ? static_cast<const int32_t*>(selected->data_ptr()) : nullptr,
                       selected ? selected->size(1) : 0);
  const Scratch scratch(set.scratch_bytes());
  set.set_scratch(scratch.data());
  run(set);
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("entry_attention", TORCH_BOX(&armllm::entry_attention)); }
