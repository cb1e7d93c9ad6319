// Attention on bfloat16 caches by BFMMLA, which multiplies 2 rows × 4 of depth by 4 of depth × 2 columns.
//
// Queries and weights are packed in pairs of rows, [group of pairs][depth / 4][pair][2 rows][4].  The quads
// of the cache are right operands without rearrangement.  Every element of both products is one chain over
// depth, in any tile.
#pragma once

#include "attention/kernels/arm/pairs_of_rows.h"
#include "attention/kernels/arm/softmax_bf16.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

struct MmlaBf16 {
  using Sum = float32x4_t;
  using Groups = PairGroups<6>;
  static constexpr int kMostGroups = 4;
  static constexpr int64_t kRows = 48;     // query rows of a tile
  static constexpr int64_t kColumns = 32;  // value columns computed for all rows before the next

  static bool takes(const AttentionArgs& args) { return args.value_size % 8 == 0 && !adds_bias(args); }

  // Pairs of columns of a register tile.
  static constexpr int columns(int pairs) { return pairs == 1 ? 16 : pairs <= 3 ? 8 : 4; }

  ARMLLM_INLINE static bfloat16x8_t load8(const uint16_t* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

  // Adds A · B over `depth` quads, for P pairs of rows and N pairs of columns.  Pairs of columns from the
  // ninth on are read from `second`.
  template <int P, int N>
  ARMLLM_INLINE static void multiply(Sum (&sum)[P][N], const uint16_t*& a, const uint16_t* b,
                                     const uint16_t* second, int64_t stride, int64_t depth) {
#pragma GCC unroll 1
    for (int64_t k = 0; k < depth; ++k) {
      const auto column = [&](int n) { return load8(n < 8 ? b + n * 8 : second + (n - 8) * 8); };
      if constexpr (P <= N) {
        bfloat16x8_t left[P];
#pragma GCC unroll 6
        for (int p = 0; p < P; ++p) left[p] = load8(a + p * 8);
#pragma GCC unroll 16
        for (int n = 0; n < N; n += 2) {
          const bfloat16x8_t right[2] = {column(n), column(n + 1)};
#pragma GCC unroll 6
          for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) sum[p][n + i] = vbfmmlaq_f32(sum[p][n + i], left[p], right[i]);
        }
      } else {
        bfloat16x8_t right[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) right[n] = column(n);
#pragma GCC unroll 6
        for (int p = 0; p < P; ++p) {
          const bfloat16x8_t left = load8(a + p * 8);
#pragma GCC unroll 16
          for (int n = 0; n < N; ++n) sum[p][n] = vbfmmlaq_f32(sum[p][n], left, right[n]);
        }
      }
      a += P * 8;
      b += stride;
      if (N > 8) second += stride;
    }
  }

