// The grouped product in float32 multiply-adds, for CPUs without a dot product for the cache's type.  Sixteen
// lanes hold 16 / G columns with G values of depth each.  The lanes of a column are added at the end.
#pragma once

#include "attention/kernels/load_query.h"
#include "attention/kernels/product_grouped.h"
#include "attention/kernels/product_micro.h"
#include "attention/kernels/product_transposed.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

template <int G>
F32 repeated(const float* p) {
  return G == 4 ? repeat4(p) : repeat8(p);
}

// Computes V of the G vectors of sixteen columns, from `vector` on, and stores their lanes before they are
// added.
template <int R, int V, int G, typename B>
void lanes_tile(const float* a, int64_t a_stride, const B& b, int unit, int vector, float* lanes) {
  F32 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = zero();
  for (int p = 0; p < b.parts(); ++p) {
    const auto* from = b.at(p, unit) + vector * kLanes;
    const int64_t prefetch_offset = b.ahead(p, unit);
    const int64_t groups = b.depth(p);
    for (int64_t g = 0; g < groups; ++g, from += b.stride, a += G) {
      F32 right[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        right[v] = load(from + v * kLanes);
        if ((vector + v) * kLanes * sizeof(*from) % 64 == 0)
          __builtin_prefetch(from + prefetch_offset + v * kLanes, 0, kToL2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F32 left = repeated<G>(a + r * a_stride);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(lanes + (r * G + vector + v) * kLanes, sum[r][v]);
}

inline F32 add_quads(const float* lanes) {
  return add_pairs(add_pairs(load(lanes), load(lanes + kLanes)),
                   add_pairs(load(lanes + 2 * kLanes), load(lanes + 3 * kLanes)));
}

template <int R, int G, typename B>
void lanes_rows(const float* a, int64_t a_stride, const B& b, int columns, float* c, int64_t c_stride) {
  constexpr int V = tile_vectors(R);
  alignas(64) float lanes[R * G * kLanes];
  for (int unit = 0; unit * kUnit < columns; ++unit) {
    for (int v = 0; v < G; v += V) lanes_tile<R, V, G>(a, a_stride, b, unit, v, lanes);
    for (int r = 0; r < R; ++r) {
      const float* row = lanes + r * G * kLanes;
      const F32 quads = add_quads(row);
      store(c + r * c_stride + unit * kUnit,
            G == 4 ? quads : add_pairs(quads, add_quads(row + (G - 4) * kLanes)));
    }
  }
}

// Weights of int8 values, multiplied by the scales of the values.
struct ScaledWeights : FloatWeights {
  static constexpr bool kScalesScores = true;
  const Split& split;
  ScaledWeights(const AttentionTile& t, const Split& of, int64_t row) : FloatWeights(t, of, row), split(of) {}
  F32 score(int64_t i, F32 x) const { return x * load(split.k_scales + i); }
  template <typename Seen>
  F32 keep(int64_t i, F32 p, Seen seen) const {
    store(s + i, seen(p * load(split.v_scales + i)));
    return seen(p);
  }
};

template <typename T, int G, typename W>
struct Lanes {
  using Element = T;
  using Weights = W;
  static constexpr int kGroup = G;
  static constexpr int64_t kRows = kTileRows, kColumns = 4 * kUnit, kPanelRows = 3 * kTileRows;

  static void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                         int64_t row) {
    load_float_query(args, token, head, args.scale, float_query(args, t, row));
  }
  static Left queries(const AttentionArgs& args, const AttentionTile& t, int64_t row) {
    return {reinterpret_cast<const char*>(float_query(args, t, row)), query_bytes(args.head_size)};
  }
  static Left weights(const AttentionTile& t, int64_t row, int64_t begin) {
    return {reinterpret_cast<const char*>(t.scores + row * kScoreStride + begin), kScoreStride * 4};
  }

  template <bool kWeights, typename B>
  static void product(const Left& a, int64_t rows, const B& b, int columns, float* c, int64_t c_stride) {
    const float* left = reinterpret_cast<const float*>(a.data);
    const int64_t stride = a.stride / static_cast<int64_t>(sizeof(float));
    switch (rows) {
      case 1:
        return lanes_rows<1, G>(left, stride, b, columns, c, c_stride);
      case 2:
        return lanes_rows<2, G>(left, stride, b, columns, c, c_stride);
      case 3:
        return lanes_rows<3, G>(left, stride, b, columns, c, c_stride);
      case 4:
        return lanes_rows<4, G>(left, stride, b, columns, c, c_stride);
      case 5:
        return lanes_rows<5, G>(left, stride, b, columns, c, c_stride);
      default:
        return lanes_rows<kTileRows, G>(left, stride, b, columns, c, c_stride);
    }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
