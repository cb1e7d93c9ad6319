// Attention on int8 caches by SMMLA, or by SDOT on CPUs without it: 2 rows × 8 of depth times 8 of depth × 2
// columns.
//
// The octets of the cache are right operands without rearrangement, and all sums are integers.  Queries are
// rounded to eight bits, like the keys in the cache; two rows of queries form a left operand.  Weights are
// 15-bit integers in two signed digits, which form the two rows of a left operand.  In eight bits, the many
// small weights of a row would all be rounded to zero.
#pragma once

#include "attention/kernels/arm/softmax_rows.h"
#include "attention/kernels/write_kv.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// Accumulators of the products of L left operands with 2 N columns.
template <int L, int N>
struct Int8Sums {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  int32x4_t sum[L][N];

  ARMLLM_INLINE void clear() {
#pragma GCC unroll 4
    for (int l = 0; l < L; ++l)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) __asm__ volatile("movi %d0, #0" : "=w"(sum[l][n]));
  }
  ARMLLM_INLINE void add(const int8x16_t (&left)[L], int n, int8x16_t right0, int8x16_t right1) {
#pragma GCC unroll 4
    for (int l = 0; l < L; ++l) {
      sum[l][n] = vmmlaq_s32(sum[l][n], left[l], right0);
      sum[l][n + 1] = vmmlaq_s32(sum[l][n + 1], left[l], right1);
    }
  }
  // Sums of columns 4 m … 4 m + 3 and the first or the second row of operand l.
  ARMLLM_INLINE int32x4_t row(int l, int second, int m) const {
    const int64x2_t a = vreinterpretq_s64_s32(sum[l][2 * m]), b = vreinterpretq_s64_s32(sum[l][2 * m + 1]);
    return vreinterpretq_s32_s64(second ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
  }
#else
  int32x4_t sum[L][2][N / 2];

  ARMLLM_INLINE void clear() {
#pragma GCC unroll 4
    for (int l = 0; l < L; ++l)
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[l][n % 2][n / 2] = vdupq_n_s32(0);
  }
  ARMLLM_INLINE void add(const int8x16_t (&left)[L], int n, int8x16_t right0, int8x16_t right1) {
    const int32x4_t x = vreinterpretq_s32_s8(right0), y = vreinterpretq_s32_s8(right1);
    const int8x16_t low = vreinterpretq_s8_s32(vuzp1q_s32(x, y)),
                    high = vreinterpretq_s8_s32(vuzp2q_s32(x, y));
#pragma GCC unroll 4
    for (int l = 0; l < L; ++l) {
      int32x4_t *first = &sum[l][0][n / 2], *second = &sum[l][1][n / 2];
      *first = vdotq_laneq_s32(*first, low, left[l], 0);
      *second = vdotq_laneq_s32(*second, low, left[l], 2);
      *first = vdotq_laneq_s32(*first, high, left[l], 1);
      *second = vdotq_laneq_s32(*second, high, left[l], 3);
    }
  }
  ARMLLM_INLINE int32x4_t row(int l, int second, int m) const { return sum[l][second][m]; }
#endif

  // Adds A · B over `depth` octets.  Columns from the seventeenth on are read from `second`.
  ARMLLM_INLINE void multiply(const int8_t*& a, const int8_t* b, const int8_t* second, int64_t stride,
                              int64_t depth) {
#pragma GCC unroll 1
    for (int64_t k = 0; k < depth; ++k) {
      int8x16_t left[L];
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) left[l] = vld1q_s8(a + l * 16);
#pragma GCC unroll 8
      for (int n = 0; n < N; n += 2) {
        const int8_t* from = n < 8 ? b + n * 16 : second + (n - 8) * 16;
        add(left, n, vld1q_s8(from), vld1q_s8(from + 16));
      }
      a += L * 16;
      b += stride;
      if (N > 8) second += stride;
    }
  }
};

