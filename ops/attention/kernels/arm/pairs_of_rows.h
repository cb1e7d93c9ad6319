// Shared parts of the attention kernels of Arm CPUs: pairs of rows and the reference of their softmax.
//
// The matrix instructions multiply two rows by two columns.  Scores keep the layout of these products, [pair
// of rows][pair of columns][2 rows][2 columns], until they are converted to weights.
#pragma once

#include <arm_neon.h>

#include "attention/kernels/kv_split.h"
#include "attention/paged_attention.h"
#include "simd/exp.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_INLINE __attribute__((always_inline)) inline

// For tiles that use nearly all registers.  The scheduler that GCC runs before register allocation would move
// loads up until accumulators spill.
#if defined(__GNUC__) && !defined(__clang__)
#define ARMLLM_IN_WRITTEN_ORDER __attribute__((optimize("no-schedule-insns")))
#else
#define ARMLLM_IN_WRITTEN_ORDER
#endif

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Divides pairs of rows into groups of nearly equal size, at most kMost pairs each, that fit a register tile.
template <int kMost>
struct PairGroups {
  int pairs, groups, size, larger;  // the first `larger` groups hold size + 1
  explicit PairGroups(int64_t rows)
      : pairs(static_cast<int>(rows + 1) / 2),
        groups((pairs + kMost - 1) / kMost),
        size(pairs / groups),
        larger(pairs % groups) {}
  int first(int group) const { return group * size + (group < larger ? group : larger); }
  int count(int group) const { return size + (group < larger ? 1 : 0); }
  // The group of a pair.
  int of(int pair) const {
    const int in_larger = larger * (size + 1);
    return pair < in_larger ? pair / (size + 1) : larger + (pair - in_larger) / size;
  }
  Span seen(const AttentionTile& t, int group) const { return visible(t, 2 * first(group), rows(t, group)); }
  int64_t rows(const AttentionTile& t, int group) const {
    return smaller(2 * count(group), t.rows - 2 * first(group));
  }
};

constexpr int64_t kPairScores = 2 * kSplit;  // floats of a pair's scores

ARMLLM_INLINE int32x4_t by_row(int64_t row0, int64_t row1) {
  return vcombine_s32(vdup_n_s32(static_cast<int32_t>(row0)), vdup_n_s32(static_cast<int32_t>(row1)));
}
ARMLLM_INLINE float32x4_t by_row(const float* rows) {
  return vcombine_f32(vdup_n_f32(rows[0]), vdup_n_f32(rows[1]));
}

// The reference of the weights of two rows, by lane.  t = score · factor is an exponent of two; n is the
// highest t of a row, rounded up.
struct Reference {
  float32x4_t factor;
  float32x4_t rounder;  // kRounder + kSteps − n: the last bit of its sum with t is worth 2^−8
  float32x4_t lowest;   // lower scores are replaced by this

  static constexpr float kRounder = 49152.0f, kSteps = 126.0f;
  static constexpr float kLimit = 1 << 20;  // all steps are exact for n up to this
};

// One pair of rows in a split.
struct Pair {
  float* scores;
  Span row[2];
  Span all, inner;  // in whole groups: positions that either row sees, that both rows see
  int32x4_t first, end;

  Pair(const AttentionTile& t, int pair, int64_t group) : scores(t.scores + pair * kPairScores) {
    row[0] = visible(t, 2 * pair, 1);
    row[1] = 2 * pair + 1 < t.rows ? visible(t, 2 * pair + 1, 1) : Span{0, 0};
    for (Span& r : row)
      if (r.empty()) r = Span{0, 0};
    limit(group);
  }

  void limit(int64_t group) {
    const bool both = !row[0].empty() && !row[1].empty();
    all = row[0].empty() ? row[1] : row[0];
    if (both) all = {smaller(row[0].begin, row[1].begin), larger(row[0].end, row[1].end)};
    all = {all.begin / group * group, round_up(all.end, group)};
    inner = {round_up(larger(row[0].begin, row[1].begin), group),
             smaller(row[0].end, row[1].end) / group * group};
    if (!both || inner.empty()) inner = {all.begin, all.begin};
    first = by_row(row[0].begin, row[1].begin);
    end = by_row(row[0].end, row[1].end);
  }

