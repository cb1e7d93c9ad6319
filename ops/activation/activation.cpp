// gated_act
#include "activation/activation.h"

#include "dispatch/variants.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

constexpr int64_t kTileValues = 4096;  // wider rows are split into tiles; narrower rows share a tile

int64_t chunks(const GatedActArgs& args) { return ceil_div(args.width, kTileValues); }
int64_t rows_per_tile(const GatedActArgs& args) {
  return args.width >= kTileValues ? 1 : kTileValues / args.width;
}

bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) != b.size(d)) return false;
  return true;
}

Tensor gated_act(Tensor given_gate, Tensor given_up, std::string activation) {
  STD_TORCH_CHECK(
      given_gate.dim() >= 1 && same_shape(given_gate, given_up) && type_of(given_gate) == type_of(given_up),
      "gate and up must have the same shape and dtype");
  const Tensor gate = as_rows(given_gate), up = as_rows(given_up);
  Tensor out = new_tensor(gate, gate.sizes());
  GatedAct act;
  act.args.gate = rows_of(gate, "gate");
  act.args.up = rows_of(up, "up");
  act.args.out = rows_of(out, "out");
  act.args.rows = row_count(gate);
  act.args.width = last_size(gate);
  act.args.activation = activation_of(activation);
  run(act);
  return out;
}

}  // namespace

int64_t GatedAct::tiles(int) const {
  return args.width == 0 ? 0 : ceil_div(args.rows, rows_per_tile(args)) * chunks(args);
}

void GatedAct::tile(int, int64_t index) {
  const int64_t column = index % chunks(args) * kTileValues;
  const int64_t left = args.width - column, n = left < kTileValues ? left : kTileValues;
  const int64_t first = index / chunks(args) * rows_per_tile(args), last = first + rows_per_tile(args);
  for (int64_t row = first; row < last && row < args.rows; ++row)
    variant().activation->gated(args.gate.at(row, column), args.up.at(row, column), args.out.at(row, column),
                                args.gate.type, n, args.activation);
}

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("gated_act", TORCH_BOX(&armllm::gated_act)); }
