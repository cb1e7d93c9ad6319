// Converts queries from the op's input to float32 rows.
#pragma once

#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

template <typename T>
void load_query_typed(const T* from, int64_t n, float scale, float* q) {
  const F32 factor = set1(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(q + i, load(from + i) * factor);
  const int rest = static_cast<int>(n - i);
  if (rest > 0) store(q + i, load_partial(from + i, rest) * factor);
}

// Writes round_up(head size, 16) floats, with zeros at the end.
inline void load_float_query(const AttentionArgs& args, int64_t token, int64_t head, float scale, float* q) {
  const char* from = args.q.at(token, head * args.head_size);
  switch (args.q.type) {
    case DType::f32:
      return load_query_typed(reinterpret_cast<const float*>(from), args.head_size, scale, q);
    case DType::bf16:
      return load_query_typed(reinterpret_cast<const bf16*>(from), args.head_size, scale, q);
    case DType::f16:
      return load_query_typed(reinterpret_cast<const f16*>(from), args.head_size, scale, q);
  }
}

// Byte offset of the extra data (RowTail) within a row of tile.query.
inline int64_t query_tail(const AttentionArgs& args) { return query_bytes(args.head_size) - 64; }

// Floats from one row of tile.query to the next.
inline int64_t query_floats(const AttentionArgs& args) {
  return query_bytes(args.head_size) / static_cast<int64_t>(sizeof(float));
}
inline float* float_query(const AttentionArgs& args, const AttentionTile& t, int64_t row) {
  return static_cast<float*>(t.query) + row * query_floats(args);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
