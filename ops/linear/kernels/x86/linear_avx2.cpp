// The linear kernels with AVX2, without VNNI; just as exact.
//
// VPMADDUBSW multiplies unsigned by signed bytes and adds pairs to 16 bits with saturation.  Nibbles are
// small enough for a whole group of 32 to stay within 16 bits, in gemv and in gemm: one VPMADDWD per group
// multiplies the sums by the group multiplier and widens them. 8-bit weights, and nibbles with folded float
// scales, are multiplied as words.
#include "linear/kernels/x86/gemv_avx2.h"

namespace armllm::avx2 {
namespace {

constexpr int kBlock =
    4;  // tokens of a register tile: 4 × 2 accumulators, two weights, one activation register
constexpr int kTokens = 64;
constexpr int kPanels = 2;
constexpr int kSegment = 16;  // groups per gemm pass

// Operands of gemm per group of a panel: words, 16 steps of 16 rows × 2 k; or nibbles, 8 steps of 16 rows × 4
// k, followed by each row's multiplier twice, and, for g32iz, each row's zero point twice.
enum Form : int32_t { kWords, kNibbles, kNibblesWithZeros };
constexpr int64_t kFormBytes[] = {1024, 512 + 64, 512 + 128};
Form form_of(Scheme scheme) {
  if (scheme == Scheme::g32iz) return kNibblesWithZeros;
  return scheme == Scheme::g32i || scheme == Scheme::row ? kNibbles : kWords;
}

// Spreads 16 words, one per row, over the 16-bit lanes of the rows of a half-line.
ARMLLM_INLINE void row_words(const int16_t* p, __m256i* low, __m256i* high) {
  const __m256i index =
      _mm256_set_epi64x(0x0706070607060706, 0x0504050405040504, 0x0302030203020302, 0x0100010001000100);
  int64_t four[2];
  __builtin_memcpy(&four[0], p, 8);
  __builtin_memcpy(&four[1], p + 8, 8);
  *low = _mm256_shuffle_epi8(_mm256_set1_epi64x(four[0]), index);
  *high = _mm256_shuffle_epi8(_mm256_set1_epi64x(four[1]), index);
}

// (u − z) · factor, rounded if the factor is a folded scale.
ARMLLM_INLINE __m256i weights(__m256i u, __m256i zero, __m256i factor, bool fold) {
  const __m256i bytes = _mm256_set1_epi16(255), half = _mm256_set1_epi16(fold ? 128 : 0);
  const __m256i even = _mm256_sub_epi16(_mm256_and_si256(u, bytes), zero);
  const __m256i odd = _mm256_sub_epi16(_mm256_srli_epi16(u, 8), zero);
  const __m256i a = _mm256_add_epi16(_mm256_mullo_epi16(even, factor), half);
  const __m256i b = _mm256_add_epi16(_mm256_mullo_epi16(odd, factor), half);
  if (fold) return _mm256_or_si256(_mm256_srli_epi16(a, 8), _mm256_andnot_si256(bytes, b));
  return _mm256_or_si256(_mm256_and_si256(a, bytes), _mm256_slli_epi16(b, 8));
}

// Reorders rows 0 … 3 and 4 … 7 × 8 k to two vectors of 8 rows × 4 k.
ARMLLM_INLINE void rows8(__m256i first, __m256i second, __m256i* even, __m256i* odd) {
  const __m256 a = _mm256_castsi256_ps(first), b = _mm256_castsi256_ps(second);
  *even = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8);
  *odd = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8);
}

// Widens 8 rows × 4 k of bytes to two vectors of 8 rows × 2 k of words, stored 64 bytes apart.
ARMLLM_INLINE void store_words(int8_t* w, __m256i bytes) {
  const __m256i low = _mm256_set1_epi32(0x01800080), high = _mm256_set1_epi32(0x03800280);
  const auto place = [](__m256i index) {  // of the four bytes of each lane
    return _mm256_add_epi8(index, _mm256_set_epi32(0x0c000c00, 0x08000800, 0x04000400, 0, 0x0c000c00,
                                                   0x08000800, 0x04000400, 0));
  };
  store(w, _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, place(low)), 8));
  store(w + 64, _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, place(high)), 8));
}

