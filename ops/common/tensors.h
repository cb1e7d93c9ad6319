// From stable-ABI tensors to the raw views that task sets take, with the checks that users see.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>

#include "common/types.h"
#include "linear/linear.h"

namespace armllm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
}

inline int64_t last_size(const Tensor& t) { return t.size(t.dim() - 1); }
inline int64_t row_count(const Tensor& t) { return last_size(t) == 0 ? 0 : t.numel() / last_size(t); }

// All dimensions but the last as rows.  A tensor whose leading dimensions do not merge is copied by the caller.
inline Rows rows_of(const Tensor& t, const char* name) {
  const int64_t dims = t.dim();
  STD_TORCH_CHECK(dims >= 1, name, " must have at least one dimension");
  STD_TORCH_CHECK(last_size(t) <= 1 || t.stride(dims - 1) == 1, name,
                  " must be contiguous in its last dimension");
  int64_t stride = last_size(t);
  bool found = false;
  for (int64_t d = dims - 2; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (!found) {
      stride = t.stride(d);
      found = true;
      continue;
    }
    int64_t inner = 1;
    for (int64_t e = d + 1; e < dims - 1; ++e) inner *= t.size(e);
    STD_TORCH_CHECK(t.stride(d) == stride * inner, name, ": its leading dimensions cannot be seen as rows");
  }
  return Rows{t.data_ptr(), stride, dtype_of(t, name)};
}

// Scratch memory of one call, 64-byte aligned.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(new char[bytes + 64]) {}
  void* data() const {
    return reinterpret_cast<void*>(round_up(reinterpret_cast<intptr_t>(memory_.get()), 64));
  }

 private:
  std::unique_ptr<char[]> memory_;
};

inline Scheme scheme_of(const std::string& name) {
  if (name == "g32i") return Scheme::g32i;
  if (name == "row") return Scheme::row;
  if (name == "g32") return Scheme::g32;
  if (name == "i8") return Scheme::i8;
  STD_TORCH_CHECK(false, "unknown scheme '", name, "'; there are: g32i, g32, row, i8");
}

inline Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  if (name == "swiglu_clamped") return Activation::swiglu_clamped;
  STD_TORCH_CHECK(false, "unknown activation '", name,
                  "'; there are: silu, gelu, gelu_tanh, relu, swiglu_clamped");
}

}  // namespace armllm
