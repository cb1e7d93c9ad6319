// 2 to 8 tokens against one panel with SMMLA.
//
// Tokens lie in pairs (Activations::block 2), weights as they are packed: both are operands of SMMLA without a move.
// A lane of an accumulator holds (token, row): (0, 0) (0, 1) (1, 0) (1, 1) of a pair of tokens and a pair of rows.
#pragma once

#include "linear/arm_panel.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kSegment = 256;  // groups whose sums times 16 · 16 fit 32 bits

// The two tokens of a pair, scaled, from sums of rows 0, 1 and of rows 2, 3.
ARMLLM_INLINE void store_pairs(int32x4_t rows01, int32x4_t rows23, const float* scale, float* first,
                               float* second) {
  store_scaled(first, zip1_doubles(rows01, rows23), scale);
  if (second != nullptr) store_scaled(second, zip2_doubles(rows01, rows23), scale);
}
ARMLLM_INLINE void store_pairs(float32x4_t rows01, float32x4_t rows23, float* first, float* second) {
  const int32x4_t a = vreinterpretq_s32_f32(rows01), b = vreinterpretq_s32_f32(rows23);
  vst1q_f32(first, vreinterpretq_f32_s32(zip1_doubles(a, b)));
  if (second != nullptr) vst1q_f32(second, vreinterpretq_f32_s32(zip2_doubles(a, b)));
}

// What a call works on.
struct TokenPairs {
  const int8_t* values[4];
  const int32_t* offsets[8];  // −8 · Σ x of each group; an odd last token stands in for the missing one
  int tokens;

  TokenPairs(const Activations& x, int64_t first, int count) : tokens(count) {
    for (int p = 0; 2 * p < count; ++p) values[p] = x.values + (first / 2 + p) * 2 * x.groups * kGroup;
    for (int t = 0; t < count + count % 2; ++t)
      offsets[t] = x.group_offsets + (first + (t < count ? t : count - 1)) * x.groups;
  }
  float* second(float* out, int pair) const {
    return 2 * pair + 1 < tokens ? out + (2 * pair + 1) * kPanel : nullptr;
  }
};

// Products with rows 2·first … 2·(first + kVectors) − 1 of both halves: A of whole bytes and B of low nibbles.
// (A − B) is 16 times the products with the high rows.
template <int kPairs, int kVectors>
struct Products {
  int32x4_t whole[kPairs][kVectors] = {}, low[kPairs][kVectors] = {};

  ARMLLM_INLINE void add_group(const uint8_t* lines, const int8_t* const* x, int64_t k) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      int8x16_t bytes[kVectors], columns[kPairs];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) bytes[v] = load_values(lines + 64 * j + 16 * v);
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) columns[p] = load_values(x[p] + 2 * k + 16 * j);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int8x16_t u = low_nibbles(bytes[v]);
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) {
          whole[p][v] = vmmlaq_s32(whole[p][v], columns[p], bytes[v]);
          low[p][v] = vmmlaq_s32(low[p][v], columns[p], u);
        }
      }
    }
  }
  ARMLLM_INLINE int32x4_t high16(int p, int v) const { return vsubq_s32(whole[p][v], low[p][v]); }
};

// Two of 32 bytes (a table and the signs of its entries) as 32-bit lanes a b a b.
ARMLLM_INLINE int32x4_t spread_pair(uint8x16_t values, uint8x16_t signs, int at) {
  const uint8x16_t first = {0, 16, 16, 16, 1, 17, 17, 17, 0, 16, 16, 16, 1, 17, 17, 17};
  const uint8x16x2_t table = {{values, signs}};
  return vreinterpretq_s32_u8(vqtbl2q_u8(table, vaddq_u8(first, vdupq_n_u8(uint8_t(at)))));
}

