// The registered op rms_norm_int8.
#include <tuple>
#include <vector>

#include "dispatch/variants.h"
#include "linear/activation_input.h"
#include "norm/norm_args.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

// The normalized row is quantized while it is still in L1.
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
    char* memory = thread_memory(normalized_bytes(args));
    for (int64_t row = first; row < last && row < args.rows; ++row)
      scales[row] = variant().linear->quantize(normalized_row(args, row, memory), args.x.type, args.width,
                                               groups(), values + row * groups() * kGroup, 8, nullptr);
  }
};

std::tuple<Tensor, Tensor, Tensor> rms_norm_int8(Tensor given_x, Tensor given_weight, double eps,
                                                 double weight_offset, std::optional<Tensor> residual) {
  STD_TORCH_CHECK(given_x.dim() >= 1, "x must have at least one dimension");
  dtype_of(given_x, "x");
  const Tensor x = as_rows(given_x), weight = as_contiguous(given_weight);
  check_parameter(weight, x, "weight");
  RmsNormInt8 norm;
  norm.args.weight_type = dtype_of(weight, "weight");
  norm.args.weight = weight.data_ptr();
  norm.args.eps = static_cast<float>(eps);
  norm.args.weight_offset = static_cast<float>(weight_offset);
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < x.dim(); ++d) sizes.push_back(x.size(d));
  std::vector<int64_t> rows(sizes.begin(), sizes.end() - 1);
  Tensor sum = new_tensor(x, residual ? sizes : std::vector<int64_t>{0});
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
  Tensor q = new_tensor(x, sizes, ScalarType::Char);
  Tensor scales = new_tensor(x, rows, ScalarType::Float);
  norm.values = static_cast<int8_t*>(q.data_ptr());
  norm.scales = static_cast<float*>(scales.data_ptr());
  run(norm);
  return {q, scales, sum};
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("rms_norm_int8", TORCH_BOX(&armllm::rms_norm_int8)); }
