// What both attention ops ask of their tensors.
#pragma once

#include <string>

#include "attention/attention.h"
#include "common/tensors.h"

namespace armllm {

inline std::string shape_of(const Tensor& t) {
  std::string text = "(";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + ")";
}

// (tokens, heads, size) whose tokens may lie apart but hold their heads one after the other.
inline Tensor with_whole_tokens(const Tensor& t) {
  const bool whole = (t.size(2) <= 1 || t.stride(2) == 1) && (t.size(1) <= 1 || t.stride(1) == t.size(2));
  return whole ? t : torch::stable::contiguous(t);
}

struct CacheShape {
  int64_t blocks, kv_heads, head_size, value_size, block_size;
  DType type;
};

inline CacheShape check_cache(const Tensor& k_cache, const Tensor& v_cache) {
  STD_TORCH_CHECK(
      k_cache.dim() == 4 && v_cache.dim() == 4,
      "k_cache must have the shape (blocks, kv heads, head size, block size) and v_cache (blocks, kv "
      "heads, block size, value size), not ",
      shape_of(k_cache), " and ", shape_of(v_cache));
  const CacheShape shape{k_cache.size(0), k_cache.size(1), k_cache.size(2),
                         v_cache.size(3), k_cache.size(3), dtype_of(k_cache, "k_cache")};
  STD_TORCH_CHECK(
      v_cache.size(0) == shape.blocks && v_cache.size(1) == shape.kv_heads &&
          v_cache.size(2) == shape.block_size,
      "v_cache ", shape_of(v_cache), " does not fit k_cache ", shape_of(k_cache),
      ": they must be (blocks, kv heads, block size, value size) and (blocks, kv heads, head size, block size)");
  STD_TORCH_CHECK(shape.kv_heads > 0 && shape.head_size > 0 && shape.value_size > 0,
                  "the cache must have heads, got k_cache ", shape_of(k_cache), " and v_cache ",
                  shape_of(v_cache));
  STD_TORCH_CHECK(shape.block_size > 0 && shape.block_size % kKeyLanes == 0 && kSplit % shape.block_size == 0,
                  "block size ", shape.block_size, " is not one of 16, 32, 64, 128, 256");
  STD_TORCH_CHECK(dtype_of(v_cache, "v_cache") == shape.type, "k_cache and v_cache must have the same dtype");
  STD_TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(),
                  "k_cache and v_cache must be contiguous");
  return shape;
}

}  // namespace armllm
