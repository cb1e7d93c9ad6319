// The linear kernels with AVX-512 VNNI.
//
// VPDPBUSD multiplies unsigned by signed bytes.  The weights are the unsigned side: nibbles are stored as q + 8, and
// INT8 weights are taken as w + 128.  What that adds to a sum depends on the activations alone, is an integer, and is
// taken away again: per group by Activations::group_offsets (gemv), per token by Σ x (gemm).
#include <immintrin.h>

#include "linear/kernels_common.h"

namespace armllm::avx512 {
namespace {

constexpr int kBlock = 8;  // tokens of a register tile
constexpr int kWide =
    3;  // panels of a register tile: 8 × 3 accumulators, 3 weights and one activation register
constexpr int kTokens = 64;
constexpr int kPanels = 2 * kWide;
constexpr int kAhead = 4096;  // bytes that gemv's prefetch runs ahead of its loads

#define ARMLLM_INLINE __attribute__((always_inline)) inline

ARMLLM_INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }

// acc += Σ of four products unsigned × signed, a lane.  Written as an instruction: with the intrinsic GCC 12 renames
// accumulators inside unrolled loops and copies them back at the end of each turn, a tenth of the whole time.
ARMLLM_INLINE void dot(__m512i& acc, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}

ARMLLM_INLINE __m512i spread(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}

ARMLLM_INLINE __m512i spread8(const int8_t* x) {
  int64_t eight;
  __builtin_memcpy(&eight, x, 8);
  return _mm512_set1_epi64(eight);
}

// u of rows 0 … 7 and of rows 8 … 15 of a line, 8 k each: 64-bit lane r.
ARMLLM_INLINE __m512i low_rows(__m512i line) { return _mm512_and_si512(line, _mm512_set1_epi8(15)); }
ARMLLM_INLINE __m512i high_rows(__m512i line) {
  // (line >> 4 & 15) ^ 8
  return _mm512_ternarylogic_epi32(_mm512_srli_epi16(line, 4), _mm512_set1_epi8(15), _mm512_set1_epi8(8),
                                   0x6a);
}

// Sums of gemv lie where VPACKSSDW of the two halves puts them: 32-bit lane 4·i + 2·h + j is row 8·h + 2·i + j.
ARMLLM_INLINE __m512i row_of_lane() {
  return _mm512_set_epi32(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0);
}
ARMLLM_INLINE __m512i lane_of_row() {
  return _mm512_set_epi32(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
}

// The nibbles of 8 bytes in the order of those lanes, the same in both 16-bit halves of a lane.
ARMLLM_INLINE __m512i lane_nibbles(const uint8_t* p) {
  const __m512i bytes = _mm512_shuffle_epi8(
      spread8(reinterpret_cast<const int8_t*>(p)),
      _mm512_set_epi64(0xff07ff07ff06ff06, 0xff07ff07ff06ff06, 0xff05ff05ff04ff04, 0xff05ff05ff04ff04,
                       0xff03ff03ff02ff02, 0xff03ff03ff02ff02, 0xff01ff01ff00ff00, 0xff01ff01ff00ff00));
  const __m512i shift = _mm512_set1_epi64(0);
  const __m512i shifts = _mm512_mask_set1_epi32(shift, 0xcccc, 4);
  return _mm512_and_si512(_mm512_srlv_epi32(bytes, shifts), _mm512_set1_epi16(15));
}

ARMLLM_INLINE __m512 group_scales(const uint8_t* panel, const PanelLayout& layout, int64_t column) {
  const uint8_t* p = panel + layout.scales;
  if (!has_bf16_scales(layout.scheme)) return _mm512_loadu_ps(p + column * kPanel * 4);
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + column * kPanel * 2));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

enum class Sum { multiplied, row, groups };  // g32i; row and rowz; float group scales

template <Sum kind, int T>
void gemv_tokens(const uint8_t* panel, const PanelLayout& layout, const Activations& x, int64_t first_token,
                 float* out) {
  const int64_t groups = x.groups, row_bytes = groups * kGroup, step = groups_per_scale(layout.scheme);
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* offsets = x.group_offsets + first_token * groups;
  const uint8_t* w = panel + layout.values;
  const bool zero_points = has_zero_points(layout.scheme);
  // The offset of a symmetric scheme belongs to one of the two lanes of each row.
  const __mmask16 offset_lanes = zero_points ? 0 : 0x5555;
  const __m512i ones = _mm512_set1_epi16(1);
  PanelPrefetch prefetch(panel, layout, kAhead);
  __m512i total[T];
  __m512 total_f[T];
  int32_t offset[T];  // since the last scale
  for (int t = 0; t < T; ++t) {
    total[t] = _mm512_setzero_si512();
    total_f[t] = _mm512_setzero_ps();
    offset[t] = 0;
  }
  int64_t left = step;  // groups of this scale
  for (int64_t g = 0; g < groups; ++g) {
    __m512i low_acc[T], high_acc[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      low_acc[t] = high_acc[t] = _mm512_maskz_set1_epi32(offset_lanes, offsets[t * groups + g]);
      if (kind != Sum::multiplied) offset[t] += offsets[t * groups + g];
    }
    const int8_t* xg = values + g * kGroup;
    prefetch.group();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, w += 64) {
      const __m512i line = load(w), low = low_rows(line), high = high_rows(line);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i eight = spread8(xg + t * row_bytes + j * 8);
        dot(low_acc[t], low, eight);
        dot(high_acc[t], high, eight);
      }
    }
    // Half a group's sum is at most 16·15·127 in size, or 32·8·127 with the offset: it fits 16 bits.
    __m512i factor = ones;
    if constexpr (kind == Sum::multiplied)
      factor = _mm512_add_epi16(lane_nibbles(panel + layout.multipliers + g * 8), ones);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      total[t] = _mm512_dpwssd_epi32(total[t], _mm512_packs_epi32(low_acc[t], high_acc[t]), factor);
    if constexpr (kind == Sum::groups) {
      if (--left != 0 && g + 1 != groups) continue;
      const int64_t column = g / step;
      left = step;
      const __m512 scale = _mm512_permutexvar_ps(row_of_lane(), group_scales(panel, layout, column));
      __m512i zero = _mm512_setzero_si512();
      if (zero_points)
        zero = _mm512_and_si512(lane_nibbles(panel + layout.zero_points + column * 8), _mm512_set1_epi32(15));
      for (int t = 0; t < T; ++t) {
        // −z · Σ x; |Σ x| of 128 values fits 16 bits
        if (zero_points) total[t] = _mm512_dpwssd_epi32(total[t], zero, _mm512_set1_epi32(offset[t] / 8));
        total_f[t] = _mm512_add_ps(total_f[t], _mm512_mul_ps(scale, _mm512_cvtepi32_ps(total[t])));
        total[t] = _mm512_setzero_si512();
        offset[t] = 0;
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    if constexpr (kind == Sum::groups) {
      _mm512_storeu_ps(out + t * kPanel, _mm512_permutexvar_ps(lane_of_row(), total_f[t]));
      continue;
    }
    if (kind == Sum::row && zero_points) {
      const __m512i zero = _mm512_and_si512(lane_nibbles(panel + layout.zero_points), _mm512_set1_epi32(15));
      total[t] = _mm512_add_epi32(total[t], _mm512_mullo_epi32(zero, _mm512_set1_epi32(offset[t] / 8)));
    }
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(lane_of_row(), total[t]));
    _mm512_storeu_ps(out + t * kPanel, _mm512_mul_ps(sum, _mm512_loadu_ps(panel_scales(panel))));
  }
}

