// Plain types shared by all kernel families.  No tensors: kernels work on raw pointers and sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace armllm {

enum class DType : int32_t {
#define DTYPE(name, number, torch_name) name = number,
#include "runtime/enums.def"
};

inline int64_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

// A row-major matrix whose row stride may exceed its row length.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;  // elements from one row to the next
  DType type = DType::f32;

  char* row(int64_t index) const { return static_cast<char*>(data) + index * stride * size_of(type); }
  char* at(int64_t row, int64_t column) const {
    return static_cast<char*>(data) + (row * stride + column) * size_of(type);
  }
  explicit operator bool() const { return data != nullptr; }
};

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
constexpr int64_t ceil_div(int64_t value, int64_t step) { return (value + step - 1) / step; }

enum class Activation : int32_t {
#define ACTIVATION(name, number) name = number,
#include "runtime/enums.def"
};

enum class PointwiseOp : int32_t {
#define POINTWISE(name, number) name = number,
#include "runtime/enums.def"
};

}  // namespace armllm
