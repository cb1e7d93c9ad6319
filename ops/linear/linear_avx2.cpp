// The linear kernels with AVX2 alone (no VNNI), exact all the same.
//
// VPMADDUBSW multiplies unsigned by signed bytes and adds pairs to 16 bits, saturating.  Nibbles are small enough that
// a whole group of 32 stays within 16 bits (gemv); INT8 weights go in as |w| against x with w's sign (gemm), where a
// pair is at most 2·128·127 = 32512.
#include <immintrin.h>

#include "linear/kernels_common.h"

namespace armllm::avx2 {
namespace {

constexpr int kBlock = 4;  // tokens of a register tile: 4 × 2 accumulators beside |w| and w
constexpr int kTokens = 64;
constexpr int kPanels = 2;
#define ARMLLM_INLINE __attribute__((always_inline)) inline

ARMLLM_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
ARMLLM_INLINE void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

ARMLLM_INLINE __m256i spread(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

ARMLLM_INLINE __m256i spread8(const int8_t* x) {
  int64_t eight;
  __builtin_memcpy(&eight, x, 8);
  return _mm256_set1_epi64x(eight);
}

// Half a line, 32 bytes: u of rows 4·h … 4·h + 3, and of rows 8 + 4·h …; 8 k each, one 64-bit lane a row.
ARMLLM_INLINE __m256i low_rows(__m256i half) { return _mm256_and_si256(half, _mm256_set1_epi8(15)); }
ARMLLM_INLINE __m256i high_rows(__m256i half) {
  return low_rows(_mm256_xor_si256(_mm256_srli_epi16(half, 4), _mm256_set1_epi8(8)));
}

// The nibbles of the four rows of `p` (bytes 4·h … of 8), likewise: in the 16-bit lanes of a 64-bit lane.
ARMLLM_INLINE void row_nibbles(const uint8_t* p, __m256i* low, __m256i* high) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const __m256i bytes = _mm256_shuffle_epi8(
      _mm256_set1_epi32(four), _mm256_set_epi64x(int64_t(0xff03ff03ff03ff03), int64_t(0xff02ff02ff02ff02),
                                                 int64_t(0xff01ff01ff01ff01), int64_t(0xff00ff00ff00ff00)));
  *low = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
  *high = _mm256_srli_epi16(bytes, 4);
}

// The 32-bit halves of rows 4·h … and 8 + 4·h … added: one lane a row, four of each.
ARMLLM_INLINE __m256i row_sums(__m256i low, __m256i high) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
}

// Four values from `p` and four from 8 rows further on.
ARMLLM_INLINE __m256 row_floats(const float* p) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 8), 1);
}

ARMLLM_INLINE __m256 group_scales(const uint8_t* panel, const PanelLayout& layout, int64_t column, int h) {
  const uint8_t* p = panel + layout.scales;
  if (!has_bf16_scales(layout.scheme))
    return row_floats(reinterpret_cast<const float*>(p) + column * kPanel + 4 * h);
  p += (column * kPanel + 4 * h) * 2;
  const __m128i high = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)),
                                          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 16)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16));
}

ARMLLM_INLINE void store_rows(float* out, __m256 v) {
  _mm_storeu_ps(out, _mm256_castps256_ps128(v));
  _mm_storeu_ps(out + 8, _mm256_extractf128_ps(v, 1));
}

// −z · Σ x of the rows of row_sums().
ARMLLM_INLINE __m256i zero_term(const uint8_t* zero_points, int h, int32_t offset) {
  __m256i low, high;
  row_nibbles(zero_points + 4 * h, &low, &high);
  const __m256i minus = _mm256_set1_epi32(offset / 8), words = _mm256_set1_epi64x(0xffff);
  return row_sums(_mm256_mullo_epi32(_mm256_and_si256(low, words), minus),
                  _mm256_mullo_epi32(_mm256_and_si256(high, words), minus));
}

