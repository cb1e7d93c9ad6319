// C (+)= A · B in registers: the inner loop of both attention products.
//
// Every element of C is one chain of fused multiply-adds over k in order, in any tile.  The tile shape can
// therefore be chosen freely without changing the bits of the result.
#pragma once

#include "attention/kernels/kv_split.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// The number of registers limits the tile shape: accumulators are rows × vectors of 16 lanes.  Tiles of few
// rows have more vectors, because several chains must be in flight to hide the latency of the multiply-add.
#if defined(__aarch64__)
constexpr int kTileRows = 5;  // 20 of 32 registers are accumulators; with 24, too few are left for operands
constexpr int tile_vectors(int rows) { return rows <= 2 ? 2 : 1; }
#elif defined(ARMLLM_VARIANT_avx512)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int) { return 4; }
#elif defined(ARMLLM_VARIANT_avx2)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kTileRows = 6;
constexpr int tile_vectors(int) { return 1; }
#endif

// B as float32 in scratch: up to four consecutive vectors per row.
struct Panel {
  const float* data;
  static constexpr int64_t stride = 4 * kLanes;
  Panel from(int vector) const { return {data + vector * kLanes}; }
  const float* at(int64_t k, int vector) const { return data + k * stride + vector * kLanes; }
  void prefetch(int64_t, int) const {}
};

// B read directly from the cache.  `ahead` points to the data of the next split; the product prefetches a
// part of it for each part of `data` that it reads.
//
// Values: the vectors of a row are adjacent.
template <typename T>
struct Adjacent {
  const T* data;
  const T* ahead;
  int64_t stride;  // from one k to the next
  Adjacent from(int vector) const { return {data + vector * kLanes, ahead + vector * kLanes, stride}; }
  const T* at(int64_t k, int vector) const { return data + k * stride + vector * kLanes; }
  void prefetch(int64_t k, int vector) const {
    if (vector * kLanes * sizeof(T) % 64 == 0)
      __builtin_prefetch(ahead + k * stride + vector * kLanes, 0, kToL2);
  }
};

// Keys: the vectors of a row may lie in different blocks.
template <typename T>
struct Scattered {
  const T* data[4];
  const T* ahead[4];
  int64_t stride;
  Scattered from(int vector) const {
    Scattered rest = *this;
    for (int v = 0; v + vector < 4; ++v) {
      rest.data[v] = data[v + vector];
      rest.ahead[v] = ahead[v + vector];
    }
    return rest;
  }
  const T* at(int64_t k, int vector) const { return data[vector] + k * stride; }
  void prefetch(int64_t k, int vector) const { __builtin_prefetch(ahead[vector] + k * stride, 0, kToL2); }
};

template <int R, int V, typename B>
void product_tile(const float* a, int64_t a_stride, const B b, int64_t depth, float* c, int64_t c_stride,
                  bool accumulate) {
  F32 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = accumulate ? load(c + r * c_stride + v * kLanes) : zero();
  for (int64_t k = 0; k < depth; ++k) {
    F32 right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      right[v] = load(b.at(k, v));
      b.prefetch(k, v);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32 left = set1(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, sum[r][v]);
}

template <int R, typename B>
void product_row_group(const float* a, int64_t a_stride, const B& b, int vectors, int64_t depth, float* c,
                       int64_t c_stride, bool accumulate) {
  constexpr int V = tile_vectors(R);
  int v = 0;
  for (; v + V <= vectors; v += V)
    product_tile<R, V>(a, a_stride, b.from(v), depth, c + v * kLanes, c_stride, accumulate);
  if constexpr (V > 1)
    for (; v < vectors; ++v)
      product_tile<R, 1>(a, a_stride, b.from(v), depth, c + v * kLanes, c_stride, accumulate);
}

// C[rows][16 · vectors] (+)= A[rows][depth] · B[depth][16 · vectors],  rows ≤ kTileRows, vectors ≤ 4
template <typename B>
void product(int64_t rows, const float* a, int64_t a_stride, const B& b, int vectors, int64_t depth, float* c,
             int64_t c_stride, bool accumulate) {
  switch (rows) {
    case 1:
      return product_row_group<1>(a, a_stride, b, vectors, depth, c, c_stride, accumulate);
    case 2:
      return product_row_group<2>(a, a_stride, b, vectors, depth, c, c_stride, accumulate);
    case 3:
      return product_row_group<3>(a, a_stride, b, vectors, depth, c, c_stride, accumulate);
    case 4:
      return product_row_group<4>(a, a_stride, b, vectors, depth, c, c_stride, accumulate);
    case 5:
      return product_row_group<5>(a, a_stride, b, vectors, depth, c, c_stride, accumulate);
    default:
      return product_row_group<kTileRows>(a, a_stride, b, vectors, depth, c, c_stride, accumulate);
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
