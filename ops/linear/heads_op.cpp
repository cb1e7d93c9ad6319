// Registered ops: int8_heads_linear, dense_heads_linear.
#include "linear/heads.h"
#include "linear/packed_panel.h"
#include "linear/tile_grid.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

// Fills in x of `a`; `held` keeps alive the tensor that x points to.
void set_input(HeadsArgs& a, const Tensor& x, Tensor& held) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(1) >= 1 && x.size(2) >= 1,
                  "x must have the shape (tokens, heads, features), not ", shape_of(x));
  held = x.size(2) == 1 || x.stride(2) == 1 ? x : as_contiguous(x);
  a.tokens = x.size(0);
  a.heads = x.size(1);
  a.in_features = x.size(2);
  a.x = Rows{held.data_ptr(), held.stride(0), dtype_of(x, "x")};
  a.x_head_stride = held.stride(1);
}

// Fills in the output of `a`, and returns it.  Sizes are checked before: it may be larger than the memory.
Tensor set_output(HeadsArgs& a, const Tensor& x, int64_t out_features) {
  a.out_features = out_features;
  Tensor out = new_tensor(x, {a.tokens, a.heads, out_features});
  a.out = Rows{out.data_ptr(), a.heads * out_features, a.x.type};
  return out;
}

Tensor int8_heads_linear(Tensor x, Tensor weight, int64_t out_features) {
  QuantHeads set;
  QuantHeadsArgs& a = set.args;
  Tensor held;
  set_input(a, x, held);
  STD_TORCH_CHECK(out_features >= 0, "out_features must not be negative: ", out_features);
  const int64_t panels = ceil_div(out_features, kPanel),
                bytes = panel_layout(Scheme::i8, a.in_features).bytes;
  STD_TORCH_CHECK(type_of(weight) == ScalarType::Byte && weight.dim() == 3,
                  "weight must be uint8 of shape (heads, panels, panel_bytes), as pack_int8 returns it");
  STD_TORCH_CHECK(weight.size(0) == a.heads, "weight has ", weight.size(0), " heads, but x has ", a.heads);
  STD_TORCH_CHECK(weight.size(1) == panels, "weight has ", weight.size(1),
                  " panels of 16 rows per head; out_features = ", out_features, " needs ", panels);
  STD_TORCH_CHECK(weight.size(2) == bytes, "weight has ", weight.size(2),
                  " bytes per panel; in_features = ", a.in_features, " (the last size of x) needs ", bytes,
                  ": was it packed with another shape or scheme?");
  STD_TORCH_CHECK(weight.stride(2) == 1, "weight must be contiguous in its last dimension");
  Tensor out = set_output(a, x, out_features);
  if (a.tokens == 0 || out_features == 0) return out;
  a.weight = static_cast<const uint8_t*>(weight.data_ptr());
  a.head_stride = weight.stride(0);
  a.panel_stride = panel_stride_of(weight, 1, bytes, "weight");
  const Scratch scratch(QuantHeads::scratch_bytes(a));
  a.scratch = scratch.data();
  run(set);
  return out;
}

Tensor dense_heads_linear(Tensor x, Tensor given_weight) {
  STD_TORCH_CHECK(given_weight.dim() == 3,
                  "weight must have the shape (heads, out_features, in_features), not ",
                  shape_of(given_weight));
  DenseHeads set;
  DenseHeadsArgs& a = set.args;
  Tensor held;
  set_input(a, x, held);
  STD_TORCH_CHECK(given_weight.size(0) == a.heads && given_weight.size(2) == a.in_features,
                  "weight has the shape ", shape_of(given_weight), "; x ", shape_of(x), " needs ", a.heads,
                  " heads of ", a.in_features, " inputs");
  Tensor out = set_output(a, x, given_weight.size(1));
  const Tensor weight = as_rows(given_weight);
  a.weight = rows_of(weight, "weight");
  if (a.tokens == 0 || a.out_features == 0) return out;
  run(set);
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("int8_heads_linear", TORCH_BOX(&armllm::int8_heads_linear));
  m.impl("dense_heads_linear", TORCH_BOX(&armllm::dense_heads_linear));
}
