// Attention on float16 caches by multiply-adds of eight float16 lanes.
//
// Chains of 32 products are summed in float16, and the chains are summed in float32.  Queries and weights
// are scaled by powers of two so that no chain overflows for any finite cache values: it has 32 terms of at
// most 2^−6 · 65504.  The error of the float16 sums is about 5e-4 of the typical size of a score or value, a
// third of the error of a bfloat16 cache.
#pragma once

#include "attention/kernels/arm/softmax_rows.h"

// CPUs with the INT8 matrix product also have the widening multiply-add of float16 (dispatch/variants.cpp
// checks for it).
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__GNUC__) && !defined(__clang__)
#define ARMLLM_WIDENING 1
#pragma GCC push_options
#pragma GCC target("+fp16fml")
#endif

namespace armllm::ARMLLM_VARIANT {
namespace {

struct FmaF16 {
  static constexpr int64_t kRows = 48;     // query rows of a tile
  static constexpr int64_t kChain = 32;    // products that are summed in float16 before float32
  static constexpr int64_t kColumns = 64;  // value columns computed for all rows before the next

  static bool takes(const AttentionArgs& args) { return args.value_size % 8 == 0 && !adds_bias(args); }

  ARMLLM_INLINE static float16x8_t load8(const uint16_t* p) { return vreinterpretq_f16_u16(vld1q_u16(p)); }

  // sum += x
  ARMLLM_INLINE static void widen(float32x4_t (&sum)[2], float16x8_t x) {
#if defined(ARMLLM_WIDENING)
    const float16x8_t one = vdupq_n_f16(static_cast<float16_t>(1.0f));
    sum[0] = vfmlalq_low_f16(sum[0], x, one);
    sum[1] = vfmlalq_high_f16(sum[1], x, one);
#else
    sum[0] = vaddq_f32(sum[0], vcvt_f32_f16(vget_low_f16(x)));
    sum[1] = vaddq_f32(sum[1], vcvt_high_f32_f16(x));
#endif
  }

  template <int R, int N, int kLane>
  ARMLLM_INLINE static void lane(float16x8_t (&chain)[R][N], const float16x8_t (&left)[R],
                                 const uint16_t* const (&b)[(N + 1) / 2], int64_t offset) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const float16x8_t right = load8(b[n / 2] + offset + n % 2 * 8);
      // Written as assembly, because with vfmaq_laneq_f16 GCC copies each lane that is used twice.
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        __asm__("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(chain[r][n]) : "w"(right), "x"(left[r]), "i"(kLane));
    }
  }

  // C[R][8 N] = A[R][begin … end) · B, where at(k, unit) points to sixteen columns of row k of B.  From row
  // k up to the next multiple of eight, consecutive rows of B are `b_stride` elements from each other.
  template <int R, int N, typename At>
  ARMLLM_INLINE static void product(const uint16_t* a, int64_t a_stride, At at, int64_t b_stride,
                                    int64_t begin, int64_t end, float* c, int64_t c_stride) {
    float32x4_t sum[R][N][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) __asm__ volatile("movi %d0, #0" : "=w"(sum[r][n][i]));
#pragma GCC unroll 1
    for (int64_t k = begin; k < end;) {
      const int64_t stop = smaller(end, k / kChain * kChain + kChain);
      float16x8_t chain[R][N];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) __asm__ volatile("movi %d0, #0" : "=w"(chain[r][n]));
#pragma GCC unroll 1
      while (k < stop) {
        const uint16_t* b[(N + 1) / 2];
#pragma GCC unroll 4
        for (int u = 0; u < (N + 1) / 2; ++u) b[u] = at(k, u);
        float16x8_t left[R];
        if (k % 8 == 0 && k + 8 <= stop) {
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) left[r] = load8(a + r * a_stride + k);
          lane<R, N, 0>(chain, left, b, 0);
          lane<R, N, 1>(chain, left, b, b_stride);
          lane<R, N, 2>(chain, left, b, 2 * b_stride);
          lane<R, N, 3>(chain, left, b, 3 * b_stride);
          lane<R, N, 4>(chain, left, b, 4 * b_stride);
          lane<R, N, 5>(chain, left, b, 5 * b_stride);
          lane<R, N, 6>(chain, left, b, 6 * b_stride);
          lane<R, N, 7>(chain, left, b, 7 * b_stride);
          k += 8;
        } else {
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) left[r] = vreinterpretq_f16_u16(vld1q_dup_u16(a + r * a_stride + k));
          lane<R, N, 0>(chain, left, b, 0);
          ++k;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) widen(sum[r][n], chain[r][n]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        vst1q_f32(c + r * c_stride + n * 8, sum[r][n][0]);
        vst1q_f32(c + r * c_stride + n * 8 + 4, sum[r][n][1]);
      }
  }