// Additions written as instructions: GCC would add the products of several steps to each other first, and keep all of
// them in memory until then.
ARMLLM_INLINE void add_words(__m256i& acc, __m256i words) {
  asm("vpaddw %1, %0, %0" : "+x"(acc) : "x"(words));
}
ARMLLM_INLINE void add_lanes(__m256i& acc, __m256i lanes) {
  asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(lanes));
}

ARMLLM_INLINE void dot_signed(__m256i& acc, __m256i w, __m256i magnitude, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
  add_lanes(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Keeps loads where they are: moved up, and shared between steps, they would push accumulators out of registers.
ARMLLM_INLINE void in_written_order() { asm volatile("" ::: "memory"); }

enum class Sum { multiplied, row, groups };  // g32i; row and rowz; float group scales

template <Sum kind, int T>
void gemv_tokens(const uint8_t* panel, const PanelLayout& layout, const Activations& x, int64_t first_token,
                 float* out) {
  const int64_t groups = x.groups, row_bytes = groups * kGroup, step = groups_per_scale(layout.scheme);
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* offsets = x.group_offsets + first_token * groups;
  const uint8_t* w = panel + layout.values;
  const bool zero_points = has_zero_points(layout.scheme);
  PanelPrefetch<4> prefetch(panel, layout);
  __m256i total[2][2][T];  // [h][low, high]
  __m256 total_f[2][T];
  int32_t offset[T] = {};  // since the last scale
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      total[h][0][t] = total[h][1][t] = _mm256_setzero_si256();
      total_f[h][t] = _mm256_setzero_ps();
    }
  }
  int64_t left = step;  // groups of this scale
  for (int64_t g = 0; g < groups; ++g, w += 256) {
    const int8_t* xg = values + g * kGroup;
    prefetch.group();
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) offset[t] += offsets[t * groups + g];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      // A 16-bit lane sums 8 products u·x, and one of a row's four takes the whole group's offset: at most 32512 in
      // the end, whatever wraps on the way.
      __m256i low_acc[T], high_acc[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t)
        low_acc[t] = high_acc[t] = _mm256_set1_epi64x(zero_points ? 0 : offsets[t * groups + g] & 0xffff);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m256i half = load(w + j * 64 + h * 32), low = low_rows(half), high = high_rows(half);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const __m256i eight = spread8(xg + t * row_bytes + j * 8);
          add_words(low_acc[t], _mm256_maddubs_epi16(low, eight));
          add_words(high_acc[t], _mm256_maddubs_epi16(high, eight));
        }
        in_written_order();
      }
      __m256i low_factor = _mm256_set1_epi16(1), high_factor = low_factor;
      if constexpr (kind == Sum::multiplied) {
        row_nibbles(panel + layout.multipliers + g * 8 + h * 4, &low_factor, &high_factor);
        low_factor = _mm256_add_epi16(low_factor, _mm256_set1_epi16(1));
        high_factor = _mm256_add_epi16(high_factor, _mm256_set1_epi16(1));
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        add_lanes(total[h][0][t], _mm256_madd_epi16(low_acc[t], low_factor));
        add_lanes(total[h][1][t], _mm256_madd_epi16(high_acc[t], high_factor));
      }
    }
    if constexpr (kind == Sum::groups) {
      if (--left != 0 && g + 1 != groups) continue;
      const int64_t column = g / step;
      left = step;
#pragma GCC unroll 4
      for (int h = 0; h < 2; ++h) {
        const __m256 scale = group_scales(panel, layout, column, h);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          __m256i sum = row_sums(total[h][0][t], total[h][1][t]);
          if (zero_points)
            sum = _mm256_add_epi32(sum, zero_term(panel + layout.zero_points + column * 8, h, offset[t]));
          total_f[h][t] = _mm256_add_ps(total_f[h][t], _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum)));
          total[h][0][t] = total[h][1][t] = _mm256_setzero_si256();
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) offset[t] = 0;
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      if constexpr (kind != Sum::groups) {
        __m256i sum = row_sums(total[h][0][t], total[h][1][t]);
        if (kind == Sum::row && zero_points)
          sum = _mm256_add_epi32(sum, zero_term(panel + layout.zero_points, h, offset[t]));
        total_f[h][t] = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), row_floats(panel_scales(panel) + 4 * h));
      }
      store_rows(out + t * kPanel + 4 * h, total_f[h][t]);
    }
  }
}

