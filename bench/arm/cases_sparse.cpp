// Attention to a part of a sequence: select_tokens, select_blocks, block_attention, and the ops of compressed
// entries, compress_windows, select_entries and entry_attention.  `queries` tokens end one sequence of
// `context`.
#include "driver.h"

namespace bench {
namespace {

using torch_shim::Call;
using torch_shim::ScalarType;
using torch_shim::Tensor;

constexpr ScalarType kType = ScalarType::BFloat16;
constexpr int64_t kBlock = 64;

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Scores of `positions` rows of keys, which all heads share.
Case select_case(const std::string& op, int64_t queries, int64_t context, const Options& options) {
  const bool of_blocks = op == "select_blocks", of_entries = op == "select_entries";
  const int64_t heads = options.number("heads", of_blocks ? 4 : 64), size = 128;
  const int64_t rate = of_entries ? options.number("rate", 4) : 1;
  Call call(op);
  add_paged_sequence(call, queries, context, kBlock);
  call.with("max_seq_len", context);
  call.with("q", values({queries, heads, size}, kType));
  call.with("keys", values({ceil_div(context, kBlock), ceil_div(kBlock, rate), size}, kType));
  call.with("top_k", options.number("top_k", of_blocks ? 16 : of_entries ? 512 : 2048));
  if (of_blocks) {
    call.with("span", int64_t(128)).with("nearest", int64_t(1));
  } else {
    call.with("weights", values({queries, heads}, ScalarType::Float)).with("scale", 0.088);
  }
  if (of_entries) call.with("block_size", kBlock).with("rate", rate);
  return case_of(call, double(queries * (context / rate) * heads * size), 0);
}

Case block_attention_case(int64_t queries, int64_t context, const Options& options) {
  const int64_t q_heads = 64, kv_heads = 4, size = 128, span = 128, group = 4;
  const int64_t chosen = options.number("top_k", 16), blocks = ceil_div(context, kBlock);
  const int64_t stride = context / span / chosen;  // from one chosen block to the next
  Call call("block_attention");
  add_paged_sequence(call, queries, context, kBlock);
  call.with("max_seq_len", context);
  call.with("q", values({queries, q_heads, size}, kType)).with("scale", 0.088).with("span", span);
  call.with("k_cache", values({blocks, kv_heads, size / group, kBlock, group}, kType));
  call.with("v_cache", values({blocks, kv_heads, kBlock / group, size, group}, kType));
  call.with("chosen", integers({queries, kv_heads, chosen}, [=](int64_t i) { return i % chosen * stride; }));
  const double seen = double(chosen * span);
  return case_of(call, 2 * double(queries * q_heads * size) * seen,
                 queries == 1 ? 2 * seen * double(kv_heads * size) : 0);
}

// Elements: values that entries sum.
Case compress_case(int64_t tokens, const Options& options) {
  const int64_t rate = options.number("rate", 4), parts = options.number("parts", 2), size = 512, pairs = 32;
  const int64_t context = options.number("context", 1024), width = parts * size;
  Call call("compress_windows");
  add_paged_sequence(call, tokens, context, kBlock);
  call.with("kv", values({tokens, width}, kType)).with("gate", values({tokens, width}, kType));
  call.with("bias", values({rate, width}, ScalarType::Float))
      .with("weight", values({size}, ScalarType::Float));
  for (const char* name : {"cos", "sin"}) call.with(name, values({tokens, pairs}, ScalarType::Float));
  call.with("state", values({1, rate * parts - 1, 2 * width}, kType));
  call.with("entries", values({ceil_div(context, kBlock), ceil_div(kBlock, rate), size}, kType));
  call.with("state_slots", integers({1}, [](int64_t) { return 0; }, ScalarType::Long));
  call.with("block_size", kBlock).with("eps", 1e-6);
  const int64_t written = context / rate - (context - tokens) / rate;
  return case_of(call, 0, double(written * rate * parts * size));
}

Case entry_attention_case(int64_t queries, int64_t context, const Options& options) {
  const int64_t heads = 64, size = 512, window = 128, rate = options.number("rate", 4);
  const int64_t selected = options.number("selected", 0), blocks = ceil_div(context, kBlock);
  Call call("entry_attention");
  add_paged_sequence(call, queries, context, kBlock);
  call.with("max_seq_len", context);
  call.with("q", values({queries, heads, size}, kType)).with("scale", 0.044).with("window", window);
  call.with("cache", values({blocks, kBlock, size}, kType)).with("rate", rate);
  call.with("entries", values({blocks, ceil_div(kBlock, rate), size}, kType), true);
  double seen = 0;
  for (int64_t t = 0; t < queries; ++t) {
    const int64_t entries = (context - queries + t + 1) / rate;
    seen += double(window + (selected ? selected : entries));
  }
  if (selected) {
    const int64_t stride = (context - queries + 1) / rate / selected;
    call.with("selected", integers({queries, selected}, [=](int64_t i) { return i % selected * stride; }),
              true);
  }
  return case_of(call, 2 * seen * double(heads * size), queries == 1 ? seen * double(size) : 0);
}

}  // namespace

bool is_sparse(const std::string& op) {
  return op.rfind("select_", 0) == 0 || op == "block_attention" || op == "compress_windows" ||
         op == "entry_attention";
}

Case sparse_case(const std::string& op, const Options& options) {
  const int64_t queries = options.number("queries", 1);
  if (op == "compress_windows") return compress_case(queries, options);
  const int64_t context = options.number("context", 8192);
  if (op == "block_attention") return block_attention_case(queries, context, options);
  if (op == "entry_attention") return entry_attention_case(queries, context, options);
  return select_case(op, queries, context, options);
}

}  // namespace bench
