// The grouped product of bfloat16 by TDPBF16PS.  A tile of A is 16 rows × 32 values of depth.  A tile of B
// is 32 values of depth × 16 columns; the quads of B are reordered into it.
//
// Blocks of 32 values of depth have the same boundaries for all rows.  Values of A before the first
// and after the last visible position are zeros, so an element of C is the same chain of operations for any
// visible range.
#pragma once

#include "attention/kernels/x86/product_bf16_avx512.h"
#include "simd/amx_tiles.h"
#include "simd/deinterleave_avx512.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kTileSize = 16;    // rows, or columns
constexpr int64_t kBlockGroups = 8;  // groups of 4 values of depth per block: one row of a tile of A
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kChunk = 8;  // blocks of B that are reordered together and stay in the L1 cache

// Reorders groups of B, U · 16 columns wide, into blocks of tiles.
template <int U, typename B>
class TileSorter {
 public:
  // The first block starts with `skipped` groups of zeros before B.
  TileSorter(const B& b, int unit, int64_t skipped) : b_(b), unit_(unit), skipped_(skipped) {}

  void sort_block(char* to) {
    for (int64_t g = 0; g < kBlockGroups; ++g, to += 128) {
      if (skipped_ > 0 || !find_part()) {
        for (int u = 0; u < U; ++u)
          store_rows(to + u * kTileBytes, _mm512_setzero_si512(), _mm512_setzero_si512());
        --skipped_;
        continue;
      }
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) {
        const bf16* from = from_[u];
        __builtin_prefetch(from + prefetch_offset_[u], 0, kToL2);
        __builtin_prefetch(from + prefetch_offset_[u] + 32, 0, kToL2);
        const EvenOdd rows = even_odd_i32(_mm512_loadu_si512(from), _mm512_loadu_si512(from + 32));
        store_rows(to + u * kTileBytes, rows.even, rows.odd);
        from_[u] = from + b_.stride;
      }
      --left_;
    }
  }

 private:
  static void store_rows(char* to, __m512i first, __m512i second) {
    _mm512_store_si512(to, first);
    _mm512_store_si512(to + 64, second);
  }

  bool find_part() {
    for (; left_ == 0 && part_ < b_.parts(); ++part_) {
      left_ = b_.depth(part_);
      for (int u = 0; u < U; ++u) {
        from_[u] = b_.at(part_, unit_ + u);
        prefetch_offset_[u] = b_.ahead(part_, unit_ + u);
      }
    }
    return left_ > 0;
  }

  const B& b_;
  const int unit_;
  int64_t skipped_, left_ = 0;
  int part_ = 0;
  const bf16* from_[U] = {};
  int64_t prefetch_offset_[U] = {};
};

// Tile registers: 2r + u hold sums, 6 holds A and 7 holds B.
#define ARMLLM_TILE_PRODUCT(r, u, sums)                          \
  if constexpr (R > r && U > u) {                                \
    ARMLLM_TILE_LOAD(6, a + r * kTileSize * a_stride, a_stride); \
    ARMLLM_TILE_DOT_BF16(sums, 6, 7);                            \
  }

template <int R, int U>
void add_block(const char* a, int64_t a_stride, const char* b) {
  ARMLLM_TILE_LOAD(7, b, 64);
  ARMLLM_TILE_PRODUCT(0, 0, 0)
  ARMLLM_TILE_PRODUCT(1, 0, 2)
  ARMLLM_TILE_PRODUCT(2, 0, 4)
  if constexpr (U > 1) ARMLLM_TILE_LOAD(7, b + kTileBytes, 64);
  ARMLLM_TILE_PRODUCT(0, 1, 1)
  ARMLLM_TILE_PRODUCT(1, 1, 3)
  ARMLLM_TILE_PRODUCT(2, 1, 5)
}
#undef ARMLLM_TILE_PRODUCT

inline void zero_sums() {
  ARMLLM_TILE_ZERO(0);
  ARMLLM_TILE_ZERO(1);
  ARMLLM_TILE_ZERO(2);
  ARMLLM_TILE_ZERO(3);
  ARMLLM_TILE_ZERO(4);
  ARMLLM_TILE_ZERO(5);
}

template <int R, int U>
void store_sums(float* c, int64_t c_stride) {
  const int64_t row = c_stride * 4, rows = kTileSize * c_stride;
  ARMLLM_TILE_STORE(0, c, row);
  if constexpr (U > 1) ARMLLM_TILE_STORE(1, c + kUnit, row);
  if constexpr (R > 1) ARMLLM_TILE_STORE(2, c + rows, row);
  if constexpr (R > 1 && U > 1) ARMLLM_TILE_STORE(3, c + rows + kUnit, row);
  if constexpr (R > 2) ARMLLM_TILE_STORE(4, c + 2 * rows, row);
  if constexpr (R > 2 && U > 1) ARMLLM_TILE_STORE(5, c + 2 * rows + kUnit, row);
}

