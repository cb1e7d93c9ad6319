// Building blocks of gemv with SMMLA.
//
// Tokens are interleaved in one block and weights are used as packed: pairs of either are SMMLA operands
// without a move.  Accumulator lanes hold (token, row): (0, 0) (0, 1) (1, 0) (1, 1) of a pair of tokens and a
// pair of rows.
#pragma once

#include "linear/kernels/arm/read_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int kMostPairs = kGemvTokens / 2;
constexpr int64_t kSegment = 256;  // g32i groups whose sums, times 16 · 16, fit 32 bits

// Stores the two tokens of a pair, scaled, from sums of rows 0, 1 and of rows 2, 3.
ARMLLM_INLINE void store_pairs(int32x4_t rows01, int32x4_t rows23, const float* scale, float* first,
                               float* second) {
  store_scaled(first, zip1_doubles(rows01, rows23), scale);
  if (second != nullptr) store_scaled(second, zip2_doubles(rows01, rows23), scale);
}

// Chunks of 8 k of kPairs token pairs, loaded with as few instructions as possible.
template <int kPairs>
struct TokenChunks {
  static constexpr int kChunks = kPairs == 1 ? 2 : 1;
  int8x16_t chunk[kChunks][kPairs];

  ARMLLM_INLINE explicit TokenChunks(const int8_t* x) {
    if constexpr (kPairs == 1) {
      load_two(x, chunk[0][0], chunk[1][0]);
    } else if constexpr (kPairs == 2) {
      load_two(x, chunk[0][0], chunk[0][1]);
    } else {
      load_more(x);
    }
  }

 private:
  ARMLLM_INLINE void load_more(const int8_t* x) {
    register int8x16_t a __asm__("v20");
    register int8x16_t b __asm__("v21");
    register int8x16_t c __asm__("v22");
    register int8x16_t d __asm__("v23");
    const auto& bytes = *reinterpret_cast<const int8_t (*)[16 * kPairs]>(x);
    if constexpr (kPairs == 4) {
      __asm__("ld1 {%0.16b - %3.16b}, %4" : "=w"(a), "=w"(b), "=w"(c), "=w"(d) : "Q"(bytes));
      chunk[0][3] = d;
    } else {
      __asm__("ld1 {%0.16b - %2.16b}, %3" : "=w"(a), "=w"(b), "=w"(c) : "Q"(bytes));
    }
    chunk[0][0] = a;
    chunk[0][1] = b;
    chunk[0][2] = c;
  }
};

struct SplitPairs;  // narrow_zero_points_smmla.h

// Activations and output stride of one gemv call.
struct TokenPairs {
  const int8_t* values;
  const int32_t* group_sums;  // −8 · Σ x, token by token
  int64_t row_groups;
  int tokens;
  int64_t stride;                     // floats from token to token in the output
  const SplitPairs* split = nullptr;  // the sums of g32iz, if one segment holds all groups

  ARMLLM_INLINE TokenPairs(const Activations& x, int64_t first, int count, int64_t out_stride)
      : values(x.values + first * x.row_bytes()),
        group_sums(x.group_sums + first * x.row_groups()),
        row_groups(x.row_groups()),
        tokens(count),
        stride(out_stride) {}

  // A missing token is replaced by the last.
  ARMLLM_INLINE const int32_t* group_sums_of(int token) const {
    return group_sums + (token < tokens ? token : tokens - 1) * row_groups;
  }
  float* second(float* out, int pair) const {
    return 2 * pair + 1 < tokens ? out + (2 * pair + 1) * stride : nullptr;
  }
};

// Products with rows 2·first … 2·(first + kVectors) − 1 of both halves: A over whole bytes, B over low
// nibbles; (A − B) is 16 times the product with the high rows.
template <int kPairs, int kVectors>
struct Products {
  int32x4_t whole[kPairs][kVectors] = {}, low[kPairs][kVectors] = {};

  ARMLLM_INLINE void add_group(const uint8_t* lines, const int8_t* x) {
    constexpr int kChunks = TokenChunks<kPairs>::kChunks;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j += kChunks) {
      const TokenChunks<kPairs> columns(x + 16 * kPairs * j);
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c) {
        int8x16_t bytes[kVectors];
        const uint8_t* line = lines + 64 * (j + c);
        if constexpr (kVectors == 1) {
          bytes[0] = load_values(line);
        } else {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; v += 2) load_two(line + 16 * v, bytes[v], bytes[v + 1]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int8x16_t u = low_nibbles(bytes[v]);
#pragma GCC unroll 4
          for (int p = 0; p < kPairs; ++p) {
            whole[p][v] = vmmlaq_s32(whole[p][v], columns.chunk[c][p], bytes[v]);
            low[p][v] = vmmlaq_s32(low[p][v], columns.chunk[c][p], u);
          }
        }
      }
    }
  }
  ARMLLM_INLINE int32x4_t high16(int p, int v) const { return vsubq_s32(whole[p][v], low[p][v]); }
};

// TBL indices that expand bytes 2i and 2i + 1 of 16 to 32-bit lanes a b a b; bytes 16 … 31 of the table are
// the sign extension.
struct PairLanes {
  alignas(16) uint8_t index[8][16];
};
constexpr PairLanes pair_lanes() {
  PairLanes lanes{};
  for (int i = 0; i < 8; ++i)
    for (int b = 0; b < 16; ++b) lanes.index[i][b] = uint8_t((b % 4 ? 16 : 0) + 2 * i + b / 4 % 2);
  return lanes;
}
constexpr PairLanes kPairLanes = pair_lanes();

// `lanes` is kPairLanes.index[pair].  Inline assembly, because GCC 12 copies both registers of a two-register
// table.
template <int kTable>
ARMLLM_INLINE int32x4_t broadcast_pair(uint8x16_t values, uint8x16_t signs, uint8x16_t lanes) {
  uint8x16_t out;
  if constexpr (kTable == 0) {
    register uint8x16_t a __asm__("v28") = values;
    register uint8x16_t b __asm__("v29") = signs;
    __asm__("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(out) : "w"(a), "w"(b), "w"(lanes));
  } else {
    register uint8x16_t a __asm__("v30") = values;
    register uint8x16_t b __asm__("v31") = signs;
    __asm__("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(out) : "w"(a), "w"(b), "w"(lanes));
  }
  return vreinterpretq_s32_u8(out);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
