// Registered quantized linear ops: argument checks, output allocation, one run of the task set.
#include <vector>

#include "dispatch/variants.h"
#include "linear/quant_linear.h"
#include "linear/scheme_arg.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

using torch::stable::contiguous;

struct Bias {
  std::optional<Tensor> owner;
  const void* data = nullptr;
  DType type = DType::f32;

  Bias(const std::optional<Tensor>& t, int64_t out_features, const char* name) {
    if (!t.has_value()) return;
    STD_TORCH_CHECK(t->numel() == out_features, name, " has ", t->numel(), " elements; out_features is ",
                    out_features);
    owner = contiguous(*t);
    data = owner->data_ptr();
    type = dtype_of(*owner, name);
  }
};

// Checks that a weight was packed for (out_features, in_features, scheme); `copies` is 2 for gate and up.
void check_weight(const Tensor& weight, const Tensor& x, int64_t out_features, Scheme scheme,
                  int64_t copies) {
  STD_TORCH_CHECK(out_features >= 0, "out_features must not be negative: ", out_features);
  const int64_t in_features = last_size(x), panels = copies * ceil_div(out_features, kPanel);
  const int64_t bytes = panel_layout(scheme, in_features).bytes;
  STD_TORCH_CHECK(
      type_of(weight) == ScalarType::Byte && weight.dim() == 2,
      "weight must be uint8 of shape (panels, panel_bytes), as pack_int4 and pack_int8 return it");
  STD_TORCH_CHECK(weight.size(0) == panels, "weight has ", weight.size(0),
                  " panels of 16 rows; out_features = ", out_features, " needs ", panels);
  STD_TORCH_CHECK(weight.size(1) == bytes, "weight has ", weight.size(1),
                  " bytes per panel; in_features = ", in_features, " (the last size of x) needs ", bytes,
                  ": was it packed with another shape or scheme?");
  STD_TORCH_CHECK(weight.stride(1) == 1, "weight must be contiguous in its last dimension");
}

std::vector<int64_t> out_sizes(const Tensor& x, int64_t out_features) {
  std::vector<int64_t> sizes(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d) sizes[d] = x.size(d);
  sizes.back() = out_features;
  return sizes;
}

void check_digits(int64_t digits) {
  STD_TORCH_CHECK(digits == 1 || digits == 2, "digits must be 1 or 2: ", digits);
}

void check_rotated(bool rotated, int64_t in_features) {
  STD_TORCH_CHECK(!rotated || in_features % kGroup == 0, "rotated layers need whole groups of ", kGroup,
                  " features; x has ", in_features);
}

int64_t tokens_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 1 && last_size(x) >= 1, "x must have at least one dimension and one feature");
  return row_count(x);
}

// Activations of an op: a float tensor, or INT8 rows with their scales.
struct ActivationSource {
  Tensor tensor, rows, scales;
  ScalarType type;  // of the output

  explicit ActivationSource(const Tensor& x) : tensor(x), rows(as_rows(x)), type(type_of(x)) {}
  ActivationSource(const Tensor& q, const Tensor& q_scales, const std::string& dtype)
      : tensor(q), rows(as_rows(q)), scales(contiguous(q_scales)), type(float_type(dtype)) {
    STD_TORCH_CHECK(
        type_of(q) == ScalarType::Char && q.dim() >= 1 && last_size(q) % kGroup == 0,
        "q must be int8 with whole groups of 32 in its last dimension, as rms_norm_int8 returns it");
    STD_TORCH_CHECK(type_of(q_scales) == ScalarType::Float && q_scales.numel() == row_count(q),
                    "scales must be float32 with one value for each of the ", row_count(q),
                    " rows of q; it has ", q_scales.numel());
  }

  template <typename Args>
  void describe(Args& args) const {
    if (type == type_of(tensor)) {
      args.x = rows_of(rows, "x");
      return;
    }
    args.input.values = static_cast<const int8_t*>(rows.data_ptr());
    args.input.value_stride = *row_stride(rows);
    args.input.scales = static_cast<const float*>(scales.data_ptr());
  }

 private:
  static ScalarType float_type(const std::string& name) {
    if (name == "float32") return ScalarType::Float;
    if (name == "bfloat16") return ScalarType::BFloat16;
    if (name == "float16") return ScalarType::Half;
    STD_TORCH_CHECK(false, "unknown dtype '", name, "'; choose from: float32, bfloat16, float16");
  }
};

