// Transposes squares of integers in registers.  It uses the compiler's own vector types, because the compiler
// knows the CPU's instructions for interleaving.  Vectors are passed by reference, because the calling
// convention for returning wide vectors depends on compiler flags.
#pragma once

#include <cstdint>

#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

#if defined(ARMLLM_VARIANT_avx512)
constexpr int kVectorBytes = 64;
#elif defined(ARMLLM_VARIANT_avx2)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename U>
struct Square {
  static constexpr int kSide = kVectorBytes / sizeof(U) < 8 ? kVectorBytes / sizeof(U) : 8;
  typedef U Vector __attribute__((vector_size(kSide * sizeof(U))));
};

// low, high = a0 b0 a1 b1 …
template <int N, typename V>
inline void zip(const V& a, const V& b, V& low, V& high) {
  if constexpr (N == 2) {
    low = __builtin_shufflevector(a, b, 0, 2);
    high = __builtin_shufflevector(a, b, 1, 3);
  } else if constexpr (N == 4) {
    low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  } else {
    low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
}

// Each round interleaves rows i and i + N / 2; after log2 N rounds the square is transposed.
template <int N, typename V>
inline void transpose_by_zips(V (&x)[N]) {
#pragma GCC unroll 3
  for (int n = 1; n < N; n *= 2) {
    V y[N];
#pragma GCC unroll 4
    for (int i = 0; i < N / 2; ++i) zip<N>(x[i], x[i + N / 2], y[2 * i], y[2 * i + 1]);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = y[i];
  }
}

#if defined(ARMLLM_VARIANT_avx512)
// Interleaves pairs within 128-bit parts, then moves whole 128-bit parts.  Unlike those of wide zips, these
// instructions do not overwrite an operand.
template <typename V>
inline void transpose_by_parts(V (&x)[8]) {
  V first[2][4], second[4];
#pragma GCC unroll 4
  for (int p = 0; p < 4; ++p) {
    first[0][p] = __builtin_shufflevector(x[2 * p], x[2 * p + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    first[1][p] = __builtin_shufflevector(x[2 * p], x[2 * p + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const V &a = first[odd][2 * h], &b = first[odd][2 * h + 1];
      second[h] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13);
      second[2 + h] = __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const V &a = second[2 * h], &b = second[2 * h + 1];
      x[2 * h + odd] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13);
      x[4 + 2 * h + odd] = __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
    }
  }
}
#endif

// Writes element `column` + i of each row to row i of `to`.
template <typename U>
inline void transpose_square(const U* const* from, int64_t column, U* to, int64_t to_stride) {
  constexpr int N = Square<U>::kSide;
  typename Square<U>::Vector x[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) __builtin_memcpy(&x[i], from[i] + column, sizeof x[i]);
#if defined(ARMLLM_VARIANT_avx512)
  if constexpr (sizeof(U) == 8) {
    transpose_by_parts(x);
  } else {
    transpose_by_zips<N>(x);
  }
#else
  transpose_by_zips<N>(x);
#endif
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) __builtin_memcpy(to + i * to_stride, &x[i], sizeof x[i]);
}

// to[4 · i + r] = rows[r][i]
inline void interleave_four(const uint16_t* const* rows, int64_t n, uint16_t* to) {
  constexpr int N = 8;
  typedef uint16_t V __attribute__((vector_size(N * sizeof(uint16_t))));
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    V x[4], even[2], odd[2], out[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) __builtin_memcpy(&x[r], rows[r] + i, sizeof(V));
    zip<N>(x[0], x[2], even[0], even[1]);
    zip<N>(x[1], x[3], odd[0], odd[1]);
    zip<N>(even[0], odd[0], out[0], out[1]);
    zip<N>(even[1], odd[1], out[2], out[3]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) __builtin_memcpy(to + i * 4 + j * N, &out[j], sizeof(V));
  }
  for (; i < n; ++i)
    for (int r = 0; r < 4; ++r) to[i * 4 + r] = rows[r][i];
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
