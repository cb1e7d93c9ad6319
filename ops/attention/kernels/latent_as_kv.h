// A latent is both key and value: a row of [block][block size][head size] whose first value-size elements
// are the value.  A split of latents is rearranged into a cache with one block of kSplit positions, and the
// products then work as on any cache.  All heads read the result, so rearranging costs little compared to
// them.
#pragma once

#include "attention/kernels/kv_split.h"
#include "attention/kernels/transpose.h"
#include "attention/kernels/write_kv.h"
#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kBatch = 32;  // keys that are rearranged together: their rows stay in the L1 cache

// The adjacent elements of a key, a group of G elements of T, as one integer.
template <typename T, int G>
struct Unit;
template <>
struct Unit<float, 1> {
  using Type = uint32_t;
};
template <>
struct Unit<f16, 1> {
  using Type = uint16_t;
};
template <>
struct Unit<bf16, 4> {
  using Type = uint64_t;
};

template <typename T, int G>
struct Latents {
  using U = typename Unit<T, G>::Type;
  const AttentionArgs& args;
  const AttentionTile& tile;
  Span span;  // positions that any row of the tile sees

  const T* row(int64_t position) const {
    int64_t at = tile.split_begin + position;
    if (tile.positions != nullptr) at = tile.positions[at];
    if (at < 0)
      return static_cast<const T*>(args.entries) + args.places.row(tile.blocks, -1 - at) * args.head_size;
    return static_cast<const T*>(args.k_cache) +
           (tile.blocks[at / args.block_size] * args.block_size + at % args.block_size) * args.head_size;
  }

  // Writes the keys as [head size / G][kSplit][G].  Positions outside the span get the nearest key inside it.
  void keys(T* to) const {
    constexpr int N = Square<U>::kSide;
    U* units = reinterpret_cast<U*>(to);
    const int64_t whole = args.head_size / G, squares = whole / N * N;
    for (int64_t i = span.begin / kBatch * kBatch; i < span.end; i += kBatch) {
      const U* from[kBatch];
      for (int r = 0; r < kBatch; ++r)
        from[r] = reinterpret_cast<const U*>(row(clamp(i + r, span.begin, span.end - 1)));
      for (int64_t c = 0; c < squares; c += N)
#pragma GCC unroll 1  // if unrolled, the rows' addresses no longer fit the registers
        for (int r = 0; r < kBatch; r += N) transpose_square(from + r, c, units + c * kSplit + i + r, kSplit);
      for (int r = 0; r < kBatch; ++r) rest_of_key(from[r], squares, whole, units + i + r);
    }
  }

  // Copies the units after the last square, and the elements after the last unit.
  void rest_of_key(const U* from, int64_t squares, int64_t whole, U* to) const {
    for (int64_t c = squares; c < whole; ++c) __builtin_memcpy(to + c * kSplit, from + c, sizeof(U));
    if (whole * G == args.head_size) return;
    T rest[G] = {};
    for (int64_t k = whole * G; k < args.head_size; ++k)
      rest[k - whole * G] = reinterpret_cast<const T*>(from)[k];
    __builtin_memcpy(to + whole * kSplit, rest, sizeof(U));
  }

  // Writes the values as [kSplit / G][value size][G].
  void values(T* to) const {
    for (int64_t i = span.begin / G * G; i < span.end; i += G) {
      const T* rows[G];
      for (int r = 0; r < G; ++r) rows[r] = row(clamp(i + r, span.begin, span.end - 1));
      T* group = to + i * args.value_size;
      if constexpr (G == 4) {
        const uint16_t* bits[4];
        for (int r = 0; r < 4; ++r) bits[r] = reinterpret_cast<const uint16_t*>(rows[r]);
        interleave_four(bits, args.value_size, reinterpret_cast<uint16_t*>(group));
      } else {
        __builtin_memcpy(group, rows[0], args.value_size * sizeof(T));
      }
    }
  }
};

// One split of latents, presented as a complete cache: the arguments and the tile to attend with.
struct LatentSplit {
  AttentionArgs args;
  AttentionTile tile;

  LatentSplit(const AttentionArgs& of, const AttentionTile& t) : args(of), tile(t) {
    for (int64_t r = 0; r < t.rows; ++r) {
      first_[r] = t.first[r] - t.split_begin;
      last_[r] = t.last[r] - t.split_begin;
    }
    args.block_size = kSplit;
    args.k_cache = t.split;
    args.v_cache =
        t.split +
        round_up(kSplit * round_up(args.head_size, group_of(args.cache_type)) * size_of(args.cache_type), 64);
    tile.split_begin = 0;
    tile.first = first_;
    tile.last = last_;
    tile.blocks = &only_;
    tile.is_near = true;
    tile.next = SplitAhead{};  // not rearranged yet, so it cannot be prefetched
    const Span span = visible(t, 0, t.rows);
    if (span.empty()) return;
    switch (args.cache_type) {
      case CacheType::f32:
        lay_out<float, 1>(of, t, span);
        break;
      case CacheType::bf16:
        lay_out<bf16, 4>(of, t, span);
        break;
      case CacheType::f16:
        lay_out<f16, 1>(of, t, span);
        break;
      case CacheType::i8:
        break;  // the op rejects int8 latents
    }
  }
  LatentSplit(const LatentSplit&) = delete;

 private:
  int64_t first_[kMostTileRows], last_[kMostTileRows];
  int32_t only_ = 0;

  template <typename T, int G>
  void lay_out(const AttentionArgs& of, const AttentionTile& t, Span span) {
    const Latents<T, G> latents{of, t, span};
    latents.keys(reinterpret_cast<T*>(t.split));
    latents.values(const_cast<T*>(static_cast<const T*>(args.v_cache)));
  }
};

template <typename T>
void write_latent_typed(const LatentWriteArgs& args, int64_t token) {
  T* to = static_cast<T*>(args.cache) + args.slots[token] * (args.rank + args.rope_size);
  spread_any<1>(args.latent.row(token), args.latent.type, args.rank, to, 1);
  spread_any<1>(args.rope.row(token), args.rope.type, args.rope_size, to + args.rank, 1);
}

void write_latent(const LatentWriteArgs& args, int64_t token) {
  if (args.slots[token] < 0) return;
  switch (args.cache_type) {
    case DType::f32:
      return write_latent_typed<float>(args, token);
    case DType::bf16:
      return write_latent_typed<bf16>(args, token);
    case DType::f16:
      return write_latent_typed<f16>(args, token);
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