void unpack_i4(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
  const uint8_t* values = panel + layout.values;
  const __m256i one = _mm256_set1_epi32(1);
  const bool zeros = has_narrow_zero_points(layout.scheme);
  const int64_t bytes = kFormBytes[form_of(layout.scheme)];
  for (int64_t g = 0; g < layout.groups; ++g, values += 256, w += bytes) {
    for (int j = 0; j < 4; ++j) {
      const __m256i first = load(values + j * 64), second = load(values + j * 64 + 32);
      __m256i even, odd;
      rows8(low_rows(first), low_rows(second), &even, &odd);
      store(w + j * 128, even);
      store(w + j * 128 + 64, odd);
      rows8(high_rows(first), high_rows(second), &even, &odd);
      store(w + j * 128 + 32, even);
      store(w + j * 128 + 96, odd);
    }
    __m256i low = one, high = one;
    if (has_multipliers(layout.scheme)) {
      const __m256i bytes = _mm256_cvtepu8_epi32(
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(panel + layout.multipliers + g * 8)));
      low = _mm256_add_epi32(_mm256_and_si256(bytes, _mm256_set1_epi32(15)), one);
      high = _mm256_add_epi32(_mm256_srli_epi32(bytes, 4), one);
    }
    store(w + 512, _mm256_or_si256(low, _mm256_slli_epi32(low, 16)));
    store(w + 544, _mm256_or_si256(high, _mm256_slli_epi32(high, 16)));
    if (zeros) {
      int32_t bits;
      __builtin_memcpy(&bits, panel + layout.zero_points + g * 4, 4);
      const __m256i two =
          _mm256_srlv_epi32(_mm256_set1_epi32(bits), _mm256_set_epi32(14, 12, 10, 8, 6, 4, 2, 0));
      const __m256i zero =
          _mm256_add_epi16(_mm256_and_si256(two, _mm256_set1_epi16(3)), _mm256_set1_epi16(kLowestZeroPoint));
      const __m256i even = _mm256_set1_epi32(0x01000100), lane = _mm256_set_epi32(12, 8, 4, 0, 12, 8, 4, 0);
      const __m256i words = _mm256_add_epi8(even, _mm256_mullo_epi32(lane, _mm256_set1_epi32(0x01010101)));
      store(w + 576, _mm256_shuffle_epi8(zero, words));
      store(w + 608, _mm256_shuffle_epi8(zero, _mm256_add_epi8(words, _mm256_set1_epi8(2))));
    }
  }
}

void unpack_i16(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
  const Scheme scheme = layout.scheme;
  const uint8_t* values = panel + layout.values;
  if (scheme == Scheme::i8) {
    for (int64_t i = 0; i < layout.groups * 8; ++i) {
      store_words(w + i * 128, load(values + i * 64));
      store_words(w + i * 128 + 32, load(values + i * 64 + 32));
    }
    return;
  }
  const bool fold = has_float_groups(scheme);
  const int64_t step = groups_per_scale(scheme);
  __m256i zero[2][2], factor[2][2];  // [h][low, high]
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h) {
    zero[h][0] = zero[h][1] = _mm256_set1_epi16(8);
    factor[h][0] = factor[h][1] = _mm256_set1_epi16(1);
    if (scheme == Scheme::rowz) row_nibbles(panel + layout.zero_points + 4 * h, &zero[h][0], &zero[h][1]);
  }
  for (int64_t g = 0; g < layout.groups; ++g, values += 256, w += kFormBytes[kWords]) {
    if (fold && g % step == 0) {
      int16_t factors[kPanel];
      linear_fold_factors(panel, layout, g / step, factors);
#pragma GCC unroll 4
      for (int h = 0; h < 2; ++h) {
        row_words(factors + 4 * h, &factor[h][0], &factor[h][1]);
        if (has_zero_points(scheme))
          row_nibbles(panel + layout.zero_points + g / step * 8 + 4 * h, &zero[h][0], &zero[h][1]);
      }
    }
    for (int j = 0; j < 4; ++j) {
      const __m256i halves[2] = {load(values + j * 64), load(values + j * 64 + 32)};
      __m256i low[2], high[2];
#pragma GCC unroll 4
      for (int h = 0; h < 2; ++h) {
        low[h] = weights(low_rows(halves[h]), zero[h][0], factor[h][0], fold);
        high[h] = weights(high_rows(halves[h]), zero[h][1], factor[h][1], fold);
      }
      __m256i even, odd;
      rows8(low[0], low[1], &even, &odd);
      store_words(w + j * 256, even);
      store_words(w + j * 256 + 128, odd);
      rows8(high[0], high[1], &even, &odd);
      store_words(w + j * 256 + 32, even);
      store_words(w + j * 256 + 160, odd);
    }
  }
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
            int32_t* row_info, float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  row_info[0] = form_of(scheme);
  for (int p = 0; p < panels; ++p) {
    __builtin_memcpy(row_scales + p * kPanel, panel[p], kPanel * sizeof(float));
    const auto unpack_one = form_of(scheme) == kWords ? unpack_i16 : unpack_i4;
    unpack_one(panel[p], layout, w + p * groups * kFormBytes[form_of(scheme)]);
  }
}