// Σ over groups of m[row] · offset[token] for rows 0 … 7: what low nibbles, which hold q + 8, are too much.
template <int kPairs>
void multiplied_offsets(const uint8_t* multipliers, int64_t groups, const TokenPairs& x,
                        int32x4_t (*sums)[4]) {
  int32x4_t upper[kPairs][4] = {};
  uint32x4_t lower[kPairs][4] = {};
  const uint8x16_t column = {0, 8, 16, 24, 32, 40, 48, 56, 1, 9, 17, 25, 33, 41, 49, 57};
  for (int64_t g = 0; g < groups; g += 8) {
    uint8x16x4_t m;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)  // the section is padded to 64 bytes
      m.val[i] = vaddq_u8(vandq_u8(vld1q_u8(multipliers + 8 * g + 16 * i), vdupq_n_u8(15)), vdupq_n_u8(1));
    uint8x16_t rows[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) rows[v] = vqtbl4q_u8(m, vaddq_u8(column, vdupq_n_u8(uint8_t(2 * v))));
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      int8x16_t both[2];
#pragma GCC unroll 2
      for (int t = 0; t < 2; ++t) {
        const int32_t* from = x.offsets[2 * p + t] + g;
        int32_t last[8] = {};
        if (groups - g < 8) {
          for (int64_t i = 0; i < groups - g; ++i) last[i] = from[i];
          from = last;
        }
        both[t] = vreinterpretq_s8_s16(
            vuzp1q_s16(vreinterpretq_s16_s32(vld1q_s32(from)), vreinterpretq_s16_s32(vld1q_s32(from + 4))));
      }
      const uint8x16_t low = vreinterpretq_u8_s8(vuzp1q_s8(both[0], both[1]));
      const int8x16_t high = vuzp2q_s8(both[0], both[1]);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        upper[p][v] = vmmlaq_s32(upper[p][v], high, vreinterpretq_s8_u8(rows[v]));
        lower[p][v] = vmmlaq_u32(lower[p][v], low, rows[v]);
      }
    }
  }
  for (int p = 0; p < kPairs; ++p)
    for (int v = 0; v < 4; ++v)
      sums[p][v] = vaddq_s32(vshlq_n_s32(upper[p][v], 8), vreinterpretq_s32_u32(lower[p][v]));
}

