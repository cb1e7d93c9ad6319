// Tile sizes, and checks of weights and residuals, for the ops that normalize rows.
#pragma once

#include "norm/norm.h"
#include "runtime/tensor_args.h"

namespace armllm {

constexpr int64_t kTileValues = 8192;  // least number of values per tile

inline int64_t rows_per_tile(const NormArgs& args) { return ceil_div(kTileValues, args.width + 1); }

inline int64_t tiles_of(const NormArgs& args) { return ceil_div(args.rows, rows_per_tile(args)); }

inline void check_parameter(const Tensor& parameter, const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() >= 1, "x must have at least one dimension");
  STD_TORCH_CHECK(parameter.dim() == 1 && parameter.size(0) == last_size(x), name, " must have shape (",
                  last_size(x), ",) to match the last dimension of x; it has ", parameter.numel(),
                  " values in ", parameter.dim(), " dimensions");
}

inline void set_residual(NormArgs& args, const Tensor& x, const Tensor& residual, Tensor& sum) {
  bool alike = type_of(residual) == type_of(x) && residual.dim() == x.dim();
  for (int64_t d = 0; alike && d < x.dim(); ++d) alike = residual.size(d) == x.size(d);
  STD_TORCH_CHECK(alike, "residual must have the shape and the dtype of x");
  args.residual = rows_of(residual, "residual");
  args.sum = rows_of(sum, "sum");
}

}  // namespace armllm
