// int4_linear, int8_linear, int4_gated_linear, dense_linear, int4_moe
#include <cstring>

#include "driver.h"

namespace bench {
namespace {

using torch_shim::Call;
using torch_shim::ScalarType;
using torch_shim::Tensor;

constexpr int64_t kPanel = 16, kGroup = 32;

// Values of k that share a scale; 0: all of a row.
int64_t scale_group(const std::string& scheme) {
  return scheme[0] == 'g' && scheme != "g32i" && scheme != "g32iz" ? std::stoll(scheme.substr(1)) : 0;
}

bool has_zero_points(const std::string& scheme) { return scheme.find('z') != std::string::npos; }

Tensor bytes(const std::vector<int64_t>& sizes, int64_t low, int64_t high, ScalarType type) {
  int64_t state = 7;
  return integers(
      sizes, [=](int64_t) mutable { return low + (state = state * 75 % 65537) % (high - low + 1); }, type);
}

// Sixteen packed rows of a scheme, as often as there are panels: a panel is one contiguous block.
Tensor packed(const std::string& scheme, const std::vector<int64_t>& leading, int64_t in_features) {
  Tensor panel;
  const int64_t group = scale_group(scheme);
  std::vector<int64_t> scale_sizes{kPanel};
  if (group > 0) scale_sizes.push_back((in_features + group - 1) / group);
  if (scheme == "i8") {
    panel = Call("pack_int8")
                .with("q", bytes({kPanel, in_features}, -127, 127, ScalarType::Char))
                .with("scales", values(scale_sizes, ScalarType::Float))
                .tensor();
  } else {
    Call call("pack_int4");
    const bool narrow = scheme == "g32iz", signs = scheme == "int3";
    const int64_t bits = scheme.rfind("int", 0) == 0 ? std::stoll(scheme.substr(3)) : 4, levels = 1 << bits;
    const int64_t low = has_zero_points(scheme) ? 0 : -levels / 2, high = low + levels - 1;
    call.with("q", bytes({kPanel, in_features}, low, high, ScalarType::Char)).with("scheme", scheme);
    call.with("scales", values(scale_sizes, ScalarType::Float));
    const std::vector<int64_t> group_sizes{kPanel, (in_features + kGroup - 1) / kGroup};
    if (scheme == "g32i" || narrow || bits != 4) {
      const int64_t most = bits > 4 ? 256 / levels : narrow ? 14 : 16;
      call.with("multipliers", bytes(group_sizes, 1, most, signs ? ScalarType::Char : ScalarType::Byte),
                true);
    }
    if (narrow) {
      call.with("zeros", bytes(group_sizes, 6, 9, ScalarType::Byte), true);
    } else if (has_zero_points(scheme)) {
      call.with("zeros", bytes(scale_sizes, 0, 15, ScalarType::Byte), true);
    }
    panel = call.tensor();
  }
  std::vector<int64_t> sizes = leading;
  const int64_t panel_bytes = panel.numel();
  sizes.push_back(panel_bytes);
  const Tensor all = torch_shim::zeros(sizes, ScalarType::Byte);
  for (int64_t i = 0; i < all.numel(); i += panel_bytes)
    std::memcpy(static_cast<char*>(all.data_ptr()) + i, panel.data_ptr(), size_t(panel_bytes));
  return all;
}

}  // namespace

Case linear_case(const std::string& op, const Options& options) {
  const int64_t m = options.number("m", 1), n = options.number("n", 2048), k = options.number("k", 2048);
  const ScalarType type = options.type("dtype", "bf16");
  Call call(op);
  call.with("x", values({m, k}, type));
  if (op == "dense_linear") {
    call.with("weight", values({n, k}, type));
    return case_of(call, double(m) * double(n) * double(k), 0);
  }
  const std::string scheme = op == "int8_linear" ? "i8" : options.word("scheme", "g32i");
  const int64_t halves = op == "int4_gated_linear" ? 2 : 1;
  call.with("weight", packed(scheme, {halves * ((n + kPanel - 1) / kPanel)}, k)).with("out_features", n);
  if (scheme != "i8") call.with("scheme", scheme);
  if (halves == 2) call.with("activation", "silu");
  call.with("rotated", options.number("rotated", 0) != 0);
  return case_of(call, double(halves) * double(m) * double(n) * double(k), 0);
}

// Every expert gets the same number of tokens, as far as that is possible.
Case moe_case(const Options& options) {
  const int64_t tokens = options.number("tokens", 16), experts = options.number("experts", 8);
  const int64_t top_k = options.number("top_k", 2), hidden = options.number("hidden", 1024);
  const int64_t inner = options.number("inner", 1024);
  const std::string scheme = options.word("scheme", "g32i");
  const auto panels = [](int64_t rows) { return (rows + kPanel - 1) / kPanel; };
  Call call("int4_moe");
  call.with("x", values({tokens, hidden}, options.type("dtype", "bf16")));
  call.with("expert_ids", integers({tokens, top_k}, [=](int64_t i) { return i % experts; }));
  call.with("expert_weights", values({tokens, top_k}, ScalarType::Float));
  call.with("gate_up", packed(scheme, {experts, 2 * panels(inner)}, hidden));
  call.with("down", packed(scheme, {experts, panels(hidden)}, inner));
  call.with("intermediate", inner).with("scheme", scheme).with("activation", "silu");
  return case_of(call, 3.0 * double(tokens) * double(top_k) * double(hidden) * double(inner), 0);
}

}  // namespace bench