  // Groups of eight columns per tile: enough accumulators to hide the latency of the multiply-add.
  static constexpr int eights(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

  template <int R>
  ARMLLM_IN_WRITTEN_ORDER static void score_rows(const uint16_t* q, int64_t q_stride, const Split& split,
                                                 int64_t head_size, Span span, float* scores) {
    constexpr int N = eights(R);
    const int64_t size = split.block_size;
    const int shift = __builtin_ctzll(static_cast<unsigned long long>(size));
#pragma GCC unroll 1
    for (int64_t i = span.begin / (8 * N) * (8 * N); i < span.end; i += 8 * N) {
      const uint16_t* keys[N / 2];
      for (int u = 0; u < N / 2; ++u)
        keys[u] =
            reinterpret_cast<const uint16_t*>(split.k[(i + 16 * u) >> shift]) + ((i + 16 * u) & (size - 1));
      product<R, N>(
          q, q_stride, [&](int64_t k, int u) { return keys[u] + k * size; }, size, 0, head_size, scores + i,
          kScoreStride);
    }
  }

  template <int R, int N>
  ARMLLM_IN_WRITTEN_ORDER static void value_tile(const uint16_t* weights, const Split& split,
                                                 int64_t value_size, Span span, int64_t column,
                                                 float* values) {
    const int64_t size = split.block_size;
    const int shift = __builtin_ctzll(static_cast<unsigned long long>(size));
    product<R, N>(
        weights, kSplit,
        [&](int64_t k, int u) {
          return reinterpret_cast<const uint16_t*>(split.v[k >> shift]) + (k & (size - 1)) * value_size +
                 column + u * 16;
        },
        value_size, span.begin, span.end, values + column, value_stride(value_size));
  }

  template <int R>
  static void value_rows(const uint16_t* weights, const Split& split, int64_t value_size, Span span,
                         int64_t column, int64_t end, float* values) {
    constexpr int N = eights(R);
    for (; column + 8 * N <= end; column += 8 * N)
      value_tile<R, N>(weights, split, value_size, span, column, values);
    for (; column + 16 <= end; column += 16)
      value_tile<R, 2>(weights, split, value_size, span, column, values);
    if (column < end) value_tile<R, 1>(weights, split, value_size, span, column, values);
  }

  // Converts the scores of a row to float16 weights.  Positions that only other rows of `group` see get
  // zeros.
  static void soften(float* scores, Span span, Span group, float factor, uint16_t* weights, float* maximum,
                     float* sum) {
    Eights row(span);
    const RowReference reference(row, scores, factor);
    *maximum = reference.maximum;
    *sum = 0.0f;
    if (!reference.has_weight()) row = Eights();
    row.outside(group, [&](int64_t i) { vst1q_u16(weights + i, vdupq_n_u16(0)); });
    if (!reference.has_weight()) return;
    const RowWeight weight(reference);
    float32x4_t total[2] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    const auto put = [&](int64_t i, float32x4_t a, float32x4_t b) {
      total[0] = vaddq_f32(total[0], a);
      total[1] = vaddq_f32(total[1], b);
      vst1q_u16(weights + i, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a), b)));
    };
    const auto at = [&](int64_t i) { return weight(vld1q_f32(scores + i)); };
    row.each([&](int64_t i) { put(i, row.kept(i, at(i)), row.kept(i + 4, at(i + 4))); },
             [&](int64_t i) { put(i, at(i), at(i + 4)); });
    *sum = reference.sum_of(total[0], total[1]);
  }

  // A query row: head-size float16 values, then the power of two that scales them back to the original
  // values.
  static int64_t query_stride(const AttentionArgs& args) { return query_bytes(args.head_size) / 2; }
  static uint16_t* query(const AttentionArgs& args, const AttentionTile& t, int64_t row) {
    return static_cast<uint16_t*>(t.query) + row * query_stride(args);
  }
  static float* query_power(const AttentionArgs& args, uint16_t* query) {
    return reinterpret_cast<float*>(query + query_stride(args) - 2);
  }

  static float power_of_two(uint32_t biased) {
    biased <<= 23;
    float x;
    __builtin_memcpy(&x, &biased, sizeof x);
    return x;
  }

  static void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                         int64_t row) {
    const char* from = args.q.at(token, head * args.head_size);
    uint16_t* to = query(args, t, row);
    const auto typed = [&](auto* x) {
      const auto at = [&](int64_t i) {
        return args.head_size - i >= kLanes ? load(x + i)
                                            : load_partial(x + i, static_cast<int>(args.head_size - i));
      };
      F32 top = zero();
      for (int64_t i = 0; i < args.head_size; i += kLanes) top = max(abs(at(i)), top);
      const float highest = reduce_max(top);
      uint32_t bits;
      __builtin_memcpy(&bits, &highest, sizeof bits);
      // Scales the highest magnitude to 2^−7 … 2^−6.  Rows with extreme magnitudes, NaN or ∞ are not scaled.
      const uint32_t exponent = bits >> 23, power = exponent < 8 || exponent > 240 ? 127 : exponent + 7;
      *query_power(args, to) = power_of_two(power);
      const F32 scale = set1(power_of_two(254 - power));
      for (int64_t i = 0; i < args.head_size; i += kLanes)
        store(reinterpret_cast<f16*>(to) + i, at(i) * scale);
    };
    switch (args.q.type) {
      case DType::f32:
        return typed(reinterpret_cast<const float*>(from));
      case DType::bf16:
        return typed(reinterpret_cast<const bf16*>(from));
      case DType::f16:
        return typed(reinterpret_cast<const f16*>(from));
    }
  }

  static uint16_t* weights(const AttentionTile& t, int64_t row) {
    return static_cast<uint16_t*>(t.weights) + row * kSplit;
  }

  static void attend(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    for (int64_t chunk = split.all.begin / kChunk * kChunk; chunk < split.all.end; chunk += kChunk)
      for (int64_t row = 0; row < t.rows; row += 4) {
        Span span = visible(t, row, smaller(4, t.rows - row));
        span = {larger(span.begin, chunk), smaller(span.end, chunk + kChunk)};
        if (span.empty()) continue;
        by_count<4>(t.rows - row, [&](auto r) {
          score_rows<decltype(r)::value>(query(args, t, row), query_stride(args), split, args.head_size, span,
                                         t.scores + row * kScoreStride);
        });
      }
    const bool shaped = args.softcap > 0.0f || !(args.scale > 0.0f);
    bool alike = true;  // true if all rows see the same positions
    for (int64_t row = 0; row < t.rows; ++row) {
      const int64_t first = row / 4 * 4;
      const Span span = visible(t, row, 1), group = visible(t, first, smaller(4, t.rows - first));
      alike = alike && span.begin == split.all.begin && span.end == split.all.end;
      const float power = *query_power(args, query(args, t, row));
      float* scores = t.scores + row * kScoreStride;
      if (shaped) shape_row(args.scale * power, args.softcap, scores, span);
      if (group.empty()) {
        t.maximum[row] = kNothing;
        t.sum[row] = 0.0f;
      } else {
        soften(scores, span, group, shaped ? kLog2E : args.scale * power * kLog2E, weights(t, row),
               t.maximum + row, t.sum + row);
      }
    }
    for (int64_t column = 0; column < args.value_size; column += kColumns)
      for (int64_t row = 0; row < t.rows; row += 4) {
        const Span span = visible(t, row, smaller(4, t.rows - row));
        by_count<4>(t.rows - row, [&](auto r) {
          value_rows<decltype(r)::value>(weights(t, row), split, args.value_size, span, column,
                                         smaller(column + kColumns, args.value_size),
                                         t.values + row * value_stride(args.value_size));
        });
      }
    if (!alike) recompute_nan_rows(args, t);
  }

  // See MmlaBf16::recompute_nan_rows.
  static void recompute_nan_rows(const AttentionArgs& args, const AttentionTile& t) {
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
      one.query = query(args, t, r);
      const Split split(args, one);
      if (!split.all.empty()) attend(args, one, split);
    }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT

#if defined(ARMLLM_WIDENING)
#undef ARMLLM_WIDENING
#pragma GCC pop_options
#endif
