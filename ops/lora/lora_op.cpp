// lora_linear
#include "lora/lora.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

const int32_t* integers(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(type_of(t) == ScalarType::Int && t.dim() == 1 && t.is_contiguous(), name,
                  " must be a contiguous int32 vector");
  return static_cast<const int32_t*>(t.data_ptr());
}

Tensor lora_linear(Tensor base, Tensor given_x, Tensor a, Tensor b, Tensor ranks, Tensor adapters) {
  const Tensor x = as_rows(given_x);
  STD_TORCH_CHECK(x.dim() >= 1 && base.dim() == x.dim() && base.defined(),
                  "base and x must have the same number of dimensions, at least one");
  for (int64_t d = 0; d + 1 < x.dim(); ++d)
    STD_TORCH_CHECK(base.size(d) == x.size(d), "base has the shape ", shape_of(base), " and x ", shape_of(x),
                    "; they must agree in all dimensions except the last");
  const bool packed = type_of(a) == ScalarType::Char;
  constexpr int64_t kGroup = sizeof(LoraIntegers);
  const int64_t a_row = packed ? ceil_div(last_size(x), kLoraBlock) * kGroup : last_size(x);
  const int64_t b_row = packed ? kGroup : kLoraBlock;
  STD_TORCH_CHECK(a.dim() == 3 && a.is_contiguous() && a.size(2) == a_row,
                  "a must be contiguous, of shape (slots, rank, ", a_row, ")");
  const int64_t blocks = ceil_div(last_size(base), kLoraBlock);
  STD_TORCH_CHECK(b.dim() == 4 && b.is_contiguous() && b.size(0) == a.size(0) && b.size(1) == blocks &&
                      b.size(2) == a.size(1) && b.size(3) == b_row,
                  "b must be contiguous, of shape (", a.size(0), ", ", blocks, ", ", a.size(1), ", ", b_row,
                  ")");
  STD_TORCH_CHECK(type_of(a) == type_of(b), "a and b must have the same dtype");
  const int64_t tokens = last_size(x) == 0 || last_size(base) == 0 ? 0 : row_count(x);
  LoraArgs args;
  args.ranks = integers(ranks, "ranks");
  args.adapters = integers(adapters, "adapters");
  STD_TORCH_CHECK(ranks.numel() == a.size(0), "ranks must have one element for each of the ", a.size(0),
                  " slots");
  Tensor out = torch::stable::clone(as_contiguous(base));
  args.x = rows_of(x, "x");
  args.out = rows_of(out, "base");
  args.a = static_cast<const char*>(a.data_ptr());
  args.b = static_cast<const char*>(b.data_ptr());
  args.integers = packed;
  if (!packed) args.type = dtype_of(a, "a");
  args.tokens = tokens;
  args.listed = adapters.numel();
  args.slots = a.size(0);
  args.most_rank = a.size(1);
  args.in_features = last_size(x);
  args.out_features = last_size(base);
  Lora lora;
  lora.parts = {args};
  const Scratch scratch(Lora::scratch_bytes(lora.parts));
  lora.set_scratch(scratch.data());
  run(lora);
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("lora_linear", TORCH_BOX(&armllm::lora_linear)); }
