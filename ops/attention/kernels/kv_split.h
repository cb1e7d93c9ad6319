// A split of the cache, as the products use it: the visible positions and the addresses of their blocks.
#pragma once

#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return smaller(larger(x, low), high); }

// Locality of prefetches: into the L2 cache.  A core can wait for many more cache lines on their way to L2
// than to L1.
constexpr int kToL2 = 2;

// Positions [begin, end), counted from the first of the split.
struct Span {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

// The smallest span of all positions that at least one of the rows sees.
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

// The only code that knows how the cache is paged.  Blocks that no row sees need not exist: the nearest
// visible block replaces them.
struct Split {
  Span all;  // positions that at least one row of the tile sees
  int64_t block_size;
  int shift;  // block_size = 2^shift, because a division per block costs measurable time
  const char* k[kSplit / kKeyLanes];       // keys of the kv head in each block
  const char* v[kSplit / kKeyLanes];       // values of the kv head in each block
  const char* next_k[kSplit / kKeyLanes];  // of the next split, or this one again: see look_ahead()
  const char* next_v[kSplit / kKeyLanes];
  int64_t key_bytes, value_bytes;  // of one kv head in a block
  const float* k_scales;           // [kSplit] of int8 caches; 0 where no row sees the position
  const float* v_scales;

  Split(const AttentionArgs& args, const AttentionTile& t)
      : all(visible(t, 0, t.rows)),
        block_size(args.block_size),
        shift(__builtin_ctzll(static_cast<unsigned long long>(args.block_size))),
        k_scales(nullptr),
        v_scales(nullptr) {
    if (all.empty()) return;
    const int64_t group = group_of(args.cache_type), size = size_of(args.cache_type);
    key_bytes = round_up(args.head_size, group) * block_size * size;
    value_bytes = block_size * args.value_size * size;
    const int32_t* table = t.blocks + (t.split_begin >> shift);
    find_blocks(args, table, all, t.kv_head, k, v);
    if (args.cache_type == CacheType::i8) gather_scales(args, t, table);
  }

  void find_blocks(const AttentionArgs& args, const int32_t* table, Span seen, int64_t kv_head,
                   const char** keys, const char** values) const {
    const int64_t low = seen.begin >> shift, high = (seen.end - 1) >> shift;
    for (int64_t b = 0; b < kSplit >> shift; ++b) {
      const int64_t head = table[clamp(b, low, high)] * args.kv_heads + kv_head;
      keys[b] = static_cast<const char*>(args.k_cache) + head * key_bytes;
      values[b] = static_cast<const char*>(args.v_cache) + head * value_bytes;
    }
  }

  // Prepares the prefetches of the products: where they read this split, they prefetch the same position of
  // the next one, because blocks are too short and too scattered for hardware prefetchers.  Visible
  // positions of the next split that the products will not pass are prefetched here.
  void look_ahead(const AttentionArgs& args, const AttentionTile& t) {
    if (!t.is_near) fetch(args, k, v, all);
    if (t.next.empty()) {
      __builtin_memcpy(next_k, k, sizeof k);
      __builtin_memcpy(next_v, v, sizeof v);
      return;
    }
    const Span next{t.next.begin, t.next.end};
    find_blocks(args, t.next.blocks, next, t.next.kv_head, next_k, next_v);
    fetch(args, next_k, next_v, Span{next.begin, smaller(all.begin, next.end)});
    fetch(args, next_k, next_v, Span{larger(all.end, next.begin), next.end});
  }

  void fetch(const AttentionArgs& args, const char* const* keys, const char* const* values, Span span) const {
    const int64_t group = group_of(args.cache_type), size = size_of(args.cache_type);
    for (int64_t stop, i = span.begin; i < span.end; i = stop) {
      const int64_t block = i >> shift, begin = i - (block << shift);
      stop = smaller((block + 1) << shift, span.end);
      const int64_t end = stop - (block << shift), row = block_size * group * size;
      for (int64_t at = 0; at < key_bytes; at += row)
        fetch_bytes(keys[block] + at + begin * group * size, keys[block] + at + end * group * size);
      fetch_bytes(values[block] + begin / group * group * args.value_size * size,
                  values[block] + round_up(end, group) * args.value_size * size);
    }
  }
  static void fetch_bytes(const char* from, const char* end) {
    for (; from < end; from += 64) __builtin_prefetch(from, 0, kToL2);
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
    for (int64_t i = t.next.begin / 16 * 16; i < t.next.end; i += 16) {
      const int64_t head = t.next.blocks[i >> shift] * args.kv_heads + t.next.kv_head,
                    at = (head << shift) + (i & (block_size - 1));
      __builtin_prefetch(args.k_scales + at);
      __builtin_prefetch(args.v_scales + at);
    }
  }

  // Keys and values of the block of `position`, which must be a visible block.
  template <typename T>
  const T* keys(int64_t position) const {
    return reinterpret_cast<const T*>(k[position >> shift]);
  }
  template <typename T>
  const T* values(int64_t position) const {
    return reinterpret_cast<const T*>(v[position >> shift]);
  }
  // Distance in elements from the block of `position` to the next split's block at that position.
  template <typename T>
  int64_t to_next_key(int64_t position) const {
    return reinterpret_cast<const T*>(next_k[position >> shift]) - keys<T>(position);
  }
  template <typename T>
  int64_t to_next_value(int64_t position) const {
    return reinterpret_cast<const T*>(next_v[position >> shift]) - values<T>(position);
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