// g32i.  Accumulators run on over the groups: with S_g the sum of groups 0 … g,
//   Σ m_g · s_g = Σ (m_g − m_(g+1)) · S_g + m_last · S_last
// needs no zeroing, and is exact modulo 2^32.
template <int kPairs>
ARMLLM_IN_WRITTEN_ORDER void smmla_multiplied(const uint8_t* panel, const PanelLayout& layout,
                                              const TokenPairs& x, float* out) {
  int32x4_t low_start[kPairs][4];
  multiplied_offsets<kPairs>(panel + layout.multipliers, layout.groups, x, low_start);
  for (int first = 0; first < 4; first += 2) {
    const uint8_t* lines = panel + layout.values + 16 * first;
    const uint8_t* multipliers = panel + layout.multipliers;
    int32x4_t low_total[kPairs][2], high_sum[kPairs][2] = {};
    for (int p = 0; p < kPairs; ++p)
      for (int v = 0; v < 2; ++v) low_total[p][v] = low_start[p][first + v];
    for (int64_t begin = 0; begin < layout.groups; begin += kSegment) {
      const int64_t end = begin + kSegment < layout.groups ? begin + kSegment : layout.groups;
      Products<kPairs, 2> sums;
      int32x4_t high_total[kPairs][2] = {};
      uint8x16_t low_before = vdupq_n_u8(0), high_before = vdupq_n_u8(0);
      const auto multiply = [&](uint8x16_t low, uint8x16_t low_sign, uint8x16_t high, uint8x16_t high_sign,
                                int at) ARMLLM_INLINE_LAMBDA {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int32x4_t l = spread_pair(low, low_sign, at + 2 * v);
          const int32x4_t h = spread_pair(high, high_sign, at + 2 * v);
#pragma GCC unroll 2
          for (int p = 0; p < kPairs; ++p) {
            low_total[p][v] = vmlaq_s32(low_total[p][v], sums.low[p][v], l);
            high_total[p][v] = vmlaq_s32(high_total[p][v], sums.high16(p, v), h);
          }
        }
      };
      const auto four_groups = [&](int64_t g, int64_t count) ARMLLM_INLINE_LAMBDA {
        // Four rows of four groups; the values follow the last multipliers.
        const uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(multipliers + 8 * g));
        const uint32x4_t b = vreinterpretq_u32_u8(vld1q_u8(multipliers + 8 * g + 16));
        const uint8x16_t four = vreinterpretq_u8_u32(first == 0 ? vuzp1q_u32(a, b) : vuzp2q_u32(a, b));
        const uint8x16_t low = vandq_u8(four, vdupq_n_u8(15)), high = vshrq_n_u8(four, 4);
        const uint8x16_t low_step = vsubq_u8(vextq_u8(low_before, low, 12), low);
        const uint8x16_t high_step = vsubq_u8(vextq_u8(high_before, high, 12), high);
        const uint8x16_t low_sign = vcltzq_s8(vreinterpretq_s8_u8(low_step));
        const uint8x16_t high_sign = vcltzq_s8(vreinterpretq_s8_u8(high_step));
        low_before = low;
        high_before = high;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          if (i == count) break;
          multiply(low_step, low_sign, high_step, high_sign, 4 * i);
          sums.add_group(lines + 256 * i, x.values, kGroup * (g + i));
        }
        lines += 1024;
      };
      int64_t g = begin;
      for (; g + 4 <= end; g += 4) four_groups(g, 4);
      if (g < end) four_groups(g, end - g);
      const uint8x16_t last = vaddq_u8(row_nibbles(multipliers + 8 * (end - 1)), vdupq_n_u8(1));
      const uint8x16_t high_last = vextq_u8(last, last, 8);
      multiply(last, vdupq_n_u8(0), high_last, vdupq_n_u8(0), 2 * first);
      for (int p = 0; p < kPairs; ++p)
        for (int v = 0; v < 2; ++v) high_sum[p][v] = vsraq_n_s32(high_sum[p][v], high_total[p][v], 4);
    }
    const float* scales = panel_scales(panel) + 2 * first;
    for (int p = 0; p < kPairs; ++p) {
      float* to = out + 2 * p * kPanel + 2 * first;
      float* second = x.second(out + 2 * first, p);
      store_pairs(low_total[p][0], low_total[p][1], scales, to, second);
      store_pairs(high_sum[p][0], high_sum[p][1], scales + 8, to + 8, second ? second + 8 : nullptr);
    }
  }
}

// g32i for more tokens: weights multiplied out, 8 rows at a time.
template <bool kHigh, int kPairs>
ARMLLM_IN_WRITTEN_ORDER void smmla_unpacked(const uint8_t* panel, const PanelLayout& layout,
                                            const TokenPairs& x, float* out) {
  Int8Pairs<Scheme::g32i, kHigh, 4> rows(panel, layout, 0);
  int32x4_t sums[kPairs][4] = {};
  for (int64_t g = 0; g < layout.groups; ++g) {
    rows.enter(g);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      int8x16_t columns[kPairs];
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) columns[p] = load_values(x.values[p] + 2 * kGroup * g + 16 * j);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const int8x16_t w = rows.at(j, v);
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) sums[p][v] = vmmlaq_s32(sums[p][v], columns[p], w);
      }
    }
  }
  const float* scales = panel_scales(panel) + 8 * kHigh;
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      float* to = out + 8 * kHigh + 4 * i;
      store_pairs(sums[p][2 * i], sums[p][2 * i + 1], scales + 4 * i, to + 2 * p * kPanel, x.second(to, p));
    }
}

// Σ x of a pair of tokens (from −8 · Σ x) times the zero points less `bias` of rows 2v and 2v + 1.
ARMLLM_INLINE int32x4_t zero_products(uint8x16_t zeros, int at, int bias, int32_t first, int32_t second) {
  const int32x4_t z = vsubq_s32(spread_pair(zeros, vdupq_n_u8(0), at), vdupq_n_s32(bias));
  const int32x4_t sums = vcombine_s32(vdup_n_s32(first / 8), vdup_n_s32(second / 8));
  return vmulq_s32(z, sums);
}

