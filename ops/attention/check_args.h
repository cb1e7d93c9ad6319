// Argument checks of the attention ops.
#pragma once

#include <optional>
#include <string>

#include "attention/paged_attention.h"
#include "runtime/tensor_args.h"

namespace armllm {

// Returns `t`, (tokens, heads, size), copied if the heads of a token are not contiguous.  Tokens may be
// strided.
inline Tensor with_whole_tokens(const Tensor& t) {
  const bool whole = (t.size(2) <= 1 || t.stride(2) == 1) && (t.size(1) <= 1 || t.stride(1) == t.size(2));
  return whole ? t : as_contiguous(t);
}

struct CacheShape {
  int64_t blocks, kv_heads, head_size, value_size, block_size;
  CacheType type;
  float *k_scales, *v_scales;
  bool nibbles;  // an int4 cache; the type is i8
};

inline bool has_nibbles(const Tensor& cache) { return type_of(cache) == ScalarType::Byte; }

inline CacheType cache_type_of(const Tensor& cache) {
  switch (type_of(cache)) {
    case ScalarType::Float:
      return CacheType::f32;
    case ScalarType::BFloat16:
      return CacheType::bf16;
    case ScalarType::Half:
      return CacheType::f16;
    case ScalarType::Char:
    case ScalarType::Byte:
      return CacheType::i8;
    default:
      STD_TORCH_CHECK(false,
                      "k_cache and v_cache must have the dtype float32, bfloat16, float16, int8 or uint8");
  }
}

// The type of a cache of latents.
inline CacheType latent_type_of(const Tensor& cache) {
  if (type_of(cache) == ScalarType::Char) return CacheType::i8;
  dtype_of(cache, "cache");
  return cache_type_of(cache);
}

// Sets the type of the latents that are attended to.
inline void set_latent_type(AttentionArgs& a, CacheType type) {
  a.latent = true;
  a.int8_latents = type == CacheType::i8;
  a.cache_type = a.int8_latents ? CacheType::bf16 : type;
}

inline std::string layout_of(CacheType type, bool nibbles, bool keys) {
  if (nibbles)
    return keys ? "(blocks, kv heads, head size / 32, block size, 19)"
                : "(blocks, kv heads, value size / 32, block size, 19)";
  const std::string group = std::to_string(group_of(type));
  if (group_of(type) == 1)
    return keys ? "(blocks, kv heads, head size, block size)" : "(blocks, kv heads, block size, value size)";
  return keys ? "(blocks, kv heads, head size / " + group + ", block size, " + group + ")"
              : "(blocks, kv heads, block size / " + group + ", value size, " + group + ")";
}

inline float* check_scales(const std::optional<Tensor>& scales, const CacheShape& shape, const char* name) {
  const auto wanted = [&shape] {
    return "(" + std::to_string(shape.blocks) + ", " + std::to_string(shape.kv_heads) + ", " +
           std::to_string(shape.block_size) + ")";
  };
  STD_TORCH_CHECK(scales.has_value(), "an int8 or uint8 cache needs ", name, ": float32 of shape ", wanted());
  STD_TORCH_CHECK(
      type_of(*scales) == ScalarType::Float && scales->dim() == 3 && scales->size(0) == shape.blocks &&
          scales->size(1) == shape.kv_heads && scales->size(2) == shape.block_size && scales->is_contiguous(),
      name, " must be contiguous float32 of shape ", wanted(), ", not of shape ", shape_of(*scales));
  return static_cast<float*>(scales->data_ptr());
}

// `head_size` is the head size of the queries or of the new keys.  The shape of the cache tells it only up to
// padding.
inline CacheShape check_cache(const Tensor& k_cache, const Tensor& v_cache, int64_t head_size,
                              const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales) {
  const CacheType type = cache_type_of(k_cache);
  const bool nibbles = has_nibbles(k_cache);
  STD_TORCH_CHECK(type_of(v_cache) == type_of(k_cache), "k_cache and v_cache must have the same dtype");
  const int64_t group = group_of(type), dims = group > 1 ? 5 : 4, last = nibbles ? kNibbleBytes : group;
  const std::string key_layout = layout_of(type, nibbles, true),
                    value_layout = layout_of(type, nibbles, false);
  STD_TORCH_CHECK(k_cache.dim() == dims && v_cache.dim() == dims &&
                      (dims == 4 || (k_cache.size(4) == last && v_cache.size(4) == last)),
                  "k_cache must have the shape ", key_layout, " and v_cache ", value_layout, ", not ",
                  shape_of(k_cache), " and ", shape_of(v_cache));
  const int64_t value_size = nibbles ? v_cache.size(2) * kNibbleGroup : v_cache.size(3);
  CacheShape shape{k_cache.size(0), k_cache.size(1), head_size, value_size, k_cache.size(3), type,
                   nullptr,         nullptr,         nibbles};
  STD_TORCH_CHECK(shape.block_size > 0 && shape.block_size % kKeyLanes == 0 && kSplit % shape.block_size == 0,
                  "block size ", shape.block_size, " is not one of 16, 32, 64, 128, 256");
  STD_TORCH_CHECK(v_cache.size(0) == shape.blocks && v_cache.size(1) == shape.kv_heads &&
                      (nibbles ? v_cache.size(3) : v_cache.size(2) * group) == shape.block_size,
                  "v_cache ", shape_of(v_cache), " does not fit k_cache ", shape_of(k_cache),
                  ": they must have the shapes ", value_layout, " and ", key_layout);
  STD_TORCH_CHECK(shape.kv_heads > 0 && k_cache.size(2) > 0 && shape.value_size > 0,
                  "k_cache and v_cache must have at least one head and element, got k_cache ",
                  shape_of(k_cache), " and v_cache ", shape_of(v_cache));
  STD_TORCH_CHECK(
      nibbles ? k_cache.size(2) * kNibbleGroup == head_size : k_cache.size(2) == ceil_div(head_size, group),
      "head size ", head_size, " does not fit k_cache ", shape_of(k_cache), " with the layout ", key_layout);
  STD_TORCH_CHECK(!nibbles || (head_size <= kMostNibbleHead && value_size <= kMostNibbleHead),
                  "keys and values in uint8 have at most ", kMostNibbleHead, " elements, not ", head_size,
                  " and ", value_size);
  STD_TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(),
                  "k_cache and v_cache must be contiguous");
  if (type == CacheType::i8) {
    shape.k_scales = check_scales(k_scales, shape, "k_scales");
    shape.v_scales = check_scales(v_scales, shape, "v_scales");
  }
  return shape;
}