  // Mask of the scores at `column`: all ones where the row of a lane sees the position.
  uint32x4_t seen(int64_t column) const {
    static const int32_t kColumn[4] = {0, 1, 0, 1};
    const int32x4_t c = vaddq_s32(vld1q_s32(kColumn), vdupq_n_s32(static_cast<int32_t>(column)));
    return vandq_u32(vcgeq_s32(c, first), vcltq_s32(c, end));
  }

  // The highest visible score of each row; NaN if one is NaN.
  float32x2_t highest() const {
    const float32x4_t nothing = vdupq_n_f32(-__builtin_inff());
    float32x4_t top[4] = {nothing, nothing, nothing, nothing};
    const auto part = [&](int64_t begin, int64_t stop) {
      for (int64_t i = begin; i < stop; i += 2)
        top[0] = vmaxq_f32(top[0], vbslq_f32(seen(i), vld1q_f32(scores + i * 2), nothing));
    };
    part(all.begin, inner.begin);
    int64_t i = inner.begin;
    for (; i + 16 <= inner.end; i += 16)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        top[j] = vmaxq_f32(
            top[j], vmaxq_f32(vld1q_f32(scores + (i + 4 * j) * 2), vld1q_f32(scores + (i + 4 * j + 2) * 2)));
    part(i, inner.end);
    part(inner.end, all.end);
    const float32x4_t one = vmaxq_f32(vmaxq_f32(top[0], top[1]), vmaxq_f32(top[2], top[3]));
    return vget_low_f32(vpmaxq_f32(one, one));
  }

  // Computes the reference and marks rows that see only −∞ as empty.  The weight of row r is
  // exp(scaled score − maximum[r]); maximum[r] is NaN for a row with a NaN or ∞.
  Reference reference(float factor, int64_t group, float* maximum) {
    const float32x2_t top = highest();
    float factors[2], rounders[2], lowest[2];
    for (int r = 0; r < 2; ++r) {
      const float t = top[r] * factor;
      float n = __builtin_ceilf(t);
      factors[r] = factor;
      maximum[r] = n * kLn2;
      if (row[r].empty() || top[r] == -__builtin_inff()) {
        row[r] = Span{0, 0};
        maximum[r] = kNothing;
        n = 0.0f;
      } else if (!(__builtin_fabsf(t) < Reference::kLimit)) {
        for (int64_t i = all.begin; i < all.end; ++i) {
          float& s = scores[i / 2 * 4 + r * 2 + i % 2];
          s = __builtin_fmaf(s, factor, -t);
        }
        maximum[r] = t < __builtin_inff() ? t * kLn2 : __builtin_nanf("");
        factors[r] = 1.0f;
        n = 0.0f;
      }
      rounders[r] = Reference::kRounder + Reference::kSteps - n;
      lowest[r] = (n - Reference::kSteps + 1.0f) / factors[r];
    }
    limit(group);
    return {by_row(factors), by_row(rounders), by_row(lowest)};
  }
};

// Multiplies the scores of a pair by the scale and applies the softcap.
inline void shape(const AttentionArgs& args, float* scores, Span span) {
  for (int64_t i = span.begin / 8 * kLanes; i < span.end * 2; i += kLanes) {
    F32 x = load(scores + i) * set1(args.scale);
    if (args.softcap > 0.0f) {
      const F32 cap = set1(args.softcap);
      x = cap * tanh(x / cap);
    }
    store(scores + i, x);
  }
}

// True if a row of sums contains a NaN.
inline bool has_nan(const float* x, int64_t n) {
  float32x4_t number[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 4; ++j) number[j] = vmaxq_f32(number[j], vld1q_f32(x + i + 4 * j));
  const float32x4_t all = vmaxq_f32(vmaxq_f32(number[0], number[1]), vmaxq_f32(number[2], number[3]));
  bool found = vminvq_u32(vceqq_f32(all, all)) == 0;
  for (; i < n; ++i) found = found || x[i] != x[i];
  return found;
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