// row, rowz
template <int kPairs, int kVectors>
ARMLLM_IN_WRITTEN_ORDER void smmla_row(const uint8_t* panel, const PanelLayout& layout, const TokenPairs& x,
                                       float* out) {
  int32_t offset[2 * kPairs] = {};
  for (int t = 0; t < 2 * kPairs; ++t)
    for (int64_t g = 0; g < layout.groups; ++g) offset[t] += x.offsets[t][g];
  const uint8x16_t zeros =
      has_zero_points(layout.scheme) ? row_nibbles(panel + layout.zero_points) : vdupq_n_u8(8);
  for (int first = 0; first < 4; first += kVectors) {
    Products<kPairs, kVectors> sums;
    for (int64_t g = 0; g < layout.groups; ++g)
      sums.add_group(panel + layout.values + 256 * g + 16 * first, x.values, kGroup * g);
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; i += 2) {
        const int row = 2 * (first + i);
        const float* scales = panel_scales(panel) + row;
        float* to = out + 2 * p * kPanel + row;
        float* second = x.second(out + row, p);
        int32x4_t low[2], high[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int32_t a = offset[2 * p], b = offset[2 * p + 1];
          low[v] = vaddq_s32(sums.low[p][i + v], zero_products(zeros, row + 2 * v, 0, a, b));
          high[v] = vaddq_s32(vshrq_n_s32(sums.high16(p, i + v), 4),
                              zero_products(zeros, row + 8 + 2 * v, 8, a, b));
        }
        store_pairs(low[0], low[1], scales, to, second);
        store_pairs(high[0], high[1], scales + 8, to + 8, second ? second + 8 : nullptr);
      }
  }
}

// Float group scales of rows `row` and `row` + 1 as lanes a b a b.
ARMLLM_INLINE float32x4_t scale_pair(const uint8_t* scales, bool halves, int row) {
  if (!halves) return vreinterpretq_f32_s8(twice(scales + 4 * row));
  int32_t both;
  __builtin_memcpy(&both, scales + 2 * row, 4);
  return vreinterpretq_f32_s32(vshll_n_s16(vreinterpret_s16_s32(vdup_n_s32(both)), 16));
}

// Float group scales: total = total + s · float(sum) for each scale.
template <int kPairs, bool kZeros>
ARMLLM_IN_WRITTEN_ORDER void smmla_scaled(const uint8_t* panel, const PanelLayout& layout,
                                          const TokenPairs& x, float* out) {
  const bool halves = has_bf16_scales(layout.scheme);
  const int64_t scale_bytes = kPanel * (halves ? 2 : 4), step = groups_per_scale(layout.scheme);
  for (int first = 0; first < 4; first += 2) {
    const uint8_t* scales = panel + layout.scales;
    const uint8_t* lines = panel + layout.values + 16 * first;
    float32x4_t low_total[kPairs][2] = {}, high_total[kPairs][2] = {};
    int64_t g = 0;
    for (int64_t column = 0; column < layout.scale_groups; ++column, scales += scale_bytes) {
      int32_t offset[2 * kPairs] = {};
      const int64_t end = g + step < layout.groups ? g + step : layout.groups;
      Products<kPairs, 2> sums;
      for (; g < end; ++g, lines += 256) {
        sums.add_group(lines, x.values, kGroup * g);
#pragma GCC unroll 4
        for (int t = 0; t < 2 * kPairs; ++t) offset[t] += x.offsets[t][g];
      }
      const uint8x16_t zeros = kZeros ? row_nibbles(panel + layout.zero_points + 8 * column) : vdupq_n_u8(8);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int row = 2 * (first + v);
        const float32x4_t low_scale = scale_pair(scales, halves, row);
        const float32x4_t high_scale = scale_pair(scales, halves, row + 8);
#pragma GCC unroll 2
        for (int p = 0; p < kPairs; ++p) {
          const int32_t a = offset[2 * p], b = offset[2 * p + 1];
          int32x4_t low = sums.low[p][v], high = sums.high16(p, v);
          if constexpr (kZeros) {
            low = vaddq_s32(low, zero_products(zeros, row, 0, a, b));
            high = vaddq_s32(high, vshlq_n_s32(zero_products(zeros, row + 8, 8, a, b), 4));
          } else {
            low = vaddq_s32(low, vcombine_s32(vdup_n_s32(a), vdup_n_s32(b)));
          }
          low_total[p][v] = vaddq_f32(low_total[p][v], vmulq_f32(low_scale, vcvtq_f32_s32(low)));
          high_total[p][v] = vaddq_f32(high_total[p][v], vmulq_f32(high_scale, vcvtq_n_f32_s32(high, 4)));
        }
      }
    }
    for (int p = 0; p < kPairs; ++p) {
      float* to = out + 2 * p * kPanel + 2 * first;
      float* second = x.second(out + 2 * first, p);
      store_pairs(low_total[p][0], low_total[p][1], to, second);
      store_pairs(high_total[p][0], high_total[p][1], to + 8, second ? second + 8 : nullptr);
    }
  }
}

