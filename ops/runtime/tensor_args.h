// From stable-ABI tensors to the raw views that task sets take, with the checks that users see.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>

#include "runtime/types.h"

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

inline std::string shape_of(const Tensor& t) {
  std::string text = "(";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + ")";
}

inline int64_t last_size(const Tensor& t) { return t.size(t.dim() - 1); }
inline int64_t row_count(const Tensor& t) { return last_size(t) == 0 ? 0 : t.numel() / last_size(t); }

// Elements from one row to the next where all dimensions but the last are rows; none if they do not merge.
inline std::optional<int64_t> row_stride(const Tensor& t) {
  const int64_t dims = t.dim();
  if (dims < 1 || (last_size(t) > 1 && t.stride(dims - 1) != 1)) return std::nullopt;
  int64_t stride = last_size(t), rows = 1;
  if (t.numel() == 0) return stride;
  for (int64_t d = dims - 2; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (rows == 1) stride = t.stride(d);
    if (t.stride(d) != stride * rows) return std::nullopt;
    rows *= t.size(d);
  }
  return stride;
}

// A tensor that rows_of takes: the same one, or a copy where its layout is no matrix of rows.
inline Tensor as_rows(const Tensor& t) { return row_stride(t) ? t : torch::stable::contiguous(t); }

inline Rows rows_of(const Tensor& t, const char* name) {
  const std::optional<int64_t> stride = row_stride(t);
  STD_TORCH_CHECK(stride.has_value(), name,
                  " must be contiguous in its last dimension, and the others must merge to rows");
  return Rows{t.data_ptr(), *stride, dtype_of(t, name)};
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

inline Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  if (name == "swiglu_clamped") return Activation::swiglu_clamped;
  if (name == "silu_clamped") return Activation::silu_clamped;
  STD_TORCH_CHECK(false, "unknown activation '", name,
                  "'; there are: silu, gelu, gelu_tanh, relu, swiglu_clamped, silu_clamped");
}

}  // namespace armllm
