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

// Returns a normalized row, rounded to the type of x; valid until the thread's next use of thread_memory().
inline const void* normalized_row(const NormArgs& norm, int64_t row) {
  NormArgs one = norm;
  one.out = Rows{thread_memory(norm.width * size_of(norm.x.type)), 0, norm.x.type};
  variant().norm->rms(one, row);
  return one.out.data;
}

inline void quantize_input_tile(const LinearKernels& kernels, const Activations& q, const Rows& x,
                                const LinearInput& input, int64_t tokens, int64_t in_features,
                                int64_t index) {
  quantize_tile(q, tokens, index, [&](int64_t t, int8_t* values, int64_t chunk_stride, int32_t* group_sums) {
    if (input.values != nullptr) {
      scatter_row(input.values + t * input.value_stride, q.groups, values, chunk_stride, group_sums);
      return input.scales[t];
    }
    const void* row = input.norm == nullptr ? x.row(t) : normalized_row(*input.norm, t);
    return kernels.quantize(row, input.norm == nullptr ? x.type : input.norm->x.type, in_features, q.groups,
                            values, chunk_stride, group_sums);
  });
}

}  // namespace armllm
