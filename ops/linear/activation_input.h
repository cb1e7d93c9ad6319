// First phase of a linear layer: quantizes the activations into the layout that the kernels read.
#pragma once

#include <cstring>

#include "dispatch/variants.h"
#include "linear/tile_grid.h"
#include "norm/norm.h"
#include "runtime/thread_scratch.h"

namespace armllm {

// Scatters a row that is quantized already into its chunks, and sums its groups.
inline void scatter_row(const int8_t* row, int64_t groups, int8_t* values, int64_t chunk_stride,
                        int32_t* group_sums) {
  for (int64_t g = 0; g < groups; ++g, row += kGroup) {
    for (int64_t c = 0; c < kGroup / 8; ++c)
      std::memcpy(values + (g * kGroup / 8 + c) * chunk_stride, row + c * 8, 8);
    if (group_sums == nullptr) continue;
    int32_t sum = 0;
    for (int64_t k = 0; k < kGroup; ++k) sum += row[k];
    group_sums[g] = -8 * sum;
  }
}

inline int64_t normalized_bytes(const NormArgs& norm) { return norm.width * size_of(norm.x.type); }

// Normalizes a row into `memory`, of normalized_bytes(), rounded to the type of x.
inline const void* normalized_row(const NormArgs& norm, int64_t row, void* memory) {
  NormArgs one = norm;
  one.out = Rows{memory, 0, norm.x.type};
  variant().norm->rms(one, row);
  return one.out.data;
}

// Quantizes one tile of rows; a tile holds both digits of a token, since a norm writes the sum with its
// residual and must run once.
inline void quantize_input_tile(const LinearKernels& kernels, const Activations& q, const Rows& x,
                                const LinearInput& input, int64_t tokens, int64_t in_features, bool rotated,
                                int64_t index) {
  const int64_t float_bytes = round_up(in_features * 4, 64);
  const int64_t error_bytes = q.digits == 1 ? 0 : float_bytes, rotated_bytes = rotated ? float_bytes : 0;
  const int64_t norm_bytes = input.norm == nullptr ? 0 : normalized_bytes(*input.norm);
  char* memory = thread_memory(error_bytes + rotated_bytes + norm_bytes);
  float* errors = reinterpret_cast<float*>(memory);
  float* turned = reinterpret_cast<float*>(memory + error_bytes);
  const DType source = input.norm == nullptr ? x.type : input.norm->x.type;
  const DType type = rotated ? DType::f32 : source;
  const void* row = nullptr;
  const int8_t* first_values = nullptr;  // the token's first digit, and its scale
  float first_scale = 0.0f;
  quantize_tile(
      q, tokens * q.digits, index, [&](int64_t r, int8_t* values, int64_t chunk_stride, int32_t* group_sums) {
        const bool second = q.digits == 2 && r % 2 == 1;
        const int64_t t = q.digits == 2 ? r / 2 : r;
        if (input.values != nullptr) {
          scatter_row(input.values + t * input.value_stride, q.groups, values, chunk_stride, group_sums);
          return input.scales[t];
        }
        if (second) {
          kernels.rounding_errors(row, type, in_features, first_values, chunk_stride, first_scale, errors);
          return kernels.quantize(errors, DType::f32, in_features, q.groups, values, chunk_stride,
                                  group_sums);
        }
        row = input.norm == nullptr ? x.row(t)
                                    : normalized_row(*input.norm, t, memory + error_bytes + rotated_bytes);
        if (rotated) {
          kernels.rotate(row, source, in_features, turned);
          row = turned;
        }
        first_values = values;
        first_scale = kernels.quantize(row, type, in_features, q.groups, values, chunk_stride, group_sums);
        return first_scale;
      });
}

}  // namespace armllm
