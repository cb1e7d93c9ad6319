// Products with caches whose elements are grouped along the dimension that is summed: quads of bfloat16,
// octets of int8.  Keys [head size / G][block size][G] and values [block size / G][value size][G] are the
// same kind of matrix B in a product,
//
//     C[rows][columns] = factor[row] · A[rows][depth] · B[depth / G][columns][G]
//
// For scores, depth is the head size and columns are keys.  For values, depth is positions and columns are
// value dimensions.  This file loops over keys, columns and rows.  `D` multiplies with one instruction set:
//
//   struct D {
//     using Element = bf16;                    // of the cache
//     static constexpr int kGroup = 4;
//     static constexpr int64_t kRows;          // rows of its largest tile
//     static constexpr int64_t kColumns;       // columns for all rows before the next ones; a multiple of 16
//     static constexpr int64_t kPanelRows;     // from this many rows on, B is converted to float32 first
//     struct Weights;                          // see softmax.h
//     static void load_query(args, token, head, tile, row);
//     // a: from queries(), or weights() if kWeights;  columns: a multiple of 16;  b: ScatteredColumns or
//     // StackedColumns of Element, or ScatteredColumns<float> where kPanelRows is reached
//     template <bool kWeights, typename B>
//     static void product(const Left& a, int64_t rows, const B& b, int columns, float* c, int64_t c_stride);
//     static Left queries(args, tile, row);
//     static Left weights(tile, row, begin);   // from position `begin` of the split on, a multiple of kGroup
//   };
//
// An element of C is one chain of operations over depth in order, the same for every tile shape.  Columns do
// not affect each other, so memory after the last key or column may hold garbage.
#pragma once

#include "attention/kernels/kv_split.h"
#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kUnit = 16;  // columns that are always adjacent in memory

// Data at the end of a row of A, for the products that need it.
struct RowTail {
  float factor;    // multiplies the row's results
  int32_t offset;  // subtracted from the row's integer sums
};

// A: rows in the format of the product.
struct Left {
  const char* data;
  int64_t stride;     // bytes from one row to the next
  int64_t tail = 0;   // bytes from the start of a row to its RowTail, if it has one
  int64_t digit = 0;  // bytes from the upper digits of integers to the lower ones
  const RowTail& tail_of(int64_t row) const {
    return *reinterpret_cast<const RowTail*>(data + row * stride + tail);
  }
};

// Both kinds of B below have a prefetch offset, `ahead`: the distance in elements to the data of the next
// split.  The product prefetches that data while it reads B.
//
// B in one part along depth, with sixteen adjacent columns per unit: keys, which lie in several blocks, and
// panels.
template <typename T>
struct ScatteredColumns {
  const T* unit[4];
  int64_t prefetch_offset[4];
  int64_t stride;  // elements from one group of depth to the next
  int64_t groups;
  static constexpr int parts() { return 1; }
  int64_t depth(int) const { return groups; }
  const T* at(int, int u) const { return unit[u]; }
  int64_t ahead(int, int u) const { return prefetch_offset[u]; }
};

// B in several parts along depth, with all columns adjacent: values.
template <typename T>
struct Part {
  const T* data;
  int64_t prefetch_offset;
  int64_t groups;
};
template <typename T, int G>
struct StackedColumns {
  const Part<T>* part;
  int count;
  int64_t stride, first;  // first: the first column
  int parts() const { return count; }
  int64_t depth(int p) const { return part[p].groups; }
  const T* at(int p, int u) const { return part[p].data + (first + u * kUnit) * G; }
  int64_t ahead(int p, int) const { return part[p].prefetch_offset; }
};

template <typename D>
struct Grouped {
  using T = typename D::Element;
  using Weights = typename D::Weights;
  static constexpr int64_t kRows = D::kRows, kGroup = D::kGroup;
  static constexpr bool kWidens = D::kPanelRows > 0;
  static constexpr int kMostParts = kSplit / kKeyLanes + 2;
  static_assert(D::kColumns <= 4 * kUnit, "ScatteredColumns holds four units");

