// The grouped product of int8 by VPDPBUSD.  A register of B holds 8 columns with 8 values of depth each.  It
// is multiplied by 8 values of a row of A, which one 64-bit broadcast loads.  Rows of A are 16-bit integers
// in two 8-bit digits, so that only the cache is rounded to 8 bits.  The instruction needs one unsigned
// operand: the weights, or the keys with their sign bit flipped.
#pragma once

#include "attention/kernels/load_query.h"
#include "attention/kernels/product_grouped.h"
#include "attention/kernels/product_micro.h"
#include "attention/kernels/softmax.h"
#include "simd/deinterleave_avx512.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

inline I32 add_pairs_i32(__m512i a, __m512i b) {
  const EvenOdd pairs = even_odd_i32(a, b);
  return {_mm512_add_epi32(pairs.even, pairs.odd)};
}

// Adds four unsigned · signed products per lane.  Written as assembly, because with the intrinsic GCC 12
// renames accumulators inside unrolled loops and copies them back at the end of each iteration.
__attribute__((always_inline)) inline void add_dot(__m512i& sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// Both digits are unsigned in weights and signed in queries.
template <bool kWeights, int R, int V, typename B>
void int8_tile(const Left& a, const B& b, int unit, float* c, int64_t c_stride) {
  __m512i sum[R][2][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int digit = 0; digit < 2; ++digit)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][digit][v] = _mm512_setzero_si512();
  const __m512i flip = _mm512_set1_epi8(-128);
  const char* left = a.data;
  for (int p = 0; p < b.parts(); ++p) {
    const int8_t* from[V / 2];
    int64_t prefetch_offset[V / 2];
#pragma GCC unroll 2
    for (int u = 0; u < V / 2; ++u) {
      from[u] = b.at(p, unit + u);
      prefetch_offset[u] = b.ahead(p, unit + u);
    }
    const int64_t groups = b.depth(p), step = b.stride;
    for (int64_t g = 0; g < groups; ++g, left += 8) {
      __m512i right[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        right[v] = _mm512_loadu_si512(from[v / 2] + v % 2 * 64);
        if constexpr (!kWeights) right[v] = _mm512_xor_si512(right[v], flip);
      }
#pragma GCC unroll 2
      for (int u = 0; u < V / 2; ++u) {
        __builtin_prefetch(from[u] + prefetch_offset[u], 0, kToL2);
        __builtin_prefetch(from[u] + prefetch_offset[u] + 64, 0, kToL2);
        from[u] += step;
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int digit = 0; digit < 2; ++digit) {
          int64_t octet;
          __builtin_memcpy(&octet, left + r * a.stride + digit * a.digit, sizeof octet);
          const __m512i row = _mm512_set1_epi64(octet);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v)
            if (kWeights)
              add_dot(sum[r][digit][v], row, right[v]);
            else
              add_dot(sum[r][digit][v], right[v], row);
        }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const RowTail tail = a.tail_of(r);
    const F32 factor = set1(tail.factor);
    const I32 offset = set1i(tail.offset);
#pragma GCC unroll 2
    for (int u = 0; u < V / 2; ++u) {
      const I32 high = add_pairs_i32(sum[r][0][2 * u], sum[r][0][2 * u + 1]),
                low = add_pairs_i32(sum[r][1][2 * u], sum[r][1][2 * u + 1]);
      store(c + r * c_stride + u * kUnit, to_float(shift_left<8>(high) + low - offset) * factor);
    }
  }
}

template <bool kWeights, int R, typename B>
void int8_rows(const Left& a, const B& b, int columns, float* c, int64_t c_stride) {
  constexpr int V = R <= 3 ? 4 : 2;  // 2 · R · V of 32 registers are accumulators
  int unit = 0;
  for (; (unit + V / 2) * kUnit <= columns; unit += V / 2)
    int8_tile<kWeights, R, V>(a, b, unit, c + unit * kUnit, c_stride);
  if constexpr (V > 2)
    if (unit * kUnit < columns) int8_tile<kWeights, R, 2>(a, b, unit, c + unit * kUnit, c_stride);
}

// Stores 16-bit integers as bytes: the upper digits, and `digit` bytes further the lower digits.
inline void store_digits(char* to, int64_t digit, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_srai_epi32(x.v, 8)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + digit), _mm512_cvtepi32_epi8(x.v));
}

constexpr int32_t kNoNumber = 0x7f800000;  // the bits of infinity; those of NaN are greater
constexpr float kSmallestRow = 1e-30f;     // 65535 / x is finite for larger x

struct DotInt8 {
  using Element = int8_t;
  static constexpr int kGroup = 8;
  static constexpr int64_t kRows = 4, kColumns = 4 * kUnit, kPanelRows = 0;

