// Attention on float16 caches by multiply-adds of eight float16 lanes.
//
// Sums of 32 products are taken in float16 and added up in float32.  Queries and weights are scaled by powers of two
// so that no such sum overflows, whatever finite values the cache holds: 32 terms of at most 2^−6 · 65504.  What
// float16 sums lose is about 5e-4 of a score's or a value's typical size, a third of what a bfloat16 cache loses.
#pragma once

#include "attention/arm.h"

// CPUs with the INT8 matrix product have the widening multiply-add of float16 as well (common/variants.cpp asks).
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__GNUC__) && !defined(__clang__)
#define ARMLLM_WIDENING 1
#pragma GCC push_options
#pragma GCC target("+fp16fml")
#endif

namespace armllm::ARMLLM_VARIANT {
namespace {

struct FmaF16 {
  static constexpr int64_t kRows = 48;     // of a tile
  static constexpr int64_t kChain = 32;    // products that are summed in float16
  static constexpr int64_t kColumns = 64;  // of values, for all rows, before the next

  static bool takes(const AttentionArgs& args) { return args.value_size % 8 == 0; }

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
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)  // GCC makes a copy of each lane that is used twice of vfmaq_laneq_f16
        __asm__("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(chain[r][n]) : "w"(right), "x"(left[r]), "i"(kLane));
    }
  }

  // C[R][8 N] = A[R][begin … end) · B, where at(k, unit) points to sixteen columns of row k of B, and rows follow
  // each other `b_stride` apart up to the next multiple of eight.
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

  // Eights of columns of a tile of R rows: enough sums to hide the latency of the multiply-add.
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

  // Weights of four scores: 23.0381 · 2^(t − n − 11), with a cubic within 4.1e-4.
  struct Weight {
    static constexpr float kOffset = 4.48746802f;  // 11 ln 2 − ln 23.0381
    static constexpr float kRounder = 12582912.0f;
    float32x4_t a = vdupq_n_f32(2.78338261f), b = vdupq_n_f32(8.27720894f), factor, rounder, lowest;
    int32x4_t exponent = vdupq_n_s32(1 << 23);
    Weight(float of_scores, float n)
        : factor(vdupq_n_f32(of_scores)),
          rounder(vdupq_n_f32(kRounder - 11.0f - n)),
          lowest(vdupq_n_f32((n - 100.0f) / of_scores)) {
      __asm__("" : "+w"(exponent));  // or the multiplication becomes a shift and an addition
    }
    ARMLLM_INLINE float32x4_t operator()(float32x4_t score) const {
      score = vmaxq_f32(score, lowest);
      const float32x4_t z = vfmaq_f32(rounder, score, factor);
      const float32x4_t f = vfmaq_f32(vsubq_f32(rounder, z), score, factor);
      const float32x4_t u = vaddq_f32(f, a);
      const float32x4_t y = vmulq_f32(vaddq_f32(vmulq_f32(u, f), b), u);  // (f + a) (f² + a f + b)
      return vreinterpretq_f32_s32(vmlaq_s32(vreinterpretq_s32_f32(y), vreinterpretq_s32_f32(z), exponent));
    }
  };

  // Lanes of the scores at `i` that are in the span.
  static uint32x4_t inside(Span span, int64_t i) {
    static const int32_t kLane[4] = {0, 1, 2, 3};
    const int32x4_t c = vaddq_s32(vld1q_s32(kLane), vdupq_n_s32(static_cast<int32_t>(i)));
    return vandq_u32(vcgeq_s32(c, vdupq_n_s32(static_cast<int32_t>(span.begin))),
                     vcltq_s32(c, vdupq_n_s32(static_cast<int32_t>(span.end))));
  }

