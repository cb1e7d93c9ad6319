// causal_conv, gated_delta_rule and selective_scan: `tokens` new tokens of one sequence that has earlier
// ones.
#include <algorithm>

#include "driver.h"

namespace bench {
namespace {

using torch_shim::Call;
using torch_shim::ScalarType;
using torch_shim::Tensor;

Tensor constant(const std::vector<int64_t>& sizes, float value) {
  const Tensor tensor = torch_shim::zeros(sizes, ScalarType::Float);
  std::fill_n(static_cast<float*>(tensor.data_ptr()), tensor.numel(), value);
  return tensor;
}

void add_sequence(Call& call, int64_t tokens) {
  constexpr int64_t kEarlier = 100;
  call.with("state_slots", integers({1}, [](int64_t) { return 0; }, ScalarType::Long));
  call.with("query_start", integers({2}, [=](int64_t i) { return i * tokens; }));
  call.with("seq_lens", integers({1}, [=](int64_t) { return kEarlier + tokens; }));
}

// Elements: those of the output.
Case conv_case(int64_t tokens, const Options& options) {
  const int64_t channels = options.number("channels", 8192), taps = options.number("taps", 4);
  const ScalarType type = options.type("dtype", "bf16");
  Call call("causal_conv");
  call.with("x", values({tokens, channels}, type));
  call.with("weight", values({taps, channels}, ScalarType::Float));
  call.with("state", values({1, taps - 1, channels}, type)).with("silu", true);
  add_sequence(call, tokens);
  return case_of(call, 0, double(tokens * channels));
}

// Elements: those of the state, once a token.
Case delta_case(int64_t tokens, const Options& options) {
  const int64_t key_heads = options.number("key_heads", 16), heads = options.number("heads", 32);
  const int64_t size = options.number("head_size", 128);
  const ScalarType type = options.type("dtype", "bf16");
  Call call("gated_delta_rule");
  for (const char* name : {"q", "k"}) call.with(name, values({tokens, key_heads, size}, type));
  call.with("v", values({tokens, heads, size}, type));
  call.with("gate", constant({tokens, heads}, -0.1f)).with("beta", constant({tokens, heads}, 0.5f));
  call.with("state", values({1, heads, size, size}, options.type("state_dtype", "f32")));
  call.with("scale", 0.088).with("normalize", true);
  add_sequence(call, tokens);
  return case_of(call, 0, double(tokens * heads * size * size));
}

// Elements: those of the state, once a token.
Case scan_case(int64_t tokens, const Options& options) {
  const int64_t channels = options.number("channels", 8192), states = options.number("states", 16);
  const ScalarType type = options.type("dtype", "bf16");
  Call call("selective_scan");
  call.with("x", values({tokens, channels}, type)).with("dt", constant({tokens, channels}, 0.1f));
  call.with("a", constant({states, channels}, -1.0f));
  for (const char* name : {"b", "c"}) call.with(name, values({tokens, states}, type), true);
  call.with("state", values({1, states, channels}, options.type("state_dtype", "f32")));
  add_sequence(call, tokens);
  return case_of(call, 0, double(tokens * channels * states));
}

}  // namespace

bool is_recurrent(const std::string& op) {
  return op == "causal_conv" || op == "gated_delta_rule" || op == "selective_scan";
}

Case recurrent_case(const std::string& op, const Options& options) {
  const int64_t tokens = options.number("tokens", 1);
  if (op == "causal_conv") return conv_case(tokens, options);
  return op == "gated_delta_rule" ? delta_case(tokens, options) : scan_case(tokens, options);
}

}  // namespace bench