  struct Weights {
    static constexpr bool kScalesScores = true;
    const Split& split;
    float* s;
    char* to;
    I32 top = set1i(0);  // as integers, NaN > infinity > every finite weight
    Weights(const AttentionTile& t, const Split& of, int64_t row)
        : split(of),
          s(t.scores + row * kScoreStride),
          to(static_cast<char*>(t.weights) + row * kWeightBytes) {}
    F32 score(int64_t i, F32 x) const { return x * load(split.k_scales + i); }
    template <typename Seen>
    F32 keep(int64_t i, F32 p, Seen seen) {
      const F32 w = seen(p * load(split.v_scales + i));
      top = max_i32(top, bits(w));
      store(s + i, w);
      return seen(p);
    }
    void clear(int64_t i) const { store(s + i, zero()); }
    // Scales the weights so that the largest is 65535, the most that 16 bits hold, and stores the digits.
    void done(Span span) const {
      const int32_t top_bits = reduce_max_i32(top);
      float most;
      __builtin_memcpy(&most, &top_bits, sizeof most);
      const bool scaled = top_bits < kNoNumber && most >= kSmallestRow;
      const F32 inverse = set1(scaled ? 65535.0f / most : 0.0f);
      for (int64_t i = span.begin; i < span.end; i += kLanes)
        store_digits(to + i, kSplit, scaled ? round_to_int(load(s + i) * inverse) : set1i(0));
      const float factor = scaled ? most / 65535.0f : top_bits < kNoNumber ? 0.0f : __builtin_nanf("");
      *reinterpret_cast<RowTail*>(to + 2 * kSplit) = RowTail{factor, 0};
    }
  };

  static void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                         int64_t row) {
    load_float_query(args, token, head, 1.0f, t.panel);
    char* to = static_cast<char*>(t.query) + row * query_bytes(args.head_size);
    const int64_t digit = round_up(args.head_size, kLanes);
    I32 top = set1i(0);
    for (int64_t i = 0; i < args.head_size; i += kLanes) top = max_i32(top, bits(abs(load(t.panel + i))));
    const int32_t top_bits = reduce_max_i32(top);
    float most;
    __builtin_memcpy(&most, &top_bits, sizeof most);
    const bool scaled = top_bits < kNoNumber && most >= kSmallestRow;
    // The 32-bit sum of the products with 8-bit keys must not overflow.
    const float largest =
        args.head_size <= 512 ? 32639.0f : 32639.0f * 512.0f / static_cast<float>(args.head_size);
    const F32 inverse = set1(scaled ? largest / most : 0.0f);
    I32 sum = set1i(0);
    for (int64_t i = 0; i < args.head_size; i += kLanes) {
      const I32 x = scaled ? round_to_int(load(t.panel + i) * inverse) : set1i(0);
      sum = sum + x;
      // The lower digit is signed, so the upper digit is rounded instead of truncated.
      const I32 low = shift_right<24>(shift_left<24>(x)), high = shift_right<8>(x - low);
      store_i8(reinterpret_cast<int8_t*>(to) + i, high);
      store_i8(reinterpret_cast<int8_t*>(to) + digit + i, low);
    }
    const float factor = scaled ? most / largest : top_bits < kNoNumber ? 0.0f : __builtin_nanf("");
    *reinterpret_cast<RowTail*>(to + query_tail(args)) =
        RowTail{factor * args.scale, static_cast<int32_t>(128u * static_cast<uint32_t>(reduce_add_i32(sum)))};
  }
  static Left queries(const AttentionArgs& args, const AttentionTile& t, int64_t row) {
    const int64_t stride = query_bytes(args.head_size);
    return {static_cast<const char*>(t.query) + row * stride, stride, query_tail(args),
            round_up(args.head_size, kLanes)};
  }
  static Left weights(const AttentionTile& t, int64_t row, int64_t begin) {
    return {static_cast<const char*>(t.weights) + row * kWeightBytes + begin, kWeightBytes,
            2 * kSplit - begin, kSplit};
  }

  template <bool kWeights, typename B>
  static void product(const Left& a, int64_t rows, const B& b, int columns, float* c, int64_t c_stride) {
    switch (rows) {
      case 1:
        return int8_rows<kWeights, 1>(a, b, columns, c, c_stride);
      case 2:
        return int8_rows<kWeights, 2>(a, b, columns, c, c_stride);
      case 3:
        return int8_rows<kWeights, 3>(a, b, columns, c, c_stride);
      default:
        return int8_rows<kWeights, 4>(a, b, columns, c, c_stride);
    }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