Tensor quant_linear(const ActivationSource& source, const Tensor& weight, int64_t out_features, Scheme scheme,
                    const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                    int64_t digits = 1, bool rotated = false) {
  check_digits(digits);
  const Tensor& x = source.tensor;
  const int64_t tokens = tokens_of(x);
  check_rotated(rotated, last_size(x));
  check_weight(weight, x, out_features, scheme, 1);
  const Bias b(bias, out_features, "bias");
  Tensor out = new_tensor(x, out_sizes(x, out_features), source.type);
  if (residual.has_value()) {
    STD_TORCH_CHECK(type_of(*residual) == source.type, "residual must have the dtype of x");
    STD_TORCH_CHECK(residual->dim() == out.dim(), "residual must have the shape of the result");
    for (int64_t d = 0; d < out.dim(); ++d)
      STD_TORCH_CHECK(residual->size(d) == out.size(d), "residual has size ", residual->size(d),
                      " in dimension ", d, "; the result has ", out.size(d));
  }
  if (tokens == 0 || out_features == 0) return out;
  const Tensor added = residual.has_value() ? as_rows(*residual) : out;
  const Scratch scratch(QuantLinear::scratch_bytes(tokens, last_size(x), digits));
  QuantLinear set;
  LinearArgs& a = set.args;
  source.describe(a);
  a.out = rows_of(out, "out");
  if (residual.has_value()) a.residual = rows_of(added, "residual");
  a.weight = static_cast<const uint8_t*>(weight.data_ptr());
  a.panel_stride = panel_stride_of(weight, 0, weight.size(1), "weight");
  a.scheme = scheme;
  a.tokens = tokens;
  a.in_features = last_size(x);
  a.out_features = out_features;
  a.digits = digits;
  a.rotated = rotated;
  a.bias = b.data;
  a.bias_type = b.type;
  a.scratch = scratch.data();
  run(set);
  return out;
}

Scheme int4_scheme(const std::string& name) {
  const Scheme scheme = scheme_of(name);
  STD_TORCH_CHECK(scheme != Scheme::i8, "scheme 'i8' is INT8: use int8_linear and pack_int8");
  return scheme;
}

Tensor int4_linear(Tensor x, Tensor weight, int64_t out_features, std::string scheme,
                   std::optional<Tensor> bias, std::optional<Tensor> residual, int64_t digits, bool rotated) {
  return quant_linear(ActivationSource(x), weight, out_features, int4_scheme(scheme), bias, residual, digits,
                      rotated);
}

Tensor int8_linear(Tensor x, Tensor weight, int64_t out_features, std::optional<Tensor> bias,
                   std::optional<Tensor> residual, int64_t digits, bool rotated) {
  return quant_linear(ActivationSource(x), weight, out_features, Scheme::i8, bias, residual, digits, rotated);
}

Tensor int4_linear_q(Tensor q, Tensor scales, Tensor weight, int64_t out_features, std::string scheme,
                     std::string dtype, std::optional<Tensor> bias, std::optional<Tensor> residual) {
  return quant_linear(ActivationSource(q, scales, dtype), weight, out_features, scheme_of(scheme), bias,
                      residual);
}

Tensor gated_linear(const ActivationSource& source, const Tensor& weight, int64_t out_features,
                    const std::string& scheme, const std::string& activation,
                    const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& up_bias,
                    int64_t digits = 1, bool rotated = false) {
  check_digits(digits);
  const Tensor& x = source.tensor;
  const int64_t tokens = tokens_of(x);
  check_rotated(rotated, last_size(x));
  const Scheme kind = scheme_of(scheme);
  check_weight(weight, x, out_features, kind, 2);
  const Bias gate(gate_bias, out_features, "gate_bias"), up(up_bias, out_features, "up_bias");
  STD_TORCH_CHECK(gate.data == nullptr || up.data == nullptr || gate.type == up.type,
                  "gate_bias and up_bias must have one dtype");
  Tensor out = new_tensor(x, out_sizes(x, out_features), source.type);
  const Activation act = activation_of(activation);
  if (tokens == 0 || out_features == 0) return out;
  const Scratch scratch(QuantGatedLinear::scratch_bytes(tokens, last_size(x), digits));
  QuantGatedLinear set;
  GatedLinearArgs& a = set.args;
  source.describe(a);
  a.out = rows_of(out, "out");
  a.weight = static_cast<const uint8_t*>(weight.data_ptr());
  a.panel_stride = panel_stride_of(weight, 0, weight.size(1), "weight");
  a.scheme = kind;
  a.tokens = tokens;
  a.in_features = last_size(x);
  a.out_features = out_features;
  a.digits = digits;
  a.rotated = rotated;
  a.activation = act;
  a.gate_bias = gate.data;
  a.up_bias = up.data;
  a.bias_type = gate.data != nullptr ? gate.type : up.type;
  a.scratch = scratch.data();
  run(set);
  return out;
}

Tensor int4_gated_linear(Tensor x, Tensor weight, int64_t out_features, std::string scheme,
                         std::string activation, std::optional<Tensor> gate_bias,
                         std::optional<Tensor> up_bias, int64_t digits, bool rotated) {
  return gated_linear(ActivationSource(x), weight, out_features, scheme, activation, gate_bias, up_bias,
                      digits, rotated);
}

Tensor int4_gated_linear_q(Tensor q, Tensor scales, Tensor weight, int64_t out_features, std::string scheme,
                           std::string activation, std::string dtype, std::optional<Tensor> gate_bias,
                           std::optional<Tensor> up_bias) {
  return gated_linear(ActivationSource(q, scales, dtype), weight, out_features, scheme, activation, gate_bias,
                      up_bias);
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("int4_linear", TORCH_BOX(&armllm::int4_linear));
  m.impl("int8_linear", TORCH_BOX(&armllm::int8_linear));
  m.impl("int4_linear_q", TORCH_BOX(&armllm::int4_linear_q));
  m.impl("int4_gated_linear_q", TORCH_BOX(&armllm::int4_gated_linear_q));
  m.impl("int4_gated_linear", TORCH_BOX(&armllm::int4_gated_linear));
}