  // Scores of a row to float16 weights, zero wherever its group sees what it does not.
  static void soften(float* scores, Span span, Span group, float factor, uint16_t* weights, float* maximum,
                     float* sum) {
    group = {group.begin / 8 * 8, round_up(group.end, 8)};
    const float32x4_t nothing = vdupq_n_f32(-__builtin_inff());
    if (span.empty()) span = {group.begin, group.begin};
    const Span all{span.begin / 8 * 8, round_up(span.end, 8)},
        inner{round_up(span.begin, 8), span.end / 8 * 8};
    float32x4_t top[4] = {nothing, nothing, nothing, nothing};
    const auto part = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 4)
        top[0] = vmaxq_f32(top[0], vbslq_f32(inside(span, i), vld1q_f32(scores + i), nothing));
    };
    const bool has_inner = inner.begin < inner.end;
    part(all.begin, has_inner ? inner.begin : all.end);
    if (has_inner) {
      int64_t i = inner.begin;
      for (; i + 32 <= inner.end; i += 32)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
          top[j] =
              vmaxq_f32(top[j], vmaxq_f32(vld1q_f32(scores + i + 8 * j), vld1q_f32(scores + i + 8 * j + 4)));
      for (; i < inner.end; i += 4) top[1] = vmaxq_f32(top[1], vld1q_f32(scores + i));
      part(inner.end, all.end);
    }
    const float highest = vmaxvq_f32(vmaxq_f32(vmaxq_f32(top[0], top[1]), vmaxq_f32(top[2], top[3])));
    const float t = highest * factor;
    float n = __builtin_ceilf(t);
    *sum = 0.0f;
    *maximum = kNothing;
    const auto none = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 8) vst1q_u16(weights + i, vdupq_n_u16(0));
    };
    if (highest == -__builtin_inff()) return none(group.begin, group.end);
    *maximum = n * kLn2 + Weight::kOffset;
    if (!(__builtin_fabsf(t) < Reference::kLimit)) {
      for (int64_t i = all.begin; i < all.end; ++i) scores[i] = __builtin_fmaf(scores[i], factor, -t);
      *maximum = t < __builtin_inff() ? t * kLn2 + Weight::kOffset : __builtin_nanf("");
      factor = 1.0f;
      n = 0.0f;
    }
    const Weight weight(factor, n);
    float32x4_t total[2] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    const auto put = [&](int64_t i, float32x4_t a, float32x4_t b) {
      total[0] = vaddq_f32(total[0], a);
      total[1] = vaddq_f32(total[1], b);
      vst1q_u16(weights + i, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a), b)));
    };
    const auto edge = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 8) {
        float32x4_t w[2];
        for (int j = 0; j < 2; ++j)
          w[j] = vreinterpretq_f32_u32(vandq_u32(
              inside(span, i + 4 * j), vreinterpretq_u32_f32(weight(vld1q_f32(scores + i + 4 * j)))));
        put(i, w[0], w[1]);
      }
    };
    none(group.begin, all.begin);
    edge(all.begin, has_inner ? inner.begin : all.end);
    if (has_inner) {
      for (int64_t i = inner.begin; i < inner.end; i += 8)
        put(i, weight(vld1q_f32(scores + i)), weight(vld1q_f32(scores + i + 4)));
      edge(inner.end, all.end);
    }
    none(all.end, group.end);
    *sum = *maximum == *maximum ? vaddvq_f32(vaddq_f32(total[0], total[1])) : *maximum;
  }

  // A row of queries: head size float16 values, and at its end the power of two that they lack.
  static int64_t query_stride(const AttentionArgs& args) { return query_bytes(args.head_size) / 2; }
  static uint16_t* query(const AttentionArgs& args, const AttentionTile& t, int64_t row) {
    return static_cast<uint16_t*>(t.query) + row * query_stride(args);
  }
  static float* lacking(const AttentionArgs& args, uint16_t* query) {
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
      // The highest magnitude comes to 2^−7 … 2^−6; what is far from it, or no number, stays as it is.
      const uint32_t exponent = bits >> 23, power = exponent < 8 || exponent > 240 ? 127 : exponent + 7;
      *lacking(args, to) = power_of_two(power);
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

  template <typename F>
  ARMLLM_INLINE static void by_rows(int64_t rows, F f) {
    switch (rows) {
      case 1:
        return f(Constant<1>());
      case 2:
        return f(Constant<2>());
      case 3:
        return f(Constant<3>());
      default:
        return f(Constant<4>());
    }
  }

  static void attend(const AttentionArgs& args, const AttentionTile& t, const Split& split) {
    for (int64_t chunk = split.all.begin / kChunk * kChunk; chunk < split.all.end; chunk += kChunk)
      for (int64_t row = 0; row < t.rows; row += 4) {
        Span span = visible(t, row, smaller(4, t.rows - row));
        span = {larger(span.begin, chunk), smaller(span.end, chunk + kChunk)};
        if (span.empty()) continue;
        by_rows(t.rows - row, [&](auto r) {
          score_rows<decltype(r)::value>(query(args, t, row), query_stride(args), split, args.head_size, span,
                                         t.scores + row * kScoreStride);
        });
      }
    const bool shaped = args.softcap > 0.0f || !(args.scale > 0.0f);
    bool alike = true;  // all rows see the same
    for (int64_t row = 0; row < t.rows; ++row) {
      const int64_t first = row / 4 * 4;
      const Span span = visible(t, row, 1), group = visible(t, first, smaller(4, t.rows - first));
      alike = alike && span.begin == split.all.begin && span.end == split.all.end;
      const float power = *lacking(args, query(args, t, row));
      float* scores = t.scores + row * kScoreStride;
      if (shaped) shape_row(args, power, scores, span);
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
        by_rows(t.rows - row, [&](auto r) {
          value_rows<decltype(r)::value>(weights(t, row), split, args.value_size, span, column,
                                         smaller(column + kColumns, args.value_size),
                                         t.values + row * value_stride(args.value_size));
        });
      }
    if (!alike) keep_apart(args, t);
  }

  static void shape_row(const AttentionArgs& args, float power, float* scores, Span span) {
    for (int64_t i = span.begin / kLanes * kLanes; i < span.end; i += kLanes) {
      F32 x = load(scores + i) * set1(args.scale * power);
      if (args.softcap > 0.0f) {
        const F32 cap = set1(args.softcap);
        x = cap * tanh(x / cap);
      }
      store(scores + i, x);
    }
  }

  // As MmlaBf16's.
  static void keep_apart(const AttentionArgs& args, const AttentionTile& t) {
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
