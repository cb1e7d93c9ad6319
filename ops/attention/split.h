// A split of the cache as the products see it: which positions any row sees, and where their blocks are.
#pragma once

#include "attention/attention.h"
#include "common/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return smaller(larger(x, low), high); }

// Positions [begin, end), counted from the split's first.
struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// What any of some rows sees.
inline Span visible(const AttentionTile& t, int64_t row, int64_t rows) {
  Span span{kSplit, 0};
  for (int64_t r = row; r < row + rows; ++r) {
    const int64_t begin = larger(t.first[r] - t.split_begin, 0),
                  end = smaller(t.last[r] - t.split_begin, kSplit);
    if (begin >= end) continue;
    span.begin = smaller(span.begin, begin);
    span.end = larger(span.end, end);
  }
  return span;
}

// The one place that knows how the cache is paged.  Blocks that nobody sees need not exist: a block that is seen
// takes their place.
struct Split {
  Span all;  // what any row of the tile sees
  int64_t block_size;
  int shift;                          // block_size = 2^shift: a division a block is felt
  const char* k[kSplit / kKeyLanes];  // the head's part of each block
  const char* v[kSplit / kKeyLanes];
  const char* next_k[kSplit / kKeyLanes];  // of the next split, if it follows
  int next_blocks;                         // 0: it does not
  int64_t key_bytes, value_bytes;          // of a head's part of a block
  const float* k_scales;                   // [kSplit] of int8 caches; 0 where nobody sees the position
  const float* v_scales;

  Split(const AttentionArgs& args, const AttentionTile& t)
      : all(visible(t, 0, t.rows)),
        block_size(args.block_size),
        shift(__builtin_ctzll(static_cast<unsigned long long>(args.block_size))),
        next_blocks(0),
        k_scales(nullptr),
        v_scales(nullptr) {
    if (all.empty()) return;
    const int64_t group = group_of(args.cache_type), size = size_of(args.cache_type);
    key_bytes = round_up(args.head_size, group) * block_size * size;
    value_bytes = block_size * args.value_size * size;
    const int32_t* table = t.blocks + (t.split_begin >> shift);
    const int64_t low = all.begin >> shift, high = (all.end - 1) >> shift, blocks = kSplit >> shift;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t head = table[clamp(b, low, high)] * args.kv_heads + t.kv_head;
      k[b] = static_cast<const char*>(args.k_cache) + head * key_bytes;
      v[b] = static_cast<const char*>(args.v_cache) + head * value_bytes;
    }
    if (t.next_split_follows) {
      const int64_t left = t.last[t.rows - 1] - t.split_begin - kSplit;
      next_blocks = static_cast<int>(smaller((left + block_size - 1) >> shift, blocks));
      for (int b = 0; b < next_blocks; ++b)
        next_k[b] = static_cast<const char*>(args.k_cache) +
                    (table[blocks + b] * args.kv_heads + t.kv_head) * key_bytes;
    }
    if (args.cache_type == CacheType::i8) gather_scales(args, t, table);
  }

  void gather_scales(const AttentionArgs& args, const AttentionTile& t, const int32_t* table) {
    float* scales = reinterpret_cast<float*>(t.edges + round_up(16 * args.value_size, 64));
    k_scales = scales;
    v_scales = scales + kSplit;
    const int64_t begin = all.begin / kLanes * kLanes, end = round_up(all.end, kLanes);
    for (int64_t stop, i = begin; i < end; i = stop) {
      stop = smaller(((i >> shift) + 1) << shift, end);
      const int64_t head = table[i >> shift] * args.kv_heads + t.kv_head,
                    at = (head << shift) - (i >> shift << shift);
      for (; i < stop; i += kLanes) {
        store(scales + i, load(args.k_scales + at + i));
        store(scales + kSplit + i, load(args.v_scales + at + i));
      }
    }
    for (int64_t side = 0; side < 2 * kSplit; side += kSplit) {
      for (int64_t i = begin; i < all.begin; ++i) scales[side + i] = 0.0f;
      for (int64_t i = all.end; i < end; ++i) scales[side + i] = 0.0f;
    }
    for (int b = 0; b < next_blocks; ++b)
      for (int64_t i = 0; i < block_size; i += 16) {
        const int64_t at = ((table[(kSplit >> shift) + b] * args.kv_heads + t.kv_head) << shift) + i;
        __builtin_prefetch(args.k_scales + at);
        __builtin_prefetch(args.v_scales + at);
      }
  }

  // Where byte `offset` of the next split's keys is, or near it: for fetching only.
  const char* next_key(int64_t offset) const {
    const int block = static_cast<int>(static_cast<float>(offset) / static_cast<float>(key_bytes));
    return next_k[block < next_blocks ? block : next_blocks - 1] + (offset - block * key_bytes);
  }

  // Of the cache's elements; `position` in a block that is seen.
  template <typename T>
  const T* keys(int64_t position) const {
    return reinterpret_cast<const T*>(k[position >> shift]);
  }
  template <typename T>
  const T* values(int64_t position) const {
    return reinterpret_cast<const T*>(v[position >> shift]);
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
