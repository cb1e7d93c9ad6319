// Conversion of stable-ABI tensors to the raw views that task sets work on.  Failed checks are reported to
// the caller of the op.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "runtime/types.h"

namespace armllm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The dtype of a tensor; torch passes None for a required tensor as an undefined one.
inline ScalarType type_of(const Tensor& t) {
  STD_TORCH_CHECK(t.defined(), "an argument is None, but the op needs a tensor there");
  return t.scalar_type();
}

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (type_of(t)) {
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

// Returns an uninitialized tensor with the dtype of `like`, or another.
inline Tensor new_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         std::optional<ScalarType> type = std::nullopt) {
  try {
    return torch::stable::new_empty(like, sizes, type);
  } catch (const std::exception&) {  // torch's reason does not pass through its stable ABI
    std::string shape;
    for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    STD_TORCH_CHECK(false, "there is no memory for a tensor of shape (", shape, ")");
  }
}

inline int64_t last_size(const Tensor& t) { return t.size(t.dim() - 1); }
inline int64_t row_count(const Tensor& t) { return last_size(t) == 0 ? 0 : t.numel() / last_size(t); }

// Elements from one row to the next if all dimensions except the last merge to rows; otherwise nullopt.
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

// Returns a contiguous tensor: `t`, or a copy.
inline Tensor as_contiguous(const Tensor& t) {
  try {
    return torch::stable::contiguous(t);
  } catch (const std::exception&) {  // torch's reason does not pass through its stable ABI
    STD_TORCH_CHECK(false, "there is no memory for a contiguous copy of a tensor of shape ", shape_of(t));
  }
}

// Returns a tensor that rows_of accepts: `t`, or a contiguous copy if its dimensions do not merge to rows.
inline Tensor as_rows(const Tensor& t) { return row_stride(t) ? t : as_contiguous(t); }

inline Rows rows_of(const Tensor& t, const char* name) {
  const std::optional<int64_t> stride = row_stride(t);
  STD_TORCH_CHECK(stride.has_value(), name,
                  " must be contiguous in its last dimension, and its other dimensions must merge to rows");
  const DType type = dtype_of(t, name);
  return Rows{t.data_ptr(), *stride, type};
}

// Bytes from one panel to the next along a dimension of a packed weight; `bytes` is the size of a panel.
inline int64_t panel_stride_of(const Tensor& weight, int64_t dim, int64_t bytes, const char* name) {
  if (weight.size(dim) <= 1) return bytes;  // the stride of a single panel is arbitrary
  STD_TORCH_CHECK(weight.stride(dim) >= bytes, name,
                  " has panels that overlap in memory: the stride of dimension ", dim, " is ",
                  weight.stride(dim), ", a panel has ", bytes, " bytes; pass ", name, ".contiguous()");
  return weight.stride(dim);
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
  std::string known;
#define ACTIVATION(activation, number)                               \
  if (Activation::activation != Activation::none) {                  \
    if (name == #activation) return Activation::activation;          \
    known += (known.empty() ? "" : ", ") + std::string(#activation); \
  }
#include "runtime/enums.def"
  STD_TORCH_CHECK(false, "unknown activation '", name, "'; choose from: ", known);
}

}  // namespace armllm
