// paged_attention and mla_attention: decode steps and prompts.
#include "driver.h"

namespace bench {

using torch_shim::Call;
using torch_shim::ScalarType;
using torch_shim::Tensor;

namespace {

// Dimensions of a key, or positions of values, that lie side by side.
int64_t cache_group(ScalarType type) {
  return type == ScalarType::BFloat16 ? 4 : type == ScalarType::Char ? 8 : 1;
}

void add_cache(Call& call, ScalarType type, int64_t blocks, int64_t heads, int64_t size, int64_t block) {
  const int64_t group = cache_group(type);
  std::vector<int64_t> keys{blocks, heads, size / group, block}, held{blocks, heads, block / group, size};
  if (group > 1) keys.push_back(group), held.push_back(group);
  call.with("k_cache", values(keys, type)).with("v_cache", values(held, type));
  if (type != ScalarType::Char) return;
  call.with("k_scales", values({blocks, heads, block}, ScalarType::Float), true);
  call.with("v_scales", values({blocks, heads, block}, ScalarType::Float), true);
}

// Pairs of a query and a position that it sees: those before it, or, with `ahead`, all.
double seen(int64_t queries, int64_t context, bool ahead) {
  if (ahead) return double(queries) * double(context);
  return double(queries) * (double(context) - double(queries - 1) / 2);
}

}  // namespace

void add_paged_sequence(Call& call, int64_t queries, int64_t context, int64_t block) {
  const int64_t blocks = (context + block - 1) / block;
  call.with("block_table", integers({1, blocks}, [=](int64_t i) { return i * 7 % blocks; }));
  call.with("query_start", integers({2}, [=](int64_t i) { return i * queries; }));
  call.with("seq_lens", integers({1}, [=](int64_t) { return context; }));
}

// A decode step (one query) is worth the elements of the cache too, each once.
Case attention_case(const std::string& op, const Options& options) {
  const int64_t queries = options.number("queries", 1), context = options.number("context", 1024);
  const int64_t q_heads = options.number("q_heads", 32), block = options.number("block", 16);
  const int64_t blocks = (context + block - 1) / block;
  const ScalarType cache = options.type("cache", "bf16"), type = options.type("dtype", "bf16");
  Call call(op);
  add_paged_sequence(call, queries, context, block);
  call.with("max_seq_len", context).with("scale", 0.088);
  if (op == "mla_attention") {
    constexpr int64_t kRank = 512, kRope = 64;
    call.with("q_latent", values({queries, q_heads, kRank}, type));
    call.with("q_rope", values({queries, q_heads, kRope}, type));
    const int64_t scale_bytes = cache == ScalarType::Char ? 8 : 0;  // two float32 end a row of int8
    call.with("cache", values({blocks, block, kRank + kRope + scale_bytes}, cache));
    return case_of(call, seen(queries, context, false) * double(q_heads * (2 * kRank + kRope)),
                   queries == 1 ? double(context * (kRank + kRope)) : 0.0);
  }
  const int64_t kv_heads = options.number("kv_heads", 8), size = options.number("head_size", 128);
  call.with("q", values({queries, q_heads, size}, type));
  add_cache(call, cache, blocks, kv_heads, size, block);
  const bool ahead = options.number("ahead", 0) != 0;
  if (ahead) call.with("ahead", context);
  if (const int64_t reach = options.number("reach", 0); reach > 0)
    call.with("biases", values({q_heads, 2 * reach + 1}, ScalarType::Float), true);
  return case_of(call, 2 * seen(queries, context, ahead) * double(q_heads * size),
                 queries == 1 ? 2.0 * double(context * kv_heads * size) : 0.0);
}

}  // namespace bench
