// The registered op dense_linear and its task set.
#include "linear/dense.h"

#include <vector>

#include "dispatch/variants.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

int64_t output_tiles(const DenseLinearArgs& args) { return ceil_div(args.out_features, kDenseOutputs); }

Tensor dense_linear(Tensor given_x, Tensor given_weight, std::optional<Tensor> given_bias, bool wide) {
  STD_TORCH_CHECK(given_x.dim() >= 1, "x must have at least one dimension");
  STD_TORCH_CHECK(given_weight.dim() == 2 && given_weight.size(1) == last_size(given_x),
                  "weight must have shape (out_features, ", last_size(given_x),
                  ") to fit the last dimension of x");
  const Tensor x = as_rows(given_x), weight = as_rows(given_weight);
  DenseLinear linear;
  linear.args.x = rows_of(x, "x");
  linear.args.weight = rows_of(weight, "weight");
  linear.args.in_features = last_size(x);
  linear.args.out_features = weight.size(0);
  std::vector<int64_t> shape;
  int64_t tokens = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    shape.push_back(x.size(d));
    tokens *= x.size(d);
  }
  shape.push_back(linear.args.out_features);
  linear.args.tokens = tokens;
  Tensor bias;
  if (given_bias) {
    STD_TORCH_CHECK(given_bias->dim() == 1 && given_bias->numel() == linear.args.out_features,
                    "bias must have shape (", linear.args.out_features, ",); it has ", given_bias->numel(),
                    " values");
    bias = as_contiguous(*given_bias);
    linear.args.bias = bias.data_ptr();
    linear.args.bias_type = dtype_of(bias, "bias");
  }
  Tensor out = wide ? new_tensor(x, shape, ScalarType::Float) : new_tensor(x, shape);
  linear.args.out = rows_of(out, "out");
  run(linear);
  return out;
}

}  // namespace

int64_t DenseLinear::tiles(int) const { return ceil_div(args.tokens, kDenseTokens) * output_tiles(args); }

// Consecutive tiles share their tokens, so the rows of x stay in the cache.
void DenseLinear::tile(int, int64_t index) {
  const int64_t token = index / output_tiles(args) * kDenseTokens,
                output = index % output_tiles(args) * kDenseOutputs;
  const int64_t tokens = args.tokens - token, outputs = args.out_features - output;
  variant().dense->tile(args, token, static_cast<int>(tokens < kDenseTokens ? tokens : kDenseTokens), output,
                        static_cast<int>(outputs < kDenseOutputs ? outputs : kDenseOutputs));
}

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("dense_linear", TORCH_BOX(&armllm::dense_linear)); }