// i8: 4 · kQuads rows at a time.
template <int kPairs, int kQuads>
ARMLLM_IN_WRITTEN_ORDER void smmla_int8(const uint8_t* panel, const PanelLayout& layout, const TokenPairs& x,
                                        float* out) {
  for (int first = 0; first < 4; first += kQuads) {
    const uint8_t* lines = panel + layout.values + 16 * first;
    int32x4_t sums[kPairs][2 * kQuads] = {};
    for (int64_t c = 0; c < 4 * layout.groups; ++c, lines += 128) {
      int8x16_t columns[kPairs];
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) columns[p] = load_values(x.values[p] + 16 * c);
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) {
        const int8x16_t a = load_values(lines + 16 * i), b = load_values(lines + 64 + 16 * i);
        const int8x16_t w0 = zip1_words(a, b), w1 = zip2_words(a, b);
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) {
          sums[p][2 * i] = vmmlaq_s32(sums[p][2 * i], columns[p], w0);
          sums[p][2 * i + 1] = vmmlaq_s32(sums[p][2 * i + 1], columns[p], w1);
        }
      }
    }
    const float* scales = panel_scales(panel) + 4 * first;
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) {
        float* to = out + 4 * (first + i);
        store_pairs(sums[p][2 * i], sums[p][2 * i + 1], scales + 4 * i, to + 2 * p * kPanel, x.second(to, p));
      }
  }
}

// `tokens` tokens, the first of them `first`, an even one; kPairs = ceil(tokens / 2).
template <int kPairs>
void smmla_tokens(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first, int tokens,
                  float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  const TokenPairs pairs(x, first, tokens);
  if (scheme == Scheme::i8) return smmla_int8<kPairs, kPairs <= 2 ? 4 : 2>(panel, layout, pairs, out);
  if (scheme == Scheme::row || scheme == Scheme::rowz)
    return smmla_row<kPairs, kPairs <= 2 ? 4 : 2>(panel, layout, pairs, out);
  if constexpr (kPairs <= 2) {
    if (scheme == Scheme::g32i) return smmla_multiplied<kPairs>(panel, layout, pairs, out);
    if (has_zero_points(scheme)) return smmla_scaled<kPairs, true>(panel, layout, pairs, out);
    smmla_scaled<kPairs, false>(panel, layout, pairs, out);
  } else if (scheme == Scheme::g32i) {
    smmla_unpacked<false, kPairs>(panel, layout, pairs, out);
    smmla_unpacked<true, kPairs>(panel, layout, pairs, out);
  } else {
    smmla_tokens<2>(scheme, panel, x, first, 4, out);
    smmla_tokens<kPairs - 2>(scheme, panel, x, first + 4, tokens - 4, out + 4 * kPanel);
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