template <int T>
void gemv_int8(const uint8_t* panel, const PanelLayout& layout, const Activations& x, int64_t first_token,
               float* out) {
  const int64_t groups = x.groups, row_bytes = groups * kGroup;
  const int8_t* values = x.values + first_token * row_bytes;
  const int32_t* offsets = x.group_offsets + first_token * groups;
  const uint8_t* w = panel + layout.values;
  const __m512i flip = _mm512_set1_epi8(-128);
  PanelPrefetch prefetch(panel, layout, kAhead);
  __m512i even[T], odd[T];  // two chains each
  int32_t offset[T];
  for (int t = 0; t < T; ++t) {
    even[t] = odd[t] = _mm512_setzero_si512();
    offset[t] = 0;
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int8_t* xg = values + g * kGroup;
    prefetch.group();
    for (int t = 0; t < T; ++t) offset[t] += offsets[t * groups + g];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, w += 128) {
      const __m512i first = _mm512_xor_si512(load(w), flip), second = _mm512_xor_si512(load(w + 64), flip);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        dot(even[t], first, spread(xg + t * row_bytes + j * 8));
        dot(odd[t], second, spread(xg + t * row_bytes + j * 8 + 4));
      }
    }
  }
  const __m512 scales = _mm512_loadu_ps(panel_scales(panel));
  for (int t = 0; t < T; ++t) {
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(even[t], odd[t]), _mm512_set1_epi32(16 * offset[t]));
    _mm512_storeu_ps(out + t * kPanel, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales));
  }
}