struct DotI8 {
  static constexpr int64_t kRows = 48;         // query rows of a tile
  static constexpr int64_t kScoreRows = 8;     // rows of the largest product with queries
  static constexpr int64_t kValueRows = 4;     // rows of the largest product with weights
  static constexpr float kLargest = 32639.0f;  // largest integer of two signed digits

  static bool takes(const AttentionArgs& args) { return args.value_size % 8 == 0 && !adds_bias(args); }

  // Pairs of columns of a register tile.
  static constexpr int columns(int left) { return left == 1 ? 16 : left == 2 ? 8 : 4; }

  // Queries: [group of rows][octet][pair][2 rows][8], and after each group the scales of its rows.
  struct Queries {
    int8_t* data;
    int64_t pairs;
    Queries(const AttentionArgs& args, const AttentionTile& t, int64_t row)
        : data(static_cast<int8_t*>(t.query) + row / kScoreRows * kScoreRows * query_bytes(args.head_size)),
          pairs((smaller(kScoreRows, t.rows - row / kScoreRows * kScoreRows) + 1) / 2) {}
    float& scale(const AttentionArgs& args, int64_t row) const {
      return reinterpret_cast<float*>(data + 2 * pairs * query_bytes(args.head_size) - 64)[row % kScoreRows];
    }
  };

