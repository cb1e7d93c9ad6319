// The registered op kv_write: writes new keys and values to the paged cache.
#include "attention/check_args.h"
#include "attention/paged_attention.h"
#include "dispatch/variants.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

constexpr int64_t kTokens = 16;  // tokens per tile: adjacent tokens of a key block share cache lines

void kv_write(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots,
              std::optional<Tensor> k_scales, std::optional<Tensor> v_scales) {
  STD_TORCH_CHECK(k.dim() == 3 && v.dim() == 3,
                  "k and v must have the shape (tokens, kv heads, head size), not ", shape_of(k), " and ",
                  shape_of(v));
  k = with_whole_tokens(k);
  v = with_whole_tokens(v);
  const CacheShape cache = check_cache(k_cache, v_cache, k.size(2), k_scales, v_scales);
  const int64_t tokens = k.size(0);
  STD_TORCH_CHECK(k.size(1) == cache.kv_heads, "k has the shape ", shape_of(k), ", but k_cache ",
                  shape_of(k_cache), " has ", cache.kv_heads, " kv heads");
  STD_TORCH_CHECK(v.size(0) == tokens && v.size(1) == cache.kv_heads && v.size(2) == cache.value_size,
                  "v has the shape ", shape_of(v), ", but for ", tokens, " tokens and v_cache ",
                  shape_of(v_cache), " it must have the shape (", tokens, ", ", cache.kv_heads, ", ",
                  cache.value_size, ")");
  STD_TORCH_CHECK(type_of(slots) == ScalarType::Long && slots.dim() == 1 && slots.size(0) == tokens,
                  "slots must be int64 of shape (", tokens, "), one slot per token");
  slots = as_contiguous(slots);

  KvWrite set;
  KvWriteArgs& a = set.args;
  a.k = Rows{k.data_ptr(), k.stride(0), dtype_of(k, "k")};
  a.v = Rows{v.data_ptr(), v.stride(0), dtype_of(v, "v")};
  a.k_cache = k_cache.data_ptr();
  a.v_cache = v_cache.data_ptr();
  a.k_scales = cache.k_scales;
  a.v_scales = cache.v_scales;
  a.cache_type = cache.type;
  a.nibbles = cache.nibbles;
  a.slots = static_cast<const int64_t*>(slots.data_ptr());
  a.tokens = tokens;
  a.kv_heads = cache.kv_heads;
  a.head_size = cache.head_size;
  a.value_size = cache.value_size;
  a.block_size = cache.block_size;
  for (int64_t t = 0; t < tokens; ++t)
    STD_TORCH_CHECK(a.slots[t] < cache.blocks * cache.block_size, "slot ", a.slots[t], " of token ", t,
                    " is past the cache of ", cache.blocks, " blocks of ", cache.block_size);
  if (tokens > 0) run(set);
}

}  // namespace

int64_t KvWrite::tiles(int) const { return ceil_div(args.tokens, kTokens) * args.kv_heads; }

void KvWrite::tile(int, int64_t index) {
  const AttentionKernels& kernels = *variant().attention;
  const int64_t first = index / args.kv_heads * kTokens, head = index % args.kv_heads;
  for (int64_t t = first; t < first + kTokens && t < args.tokens; ++t) kernels.write(args, t, head);
}

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("kv_write", TORCH_BOX(&armllm::kv_write)); }