template <int T>
void gemv_count(const uint8_t* panel, const PanelLayout& layout, const Activations& x, int64_t first,
                float* out) {
  if (layout.scheme == Scheme::i8) return gemv_int8<T>(panel, layout, x, first, out);
  if (layout.scheme == Scheme::g32i) return gemv_tokens<Sum::multiplied, T>(panel, layout, x, first, out);
  if (has_float_groups(layout.scheme)) return gemv_tokens<Sum::groups, T>(panel, layout, x, first, out);
  return gemv_tokens<Sum::row, T>(panel, layout, x, first, out);
}

void gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first, int tokens, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  switch (tokens) {
    case 1:
      return gemv_count<1>(panel, layout, x, first, out);
    case 2:
      return gemv_count<2>(panel, layout, x, first, out);
    case 3:
      return gemv_count<3>(panel, layout, x, first, out);
    case 4:
      return gemv_count<4>(panel, layout, x, first, out);
    case 5:
      return gemv_count<5>(panel, layout, x, first, out);
    case 6:
      return gemv_count<6>(panel, layout, x, first, out);
    case 7:
      return gemv_count<7>(panel, layout, x, first, out);
    case 8:
      return gemv_count<8>(panel, layout, x, first, out);
  }
}

// Lines of rows × 8 k become the lines of gemm: 16 rows × 4 k.
ARMLLM_INLINE void store_lines(int8_t* w, int64_t step, __m512i low, __m512i high) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  _mm512_storeu_si512(w, _mm512_permutex2var_epi32(low, even, high));
  _mm512_storeu_si512(w + step, _mm512_permutex2var_epi32(low, odd, high));
}

// 8 nibbles of `p` in the 16-bit lanes of rows 0 … 7 (low) or 8 … 15 (high), one 64-bit lane a row.
ARMLLM_INLINE void row_nibbles(const uint8_t* p, __m512i* low, __m512i* high) {
  const __m512i bytes = _mm512_shuffle_epi8(
      spread8(reinterpret_cast<const int8_t*>(p)),
      _mm512_set_epi64(0xff07ff07ff07ff07, 0xff06ff06ff06ff06, 0xff05ff05ff05ff05, 0xff04ff04ff04ff04,
                       0xff03ff03ff03ff03, 0xff02ff02ff02ff02, 0xff01ff01ff01ff01, 0xff00ff00ff00ff00));
  *low = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
  *high = _mm512_srli_epi16(bytes, 4);
}

// 16 values of 16 bits, one a row, likewise.
ARMLLM_INLINE void row_words(const int16_t* p, __m512i* low, __m512i* high) {
  const __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i index =
      _mm512_set_epi64(0x0007000700070007, 0x0006000600060006, 0x0005000500050005, 0x0004000400040004,
                       0x0003000300030003, 0x0002000200020002, 0x0001000100010001, 0);
  *low = _mm512_permutexvar_epi16(index, both);
  *high = _mm512_permutexvar_epi16(_mm512_add_epi16(index, _mm512_set1_epi16(8)), both);
}

ARMLLM_INLINE __m512i both_bytes(__m512i words) {
  return _mm512_or_si512(words, _mm512_slli_epi16(words, 8));
}

// (u − z) · factor rounded, + 128, for the bytes of a line's rows: each half of them in 16 bits.
ARMLLM_INLINE __m512i folded(__m512i u, __m512i zero, __m512i factor) {
  const __m512i half = _mm512_set1_epi16(128);
  const __m512i even = _mm512_sub_epi16(_mm512_and_si512(u, _mm512_set1_epi16(255)), zero);
  const __m512i odd = _mm512_sub_epi16(_mm512_srli_epi16(u, 8), zero);
  const __m512i a = _mm512_srli_epi16(_mm512_add_epi16(_mm512_mullo_epi16(even, factor), half), 8);
  const __m512i b = _mm512_add_epi16(_mm512_mullo_epi16(odd, factor), half);
  // the high byte of b, and a in the low byte
  const __m512i both = _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi16(int16_t(0xff00)), 0xd8);
  return _mm512_xor_si512(both, _mm512_set1_epi8(-128));
}