  static void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                         int64_t row) {
    const Queries queries(args, t, row);
    int8_t* to = queries.data + row % kScoreRows / 2 * 16 + row % 2 * 8;
    const int64_t step = queries.pairs * 16;
    queries.scale(args, row) =
        spread_int8_any<8>(args.q.at(token, head * args.head_size), args.q.type, args.head_size, to, step);
    if (row == t.rows - 1 && row % 2 == 0)  // the pair has no second row
      for (int64_t i = 0; i < args.head_size; i += 8) vst1_s8(to + 8 + i / 8 * step, vdup_n_s8(0));
  }

  // Weights: [group of rows][octet][row][2 digits][8], and after each group the factors of its rows' sums.
  struct Weights {
    int8_t* data;
    int64_t rows;
    Weights(const AttentionTile& t, int64_t row)
        : data(static_cast<int8_t*>(t.weights) + row / kValueRows * kValueRows * kWeightBytes),
          rows(smaller(kValueRows, t.rows - row / kValueRows * kValueRows)) {}
    float* factors() const { return reinterpret_cast<float*>(data + rows * kWeightBytes - 64); }
  };

  template <int L, int N>
  ARMLLM_IN_WRITTEN_ORDER static void score_tile(const int8_t* q, const int8_t* keys, const int8_t* second,
                                                 int64_t stride, int64_t depth, const float* scales,
                                                 float* scores) {
    Int8Sums<L, N> sums;
    sums.clear();
    sums.multiply(q, keys, second, stride, depth);
#pragma GCC unroll 8
    for (int m = 0; m < N / 2; ++m) {
      const float32x4_t scale = vld1q_f32(scales + 4 * m);
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l)
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r)
          vst1q_f32(scores + (2 * l + r) * kScoreStride + 4 * m,
                    vmulq_f32(vcvtq_f32_s32(sums.row(l, r, m)), scale));
    }
  }

  template <int L>
  static void score_group(const int8_t* q, const Split& split, int64_t depth, Span span, float* scores) {
    constexpr int N = columns(L);
    const auto at = [&](int64_t i) {
      return reinterpret_cast<const int8_t*>(split.k[i >> split.shift]) + (i & (split.block_size - 1)) * 8;
    };
    for (int64_t i = span.begin / (2 * N) * (2 * N); i < span.end; i += 2 * N) {
      const int8_t* keys = at(i);
      score_tile<L, N>(q, keys, N > 8 ? at(i + 16) : keys, split.block_size * 8, depth, split.k_scales + i,
                       scores + i);
    }
  }

  static void score(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    const int64_t depth = ceil_div(args.head_size, 8);
    for (int64_t chunk = split.all.begin / kChunk * kChunk; chunk < split.all.end; chunk += kChunk)
      for (int64_t row = 0; row < t.rows; row += kScoreRows) {
        Span span = visible(t, row, smaller(kScoreRows, t.rows - row));
        span = {larger(span.begin, chunk), smaller(span.end, chunk + kChunk)};
        if (span.empty()) continue;
        const Queries queries(args, t, row);
        by_count<kScoreRows / 2>(queries.pairs, [&](auto l) {
          score_group<decltype(l)::value>(queries.data, split, depth, span, t.scores + row * kScoreStride);
        });
      }
  }

  // The smallest power of two that is not less than x.
  static float unit_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fffff) & 0x7f800000;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
  // The digits of eight integers up to kLargest, which are the last bits of the floats x and y.
  ARMLLM_INLINE static int8x16_t digits(float32x4_t x, float32x4_t y) {
    const uint16x8_t both = vuzp1q_u16(vreinterpretq_u16_f32(x), vreinterpretq_u16_f32(y));
    const uint8x8_t upper = vaddhn_u16(both, vdupq_n_u16(128));  // rounded: the lower digit is signed
    return vreinterpretq_s8_u8(vmovn_high_u16(upper, both));
  }

  // Replaces each score by its weight times the scale of its value.  Stores the sum of the weights without
  // the scales in `sum`, and returns the highest product.
  static float weigh(const Eights& row, const RowReference& reference, const float* scales, float* scores,
                     float* sum) {
    const RowWeight weight(reference);
    float32x4_t total[2] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}, top[2] = {total[0], total[0]};
    const auto keep = [&](int64_t i, int j, float32x4_t y, float32x4_t scaled) {
      total[j] = vaddq_f32(total[j], y);
      top[j] = vmaxq_f32(top[j], scaled);
      vst1q_f32(scores + i, scaled);
    };
    row.each(
        [&](int64_t i) {
          for (int j = 0; j < 2; ++j, i += 4) {
            const float32x4_t y = row.kept(i, weight(vld1q_f32(scores + i)));
            keep(i, j, y, row.kept(i, vmulq_f32(y, vld1q_f32(scales + i))));
          }
        },
        [&](int64_t i) {
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j, i += 4) {
            const float32x4_t y = weight(vld1q_f32(scores + i));
            keep(i, j, y, vmulq_f32(y, vld1q_f32(scales + i)));
          }
        });
    *sum = reference.sum_of(total[0], total[1]);
    return vmaxvq_f32(vmaxq_f32(top[0], top[1]));
  }

  // Converts the scaled weights in `scores` to digits; `most` is the highest of them.  Consecutive octets are
  // `step` bytes from each other.  Returns the unit, a power of two: a weight is an integer times the unit.
  // Adding 2^23 · unit to a weight leaves that integer in the last bits of the sum.
  static float cut(const Eights& row, const float* scores, float most, int8_t* to, int64_t step) {
    const bool scaled = most < __builtin_inff() && most >= kSmallestScaled;
    const float unit = scaled                    ? unit_of(most / kLargest)
                       : most < __builtin_inff() ? 0.0f
                                                 : __builtin_nanf("");
    const float32x4_t rounder = vdupq_n_f32((scaled ? unit : 1.0f) * 8388608.0f);
    for (int64_t i = row.all.begin; i < row.all.end; i += 8, to += step)
      vst1q_s8(to, digits(vaddq_f32(vld1q_f32(scores + i), rounder),
                          vaddq_f32(vld1q_f32(scores + i + 4), rounder)));
    return unit;
  }

  // Converts the scores of a group of rows to weights.  Each step runs over all rows, so that no row waits
  // for the result of its own reduction.
  static void soften(const AttentionArgs& args, const AttentionTile& t, const Split& split, int64_t first,
                     const Weights& weights, Span group) {
    const bool shaped = args.softcap > 0.0f || !(args.scale > 0.0f);
    const Queries queries(args, t, first);
    Eights seen[kValueRows];
    const int64_t octet = group.begin / 8, step = weights.rows * 16;
    const auto at = [&](int64_t r, int64_t i) { return weights.data + r * 16 + (i / 8 - octet) * step; };
    const auto scores = [&](int64_t r) { return t.scores + (first + r) * kScoreStride; };
    RowReference references[kValueRows];
    float most[kValueRows];
    for (int64_t r = 0; r < weights.rows; ++r) {
      const Span span = visible(t, first + r, 1);
      const float scale = args.scale * queries.scale(args, first + r);
      if (shaped) shape_row(scale, args.softcap, scores(r), span);
      seen[r] = Eights(span);
      references[r] = RowReference(seen[r], scores(r), shaped ? kLog2E : scale * kLog2E);
      t.maximum[first + r] = references[r].maximum;
    }
    for (int64_t r = 0; r < weights.rows; ++r) {
      if (!references[r].has_weight()) seen[r] = Eights();
      seen[r].outside(group, [&](int64_t i) { vst1q_s8(at(r, i), vdupq_n_s8(0)); });
      most[r] = weigh(seen[r], references[r], split.v_scales, scores(r), t.sum + first + r);
    }
    for (int64_t r = 0; r < weights.rows; ++r)
      weights.factors()[r] = cut(seen[r], scores(r), most[r], at(r, seen[r].all.begin), step);
  }

  // Contiguous octets of values.
  struct Part {
    const int8_t* data;
    int64_t octets;
  };

  // Finds the parts of the values in octets that overlap the span.
  static int value_parts(const AttentionArgs& args, const Split& split, Span span, Part* parts) {
    const int64_t end = round_up(span.end, 8);
    int64_t i = span.begin / 8 * 8, block = i >> split.shift;
    Part* next = parts;
    for (int64_t stop = i; i < end; i = stop, ++block) {
      stop = smaller((block + 1) << split.shift, end);
      const int64_t inside = i & (split.block_size - 1);
      *next++ =
          Part{reinterpret_cast<const int8_t*>(split.v[block]) + inside * args.value_size, (stop - i) / 8};
    }
    return static_cast<int>(next - parts);
  }

  template <int R, int N>
  ARMLLM_IN_WRITTEN_ORDER static void value_tile(const int8_t* weights, const Part* parts, int count,
                                                 int64_t value_size, int64_t column, const float* factors,
                                                 float* values) {
    Int8Sums<R, N> sums;
    sums.clear();
    int32x4_t digit = vdupq_n_s32(256);
    // Hides the constant, or the multiply-add would become a shift and an addition.
    __asm__("" : "+w"(digit));
    for (int i = 0; i < count; ++i) {
      const int8_t* from = parts[i].data + column * 8;
      sums.multiply(weights, from, from + 128, value_size * 8, parts[i].octets);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < N / 2; ++m) {
        const int32x4_t sum = vmlaq_s32(sums.row(r, 1, m), sums.row(r, 0, m), digit);
        vst1q_f32(values + r * value_stride(value_size) + column + 4 * m,
                  vmulq_n_f32(vcvtq_f32_s32(sum), factors[r]));
      }
  }

  template <int R>
  static void value_rows(const Weights& weights, const Part* parts, int count, int64_t value_size,
                         float* values) {
    constexpr int N = columns(R);
    int64_t column = 0;
    for (; column + 2 * N <= value_size; column += 2 * N)
      value_tile<R, N>(weights.data, parts, count, value_size, column, weights.factors(), values);
    for (; column < value_size; column += 8)
      value_tile<R, 4>(weights.data, parts, count, value_size, column, weights.factors(), values);
  }

  static void attend(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    score(args, t, split);
    for (int64_t first = 0; first < t.rows; first += kValueRows) {
      const Weights weights(t, first);
      const Span group = visible(t, first, weights.rows);
      soften(args, t, split, first, weights, group);
      Part parts[kSplit / kKeyLanes + 1];
      const int count = group.empty() ? 0 : value_parts(args, split, group, parts);
      by_count<kValueRows>(weights.rows, [&](auto r) {
        value_rows<decltype(r)::value>(weights, parts, count, args.value_size,
                                       t.values + first * value_stride(args.value_size));
      });
    }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
