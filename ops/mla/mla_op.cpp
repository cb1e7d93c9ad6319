// mla_attention, mla_write
#include "attention/check_args.h"
#include "mla/mla.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

struct LatentCache {
  int64_t blocks, block_size, width;  // elements of a row, scales included
  CacheType type;
};

LatentCache check_latents(const Tensor& cache) {
  STD_TORCH_CHECK(cache.dim() == 3, "cache must have shape (blocks, block size, rank + rope size), not ",
                  shape_of(cache));
  const LatentCache shape{cache.size(0), cache.size(1), cache.size(2), latent_type_of(cache)};
  STD_TORCH_CHECK(shape.block_size > 0 && shape.block_size % kKeyLanes == 0 && kSplit % shape.block_size == 0,
                  "block size ", shape.block_size, " is not one of 16, 32, 64, 128, 256");
  STD_TORCH_CHECK(cache.is_contiguous(), "cache must be contiguous");
  return shape;
}

const char* with_scales(CacheType type) { return type == CacheType::i8 ? ", with 8 bytes of scales" : ""; }

Tensor with_whole_heads(const Tensor& t) { return t.size(2) <= 1 || t.stride(2) == 1 ? t : as_contiguous(t); }

QueryPart part_of(const Tensor& t) {
  return {static_cast<const char*>(t.data_ptr()), t.stride(0), t.stride(1), t.size(2)};
}

// True if the parts are adjacent slices of one tensor.
bool side_by_side(const QueryPart& a, const QueryPart& b, int64_t element_size, int64_t heads) {
  if (b.size == 0) return heads == 1 || a.head_stride == a.size;
  return b.data == a.data + a.size * element_size && a.token_stride == b.token_stride &&
         a.head_stride == b.head_stride && (heads == 1 || a.head_stride == a.size + b.size);
}

// Checks that tokens of long sequences select positions that they see, in ascending order.
void check_selected(const AttentionArgs& a, const Tensor& selected) {
  const int64_t most = selected.size(1);
  const int32_t* row = static_cast<const int32_t*>(selected.data_ptr());
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int64_t first = a.query_start[b], end = a.query_start[b + 1], length = a.seq_lens[b];
    for (int64_t t = first; length > most && t < end; ++t) {
      const int64_t seen = length - end + t + 1, count = seen < most ? seen : most;
      for (int64_t i = 0, least = 0; i < count; ++i) {
        const int64_t position = row[t * most + i];
        STD_TORCH_CHECK(position >= least && position < seen, "selected has position ", position,
                        " for token ", t, ", which must select ", count, " of its ", seen,
                        " positions in ascending order");
        least = position + 1;
      }
    }
  }
}