template <int T>
void gemv_int8(const uint8_t* panel, const PanelLayout& layout, const Activations& x, int64_t first_token,
               float* out) {
  const int64_t row_bytes = x.groups * kGroup;
  const int8_t* values = x.values + first_token * row_bytes;
  const uint8_t* w = panel + layout.values;
  PanelPrefetch<8> prefetch(panel, layout);
  __m256i total[2][T];
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) total[h][t] = _mm256_setzero_si256();
  for (int64_t g = 0; g < x.groups; ++g) {
    prefetch.group();
    for (int j = 0; j < 8; ++j, w += 64) {
#pragma GCC unroll 4
      for (int h = 0; h < 2; ++h) {
        const __m256i line = load(w + h * 32), magnitude = _mm256_abs_epi8(line);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
          dot_signed(total[h][t], line, magnitude, spread(values + t * row_bytes + g * kGroup + j * 4));
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
      _mm256_storeu_ps(out + t * kPanel + h * 8, _mm256_mul_ps(_mm256_cvtepi32_ps(total[h][t]),
                                                               _mm256_loadu_ps(panel_scales(panel) + h * 8)));
}

template <int T>
void gemv_count(const uint8_t* panel, const PanelLayout& layout, const Activations& x, int64_t first,
                float* out) {
  if (layout.scheme == Scheme::i8) return gemv_int8<T>(panel, layout, x, first, out);
  if (layout.scheme == Scheme::g32i) return gemv_tokens<Sum::multiplied, T>(panel, layout, x, first, out);
  if (has_float_groups(layout.scheme)) return gemv_tokens<Sum::groups, T>(panel, layout, x, first, out);
  return gemv_tokens<Sum::row, T>(panel, layout, x, first, out);
}

// Up to four tokens at a time: more would not stay in 16 registers.
void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first, int tokens, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  for (; tokens >= 4; tokens -= 4, first += 4, out += 4 * kPanel) gemv_count<4>(panel, layout, x, first, out);
  switch (tokens) {
    case 1:
      return gemv_count<1>(panel, layout, x, first, out);
    case 2:
      return gemv_count<2>(panel, layout, x, first, out);
    case 3:
      return gemv_count<3>(panel, layout, x, first, out);
  }
}

// 16 words, one a row, in the 16-bit lanes of the rows of a half-line.
ARMLLM_INLINE void row_words(const int16_t* p, __m256i* low, __m256i* high) {
  const __m256i index =
      _mm256_set_epi64x(0x0706070607060706, 0x0504050405040504, 0x0302030203020302, 0x0100010001000100);
  int64_t four[2];
  __builtin_memcpy(&four[0], p, 8);
  __builtin_memcpy(&four[1], p + 8, 8);
  *low = _mm256_shuffle_epi8(_mm256_set1_epi64x(four[0]), index);
  *high = _mm256_shuffle_epi8(_mm256_set1_epi64x(four[1]), index);
}

// (u − z) · factor, rounded where the factor is a folded scale.
ARMLLM_INLINE __m256i weights(__m256i u, __m256i zero, __m256i factor, bool fold) {
  const __m256i bytes = _mm256_set1_epi16(255), half = _mm256_set1_epi16(fold ? 128 : 0);
  const __m256i even = _mm256_sub_epi16(_mm256_and_si256(u, bytes), zero);
  const __m256i odd = _mm256_sub_epi16(_mm256_srli_epi16(u, 8), zero);
  const __m256i a = _mm256_add_epi16(_mm256_mullo_epi16(even, factor), half);
  const __m256i b = _mm256_add_epi16(_mm256_mullo_epi16(odd, factor), half);
  if (fold) return _mm256_or_si256(_mm256_srli_epi16(a, 8), _mm256_andnot_si256(bytes, b));
  return _mm256_or_si256(_mm256_and_si256(a, bytes), _mm256_slli_epi16(b, 8));
}

// Rows 0 … 3 and 4 … 7 × 8 k become 8 rows × 4 k, twice.
ARMLLM_INLINE void store_rows8(int8_t* w, __m256i first, __m256i second) {
  const __m256 a = _mm256_castsi256_ps(first), b = _mm256_castsi256_ps(second);
  store(w, _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8));
  store(w + 64, _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8));
}