// Activations of a segment, prepared for one block of tokens: widened to words, or, for nibbles stored as q +
// 8, −8 · Σ x of each token and group; with zero points, two words whose sum is −Σ x.
struct PreparedActivations {
  alignas(32) int8_t words[kSegment * kBlock * kGroup * 2];
  alignas(32) int32_t group_sums[kSegment][kBlock];
};

void prepare_i16(const int8_t* x, int64_t groups, PreparedActivations& to) {
  for (int64_t i = 0; i < groups * kBlock * 2; ++i)
    store(to.words + i * 32,
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i * 16))));
}

template <bool kZeros>
void prepare_group_sums(const int8_t* x, int64_t groups, PreparedActivations& to) {
  const __m256i ones = _mm256_set1_epi8(1), minus8 = _mm256_set1_epi16(-8);
  for (int64_t g = 0; g < groups; ++g, x += kBlock * kGroup) {
    __m256i sum = _mm256_maddubs_epi16(ones, load(x));
    for (int c = 1; c < 4; ++c) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(ones, load(x + c * 32)));
    sum = _mm256_madd_epi16(sum, minus8);
    sum = _mm256_hadd_epi32(sum, sum);  // tokens 0, 1 and 2, 3
    __m256i words = _mm256_and_si256(sum, _mm256_set1_epi32(0xffff));
    if constexpr (kZeros) {
      const __m256i whole = _mm256_srai_epi32(sum, 3), half = _mm256_srai_epi32(sum, 4);
      const __m256i rest = _mm256_slli_epi32(_mm256_sub_epi32(whole, half), 16);
      words = _mm256_or_si256(_mm256_and_si256(half, _mm256_set1_epi32(0xffff)), rest);
    }
    _mm_store_si128(reinterpret_cast<__m128i*>(to.group_sums[g]),
                    _mm_unpacklo_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
}

using Sums = __m256i[kBlock][2];  // rows 0 … 7 and 8 … 15

// A 16-bit lane sums 16 products u·x, and one of a row's two lanes starts from the group's correction.  The
// final sum is at most 32512, so intermediate wrap-around is harmless.  With zero points, both lanes start
// from half of −z · Σ x, and their sums are at most 16 · 15 · 127 + 5.
template <bool kZeros>
void gemm_i4_maddubs(const int8_t* w, const int8_t* x, int64_t groups, const PreparedActivations& prepared,
                     Sums& sums) {
  for (int64_t g = 0; g < groups;
       ++g, w += kFormBytes[kZeros ? kNibblesWithZeros : kNibbles], x += kBlock * kGroup) {
    __m256i acc[kBlock][2];
#pragma GCC unroll 4
    for (int t = 0; t < kBlock; ++t) {
      acc[t][0] = acc[t][1] = _mm256_set1_epi32(prepared.group_sums[g][t]);
      if constexpr (kZeros) {
        acc[t][0] = _mm256_mullo_epi16(acc[t][0], load(w + 576));
        acc[t][1] = _mm256_mullo_epi16(acc[t][1], load(w + 608));
      }
    }
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step) {
      const __m256i w0 = load(w + step * 64), w1 = load(w + step * 64 + 32);
#pragma GCC unroll 4
      for (int t = 0; t < kBlock; ++t) {
        const __m256i four = broadcast4(x + step / 2 * kBlock * 8 + step % 2 * 4 + t * 8);
        add_words(acc[t][0], _mm256_maddubs_epi16(w0, four));
        add_words(acc[t][1], _mm256_maddubs_epi16(w1, four));
      }
      in_written_order();
    }
#pragma GCC unroll 4
    for (int t = 0; t < kBlock; ++t)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
        sums[t][h] = _mm256_add_epi32(sums[t][h], _mm256_madd_epi16(acc[t][h], load(w + 512 + h * 32)));
  }
}

