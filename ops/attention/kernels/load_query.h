// Converts queries from the op's input to float32 rows.
#pragma once

#include "attention/kernels/rotate_head.h"
#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Writes round_up(head size, 16) floats, with zeros at the end.
inline void load_float_query(const AttentionArgs& args, int64_t token, int64_t head, float scale, float* q) {
  load_floats(args.q.at(token, head * args.head_size), args.q.type, args.head_size, scale, q);
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