Tensor mla_attention(Tensor q_latent, Tensor q_rope, Tensor cache, Tensor block_table, Tensor query_start,
                     Tensor seq_lens, int64_t max_seq_len, double scale, std::optional<Tensor> sinks,
                     std::optional<Tensor> selected, int64_t window) {
  STD_TORCH_CHECK(q_latent.dim() == 3, "q_latent must have shape (tokens, heads, rank), not ",
                  shape_of(q_latent));
  const int64_t tokens = q_latent.size(0), heads = q_latent.size(1), rank = q_latent.size(2);
  STD_TORCH_CHECK(q_rope.dim() == 3 && q_rope.size(0) == tokens && q_rope.size(1) == heads,
                  "q_rope has shape ", shape_of(q_rope), ", but q_latent has shape ", shape_of(q_latent),
                  ": they must agree in tokens and heads");
  STD_TORCH_CHECK(type_of(q_rope) == type_of(q_latent), "q_rope must have the dtype of q_latent");
  STD_TORCH_CHECK(heads > 0 && rank > 0,
                  "q_latent must have at least one head and a rank of at least 1, not shape ",
                  shape_of(q_latent));
  const LatentCache latents = check_latents(cache);
  const int64_t size = rank + q_rope.size(2);
  STD_TORCH_CHECK(latent_width(latents.type, size) == latents.width, "q_latent and q_rope have together ",
                  size, " values per head, but a position of cache ", shape_of(cache), " has ", latents.width,
                  with_scales(latents.type));
  const int64_t sequences = seq_lens.numel();
  seq_lens = int32_vector(seq_lens, sequences, "seq_lens", "one per sequence");
  query_start = int32_vector(query_start, sequences + 1, "query_start", "one per sequence and the end");
  block_table = int32_table(block_table, sequences);

  LatentAttention set;
  AttentionArgs& a = set.attention.args;
  q_latent = with_whole_heads(q_latent);
  q_rope = with_whole_heads(q_rope);
  set.latent = part_of(q_latent);
  set.rope = part_of(q_rope);
  const DType type = dtype_of(q_latent, "q_latent");
  Tensor out = new_tensor(q_latent, {tokens, heads, rank}), joined;
  if (side_by_side(set.latent, set.rope, size_of(type), heads)) {
    a.q = Rows{const_cast<char*>(set.latent.data), set.latent.token_stride, type};
  } else {
    joined = new_tensor(q_latent, {tokens, heads, size});
    set.joined = joined.data_ptr();
    a.q = Rows{set.joined, heads * size, type};
  }
  a.out = Rows{out.data_ptr(), heads * rank, type};
  a.k_cache = cache.data_ptr();
  set_latent_type(a, latents.type);
  a.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  a.block_table_stride = block_table.size(1);
  a.query_start = static_cast<const int32_t*>(query_start.data_ptr());
  a.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  a.sequences = sequences;
  a.tokens = tokens;
  a.q_heads = heads;
  a.kv_heads = 1;
  a.head_size = size;
  a.value_size = rank;
  a.block_size = latents.block_size;
  a.scale = static_cast<float>(scale);
  a.window = window;
  STD_TORCH_CHECK(!selected || window <= 0, "selected and a window of ", window,
                  " exclude each other: a token attends to what it selects, or to its last positions");
  if (sinks) {
    STD_TORCH_CHECK(sinks->numel() == heads && type_of(*sinks) == ScalarType::Float,
                    "sinks must be float32, one for each of the ", heads, " heads");
    sinks = as_contiguous(*sinks);
    a.sinks = static_cast<const float*>(sinks->data_ptr());
  }
  a.threads = team_size();
  a.max_seq_len = max_seq_len;
  check_sequences(a, latents.blocks);
  if (tokens == 0) return out;
  if (selected) {
    STD_TORCH_CHECK(type_of(*selected) == ScalarType::Int && selected->dim() == 2 &&
                        selected->size(0) == tokens && selected->size(1) > 0,
                    "selected must be int32 of shape (", tokens, ", positions), not of shape ",
                    shape_of(*selected));
    selected = as_contiguous(*selected);
    check_selected(a, *selected);
    set.select(static_cast<const int32_t*>(selected->data_ptr()), selected->size(1));
  }
  const Scratch scratch(set.scratch_bytes());
  set.set_scratch(scratch.data());
  run(set);
  return out;
}

void mla_write(Tensor latent, Tensor k_rope, Tensor cache, Tensor slots) {
  STD_TORCH_CHECK(latent.dim() == 2, "latent must have shape (tokens, rank), not ", shape_of(latent));
  const int64_t tokens = latent.size(0);
  STD_TORCH_CHECK(k_rope.dim() == 2 && k_rope.size(0) == tokens, "k_rope has shape ", shape_of(k_rope),
                  ", but there are ", tokens, " latents");
  const LatentCache latents = check_latents(cache);
  STD_TORCH_CHECK(latent_width(latents.type, latent.size(1) + k_rope.size(1)) == latents.width,
                  "latent and k_rope are ", latent.size(1), " and ", k_rope.size(1),
                  " wide, but a position of cache ", shape_of(cache), " has ", latents.width,
                  with_scales(latents.type));
  STD_TORCH_CHECK(type_of(slots) == ScalarType::Long && slots.dim() == 1 && slots.size(0) == tokens,
                  "slots must be int64 of shape (", tokens, "), one per token");
  slots = as_contiguous(slots);
  latent = as_rows(latent);
  k_rope = as_rows(k_rope);
  LatentWrite set;
  LatentWriteArgs& a = set.args;
  a.latent = rows_of(latent, "latent");
  a.rope = rows_of(k_rope, "k_rope");
  a.cache = cache.data_ptr();
  a.cache_type = latents.type;
  a.slots = static_cast<const int64_t*>(slots.data_ptr());
  a.tokens = tokens;
  a.rank = latent.size(1);
  a.rope_size = k_rope.size(1);
  for (int64_t t = 0; t < tokens; ++t)
    STD_TORCH_CHECK(a.slots[t] < latents.blocks * latents.block_size, "slot ", a.slots[t], " of token ", t,
                    " is past the end of the cache, which has ", latents.blocks, " blocks of size ",
                    latents.block_size);
  if (tokens > 0) run(set);
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("mla_attention", TORCH_BOX(&armllm::mla_attention));
  m.impl("mla_write", TORCH_BOX(&armllm::mla_write));
}