// One panel to w + 128; its lines lie `step` bytes apart.
void unpack_panel(const uint8_t* panel, const PanelLayout& layout, int8_t* w, int64_t step) {
  const Scheme scheme = layout.scheme;
  const uint8_t* values = panel + layout.values;
  if (scheme == Scheme::i8) {
    for (int64_t c = 0; c < layout.groups * 8; ++c, values += 64, w += step)
      _mm512_storeu_si512(w, _mm512_xor_si512(load(values), _mm512_set1_epi8(-128)));
    return;
  }
  const __m512i top = _mm512_set1_epi8(-128);
  if (has_float_groups(scheme)) {
    const int64_t span = groups_per_scale(scheme);
    __m512i zero[2], factor[2];
    zero[0] = zero[1] = _mm512_set1_epi16(8);
    for (int64_t g = 0; g < layout.groups; ++g) {
      if (g % span == 0) {
        int16_t factors[kPanel];
        linear_fold_factors(panel, layout, g / span, factors);
        row_words(factors, &factor[0], &factor[1]);
        if (has_zero_points(scheme))
          row_nibbles(panel + layout.zero_points + g / span * 8, &zero[0], &zero[1]);
      }
      for (int j = 0; j < 4; ++j, values += 64, w += 2 * step) {
        const __m512i line = load(values);
        store_lines(w, step, folded(low_rows(line), zero[0], factor[0]),
                    folded(high_rows(line), zero[1], factor[1]));
      }
    }
    return;
  }
  __m512i less[2];
  less[0] = less[1] = _mm512_set1_epi8(120);
  if (scheme == Scheme::rowz) {
    __m512i zero[2];
    row_nibbles(panel + layout.zero_points, &zero[0], &zero[1]);
    for (int h = 0; h < 2; ++h) less[h] = _mm512_sub_epi8(top, both_bytes(zero[h]));
  }
  for (int64_t g = 0; g < layout.groups; ++g) {
    __m512i factor[2];
    if (scheme == Scheme::g32i) {
      row_nibbles(panel + layout.multipliers + g * 8, &factor[0], &factor[1]);
      for (int h = 0; h < 2; ++h) {
        factor[h] = _mm512_add_epi16(factor[h], _mm512_set1_epi16(1));
        less[h] = _mm512_sub_epi8(top, both_bytes(_mm512_slli_epi16(factor[h], 3)));
      }
    }
    for (int j = 0; j < 4; ++j, values += 64, w += 2 * step) {
      const __m512i line = load(values);
      __m512i low = low_rows(line), high = high_rows(line);
      if (scheme == Scheme::g32i) {
        // u times m stays below 256: one 16-bit product multiplies both bytes, nothing crosses between them.
        low = _mm512_mullo_epi16(low, factor[0]);
        high = _mm512_mullo_epi16(high, factor[1]);
      }
      store_lines(w, step, _mm512_add_epi8(low, less[0]), _mm512_add_epi8(high, less[1]));
    }
  }
}

void unpack(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w, int32_t*,
            float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  for (int p = 0; p < panels; ++p) {
    const int first = p / kWide * kWide, wide = panels - first < kWide ? panels - first : kWide;
    _mm512_storeu_ps(row_scales + p * kPanel, _mm512_loadu_ps(panel_scales(panel[p])));
    unpack_panel(panel[p], layout, w + first * groups * 512 + (p - first) * 64, wide * 64);
  }
}

// −128 · Σ x of each of a block's tokens.
void token_offsets(const int8_t* x, int64_t chunks, int32_t* offsets) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t c = 0; c < chunks; c += 2) {  // groups have four chunks
    dot(sums[0], ones, load(x + c * 64));
    dot(sums[1], ones, load(x + c * 64 + 64));
  }
  alignas(64) int32_t halves[16];
  _mm512_store_si512(halves, _mm512_add_epi32(sums[0], sums[1]));
  for (int t = 0; t < kBlock; ++t) offsets[t] = -128 * (halves[2 * t] + halves[2 * t + 1]);
}

// Fetches four lines a group until it is at the end, where it stays: a branch would cost the tiles registers.
struct Ahead {
  const uint8_t *at, *end;