  // Clears each register with its own instruction.  The compiler would clear one and copy it, and the copies
  // would take issue slots from the products.
  template <int P, int N>
  ARMLLM_INLINE static void clear(Sum (&sum)[P][N]) {
#pragma GCC unroll 6
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) __asm__ volatile("movi %d0, #0" : "=w"(sum[p][n]));
  }

  template <int P, int N>
  ARMLLM_IN_WRITTEN_ORDER static void score_tile(const uint16_t* q, const uint16_t* keys,
                                                 const uint16_t* second, int64_t stride, int64_t depth,
                                                 float* scores) {
    Sum sum[P][N];
    clear(sum);
    multiply(sum, q, keys, second, stride, depth);
#pragma GCC unroll 6
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) vst1q_f32(scores + p * kPairScores + n * 4, sum[p][n]);
  }

  template <int P>
  static void score_group(const uint16_t* q, const Split& split, int64_t depth, Span span, float* scores) {
    constexpr int N = columns(P);
    const int64_t stride = split.block_size * 4;
    const int shift = __builtin_ctzll(static_cast<unsigned long long>(split.block_size));
    const auto at = [&](int64_t i) {
      return reinterpret_cast<const uint16_t*>(split.k[i >> shift]) + (i & (split.block_size - 1)) * 4;
    };
    for (int64_t i = span.begin / (2 * N) * (2 * N); i < span.end; i += 2 * N) {
      const uint16_t* keys = at(i);
      score_tile<P, N>(q, keys, N > 8 ? at(i + 16) : keys, stride, depth, scores + i * 2);
    }
  }

  // Contiguous quads of values.
  struct Part {
    const uint16_t* data;
    int64_t quads;
  };

  template <int P, int N>
  ARMLLM_IN_WRITTEN_ORDER static void value_tile(const uint16_t* weights, const Part* parts, int count,
                                                 int64_t value_size, int64_t column, int64_t rows,
                                                 float* values) {
    Sum sum[P][N];
    clear(sum);
    for (int i = 0; i < count; ++i) {
      const uint16_t* from = parts[i].data + column * 4;
      multiply(sum, weights, from, from + 64, value_size * 4, parts[i].quads);
    }
    const int64_t stride = value_stride(value_size);
    values += column;
#pragma GCC unroll 6
    for (int p = 0; p < P; ++p, values += 2 * stride) {
      // Without a second row, its result is written to the first row, whose own result then overwrites it.
      float* second = 2 * p + 1 < rows ? values + stride : values;
#pragma GCC unroll 8
      for (int n = 0; n < N; n += 2) {
        const float64x2_t a = vreinterpretq_f64_f32(sum[p][n]), b = vreinterpretq_f64_f32(sum[p][n + 1]);
        vst1q_f32(second + n * 2, vreinterpretq_f32_f64(vzip2q_f64(a, b)));
        vst1q_f32(values + n * 2, vreinterpretq_f32_f64(vzip1q_f64(a, b)));
      }
    }
  }

  template <int P>
  static void value_columns(const uint16_t* weights, const Part* parts, int count, int64_t value_size,
                            int64_t column, int64_t end, int64_t rows, float* values) {
    constexpr int N = columns(P);
    for (; column + 2 * N <= end; column += 2 * N)
      value_tile<P, N>(weights, parts, count, value_size, column, rows, values);
    for (; column < end; column += 8)
      value_tile<P, 4>(weights, parts, count, value_size, column, rows, values);
  }

  // Converts the scores of a pair to weights.  Consecutive quads of `group` are `step` elements from each
  // other.
  static void soften(Pair& pair, float factor, Span group, uint16_t* weights, int64_t step, float* maximum,
                     float* sum) {
    const Reference reference = pair.reference(factor, 4, maximum);
    float32x4_t total = vdupq_n_f32(0.0f);
    const auto none = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 4)
        vst1q_u16(weights + (i - group.begin) / 4 * step, vdupq_n_u16(0));
    };
    const auto edge = [&](int64_t begin, int64_t end) {
      const Bf16Weights weight(reference);
      for (int64_t i = begin; i < end; i += 4) {
        const uint16x8_t seen = Bf16Weights::rows_of(pair.seen(i), pair.seen(i + 2));
        const uint16x8_t w = vandq_u16(seen, weight(pair.scores + i * 2));
        vst1q_u16(weights + (i - group.begin) / 4 * step, w);
        total = weight.add(total, w);
      }
    };
    none(group.begin, smaller(pair.all.begin, group.end));
    edge(pair.all.begin, pair.inner.begin);
    uint16_t* to = weights + (pair.inner.begin - group.begin) / 4 * step;
    const Bf16Weights weight(reference);
    for (int64_t i = pair.inner.begin; i < pair.inner.end; i += 4, to += step) {
      const uint16x8_t w = weight(pair.scores + i * 2);
      vst1q_u16(to, w);
      total = weight.add(total, w);
    }
    edge(pair.inner.end, pair.all.end);
    none(larger(pair.all.end, group.begin), group.end);
    sum[0] = total[0] + total[1];
    sum[1] = total[2] + total[3];
    for (int r = 0; r < 2; ++r)
      if (maximum[r] != maximum[r]) sum[r] = maximum[r];
  }

  static uint16_t* query(const AttentionArgs& args, const AttentionTile& t, int pair) {
    return static_cast<uint16_t*>(t.query) + pair * round_up(args.head_size, 4) * 2;
  }
  static uint16_t* weights(const AttentionTile& t, int pair) {
    return static_cast<uint16_t*>(t.weights) + pair * kSplit * 2;
  }

  static void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                         int64_t row) {
    const Groups groups(t.rows);
    const int pair = static_cast<int>(row / 2), group = groups.of(pair), first = groups.first(group);
    uint16_t* to = query(args, t, first) + (pair - first) * 8 + row % 2 * 4;
    const int64_t step = groups.count(group) * 8;
    const char* from = args.q.at(token, head * args.head_size);
    const auto typed = [&](auto* x) {
      for (int64_t i = 0; i < args.head_size; i += kLanes) {
        const int64_t n = smaller(args.head_size - i, kLanes);
        bf16 lanes[kLanes];
        store(lanes, n == kLanes ? load(x + i) : load_partial(x + i, static_cast<int>(n)));
        for (int64_t l = 0; l < n; l += 4) __builtin_memcpy(to + (i + l) / 4 * step, lanes + l, 8);
      }
    };
    switch (args.q.type) {
      case DType::f32:
        typed(reinterpret_cast<const float*>(from));
        break;
      case DType::f16:
        typed(reinterpret_cast<const f16*>(from));
        break;
      case DType::bf16: {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
        uint16_t* next = to;
        int64_t i = 0;
        for (; i + 8 <= args.head_size; i += 8, next += 2 * step) {
          const uint16x8_t both = vld1q_u16(x + i);
          vst1_u16(next, vget_low_u16(both));
          vst1_u16(next + step, vget_high_u16(both));
        }
        if (i == args.head_size) break;
        uint16_t last[8] = {};
        __builtin_memcpy(last, x + i, static_cast<size_t>(args.head_size - i) * 2);
        for (int64_t l = 0; i + l < args.head_size; l += 4, next += step) __builtin_memcpy(next, last + l, 8);
      }
    }
    if (row == t.rows - 1 && row % 2 == 0)  // the pair has no second row
      for (int64_t i = 0; i < args.head_size; i += 4) vst1_u16(to + 4 + i / 4 * step, vdup_n_u16(0));
  }

  // Finds the parts of the values in quads that overlap the span.  A quad that extends past the visible
  // positions is read from the edges, where the other positions are zero.
  static int value_parts(const AttentionArgs& args, const AttentionTile& t, const Split& split, Span span,
                         Part* parts) {
    int count = 0;
    const int64_t size = args.value_size * 4, first_whole = round_up(split.all.begin, 4),
                  last_whole = split.all.end / 4 * 4, end = round_up(span.end, 4);
    const uint16_t* edges = reinterpret_cast<const uint16_t*>(t.edges);
    const int shift = __builtin_ctzll(static_cast<unsigned long long>(split.block_size));
    for (int64_t i = span.begin / 4 * 4; i < end;) {
      if (i < first_whole || i >= last_whole) {
        parts[count++] = Part{edges + (i >= first_whole ? size : 0), 1};
        i += 4;
        continue;
      }
      const int64_t inside = i & (split.block_size - 1);
      const int64_t stop = smaller(smaller(i - inside + split.block_size, last_whole), end);
      const uint16_t* block = reinterpret_cast<const uint16_t*>(split.v[i >> shift]);
      parts[count++] = Part{block + inside / 4 * size, (stop - i) / 4};
      i = stop;
    }
    return count;
  }

  // Copies quads of values that extend past the visible positions to the edges, with zeros at the others.
  static void copy_edges(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    const Span all = split.all;
    const auto copy = [&](int64_t quad, bool last) {
      const uint16_t* from = split.values<uint16_t>(quad) + quad % split.block_size * args.value_size;
      uint16_t* to = reinterpret_cast<uint16_t*>(t.edges) + (last ? args.value_size * 4 : 0);
      uint64_t seen = 0;
      for (int64_t i = 0; i < 4; ++i)
        if (quad + i >= all.begin && quad + i < all.end) seen |= uint64_t{0xffff} << (16 * i);
      const uint16x8_t mask = vreinterpretq_u16_u64(vdupq_n_u64(seen));
      for (int64_t c = 0; c < args.value_size; c += 2)
        vst1q_u16(to + c * 4, vandq_u16(vld1q_u16(from + c * 4), mask));
    };
    const bool first = all.begin % 4 != 0;
    if (first) copy(all.begin / 4 * 4, false);
    if (all.end % 4 != 0 && !(first && all.begin / 4 == all.end / 4)) copy(all.end / 4 * 4, true);
  }

  template <typename F>
  ARMLLM_INLINE static void by_pairs(int pairs, F f) {
    switch (pairs) {
      case 1:
        return f(Constant<1>());
      case 2:
        return f(Constant<2>());
      case 3:
        return f(Constant<3>());
      case 4:
        return f(Constant<4>());
      case 5:
        return f(Constant<5>());
      default:
        return f(Constant<6>());
    }
  }

  static void score(const AttentionArgs& args, const AttentionTile& t, const Split& split,
                    const Groups& groups, const Span* seen) {
    const int64_t depth = ceil_div(args.head_size, 4);
    for (int64_t chunk = split.all.begin / kChunk * kChunk; chunk < split.all.end; chunk += kChunk)
      for (int g = 0; g < groups.groups; ++g) {
        const Span span = {larger(seen[g].begin, chunk), smaller(seen[g].end, chunk + kChunk)};
        if (span.empty()) continue;
        const int first = groups.first(g);
        by_pairs(groups.count(g), [&](auto p) {
          score_group<decltype(p)::value>(query(args, t, first), split, depth, span,
                                          t.scores + first * kPairScores);
        });
      }
  }

  static void attend(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    const Groups groups(t.rows);
    Span seen[kMostGroups];
    for (int g = 0; g < groups.groups; ++g) seen[g] = groups.seen(t, g);
    score(args, t, split, groups, seen);
    const bool shaped = args.softcap > 0.0f || !(args.scale > 0.0f);
    const float factor = shaped ? kLog2E : args.scale * kLog2E;
    Part parts[kMostGroups][kSplit / kKeyLanes + 2];
    int counts[kMostGroups];
    copy_edges(args, t, split);
    bool alike = true;  // true if all rows see the same positions
    for (int g = 0; g < groups.groups; ++g) {
      const int first = groups.first(g), pairs = groups.count(g);
      const Span quads{seen[g].begin / 4 * 4, round_up(seen[g].end, 4)};
      counts[g] = seen[g].empty() ? 0 : value_parts(args, t, split, seen[g], parts[g]);
      for (int p = first; p < first + pairs; ++p) {
        Pair pair(t, p, 4);
        const int rows = 2 * p + 1 < t.rows ? 2 : 1;
        for (int r = 0; r < rows; ++r)
          alike = alike && pair.row[r].begin == split.all.begin && pair.row[r].end == split.all.end;
        if (shaped) shape(args, pair.scores, quads);
        float maximum[2], sum[2];
        soften(pair, factor, quads, weights(t, first) + (p - first) * 8, pairs * 8, maximum, sum);
        for (int r = 0; r < rows; ++r) {
          t.maximum[2 * p + r] = maximum[r];
          t.sum[2 * p + r] = sum[r];
        }
      }
    }
    for (int64_t column = 0; column < args.value_size; column += kColumns)
      for (int g = 0; g < groups.groups; ++g) {
        const int first = groups.first(g);
        by_pairs(groups.count(g), [&](auto p) {
          value_columns<decltype(p)::value>(weights(t, first), parts[g], counts[g], args.value_size, column,
                                            smaller(column + kColumns, args.value_size), groups.rows(t, g),
                                            t.values + 2 * first * value_stride(args.value_size));
        });
      }
    if (!alike) recompute_nan_rows(args, t, groups);
  }

  // Zero times NaN or infinity is NaN.  A NaN or infinity among the values therefore also reaches rows that
  // do not see its position.  If rows see different positions, each row with a NaN is computed again alone.
  static void recompute_nan_rows(const AttentionArgs& args, const AttentionTile& t, const Groups& groups) {
    for (int64_t r = 0; r < t.rows; ++r) {
      float* values = t.values + r * value_stride(args.value_size);
      if (!has_nan(values, args.value_size)) continue;
      AttentionTile one = t;
      one.rows = 1;
      one.first += r;
      one.last += r;
      one.maximum += r;
      one.sum += r;
      one.values = values;
      one.query = t.panel;
      const Split split(args, one);
      if (split.all.empty()) continue;
      const int pair = static_cast<int>(r / 2), group = groups.of(pair), first = groups.first(group);
      const uint16_t* from = query(args, t, first) + (pair - first) * 8 + r % 2 * 4;
      uint16_t* to = static_cast<uint16_t*>(one.query);
      for (int64_t k = 0; k < args.head_size; k += 4, to += 8, from += groups.count(group) * 8)
        vst1q_u16(to, vcombine_u16(vld1_u16(from), vdup_n_u16(0)));
      attend(args, one, split);
    }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
