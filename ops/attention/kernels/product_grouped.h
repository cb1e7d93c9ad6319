// Products against caches whose elements lie in groups along the dimension that is summed: quads of bfloat16,
// octets of int8.  Keys [head size / G][block size][G] and values [block size / G][value size][G] are the
// same matrix to a product,
//
//     C[rows][columns] = factor[row] · A[rows][depth] · B[depth / G][columns][G]
//
// once with dimensions summed and keys as columns, once with positions summed and value dimensions as
// columns.  This file walks over keys, columns and rows; `D` is what an instruction set makes of the product:
//
//   struct D {
//     using Element = bf16;                    // of the cache
//     static constexpr int kGroup = 4;
//     static constexpr int64_t kRows;          // rows of its largest tile
//     static constexpr int64_t kColumns;       // columns for all rows before the next; multiple of 16
//     static constexpr int64_t kPanelRows;     // from so many rows on, B is converted to float32 first
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
// An element of C is one chain of operations over depth in order, the same for every tile shape, and columns
// do not affect each other: memory after the last key or column may hold garbage.
#pragma once

#include "attention/kernels/kv_split.h"
#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kUnit = 16;  // columns that certainly lie side by side

// What ends a row of A, for the products that take it.
struct RowTail {
  float factor;    // of the row's results
  int32_t offset;  // subtracted from its sums of integers
};

// A: rows of whatever the product takes.
struct Left {
  const char* data;
  int64_t stride;     // bytes from one row to the next
  int64_t tail = 0;   // bytes to the row's RowTail, if it has one
  int64_t digit = 0;  // bytes to the lower digits of integers
  const RowTail& tail_of(int64_t row) const {
    return *reinterpret_cast<const RowTail*>(data + row * stride + tail);
  }
};

// Of both: what lies `ahead` elements further will be read next, and is brought closer at the pace of the
// product.
//
// B in one piece of depth, sixteen columns at a place: keys, which lie in several blocks, and panels.
template <typename T>
struct ScatteredColumns {
  const T* unit[4];
  int64_t next[4];
  int64_t stride;  // elements from one group of depth to the next
  int64_t groups;
  static constexpr int parts() { return 1; }
  int64_t depth(int) const { return groups; }
  const T* at(int, int u) const { return unit[u]; }
  int64_t ahead(int, int u) const { return next[u]; }
};

// B in several pieces of depth, columns side by side: values.
template <typename T>
struct Part {
  const T* data;
  int64_t ahead;
  int64_t groups;
};
template <typename T, int G>
struct StackedColumns {
  const Part<T>* part;
  int count;
  int64_t stride, first;  // first: of the columns
  int parts() const { return count; }
  int64_t depth(int p) const { return part[p].groups; }
  const T* at(int p, int u) const { return part[p].data + (first + u * kUnit) * G; }
  int64_t ahead(int p, int) const { return part[p].ahead; }
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

  // seen: by each kRows rows
  template <typename B>
  static void score_rows(const AttentionArgs& args, const AttentionTile& t, const Span* seen, int64_t chunk,
                         const B& keys) {
    for (int64_t row = 0; row < t.rows; row += kRows) {
      const int64_t rows = smaller(kRows, t.rows - row);
      const Span span = seen[row / kRows];
      if (span.end <= chunk || span.begin >= chunk + D::kColumns) continue;
      const int64_t columns = smaller(D::kColumns, round_up(span.end - chunk, kUnit));
      D::template product<false>(D::queries(args, t, row), rows, keys, static_cast<int>(columns),
                                 t.scores + row * kScoreStride + chunk, kScoreStride);
    }
  }

  static void score(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    const int64_t low = split.all.begin / kUnit * kUnit, high = (split.all.end - 1) / kUnit * kUnit;
    Span seen[ceil_div(kMostTileRows, kRows)];
    for (int64_t row = 0; row < t.rows; row += kRows)
      seen[row / kRows] = visible(t, row, smaller(kRows, t.rows - row));
    for (int64_t chunk = split.all.begin / D::kColumns * D::kColumns; chunk < split.all.end;
         chunk += D::kColumns) {
      ScatteredColumns<T> keys;
      keys.stride = split.block_size * kGroup;
      keys.groups = ceil_div(args.head_size, kGroup);
      for (int u = 0; u < D::kColumns / kUnit; ++u) {
        const int64_t position = clamp(chunk + u * kUnit, low, high);
        keys.unit[u] = key(split, position);
        keys.next[u] = split.to_next_key<T>(position);
      }
      if constexpr (kWidens) {
        if (t.rows >= D::kPanelRows) {
          score_rows(args, t, seen, chunk, widened(keys, D::kColumns, t.panel));
          continue;
        }
      }
      score_rows(args, t, seen, chunk, keys);
    }
  }

  static const T* key(const Split& split, int64_t position) {
    return split.keys<T>(position) + position % split.block_size * kGroup;
  }
  // The group that holds a position.
  static const T* value(const AttentionArgs& args, const Split& split, int64_t position) {
    return split.values<T>(position) + position % split.block_size / kGroup * kGroup * args.value_size;
  }

  // Columns of B as float32, side by side.
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
      wide.next[u] = 0;
    }
    return wide;
  }

  // The parts of the values in groups that touch the span; a group that reaches past what is seen is taken
  // from the edges, where those positions are zero.
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

  // The last columns where there are no sixteen.
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
      whole.next[u] = 0;
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

  template <typename E>
  static ScatteredColumns<E> cut(ScatteredColumns<E> b, int64_t begin, int64_t groups) {
    for (int u = 0; u < 4; ++u) b.unit[u] += begin * b.stride;
    b.groups = groups;
    return b;
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
