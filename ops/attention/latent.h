// Latents are key and value in one: rows [block][block size][head size], of which the first value-size elements are
// the value.  A split of them is laid out as a cache of one block of kSplit positions, and the products then work as
// on any other.  Every head reads it, so that this costs little beside them.
#pragma once

#include "attention/attention.h"
#include "attention/split.h"
#include "attention/write.h"
#include "common/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kMostTileRows = 64;
constexpr int kSide = 8;  // of a square that is transposed in registers

// Eight of a type as one vector; the compiler knows how this CPU interleaves them.
template <typename U>
struct Eight {
  typedef U Vector __attribute__((vector_size(kSide * sizeof(U))));
};

// low, high = a0 b0 a1 b1 …  By reference: vectors wider than the CPU's have no agreed way of being returned.
template <typename V>
inline void zip(const V& a, const V& b, V& low, V& high) {
  low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

// Row i of `to` gets element i of each of eight rows.
template <typename U>
inline void transpose_square(const U* const* from, int64_t column, U* to, int64_t to_stride) {
  using V = typename Eight<U>::Vector;
  V x[kSide], y[kSide];
#pragma GCC unroll 8
  for (int i = 0; i < kSide; ++i) __builtin_memcpy(&x[i], from[i] + column, sizeof(V));
  // Each round interleaves rows that lie four apart; after three the square is transposed.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) zip(x[i], x[i + 4], y[2 * i], y[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) zip(y[i], y[i + 4], x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) zip(x[i], x[i + 4], y[2 * i], y[2 * i + 1]);
#pragma GCC unroll 8
  for (int i = 0; i < kSide; ++i) __builtin_memcpy(to + i * to_stride, &y[i], sizeof(V));
}

// What lies side by side in a key of a cache with groups of G elements of T, as one integer.
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
    const int64_t at = tile.split_begin + position;
    return static_cast<const T*>(args.k_cache) +
           (tile.blocks[at / args.block_size] * args.block_size + at % args.block_size) * args.head_size;
  }

  // [head size / G][kSplit][G].  Where nobody looks, the nearest position that is seen is taken.
  void keys(T* to) const {
    U* units = reinterpret_cast<U*>(to);
    const int64_t whole = args.head_size / G, squares = whole / kSide * kSide;
    for (int64_t i = span.begin / kSide * kSide; i < span.end; i += kSide) {
      const T* rows[kSide];
      const U* from[kSide];
      for (int r = 0; r < kSide; ++r) {
        rows[r] = row(clamp(i + r, span.begin, span.end - 1));
        from[r] = reinterpret_cast<const U*>(rows[r]);
      }
      for (int64_t c = 0; c < squares; c += kSide) transpose_square(from, c, units + c * kSplit + i, kSplit);
      for (int r = 0; r < kSide; ++r) {
        for (int64_t c = squares; c < whole; ++c)
          __builtin_memcpy(units + c * kSplit + i + r, rows[r] + c * G, sizeof(U));
        if (whole * G == args.head_size) continue;
        T rest[G] = {};
        for (int64_t k = whole * G; k < args.head_size; ++k) rest[k - whole * G] = rows[r][k];
        __builtin_memcpy(units + whole * kSplit + i + r, rest, sizeof(U));
      }
    }
  }

  // [kSplit / G][value size][G]
  void values(T* to) const {
    for (int64_t i = span.begin / G * G; i < span.end; i += G) {
      const T* rows[G];
      for (int r = 0; r < G; ++r) rows[r] = row(clamp(i + r, span.begin, span.end - 1));
      interleave(rows, args.value_size, to + i * args.value_size);
    }
  }

  static void interleave(const T* const (&rows)[1], int64_t n, T* to) {
    __builtin_memcpy(to, rows[0], n * sizeof(T));
  }

  static void interleave(const T* const (&rows)[4], int64_t n, T* to) {
    typedef uint16_t V __attribute__((vector_size(16)));
    int64_t i = 0;
    for (; i + kSide <= n; i += kSide) {
      V x[4];
      for (int r = 0; r < 4; ++r) __builtin_memcpy(&x[r], rows[r] + i, sizeof(V));
      V even[2], odd[2], out[4];
      zip(x[0], x[2], even[0], even[1]);
      zip(x[1], x[3], odd[0], odd[1]);
      zip(even[0], odd[0], out[0], out[1]);
      zip(even[1], odd[1], out[2], out[3]);
      __builtin_memcpy(to + i * 4, out, sizeof out);
    }
    for (; i < n; ++i)
      for (int r = 0; r < 4; ++r) to[i * 4 + r] = rows[r][i];
  }
};

// One split of a tile, as if it were all of a cache.
struct LatentSplit {
  AttentionArgs args;
  AttentionTile tile;

  LatentSplit(const AttentionArgs& of, const AttentionTile& t) : args(of), tile(t) {
    for (int64_t r = 0; r < t.rows; ++r) {
      first_[r] = t.first[r] - t.split_begin;
      last_[r] = t.last[r] - t.split_begin;
    }
    args.latent = false;
    args.block_size = kSplit;
    args.k_cache = t.split;
    args.v_cache =
        t.split +
        round_up(kSplit * round_up(args.head_size, group_of(args.cache_type)) * size_of(args.cache_type), 64);
    tile.split_begin = 0;
    tile.first = first_;
    tile.last = last_;
    tile.blocks = &only_;
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
        break;  // refused by the op
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
