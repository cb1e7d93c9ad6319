// Products with caches of float32 and float16.  A register holds one dimension of consecutive keys, or
// consecutive dimensions of one value.  Every sum is one chain of float32 multiply-adds.
#pragma once

#include "attention/kernels/kv_split.h"
#include "attention/kernels/load_query.h"
#include "attention/kernels/product_micro.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Float32 weights that overwrite the scores.
struct FloatWeights {
  static constexpr bool kScalesScores = false;
  float* s;
  FloatWeights(const AttentionTile& t, const Split&, int64_t row) : s(t.scores + row * kScoreStride) {}
  F32 score(int64_t, F32 x) const { return x; }
  template <typename Seen>
  F32 keep(int64_t i, F32 p, Seen seen) const {
    p = seen(p);
    store(s + i, p);
    return p;
  }
  void clear(int64_t i) const { store(s + i, zero()); }
  void done(Span) const {}
};

template <typename T>
struct Transposed {
  static constexpr int64_t kRows = kTileRows;
  // From this many rows on, converting the cache once to a panel is faster than converting in registers.
  static constexpr int64_t kPanelRows = 3 * kTileRows;
  using Weights = FloatWeights;

  static void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                         int64_t row) {
    load_float_query(args, token, head, args.scale, float_query(args, t, row));
  }

  // Dimension 0 of sixteen keys from `position` on; the next dimension is block_size elements further.
  static const T* keys(const Split& split, int64_t position) {
    return split.keys<T>(position) + position % split.block_size;
  }
  static const T* value(const AttentionArgs& args, const Split& split, int64_t position) {
    return split.values<T>(position) + position % split.block_size * args.value_size;
  }

  template <typename B>
  static void score_groups(const AttentionArgs& args, const AttentionTile& t, int64_t chunk, const B& keys) {
    for (int64_t row = 0; row < t.rows; row += kRows) {
      const int64_t rows = smaller(kRows, t.rows - row);
      const Span span = visible(t, row, rows);
      if (span.end <= chunk || span.begin >= chunk + kChunk) continue;
      product(rows, float_query(args, t, row), query_floats(args), keys, kChunk / kLanes, args.head_size,
              t.scores + row * kScoreStride + chunk, kScoreStride, false);
    }
  }

  // scores = Q · Kᵀ
  static void score(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    const Span all = split.all;
    // Vectors that no row sees may lie in blocks that do not exist.  The nearest visible vector replaces
    // them.
    const int64_t low = all.begin / kLanes * kLanes, high = (all.end - 1) / kLanes * kLanes;
    for (int64_t chunk = all.begin / kChunk * kChunk; chunk < all.end; chunk += kChunk) {
      Scattered<T> b;
      b.stride = args.block_size;
      for (int v = 0; v < kChunk / kLanes; ++v) {
        const int64_t position = clamp(chunk + v * kLanes, low, high);
        b.data[v] = keys(split, position);
        b.ahead[v] = b.data[v] + split.to_next_key<T>(position);
      }
      if (t.rows < kPanelRows) {
        score_groups(args, t, chunk, b);
        continue;
      }
      for (int64_t d = 0; d < args.head_size; ++d)
        for (int v = 0; v < kChunk / kLanes; ++v) store(t.panel + d * kChunk + v * kLanes, load(b.at(d, v)));
      score_groups(args, t, chunk, Panel{t.panel});
    }
  }

  static void widen_values(const AttentionArgs& args, const Split& split, int64_t begin, int64_t end,
                           int64_t column, int width, float* panel) {
    for (int64_t i = begin; i < end; ++i) {
      const T* from = value(args, split, i) + column;
      float* to = panel + (i - begin) * kChunk;
      int v = 0;
      for (; v + kLanes <= width; v += kLanes) store(to + v, load(from + v));
      if (v < width) store(to + v, load_partial(from + v, width - v));
    }
  }

  // values += P · V for keys [begin, end) and up to 64 value dimensions from `column` on
  template <typename B>
  static void weigh_group(const AttentionArgs& args, const AttentionTile& t, int64_t row, int64_t begin,
                          int64_t end, int64_t column, int vectors, const B& values) {
    const int64_t stride = value_stride(args.value_size);
    product(smaller(kRows, t.rows - row), t.scores + row * kScoreStride + begin, kScoreStride, values,
            vectors, end - begin, t.values + row * stride + column, stride, true);
  }

  // One chunk of keys and up to 64 value dimensions.
  static void weigh_chunk(const AttentionArgs& args, const AttentionTile& t, const Split& split, Span keys,
                          int64_t column) {
    const int width = static_cast<int>(smaller(kChunk, args.value_size - column));
    const int vectors = static_cast<int>(ceil_div(width, kLanes));
    const bool widen = t.rows >= kPanelRows || width % kLanes != 0;
    if (widen) widen_values(args, split, keys.begin, keys.end, column, width, t.panel);
    for (int64_t row = 0; row < t.rows; row += kRows) {
      const Span span = visible(t, row, smaller(kRows, t.rows - row));
      const int64_t end = smaller(keys.end, span.end);
      int64_t begin = larger(keys.begin, span.begin);
      if (widen && begin < end)
        weigh_group(args, t, row, begin, end, column, vectors,
                    Panel{t.panel + (begin - keys.begin) * kChunk});
      while (!widen && begin < end) {
        const int64_t stop = smaller(end, round_up(begin + 1, args.block_size));
        const T* from = value(args, split, begin) + column;
        weigh_group(args, t, row, begin, stop, column, vectors,
                    Adjacent<T>{from, from + split.to_next_value<T>(begin), args.value_size});
        begin = stop;
      }
    }
  }

  // values = P · V
  static void weigh(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    const int64_t stride = value_stride(args.value_size);
    for (int64_t i = 0; i < t.rows * stride; i += kLanes) store(t.values + i, zero());
    const Span all = split.all;
    for (int64_t chunk = all.begin / kChunk * kChunk; chunk < all.end; chunk += kChunk) {
      const Span keys{larger(chunk, all.begin), smaller(chunk + kChunk, all.end)};
      for (int64_t column = 0; column < args.value_size; column += kChunk)
        weigh_chunk(args, t, split, keys, column);
    }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
