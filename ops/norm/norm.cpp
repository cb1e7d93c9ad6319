// rms_norm, add_rms_norm, layer_norm, add_layer_norm
#include "norm/norm.h"

#include <tuple>
#include <vector>

#include "common/tensors.h"
#include "common/variants.h"
#include "linear/input.h"

namespace armllm {
namespace {

constexpr int64_t kTileValues = 8192;  // enough to be worth a tile

int64_t rows_per_tile(const NormArgs& args) { return ceil_div(kTileValues, args.width + 1); }

int64_t tiles_of(const NormArgs& args) { return ceil_div(args.rows, rows_per_tile(args)); }

void run_tile(const NormArgs& args, int64_t index, void (*kernel)(const NormArgs&, int64_t)) {
  const int64_t first = index * rows_per_tile(args);
  const int64_t last = first + rows_per_tile(args);
  for (int64_t row = first; row < last && row < args.rows; ++row) kernel(args, row);
}

void check_parameter(const Tensor& parameter, const Tensor& x, const char* name) {
  STD_TORCH_CHECK(parameter.dim() == 1 && parameter.size(0) == last_size(x), name, " must have shape (",
                  last_size(x), ",) like the last dimension of x; it has ", parameter.numel(), " values in ",
                  parameter.dim(), " dimensions");
}

void set_input(NormArgs& args, const Tensor& x, Tensor& out) {
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "out");
  args.rows = row_count(x);
  args.width = last_size(x);
}

void set_residual(NormArgs& args, const Tensor& x, const Tensor& residual, Tensor& sum) {
  bool alike = residual.scalar_type() == x.scalar_type() && residual.dim() == x.dim();
  for (int64_t d = 0; alike && d < x.dim(); ++d) alike = residual.size(d) == x.size(d);
  STD_TORCH_CHECK(alike, "residual must have the shape and the dtype of x");
  args.residual = rows_of(residual, "residual");
  args.sum = rows_of(sum, "sum");
}

template <typename Norm>
Tensor normalize(Norm& norm, const Tensor& given_x, const Tensor* given_residual, Tensor* sum) {
  STD_TORCH_CHECK(given_x.dim() >= 1, "x must have at least one dimension");
  const Tensor x = as_rows(given_x);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  set_input(norm.args, x, out);
  Tensor residual;
  if (given_residual != nullptr) {
    STD_TORCH_CHECK(given_residual->dim() >= 1, "residual must have the shape and the dtype of x");
    residual = as_rows(*given_residual);
    *sum = torch::stable::new_empty(x, x.sizes());
    set_residual(norm.args, x, residual, *sum);
  }
  run(norm);
  return out;
}

Tensor rms(const Tensor& x, const Tensor* residual, Tensor* sum, const Tensor& given_weight, double eps,
           double weight_offset) {
  const Tensor weight = torch::stable::contiguous(given_weight);
  check_parameter(weight, x, "weight");
  RmsNorm norm;
  norm.args.weight = weight.data_ptr();
  norm.args.weight_type = dtype_of(weight, "weight");
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
    kept_weight = torch::stable::contiguous(*weight);
    check_parameter(kept_weight, x, "weight");
    norm.args.weight = kept_weight.data_ptr();
    norm.args.weight_type = dtype_of(kept_weight, "weight");
  }
  if (bias) {
    kept_bias = torch::stable::contiguous(*bias);
    check_parameter(kept_bias, x, "bias");
    STD_TORCH_CHECK(!weight || weight->scalar_type() == bias->scalar_type(),
                    "weight and bias must have one dtype");
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

// The norm of a row goes from the nearest cache straight into INT8.
class RmsNormInt8 final : public TaskSet {
 public:
  NormArgs args;
  int8_t* values = nullptr;
  float* scales = nullptr;

  int64_t groups() const { return ceil_div(args.width, kGroup); }
  int phases() const override { return 1; }
  int64_t tiles(int) const override { return tiles_of(args); }
  void tile(int, int64_t index) override {
    const int64_t first = index * rows_per_tile(args), last = first + rows_per_tile(args);
    for (int64_t row = first; row < last && row < args.rows; ++row)
      scales[row] = variant().linear->quantize(normalised_row(args, row), args.x.type, args.width, groups(),
                                               values + row * groups() * kGroup, 8, nullptr);
  }
};

std::tuple<Tensor, Tensor, Tensor> rms_norm_int8(Tensor given_x, Tensor given_weight, double eps,
                                                 double weight_offset, std::optional<Tensor> residual) {
  STD_TORCH_CHECK(given_x.dim() >= 1, "x must have at least one dimension");
  const Tensor x = as_rows(given_x), weight = torch::stable::contiguous(given_weight);
  check_parameter(weight, x, "weight");
  RmsNormInt8 norm;
  norm.args.weight = weight.data_ptr();
  norm.args.weight_type = dtype_of(weight, "weight");
  norm.args.eps = static_cast<float>(eps);
  norm.args.weight_offset = static_cast<float>(weight_offset);
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < x.dim(); ++d) sizes.push_back(x.size(d));
  std::vector<int64_t> rows(sizes.begin(), sizes.end() - 1);
  Tensor sum = torch::stable::new_empty(x, residual ? sizes : std::vector<int64_t>{0});
  norm.args.x = rows_of(x, "x");
  norm.args.rows = row_count(x);
  norm.args.width = last_size(x);
  Tensor added;
  if (residual) {
    STD_TORCH_CHECK(residual->dim() >= 1, "residual must have the shape and the dtype of x");
    added = as_rows(*residual);
    set_residual(norm.args, x, added, sum);
  }
  sizes.back() = norm.groups() * kGroup;
  Tensor q = torch::stable::new_empty(x, sizes, ScalarType::Char);
  Tensor scales = torch::stable::new_empty(x, rows, ScalarType::Float);
  norm.values = static_cast<int8_t*>(q.data_ptr());
  norm.scales = static_cast<float*>(scales.data_ptr());
  run(norm);
  return {q, scales, sum};
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
  m.impl("rms_norm_int8", TORCH_BOX(&armllm::rms_norm_int8));
  m.impl("layer_norm", TORCH_BOX(&armllm::layer_norm));
  m.impl("add_layer_norm", TORCH_BOX(&armllm::add_layer_norm));
}