  static void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                         int64_t row) {
    D::load_query(args, token, head, t, row);
  }

  // visible_spans: the positions that each group of kRows rows sees
  template <typename B>
  static void score_rows(const AttentionArgs& args, const AttentionTile& t, const Span* visible_spans,
                         int64_t chunk, const B& keys) {
    for (int64_t row = 0; row < t.rows; row += kRows) {
      const int64_t rows = smaller(kRows, t.rows - row);
      const Span span = visible_spans[row / kRows];
      if (span.end <= chunk || span.begin >= chunk + D::kColumns) continue;
      const int64_t columns = smaller(D::kColumns, round_up(span.end - chunk, kUnit));
      D::template product<false>(D::queries(args, t, row), rows, keys, static_cast<int>(columns),
                                 t.scores + row * kScoreStride + chunk, kScoreStride);
    }
  }

  static void score(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    const int64_t low = split.all.begin / kUnit * kUnit, high = (split.all.end - 1) / kUnit * kUnit;
    Span visible_spans[ceil_div(kMostTileRows, kRows)];
    for (int64_t row = 0; row < t.rows; row += kRows)
      visible_spans[row / kRows] = visible(t, row, smaller(kRows, t.rows - row));
    for (int64_t chunk = split.all.begin / D::kColumns * D::kColumns; chunk < split.all.end;
         chunk += D::kColumns) {
      ScatteredColumns<T> keys;
      keys.stride = split.block_size * kGroup;
      keys.groups = ceil_div(args.head_size, kGroup);
      for (int u = 0; u < D::kColumns / kUnit; ++u) {
        const int64_t position = clamp(chunk + u * kUnit, low, high);
        keys.unit[u] = key(split, position);
        keys.prefetch_offset[u] = split.to_next_key<T>(position);
      }
      if constexpr (kWidens) {
        if (t.rows >= D::kPanelRows) {
          score_rows(args, t, visible_spans, chunk, widened(keys, D::kColumns, t.panel));
          continue;
        }
      }
      score_rows(args, t, visible_spans, chunk, keys);
    }
  }

  static const T* key(const Split& split, int64_t position) {
    return split.keys<T>(position) + position % split.block_size * kGroup;
  }
  // The group of values that contains a position.
  static const T* value(const AttentionArgs& args, const Split& split, int64_t position) {
    return split.values<T>(position) + position % split.block_size / kGroup * kGroup * args.value_size;
  }

  // Converts columns of B to float32 in the panel.
  template <typename B>
  static ScatteredColumns<float> widened(const B& b, int64_t columns, float* panel) {
    ScatteredColumns<float> wide;
    wide.stride = columns * kGroup;
    wide.groups = 0;
    for (int p = 0; p < b.parts(); ++p)
      for (int64_t g = 0; g < b.depth(p); ++g, ++wide.groups)
        for (int u = 0; u < columns / kUnit; ++u)
          for (int64_t i = 0; i < kUnit * kGroup; i += kLanes)
            store(panel + wide.groups * wide.stride + u * kUnit * kGroup + i,
                  load(b.at(p, u) + g * b.stride + i));
    for (int u = 0; u < 4; ++u) {
      wide.unit[u] = panel + u * kUnit * kGroup;
      wide.prefetch_offset[u] = 0;
    }
    return wide;
  }

  // Finds the parts of the values in groups that overlap the span.  A group that extends past the visible
  // positions is read from the edges, where the other positions are zero.
  static int value_parts(const AttentionArgs& args, const AttentionTile& t, const Split& split, Span span,
                         Part<T>* parts) {
    int count = 0;
    const int64_t first_whole = round_up(split.all.begin, kGroup),
                  last_whole = split.all.end / kGroup * kGroup;
    int64_t i = span.begin / kGroup * kGroup;
    while (i < span.end) {
      if (i < first_whole || i >= last_whole) {
        const T* from = edge(args, t, i >= first_whole);
        parts[count++] = Part<T>{from, value(args, split, i) + split.to_next_value<T>(i) - from, 1};
        i += kGroup;
        continue;
      }
      const int64_t stop =
          smaller(smaller(round_up(i + 1, split.block_size), last_whole), round_up(span.end, kGroup));
      parts[count++] = Part<T>{value(args, split, i), split.to_next_value<T>(i), (stop - i) / kGroup};
      i = stop;
    }
    return count;
  }

  static T* edge(const AttentionArgs& args, const AttentionTile& t, bool last) {
    return reinterpret_cast<T*>(t.edges) + (last ? args.value_size * kGroup : 0);
  }

  // Copies a group of values to the edges, with zeros at positions that no row sees.
  static void copy_edge(const AttentionArgs& args, const AttentionTile& t, const Split& split, int64_t group,
                        bool last) {
    const T* from = split.values<T>(group) + group % split.block_size * args.value_size;
    T* to = edge(args, t, last);
    const T nothing{};
    for (int64_t c = 0; c < args.value_size; ++c)
      for (int64_t i = 0; i < kGroup; ++i) {
        const bool seen = group + i >= split.all.begin && group + i < split.all.end;
        to[c * kGroup + i] = seen ? from[c * kGroup + i] : nothing;
      }
  }

  // Copies the last columns, fewer than sixteen, to the panel and pads them with zeros.
  static ScatteredColumns<T> completed(const StackedColumns<T, kGroup>& b, int64_t columns, T* panel) {
    ScatteredColumns<T> whole;
    whole.stride = kUnit * kGroup;
    whole.groups = 0;
    const T nothing{};
    for (int p = 0; p < b.parts(); ++p)
      for (int64_t g = 0; g < b.depth(p); ++g, ++whole.groups)
        for (int64_t i = 0; i < kUnit * kGroup; ++i)
          panel[whole.groups * whole.stride + i] =
              i < columns * kGroup ? b.at(p, 0)[g * b.stride + i] : nothing;
    for (int u = 0; u < 4; ++u) {
      whole.unit[u] = panel;
      whole.prefetch_offset[u] = 0;
    }
    return whole;
  }

  static void weigh(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    const Span all = split.all;
    if (all.begin % kGroup != 0) copy_edge(args, t, split, all.begin / kGroup * kGroup, false);
    if (all.end % kGroup != 0 && (all.begin % kGroup == 0 || all.begin / kGroup != all.end / kGroup))
      copy_edge(args, t, split, all.end / kGroup * kGroup, true);
    const int64_t whole = args.value_size / kUnit * kUnit;
    const bool widens = kWidens && t.rows >= D::kPanelRows;
    const int64_t step = widens ? kUnit : D::kColumns;
    Part<T> all_parts[kMostParts], parts[kMostParts];
    const int all_count = value_parts(args, t, split, all, all_parts);
    for (int64_t column = 0; column < args.value_size;
         column += column < whole ? smaller(step, whole - column) : kUnit) {
      const int64_t width = column < whole ? smaller(step, whole - column) : kUnit;
      StackedColumns<T, kGroup> b{all_parts, all_count, args.value_size * kGroup, column};
      ScatteredColumns<T> completion{};
      ScatteredColumns<float> wide{};
      if (column >= whole)
        completion = completed(b, args.value_size - column, reinterpret_cast<T*>(t.panel));
      else if (widens)
        wide = widened(b, kUnit, t.panel);
      for (int64_t row = 0; row < t.rows; row += kRows) {
        const int64_t rows = smaller(kRows, t.rows - row), stride = value_stride(args.value_size);
        const Span span = visible(t, row, rows);
        float* c = t.values + row * stride + column;
        if (span.empty()) {
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < width; i += kLanes) store(c + r * stride + i, zero());
          continue;
        }
        const int64_t begin = span.begin / kGroup, end = ceil_div(span.end, kGroup);
        const Left a = D::weights(t, row, begin * kGroup);
        const int columns = static_cast<int>(width);
        if (column >= whole) {
          D::template product<true>(a, rows, cut(completion, begin - all.begin / kGroup, end - begin),
                                    columns, c, stride);
        } else if constexpr (kWidens) {
          if (widens) {
            D::template product<true>(a, rows, cut(wide, begin - all.begin / kGroup, end - begin), columns, c,
                                      stride);
            continue;
          }
        }
        if (column >= whole) continue;
        if (span.begin != all.begin || span.end != all.end) {
          b.count = value_parts(args, t, split, span, parts);
          b.part = parts;
        } else {
          b.count = all_count;
          b.part = all_parts;
        }
        D::template product<true>(a, rows, b, columns, c, stride);
      }
    }
  }

  // The part of B along depth that has `groups` groups from group `begin` on.
  template <typename E>
  static ScatteredColumns<E> cut(ScatteredColumns<E> b, int64_t begin, int64_t groups) {
    for (int u = 0; u < 4; ++u) b.unit[u] += begin * b.stride;
    b.groups = groups;
    return b;
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