  Ahead(const Activations& x, const void* cached)
      : at(x.ahead_bytes > 0 ? x.ahead : static_cast<const uint8_t*>(cached)), end(at + x.ahead_bytes) {}
  ARMLLM_INLINE void group() {
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + 64, 0, 2);
    __builtin_prefetch(at + 128, 0, 2);
    __builtin_prefetch(at + 192, 0, 2);
    at = at + 256 < end ? at + 256 : end;
  }
};

// T ≤ kBlock tokens × P panels in registers.
template <int T, int P>
void gemm_tile(const int8_t* w, const int8_t* x, int64_t groups, const int32_t* offsets,
               const float* row_scales, int tokens, Ahead& ahead, float* out, int64_t out_stride) {
  __m512i acc[T][P];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p) acc[t][p] = _mm512_set1_epi32(offsets[t]);
  Ahead fetch = ahead;
  for (int64_t g = 0; g < groups; ++g) {
    fetch.group();
#pragma GCC unroll 8
    for (int h = 0; h < 8; ++h) {
      __m512i lines[P];
#pragma GCC unroll 3
      for (int p = 0; p < P; ++p) lines[p] = load(w + (h * P + p) * 64);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i four = spread(x + h / 2 * kBlock * 8 + t * 8 + h % 2 * 4);
#pragma GCC unroll 3
        for (int p = 0; p < P; ++p) dot(acc[t][p], lines[p], four);
      }
      asm volatile(
          "" ::
              : "memory");  // loads hoisted from the next step would push accumulators out of registers
    }
    w += 8 * P * 64;
    x += 4 * kBlock * 8;
  }
  ahead = fetch;
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    if (t >= tokens) break;
#pragma GCC unroll 3
    for (int p = 0; p < P; ++p)
      _mm512_storeu_ps(
          out + t * out_stride + p * kPanel,
          _mm512_mul_ps(_mm512_cvtepi32_ps(acc[t][p]), _mm512_loadu_ps(row_scales + p * kPanel)));
  }
}

template <int P>
void gemm_panels(const int8_t* w, const float* row_scales, const Activations& x, int64_t first_token,
                 int tokens, const int32_t* offsets, Ahead& ahead, float* out, int64_t out_stride) {
  for (int t = 0; t < tokens; t += kBlock) {
    const int8_t* values = x.values + (first_token + t) * x.groups * kGroup;
    const int left = tokens - t;
    float* to = out + t * out_stride;
    // Experts have few rows: a last block is often ragged.
    if (left > 6) {
      gemm_tile<8, P>(w, values, x.groups, offsets + t, row_scales, left, ahead, to, out_stride);
    } else if (left > 4) {
      gemm_tile<6, P>(w, values, x.groups, offsets + t, row_scales, left, ahead, to, out_stride);
    } else if (left > 2) {
      gemm_tile<4, P>(w, values, x.groups, offsets + t, row_scales, left, ahead, to, out_stride);
    } else {
      gemm_tile<2, P>(w, values, x.groups, offsets + t, row_scales, left, ahead, to, out_stride);
    }
  }
}

void gemm(const int8_t* w, const int32_t*, const float* row_scales, int panels, const Activations& x,
          int64_t first_token, int tokens, float* out, int64_t out_stride) {
  int32_t offsets[kTokens];
  for (int t = 0; t < tokens; t += kBlock)
    token_offsets(x.values + (first_token + t) * x.groups * kGroup, x.groups * 4, offsets + t);
  Ahead ahead(x, w);
  for (int p = 0; p < panels; p += kWide) {
    const int8_t* group = w + p * x.groups * 512;
    const float* scales = row_scales + p * kPanel;
    float* to = out + p * kPanel;
    switch (panels - p) {
      case 1:
        gemm_panels<1>(group, scales, x, first_token, tokens, offsets, ahead, to, out_stride);
        break;
      case 2:
        gemm_panels<2>(group, scales, x, first_token, tokens, offsets, ahead, to, out_stride);
        break;
      default:
        gemm_panels<kWide>(group, scales, x, first_token, tokens, offsets, ahead, to, out_stride);
    }
  }
}

}  // namespace

extern const LinearKernels linear;
const LinearKernels linear = {kBlock, kTokens, kPanels, linear_quantize, gemv, unpack, gemm, linear_finish};

}  // namespace armllm::avx512