void gemm_i16_madd(const int8_t* w, int64_t groups, const PreparedActivations& prepared, Sums& sums) {
  const int8_t* x = prepared.words;
  __m256i acc[kBlock][2];
#pragma GCC unroll 4
  for (int t = 0; t < kBlock; ++t) acc[t][0] = sums[t][0], acc[t][1] = sums[t][1];
  for (int64_t c = 0; c < groups * 4; ++c, w += kFormBytes[kWords] / 4, x += kBlock * 16) {
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
      const __m256i w0 = load(w + step * 64), w1 = load(w + step * 64 + 32);
#pragma GCC unroll 4
      for (int t = 0; t < kBlock; ++t) {
        const __m256i two = broadcast4(x + t * 16 + step * 4);
        add_lanes(acc[t][0], _mm256_madd_epi16(w0, two));
        add_lanes(acc[t][1], _mm256_madd_epi16(w1, two));
      }
      in_written_order();
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < kBlock; ++t) sums[t][0] = acc[t][0], sums[t][1] = acc[t][1];
}

template <Form kForm>
void gemm_of_form(const int8_t* w, const float* row_scales, int panels, const Activations& x,
                  int64_t first_token, int tokens, float* out, int64_t out_stride) {
  constexpr int64_t group_bytes = kFormBytes[kForm];
  constexpr bool kZeros = kForm == kNibblesWithZeros;
  PreparedActivations prepared;
  Sums sums[kTokens / kBlock][kPanels];
  for (int t = 0; t < tokens; t += kBlock)
    for (int p = 0; p < panels; ++p)
      for (auto& token : sums[t / kBlock][p]) token[0] = token[1] = _mm256_setzero_si256();
  for (int64_t g = 0; g < x.groups; g += kSegment) {
    const int64_t some = x.groups - g < kSegment ? x.groups - g : kSegment;
    for (int t = 0; t < tokens; t += kBlock) {
      const int8_t* values = x.values + (first_token + t) * x.row_bytes() + g * kBlock * kGroup;
      if constexpr (kForm == kWords) {
        prepare_i16(values, some, prepared);
      } else {
        prepare_group_sums<kZeros>(values, some, prepared);
      }
      for (int p = 0; p < panels; ++p) {
        const int8_t* lines = w + (p * x.groups + g) * group_bytes;
        if constexpr (kForm == kWords) {
          gemm_i16_madd(lines, some, prepared, sums[t / kBlock][p]);
        } else {
          gemm_i4_maddubs<kZeros>(lines, values, some, prepared, sums[t / kBlock][p]);
        }
      }
    }
  }
  for (int t = 0; t < tokens; ++t)
    for (int p = 0; p < panels; ++p)
      for (int h = 0; h < 2; ++h)
        _mm256_storeu_ps(out + t * out_stride + p * kPanel + h * 8,
                         _mm256_mul_ps(_mm256_cvtepi32_ps(sums[t / kBlock][p][t % kBlock][h]),
                                       _mm256_loadu_ps(row_scales + p * kPanel + h * 8)));
}

void gemm(const int8_t* w, const int32_t* row_info, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  const auto multiply = row_info[0] == kWords     ? gemm_of_form<kWords>
                        : row_info[0] == kNibbles ? gemm_of_form<kNibbles>
                                                  : gemm_of_form<kNibblesWithZeros>;
  multiply(w, row_scales, panels, x, first_token, tokens, out, out_stride);
}

}  // namespace

extern const LinearKernels linear;
constexpr LinearKernels linear = [] {
  LinearKernels k = common_kernels();
  k.gemm_block = kBlock;
  k.gemm_tokens = kTokens;
  k.gemm_panels = kPanels;
  k.gemv = gemv;
  k.unpack = unpack;
  k.gemm = gemm;
  k.gemv_tokens = kMaxGemvTokens;
  k.gemm_group_bytes = kFormBytes[kWords];
  return k;
}();

}  // namespace armllm::avx2
