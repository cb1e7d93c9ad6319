// Keys of an int8 cache are rotated by a Hadamard matrix, and queries with them.
//
// Products of rotated vectors are those of the vectors themselves.  Some models (Qwen2.5) have keys with
// elements that are a hundred times larger than the others, and one scale would leave these no digits.  A
// rotation spreads every element over all others, so that all have about the same size.
//
// Keys are multiplied by the matrix H of ones and minus ones, queries by H / n: both are exact but for sums,
// as n is a power of two.
#pragma once

#include <utility>

#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kMostRotated = 1024;  // elements of the largest head that is rotated

// Consecutive elements that are mixed with each other: the largest power of two that divides the head size,
// padded to whole groups.  1: the head is not rotated.
inline int64_t rotation_of(int64_t padded_size) {
  return padded_size <= kMostRotated ? padded_size & -padded_size : 1;
}

// Writes round_up(n, 16) floats, with zeros at the end.
template <typename T>
void load_floats_typed(const T* x, int64_t n, float factor, float* to) {
  const F32 f = set1(factor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(x + i) * f);
  if (i < n) store(to + i, load_partial(x + i, static_cast<int>(n - i)) * f);
}

inline void load_floats(const char* x, DType type, int64_t n, float factor, float* to) {
  switch (type) {
    case DType::f32:
      return load_floats_typed(reinterpret_cast<const float*>(x), n, factor, to);
    case DType::bf16:
      return load_floats_typed(reinterpret_cast<const bf16*>(x), n, factor, to);
    case DType::f16:
      return load_floats_typed(reinterpret_cast<const f16*>(x), n, factor, to);
  }
}

// to[2 i], to[2 i + 1] = x[i] ± x[half + i].  As many times as 2 · half has bits, this is a product with H.
inline void mix_halves(const float* x, int64_t half, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32 a = load(x + i), b = load(x + half + i);
    store_pairs(to + 2 * i, a + b, a - b);
  }
  for (; i < half; ++i) {
    to[2 * i] = x[i] + x[half + i];
    to[2 * i + 1] = x[i] - x[half + i];
  }
}

// A head in float32, rotated.
class RotatedHead {
 public:
  // Rotates the n elements at x, times `factor`; `padded` is n rounded up to a multiple of 8.
  RotatedHead(const char* x, DType type, int64_t n, int64_t padded, float factor) {
    load_floats(x, type, n, factor, first_);
    const int64_t mixed = rotation_of(padded);
    float* spare = second_;
    for (int64_t done = 1; done < mixed; done *= 2) {
      for (int64_t i = 0; i < padded; i += mixed) mix_halves(data_ + i, mixed / 2, spare + i);
      std::swap(data_, spare);
    }
  }
  RotatedHead(const RotatedHead&) = delete;
  RotatedHead& operator=(const RotatedHead&) = delete;

  float* data() { return data_; }

 private:
  alignas(64) float first_[kMostRotated + kLanes];
  alignas(64) float second_[kMostRotated + kLanes];
  float* data_ = first_;
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