// A in whole blocks of depth.  If its end lies within the last block, and the values after it are not zeros,
// `last` holds a copy of that block with zeros after the end.
struct TileRows {
  const char* data;
  int64_t stride;
  int64_t blocks, whole;  // blocks from `whole` on, at most one, are in `last`
  const char* last;

  const char* at(int64_t block) const { return block < whole ? data + block * 64 : last; }
  int64_t stride_of(int64_t block) const { return block < whole ? stride : 64; }
};

template <int R, int U, typename B>
void tile_columns(const TileRows& a, const B& b, int unit, int64_t skipped, float* c, int64_t c_stride) {
  alignas(64) char sorted[kChunk * U * kTileBytes];
  TileSorter<U, B> sorter(b, unit, skipped);
  zero_sums();
  for (int64_t first = 0; first < a.blocks; first += kChunk) {
    const int64_t count = smaller(kChunk, a.blocks - first);
    for (int64_t i = 0; i < count; ++i) sorter.sort_block(sorted + i * U * kTileBytes);
    for (int64_t i = 0; i < count; ++i)
      add_block<R, U>(a.at(first + i), a.stride_of(first + i), sorted + i * U * kTileBytes);
  }
  store_sums<R, U>(c + unit * kUnit, c_stride);
}

template <int R, typename B>
void tile_rows_product(const TileRows& a, const B& b, int columns, int64_t skipped, float* c,
                       int64_t c_stride) {
  int unit = 0;
  for (; (unit + 2) * kUnit <= columns; unit += 2) tile_columns<R, 2>(a, b, unit, skipped, c, c_stride);
  if (unit * kUnit < columns) tile_columns<R, 1>(a, b, unit, skipped, c, c_stride);
}

// Sets the rows of the tiles of A and of sums.  A tile of B always has all rows.
inline void configure(int64_t rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.set(i, i < 7 ? rows : kTileSize);
  config.use();
}

struct TilesBf16 : DotBf16 {
  static constexpr int64_t kRows = 3 * kTileSize;

  // Starts at the block that contains the position.  The softmax has set the weights before and after the
  // visible positions to zero.  `digit` holds the number of groups before the position.
  static Left weights(const AttentionTile& t, int64_t row, int64_t begin) {
    const int64_t skipped = begin / kGroup % kBlockGroups;
    Left from = DotBf16::weights(t, row, begin - skipped * kGroup);
    from.digit = skipped;
    return from;
  }

  template <bool kWeights, typename B>
  static void product(const Left& a, int64_t rows, const B& b, int columns, float* c, int64_t c_stride) {
    const int64_t skipped = kWeights ? a.digit : 0;
    int64_t groups = skipped;
    for (int p = 0; p < b.parts(); ++p) groups += b.depth(p);
    const int64_t blocks = ceil_div(groups, kBlockGroups);
    alignas(64) char last[kRows][64];
    TileRows of_a{a.data, a.stride, blocks, kWeights ? blocks : groups / kBlockGroups, last[0]};
    if (of_a.whole < blocks) {
      const int64_t bytes = (groups - of_a.whole * kBlockGroups) * kGroup * 2;
      for (int64_t r = 0; r < rows; ++r) {
        _mm512_store_si512(last[r], _mm512_setzero_si512());
        __builtin_memcpy(last[r], a.data + r * a.stride + of_a.whole * 64, bytes);
      }
    }
    const int64_t full = rows / kTileSize;
    if (full > 0) {
      configure(kTileSize);
      if (full == 1) tile_rows_product<1>(of_a, b, columns, skipped, c, c_stride);
      if (full == 2) tile_rows_product<2>(of_a, b, columns, skipped, c, c_stride);
      if (full == 3) tile_rows_product<3>(of_a, b, columns, skipped, c, c_stride);
    }
    if (const int64_t done = full * kTileSize; done < rows) {
      configure(rows - done);
      of_a.data += done * of_a.stride;
      of_a.last = last[done];
      tile_rows_product<1>(of_a, b, columns, skipped, c + done * c_stride, c_stride);
    }
    release_tiles();
    if constexpr (!kWeights) {
      for (int64_t r = 0; r < rows; ++r) {
        const F32 factor = set1(a.tail_of(r).factor);
        for (int i = 0; i < columns; i += kLanes)
          store(c + r * c_stride + i, load(c + r * c_stride + i) * factor);
      }
    }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
