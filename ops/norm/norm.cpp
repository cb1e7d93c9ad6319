// rms_norm, add_rms_norm, layer_norm, add_layer_norm
#include "norm/norm.h"

#include <tuple>

#include "dispatch/variants.h"
#include "norm/norm_args.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

void run_tile(const NormArgs& args, int64_t index, void (*kernel)(const NormArgs&, int64_t)) {
  const int64_t first = index * rows_per_tile(args);
  const int64_t last = first + rows_per_tile(args);
  for (int64_t row = first; row < last && row < args.rows; ++row) kernel(args, row);
}

void set_input(NormArgs& args, const Tensor& x, Tensor& out) {
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "out");
  args.rows = row_count(x);
  args.width = last_size(x);
}

template <typename Norm>
Tensor normalize(Norm& norm, const Tensor& given_x, const Tensor* given_residual, Tensor* sum) {
  STD_TORCH_CHECK(given_x.dim() >= 1, "x must have at least one dimension");
  dtype_of(given_x, "x");
  const Tensor x = as_rows(given_x);
  Tensor out = new_tensor(x, x.sizes());
  set_input(norm.args, x, out);
  Tensor residual;
  if (given_residual != nullptr) {
    STD_TORCH_CHECK(given_residual->dim() >= 1, "residual must have the shape and the dtype of x");
    residual = as_rows(*given_residual);
    *sum = new_tensor(x, x.sizes());
    set_residual(norm.args, x, residual, *sum);
  }
  run(norm);
  return out;
}

Tensor rms(const Tensor& x, const Tensor* residual, Tensor* sum, const Tensor& given_weight, double eps,
           double weight_offset) {
  const Tensor weight = as_contiguous(given_weight);
  check_parameter(weight, x, "weight");
  RmsNorm norm;
  norm.args.weight_type = dtype_of(weight, "weight");
  norm.args.weight = weight.data_ptr();
  norm.args.eps = static_cast<float>(eps);
  norm.args.weight_offset = static_cast<float>(weight_offset);
  return normalize(norm, x, residual, sum);
}

Tensor layer(const Tensor& x, const Tensor* residual, Tensor* sum, const std::optional<Tensor>& weight,
             const std::optional<Tensor>& bias, double eps) {
  LayerNorm norm;
  norm.args.eps = static_cast<float>(eps);
  Tensor kept_weight, kept_bias;
  if (weight) {
    kept_weight = as_contiguous(*weight);
    check_parameter(kept_weight, x, "weight");
    norm.args.weight = kept_weight.data_ptr();
    norm.args.weight_type = dtype_of(kept_weight, "weight");
  }
  if (bias) {
    kept_bias = as_contiguous(*bias);
    check_parameter(kept_bias, x, "bias");
    STD_TORCH_CHECK(!weight || type_of(*weight) == type_of(*bias),
                    "weight and bias must have the same dtype");
    norm.args.bias = kept_bias.data_ptr();
    norm.args.weight_type = dtype_of(kept_bias, "bias");
  }
  return normalize(norm, x, residual, sum);
}

Tensor rms_norm(Tensor x, Tensor weight, double eps, double weight_offset) {
  return rms(x, nullptr, nullptr, weight, eps, weight_offset);
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps,
                                        double weight_offset) {
  Tensor sum;
  Tensor out = rms(x, &residual, &sum, weight, eps, weight_offset);
  return {out, sum};
}

Tensor layer_norm(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
  return layer(x, nullptr, nullptr, weight, bias, eps);
}

std::tuple<Tensor, Tensor> add_layer_norm(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                          std::optional<Tensor> bias, double eps) {
  Tensor sum;
  Tensor out = layer(x, &residual, &sum, weight, bias, eps);
  return {out, sum};
}

}  // namespace

int64_t RmsNorm::tiles(int) const { return tiles_of(args); }
void RmsNorm::tile(int, int64_t index) { run_tile(args, index, variant().norm->rms); }

int64_t LayerNorm::tiles(int) const { return tiles_of(args); }
void LayerNorm::tile(int, int64_t index) { run_tile(args, index, variant().norm->layer); }

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&armllm::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&armllm::add_rms_norm));
  m.impl("layer_norm", TORCH_BOX(&armllm::layer_norm));
  m.impl("add_layer_norm", TORCH_BOX(&armllm::add_layer_norm));
}
