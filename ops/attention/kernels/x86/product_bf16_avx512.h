// The grouped product of bfloat16 by VDPBF16PS.  A register of B holds 8 columns with 4 values of depth
// each, as two pairs.  It is multiplied by 4 values of a row of A, which one 64-bit broadcast loads.  The
// two sums of a column are added at the end.
#pragma once

#if !defined(__AVX512BF16__)
#error "needs AVX-512 BF16"
#endif

#include "attention/kernels/load_query.h"
#include "attention/kernels/product_grouped.h"
#include "attention/kernels/product_micro.h"
#include "attention/kernels/x86/softmax_bf16_avx512.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

template <int R, int V, typename B>
void bf16_tile(const Left& a, const B& b, int unit, float* c, int64_t c_stride) {
  __m512 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = _mm512_setzero_ps();
  const char* left = a.data;
  for (int p = 0; p < b.parts(); ++p) {
    const bf16* from[V / 2];
    int64_t prefetch_offset[V / 2];
#pragma GCC unroll 4
    for (int u = 0; u < V / 2; ++u) {
      from[u] = b.at(p, unit + u);
      prefetch_offset[u] = b.ahead(p, unit + u);
    }
    const int64_t groups = b.depth(p), step = b.stride;
    for (int64_t g = 0; g < groups; ++g, left += 8) {
#pragma GCC unroll 4
      for (int u = 0; u < V / 2; ++u) {
        __builtin_prefetch(from[u] + prefetch_offset[u], 0, kToL2);
        __builtin_prefetch(from[u] + prefetch_offset[u] + 32, 0, kToL2);
      }
      __m512i row[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int64_t quad;
        __builtin_memcpy(&quad, left + r * a.stride, sizeof quad);
        row[r] = _mm512_set1_epi64(quad);
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const __m512i right = _mm512_loadu_si512(from[v / 2] + v % 2 * 32);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) add_dot(sum[r][v], right, row[r]);
      }
#pragma GCC unroll 4
      for (int u = 0; u < V / 2; ++u) from[u] += step;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const F32 factor = set1(a.tail_of(r).factor);
#pragma GCC unroll 4
    for (int u = 0; u < V / 2; ++u)
      store(c + r * c_stride + u * kUnit, add_pairs(F32{sum[r][2 * u]}, F32{sum[r][2 * u + 1]}) * factor);
  }
}

template <int R, typename B>
void bf16_rows(const Left& a, const B& b, int columns, float* c, int64_t c_stride) {
  int unit = 0;
  if constexpr (R <= 3)
    for (; (unit + 4) * kUnit <= columns; unit += 4) bf16_tile<R, 8>(a, b, unit, c + unit * kUnit, c_stride);
  for (; (unit + 2) * kUnit <= columns; unit += 2) bf16_tile<R, 4>(a, b, unit, c + unit * kUnit, c_stride);
  if (unit * kUnit < columns) bf16_tile<R, 2>(a, b, unit, c + unit * kUnit, c_stride);
}

struct DotBf16 {
  using Element = bf16;
  static constexpr int kGroup = 4;
  static constexpr int64_t kRows = 6, kColumns = 4 * kUnit, kPanelRows = 0;

  using Weights = Bf16Powers;

  static void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                         int64_t row) {
    load_float_query(args, token, head, 1.0f, t.panel);
    char* to = static_cast<char*>(t.query) + row * query_bytes(args.head_size);
    for (int64_t i = 0; i < args.head_size; i += kLanes)
      store(reinterpret_cast<bf16*>(to) + i, load(t.panel + i));
    *reinterpret_cast<RowTail*>(to + query_tail(args)) = RowTail{args.scale * kLog2E, 0};
  }
  static Left queries(const AttentionArgs& args, const AttentionTile& t, int64_t row) {
    const int64_t stride = query_bytes(args.head_size);
    return {static_cast<const char*>(t.query) + row * stride, stride, query_tail(args), 0};
  }
  static Left weights(const AttentionTile& t, int64_t row, int64_t begin) {
    const int64_t skipped = begin * 2;
    return {static_cast<const char*>(t.weights) + row * kWeightBytes + skipped, kWeightBytes,
            kSplit * 2 - skipped, 0};
  }

  template <bool kWeights, typename B>
  static void product(const Left& a, int64_t rows, const B& b, int columns, float* c, int64_t c_stride) {
    switch (rows) {
      case 1:
        return bf16_rows<1>(a, b, columns, c, c_stride);
      case 2:
        return bf16_rows<2>(a, b, columns, c, c_stride);
      case 3:
        return bf16_rows<3>(a, b, columns, c, c_stride);
      case 4:
        return bf16_rows<4>(a, b, columns, c, c_stride);
      case 5:
        return bf16_rows<5>(a, b, columns, c, c_stride);
      default:
        return bf16_rows<6>(a, b, columns, c, c_stride);
    }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