inline Tensor int32_vector(const Tensor& t, int64_t size, const char* name, const char* what) {
  STD_TORCH_CHECK(type_of(t) == ScalarType::Int && t.dim() == 1 && t.size(0) == size, name,
                  " must be int32 of shape (", size, "), ", what, ", not of shape ", shape_of(t));
  return as_contiguous(t);
}

inline Tensor int32_table(const Tensor& t, int64_t sequences) {
  STD_TORCH_CHECK(type_of(t) == ScalarType::Int && t.dim() == 2 && t.size(0) == sequences,
                  "block_table must be int32 of shape (", sequences, ", blocks), not of shape ", shape_of(t));
  return as_contiguous(t);
}

// Sets what attention reads and writes: queries (tokens, heads, head size), the result, and the cache.
inline void set_queries_and_cache(AttentionArgs& a, const Tensor& q, const Tensor& out, const Tensor& k_cache,
                                  const Tensor& v_cache, const CacheShape& cache) {
  a.q = Rows{q.data_ptr(), q.stride(0), dtype_of(q, "q")};
  a.out = Rows{out.data_ptr(), q.size(1) * cache.value_size, a.q.type};
  a.k_cache = k_cache.data_ptr();
  a.v_cache = v_cache.data_ptr();
  a.k_scales = cache.k_scales;
  a.v_scales = cache.v_scales;
  a.cache_type = cache.type;
  a.nibbles = cache.nibbles;
  a.tokens = q.size(0);
  a.q_heads = q.size(1);
  a.kv_heads = cache.kv_heads;
  a.head_size = cache.head_size;
  a.value_size = cache.value_size;
  a.block_size = cache.block_size;
}

// Sets the sequences of a step; the tensors are contiguous int32.
inline void set_sequences(AttentionArgs& a, const Tensor& block_table, const Tensor& query_start,
                          const Tensor& seq_lens) {
  a.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  a.block_table_stride = block_table.size(1);
  a.query_start = static_cast<const int32_t*>(query_start.data_ptr());
  a.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  a.sequences = seq_lens.numel();
}

// Checks a step's metadata against the cache, so that nothing is read out of bounds.  Lowers the caller's
// bound of the lengths and its window to the most that the block table holds: sums of them do not overflow.
inline void check_sequences(AttentionArgs& a, int64_t blocks) {
  const int64_t room = a.block_table_stride * a.block_size;
  STD_TORCH_CHECK(a.query_start[0] == 0 && a.query_start[a.sequences] == a.tokens,
                  "query_start must run from 0 to the number of tokens, ", a.tokens, ", not from ",
                  a.query_start[0], " to ", a.query_start[a.sequences]);
  if (a.window > room) a.window = 0;
  if (a.ahead > room) a.ahead = room;
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int64_t tokens = a.query_start[b + 1] - a.query_start[b], length = a.seq_lens[b];
    STD_TORCH_CHECK(tokens >= 0, "query_start must not decrease: sequence ", b, " has ", tokens, " tokens");
    if (tokens == 0) continue;
    STD_TORCH_CHECK(length >= tokens, "sequence ", b, " has ", tokens, " new tokens, but seq_lens says ",
                    length, "; seq_lens must include the new tokens");
    STD_TORCH_CHECK(length <= a.max_seq_len, "sequence ", b, " has length ", length,
                    ", which exceeds max_seq_len = ", a.max_seq_len);
    const int64_t end = ceil_div(length, a.block_size);
    STD_TORCH_CHECK(end <= a.block_table_stride, "sequence ", b, " has length ", length, " and needs ", end,
                    " blocks of ", a.block_size, ", but block_table has columns for ", a.block_table_stride);
    int64_t first = a.window > 0 ? length - tokens - a.window + 1 : 0;
    if (first < 0) first = 0;
    for (int64_t i = first / a.block_size; i < end; ++i) {
      const int64_t block = a.block_table[b * a.block_table_stride + i];
      STD_TORCH_CHECK(block >= 0 && block < blocks, "block_table names block ", block, " for sequence ", b,
                      ", but the number of blocks in the cache is ", blocks);
    }
  }
  if (a.max_seq_len > room) a.max_seq_len = room;
}

}  // namespace armllm
