// A latent is both key and value: a row of [block][block size][head size] whose first value-size elements
// are the value.  A split of latents is rearranged into a cache with one block of kSplit positions, and the
// products then work as on any cache.  All heads read the result, so rearranging costs little compared to
// them.  Rows of int8 are first multiplied by their scales and rounded to bfloat16, because a key has two
// scales, and products with int8 keys take one.
#pragma once

#include "attention/kernels/kv_split.h"
#include "attention/kernels/transpose.h"
#include "attention/kernels/write_kv.h"
#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

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
  T* room;    // [kLatentBatch][row_stride()] for rows that are expanded

  // Writes keys as [head size / G][kSplit][G] and values as [kSplit / G][value size][G].  Positions outside
  // the span get the nearest row inside it.
  void lay_out(T* keys, T* values) const {
    for (int64_t i = span.begin / kLatentBatch * kLatentBatch; i < span.end; i += kLatentBatch) {
      const T* rows[kLatentBatch];
      for (int r = 0; r < kLatentBatch; ++r) {
        const int64_t position = clamp(i + r, span.begin, span.end - 1);
        rows[r] = !args.int8_latents ? row(position) : room + (position - i) * row_stride();
        if (args.int8_latents && position == i + r) expand(position, room + r * row_stride());
      }
      keys_of(rows, reinterpret_cast<U*>(keys) + i);
      values_of(rows, smaller(kLatentBatch, round_up(span.end - i, G)), values + i * args.value_size);
    }
  }

 private:
  int64_t row_stride() const { return round_up(args.head_size, 16); }

  // Number of a position's row in the cache.
  int64_t number(int64_t at) const {
    return tile.blocks[at / args.block_size] * args.block_size + at % args.block_size;
  }
  int64_t in_sequence(int64_t position) const {
    const int64_t at = tile.split_begin + position;
    return tile.positions == nullptr ? at : tile.positions[at];
  }

  const T* row(int64_t position) const {
    const int64_t at = in_sequence(position);
    if (at < 0)
      return static_cast<const T*>(args.entries) + args.places.row(tile.blocks, -1 - at) * args.head_size;
    return static_cast<const T*>(args.k_cache) + number(at) * args.head_size;
  }

  void expand(int64_t position, T* to) const {
    const int8_t* from = static_cast<const int8_t*>(args.k_cache) +
                         number(in_sequence(position)) * latent_width(CacheType::i8, args.head_size);
    const int64_t rank = args.value_size;
    float scales[2];
    __builtin_memcpy(scales, from + args.head_size, sizeof scales);
    multiply(from, rank, scales[0], to);
    multiply(from + rank, args.head_size - rank, scales[1], to + rank);
  }
  static void multiply(const int8_t* from, int64_t n, float scale, T* to) {
    const F32 factor = set1(scale);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * factor);
    if (i == n) return;
    int8_t rest[kLanes] = {};
    __builtin_memcpy(rest, from + i, n - i);
    store_partial(to + i, load(rest) * factor, static_cast<int>(n - i));
  }

  void keys_of(const T* const* rows, U* units) const {
    constexpr int N = Square<U>::kSide;
    const int64_t whole = args.head_size / G, squares = whole / N * N;
    const U* from[kLatentBatch];
    for (int r = 0; r < kLatentBatch; ++r) from[r] = reinterpret_cast<const U*>(rows[r]);
    for (int64_t c = 0; c < squares; c += N)
#pragma GCC unroll 1  // if unrolled, the rows' addresses no longer fit the registers
      for (int r = 0; r < kLatentBatch; r += N) transpose_square(from + r, c, units + c * kSplit + r, kSplit);
    for (int r = 0; r < kLatentBatch; ++r) rest_of_key(from[r], squares, whole, units + r);
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

  void values_of(const T* const* rows, int64_t count, T* to) const {
    for (int64_t i = 0; i < count; i += G) {
      T* group = to + i * args.value_size;
      if constexpr (G == 4) {
        const uint16_t* bits[4];
        for (int r = 0; r < 4; ++r) bits[r] = reinterpret_cast<const uint16_t*>(rows[i + r]);
        interleave_four(bits, args.value_size, reinterpret_cast<uint16_t*>(group));
      } else {
        __builtin_memcpy(group, rows[i], args.value_size * sizeof(T));
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
        break;  // int8 latents are expanded to bf16
    }
  }
  LatentSplit(const LatentSplit&) = delete;

 private:
  int64_t first_[kMostTileRows], last_[kMostTileRows];
  int32_t only_ = 0;

  template <typename T, int G>
  void lay_out(const AttentionArgs& of, const AttentionTile& t, Span span) {
    T* values = const_cast<T*>(static_cast<const T*>(args.v_cache));
    const Latents<T, G> latents{of, t, span, values + kSplit * args.value_size};
    latents.lay_out(reinterpret_cast<T*>(t.split), values);
  }
};

template <typename T>
void write_latent_typed(const LatentWriteArgs& args, int64_t token) {
  T* to = static_cast<T*>(args.cache) + args.slots[token] * (args.rank + args.rope_size);
  spread_any<1>(args.latent.row(token), args.latent.type, args.rank, to, 1);
  spread_any<1>(args.rope.row(token), args.rope.type, args.rope_size, to + args.rank, 1);
}

// The two parts have scales of their own: latents are normalized, and rotated keys are not.
inline void write_latent_int8(const LatentWriteArgs& args, int64_t token) {
  const int64_t size = args.rank + args.rope_size;
  int8_t* to = static_cast<int8_t*>(args.cache) + args.slots[token] * latent_width(CacheType::i8, size);
  const float scales[2] = {
      spread_int8_any<1>(args.latent.row(token), args.latent.type, args.rank, to, 1),
      spread_int8_any<1>(args.rope.row(token), args.rope.type, args.rope_size, to + args.rank, 1)};
  __builtin_memcpy(to + size, scales, sizeof scales);
}

void write_latent(const LatentWriteArgs& args, int64_t token) {
  if (args.slots[token] < 0) return;
  switch (args.cache_type) {
    case CacheType::f32:
      return write_latent_typed<float>(args, token);
    case CacheType::bf16:
      return write_latent_typed<bf16>(args, token);
    case CacheType::f16:
      return write_latent_typed<f16>(args, token);
    case CacheType::i8:
      return write_latent_int8(args, token);
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
