// lora_linear, lora_embedding
#include "lora/lora.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

const int32_t* integers(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(type_of(t) == ScalarType::Int && t.dim() == 1 && t.is_contiguous(), name,
                  " must be a contiguous int32 vector");
  return static_cast<const int32_t*>(t.data_ptr());
}

// The fields that both ops have; returns the copy of base that the addition changes.
Tensor begin(LoraArgs& args, const Tensor& base, const Tensor& b, bool packed, int64_t slots,
             int64_t most_rank, const Tensor& ranks, const Tensor& adapters) {
  const int64_t blocks = ceil_div(last_size(base), kLoraBlock);
  const int64_t row = packed ? static_cast<int64_t>(sizeof(LoraIntegers)) : kLoraBlock;
  STD_TORCH_CHECK(b.dim() == 4 && b.is_contiguous() && b.size(0) == slots && b.size(1) == blocks &&
                      b.size(2) == most_rank && b.size(3) == row,
                  "b must be contiguous, of shape (", slots, ", ", blocks, ", ", most_rank, ", ", row, ")");
  args.ranks = integers(ranks, "ranks");
  args.adapters = integers(adapters, "adapters");
  STD_TORCH_CHECK(ranks.numel() == slots, "ranks must have one element for each of the ", slots, " slots");
  Tensor out = torch::stable::clone(as_contiguous(base));
  args.out = rows_of(out, "base");
  args.b = static_cast<const char*>(b.data_ptr());
  args.integers = packed;
  if (!packed) args.type = dtype_of(b, "b");
  args.listed = adapters.numel();
  args.slots = slots;
  args.most_rank = most_rank;
  args.out_features = last_size(base);
  return out;
}

void add(const LoraArgs& args) {
  Lora lora;
  lora.parts = {args};
  const Scratch scratch(Lora::scratch_bytes(lora.parts));
  lora.set_scratch(scratch.data());
  run(lora);
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
  STD_TORCH_CHECK(a.dim() == 3 && a.is_contiguous() && a.size(2) == a_row,
                  "a must be contiguous, of shape (slots, rank, ", a_row, ")");
  LoraArgs args;
  if (!packed) dtype_of(a, "a");
  Tensor out = begin(args, base, b, packed, a.size(0), a.size(1), ranks, adapters);
  STD_TORCH_CHECK(type_of(a) == type_of(b), "a and b must have the same dtype");
  const int64_t tokens = last_size(x) == 0 || last_size(base) == 0 ? 0 : row_count(x);
  args.x = rows_of(x, "x");
  args.a = static_cast<const char*>(a.data_ptr());
  args.tokens = tokens;
  args.in_features = last_size(x);
  add(args);
  return out;
}

Tensor lora_embedding(Tensor base, Tensor given_ids, Tensor a, Tensor b, Tensor ranks, Tensor adapters) {
  STD_TORCH_CHECK(type_of(given_ids) == ScalarType::Long, "ids must be int64");
  const Tensor ids = as_contiguous(given_ids);
  STD_TORCH_CHECK(base.defined() && base.dim() == ids.dim() + 1,
                  "base must have one more dimension than ids");
  for (int64_t d = 0; d < ids.dim(); ++d)
    STD_TORCH_CHECK(base.size(d) == ids.size(d), "base has the shape ", shape_of(base), " and ids ",
                    shape_of(ids), "; they must agree in all dimensions except base's last");
  STD_TORCH_CHECK(a.defined() && a.dim() == 3 && a.is_contiguous(),
                  "a must be contiguous, of shape (slots, vocabulary, rank)");
  LoraArgs args;
  args.table_type = dtype_of(a, "a");
  const bool packed = type_of(b) == ScalarType::Char;
  Tensor out = begin(args, base, b, packed, a.size(0), a.size(2), ranks, adapters);
  args.table = static_cast<const char*>(a.data_ptr());
  args.ids = static_cast<const int64_t*>(ids.data_ptr());
  args.vocab_size = a.size(1);
  args.tokens = last_size(base) == 0 ? 0 : ids.numel();
  if (args.tokens > 0) add(args);  // the pointer to no ids may be null, which means a linear layer
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("lora_linear", TORCH_BOX(&armllm::lora_linear));
  m.impl("lora_embedding", TORCH_BOX(&armllm::lora_embedding));
}