// One panel in the order of scheme i8.
void unpack_panel(const uint8_t* panel, const PanelLayout& layout, int8_t* w) {
  const Scheme scheme = layout.scheme;
  const uint8_t* values = panel + layout.values;
  if (scheme == Scheme::i8) {
    for (int64_t i = 0; i < layout.groups * 16; ++i) store(w + i * 32, load(values + i * 32));
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
  for (int64_t g = 0; g < layout.groups; ++g, values += 256, w += 512) {
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
    for (int h = 0; scheme == Scheme::g32i && h < 2; ++h) {
      row_nibbles(panel + layout.multipliers + g * 8 + h * 4, &factor[h][0], &factor[h][1]);
      for (int i = 0; i < 2; ++i) factor[h][i] = _mm256_add_epi16(factor[h][i], _mm256_set1_epi16(1));
    }
    for (int j = 0; j < 4; ++j) {
      const __m256i halves[2] = {load(values + j * 64), load(values + j * 64 + 32)};
      __m256i low[2], high[2];
#pragma GCC unroll 4
      for (int h = 0; h < 2; ++h) {
        low[h] = weights(low_rows(halves[h]), zero[h][0], factor[h][0], fold);
        high[h] = weights(high_rows(halves[h]), zero[h][1], factor[h][1], fold);
      }
      store_rows8(w + j * 128, low[0], low[1]);
      store_rows8(w + j * 128 + 32, high[0], high[1]);
    }
  }
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w, int32_t*,
            float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p) {
    __builtin_memcpy(row_scales + p * kPanel, panel[p], kPanel * sizeof(float));
    unpack_panel(panel[p], layout, w + p * groups * 512);
  }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  for (int p = 0; p < panels; ++p, w += x.groups * 512) {
    for (int t = 0; t < tokens; t += kBlock) {
      const int8_t* values = x.values + (first_token + t) * x.groups * kGroup;
      const int8_t* lines = w;
      __m256i acc[kBlock][2];
#pragma GCC unroll 4
      for (int i = 0; i < kBlock; ++i) acc[i][0] = acc[i][1] = _mm256_setzero_si256();
      for (int64_t step = 0; step < x.groups * 8; ++step, lines += 64) {
        const __m256i w0 = load(lines), w1 = load(lines + 32);
        const __m256i m0 = _mm256_abs_epi8(w0), m1 = _mm256_abs_epi8(w1);
        const int8_t* xs = values + step / 2 * kBlock * 8 + step % 2 * 4;
#pragma GCC unroll 4
        for (int i = 0; i < kBlock; ++i) {
          const __m256i four = spread(xs + i * 8);
          dot_signed(acc[i][0], w0, m0, four);
          dot_signed(acc[i][1], w1, m1, four);
        }
        in_written_order();
      }
#pragma GCC unroll 4
      for (int i = 0; i < kBlock; ++i) {
        if (i >= tokens - t) break;
        float* to = out + (t + i) * out_stride + p * kPanel;
        const float* scales = row_scales + p * kPanel;
        _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[i][0]), _mm256_loadu_ps(scales)));
        _mm256_storeu_ps(to + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[i][1]), _mm256_loadu_ps(scales + 8)));
      }
    }
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {kBlock, kTokens, kPanels,       linear_quantize, gemv,
                              unpack, gemm,    linear_finish, false,           kMostGemvTokens};

}  // namespace armllm::avx2
