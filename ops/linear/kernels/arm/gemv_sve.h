// gemv with SVE for up to kGemvTokens tokens.
//
// Sizeless vectors cannot be array elements.  Macros ARMLLM_* repeat a statement for four numbered slots
// instead, each a pair of accumulators for one of V vectors of a line and one of N tokens.  Compilers
// eliminate the common subexpressions of slots (loads, masks).
#pragma once

#include "linear/kernels/arm/read_panel_sve.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int kSlots = 4;
#define ARMLLM_EACH(M) M(0) M(1) M(2) M(3)

// Lanes are (row, half of 8 k).  The initial value of a sum belongs to one half only.
ARMLLM_INLINE svint32_t in_one_half(int32_t value) { return svreinterpret_s32(svdup_n_u64(uint32_t(value))); }

// TBL indices for lanes of vector `v` of a line: the byte of each lane's row out of 8, zero extended, because
// TBL reads 0 past the table.
ARMLLM_INLINE svuint8_t rows_of_lanes(int64_t v) {
  const svbool_t all = svptrue_b32();
  const svuint32_t row = svlsr_n_u32_x(all, svindex_u32(uint32_t(v * int64_t(svcntw())), 1), 1);
  return svreinterpret_u8(svorr_n_u32_x(all, row, 0xffffff00u));
}

// Sums of a vector of rows from two vectors of lanes.
ARMLLM_INLINE svint32_t sums_of_rows(svint32_t a, svint32_t b) {
  return svadd_s32_x(svptrue_b32(), svuzp1_s32(a, b), svuzp2_s32(a, b));
}

// Two vectors of lanes hold one vector of rows.
ARMLLM_INLINE void store_rows(svint32_t a, svint32_t b, const float* scale, float* out) {
  store_scaled(sums_of_rows(a, b), scale, out);
}

// One slot over 8 k: A += bytes · x, B += low nibbles · x.
template <int V, int s>
ARMLLM_INLINE void add_line(svint32_t& a, svint32_t& b, const int8_t* line, const int8_t* const* x,
                            int64_t k) {
  const svint8_t w = svld1_s8(svptrue_b8(), line + s % V * int64_t(svcntb()));
  const svint8_t operand = svreinterpret_s8(broadcast8(x[s / V] + k));
  a = svdot_s32(a, w, operand);
  b = svdot_s32(b, svand_n_s8_x(svptrue_b8(), w, 15), operand);
}

// (A − B) / 16, the sum of the high nibbles.
ARMLLM_INLINE svint32_t high_sum(svint32_t a, svint32_t b) {
  return svasr_n_s32_x(svptrue_b32(), svsub_s32_x(svptrue_b32(), a, b), 4);
}

// Adds a slot's sums of a group, times the multipliers of rows 0 … 7 and of rows 8 … 15.
ARMLLM_INLINE void add_multiplied(svint32_t& low, svint32_t& high, svint32_t a, svint32_t b, svuint8_t first,
                                  svuint8_t second, svuint8_t rows) {
  const svbool_t all = svptrue_b32();
  low = svmla_s32_x(all, low, b, svreinterpret_s32(svtbl_u8(first, rows)));
  high = svmla_s32_x(all, high, high_sum(a, b), svreinterpret_s32(svtbl_u8(second, rows)));
}

// Adds −Σ x times the products of zero points and multipliers of rows 0 … 7 and of rows 8 … 15.
ARMLLM_INLINE void subtract_products(svint32_t& low, svint32_t& high, int32_t sum, svuint8_t first,
                                     svuint8_t second, svuint8_t rows) {
  const svbool_t all = svptrue_b32();
  low = svmla_s32_x(all, low, in_one_half(sum), svreinterpret_s32(svtbl_u8(first, rows)));
  high = svmla_s32_x(all, high, in_one_half(sum), svreinterpret_s32(svtbl_u8(second, rows)));
}

// Subtracts zero point (8 without) · Σ x from the sums of a row with one scale; `correction` is −8 · Σ x.
ARMLLM_INLINE void add_zero_points(svint32_t& low, svint32_t& high, svint32_t a, svint32_t b,
                                   svint32_t correction, svuint8_t first, svuint8_t second, svuint8_t rows) {
  const svbool_t all = svptrue_b32();
  const svint32_t less = svasr_n_s32_x(all, correction, 3);
  const svint32_t z8 = svsub_n_s32_x(all, svreinterpret_s32(svtbl_u8(second, rows)), 8);
  low = svmla_s32_x(all, b, less, svreinterpret_s32(svtbl_u8(first, rows)));
  high = svmla_s32_x(all, high_sum(a, b), less, z8);
}

inline int32_t row_correction(const int32_t* group_sums, int64_t groups) {
  int32_t sum = 0;
  for (int64_t g = 0; g < groups; ++g) sum += group_sums[g];
  return sum;
}

// V vectors per line, N tokens, of which `tokens` are stored.
template <Scheme kScheme, int V, int N>
void gemv_i4_sve_sdot(const uint8_t* panel, const PanelLayout& layout, const int8_t* const* x,
                      const int32_t* const* group_sums, int tokens, float* out) {
  static_assert(V * N <= kSlots);
  constexpr bool kMultiplied = has_multipliers(kScheme), kNarrow = has_narrow_zero_points(kScheme);
  const int8_t* values = reinterpret_cast<const int8_t*>(panel + layout.values);
#define ARMLLM_BEGIN(s)                                                                               \
  [[maybe_unused]] svint32_t low##s = svdup_n_s32(0), high##s = low##s, a##s = low##s, b##s = low##s; \
  [[maybe_unused]] const svuint8_t rows##s = rows_of_lanes(s % V);
  ARMLLM_EACH(ARMLLM_BEGIN)
  for (int64_t g = 0; g < layout.groups; ++g, values += 4 * kLine) {
    // With zero points, sums are those of u: high nibbles are stored as u − 8.
#define ARMLLM_OFFSET(s)                                                                                 \
  if constexpr (kMultiplied && s < V * N) a##s = b##s = in_one_half(kNarrow ? 0 : group_sums[s / V][g]); \
  if constexpr (kNarrow && s < V * N) a##s = in_one_half(-16 * group_sums[s / V][g]);
    ARMLLM_EACH(ARMLLM_OFFSET)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
#define ARMLLM_LINE(s) \
  if constexpr (s < V * N) add_line<V, s>(a##s, b##s, values + kLine * j, x, kGroup * g + 8 * j);
      ARMLLM_EACH(ARMLLM_LINE)
    }
    if constexpr (kMultiplied) {
      const svuint8_t stored = broadcast8(panel + layout.multipliers + 8 * g);
      const svuint8_t first = svadd_n_u8_x(svptrue_b8(), low_nibbles(stored), 1);
      const svuint8_t second = svadd_n_u8_x(svptrue_b8(), high_nibbles(stored), 1);
#define ARMLLM_ADD(s) \
  if constexpr (s < V * N) add_multiplied(low##s, high##s, a##s, b##s, first, second, rows##s);
      ARMLLM_EACH(ARMLLM_ADD)
      if constexpr (kNarrow) {
        const svbool_t all = svptrue_b8();
        const svuint8_t zeros = narrow_zero_points(panel + layout.zero_points + 4 * g);
        const svuint8_t first_product = svmul_u8_x(all, first, zeros),
                        second_product = svmul_u8_x(all, second, svext_u8(zeros, zeros, 8));
#define ARMLLM_SUBTRACT(s) \
  if constexpr (s < V * N) \
    subtract_products(low##s, high##s, group_sums[s / V][g] >> 3, first_product, second_product, rows##s);
        ARMLLM_EACH(ARMLLM_SUBTRACT)
      }
    }
  }
  if constexpr (!kMultiplied) {
    const svuint8_t stored =
        has_zero_points(kScheme) ? broadcast8(panel + layout.zero_points) : svdup_n_u8(0x88);
    const svuint8_t first = low_nibbles(stored), second = high_nibbles(stored);
#define ARMLLM_ZERO(s)                           \
  if constexpr (s < V * N)                       \
    add_zero_points(low##s, high##s, a##s, b##s, \
                    in_one_half(row_correction(group_sums[s / V], layout.groups)), first, second, rows##s);
    ARMLLM_EACH(ARMLLM_ZERO)
  }
  const float* scales = panel_scales(panel);
#define ARMLLM_STORE(s, next)                                            \
  if constexpr (s < V * N)                                               \
    if (s / V < tokens) {                                                \
      float* const to = out + s / V * kPanel;                            \
      const int64_t row = s % V * int64_t(svcntb()) / 8;                 \
      if constexpr (V == 1) store_rows(low##s, high##s, scales, to);     \
      if constexpr (V > 1 && s % 2 == 0) {                               \
        store_rows(low##s, low##next, scales + row, to + row);           \
        store_rows(high##s, high##next, scales + row + 8, to + row + 8); \
      }                                                                  \
    }
  ARMLLM_STORE(0, 1) ARMLLM_STORE(1, 2) ARMLLM_STORE(2, 3) ARMLLM_STORE(3, 3)
}

// INT8 weights, one token; a lane is a row.
template <int V>
void gemv_i8_sve_sdot(const uint8_t* panel, const PanelLayout& layout, const int8_t* x, float* out) {
  const svbool_t all = svptrue_b8();
  const int8_t* values = reinterpret_cast<const int8_t*>(panel + layout.values);
#define ARMLLM_BEGIN_ROWS(s) [[maybe_unused]] svint32_t even##s = svdup_n_s32(0), odd##s = even##s;
  ARMLLM_EACH(ARMLLM_BEGIN_ROWS)
  for (int64_t c = 0; c < 2 * layout.groups; ++c, values += 4 * kLine) {
    const svint8_t chunk = svld1rq_s8(all, x + 16 * c);
#define ARMLLM_DOT(s)                                                             \
  if constexpr (s < V) {                                                          \
    const int8_t* line = values + s * int64_t(svcntb());                          \
    even##s = svdot_lane_s32(even##s, svld1_s8(all, line), chunk, 0);             \
    odd##s = svdot_lane_s32(odd##s, svld1_s8(all, line + kLine), chunk, 1);       \
    even##s = svdot_lane_s32(even##s, svld1_s8(all, line + 2 * kLine), chunk, 2); \
    odd##s = svdot_lane_s32(odd##s, svld1_s8(all, line + 3 * kLine), chunk, 3);   \
  }
    ARMLLM_EACH(ARMLLM_DOT)
  }
  const int64_t lanes = int64_t(svcntw());
  const float* scales = panel_scales(panel);
#define ARMLLM_STORE_ROWS(s) \
  if constexpr (s < V)       \
    store_scaled(svadd_s32_x(svptrue_b32(), even##s, odd##s), scales + s * lanes, out + s * lanes);
  ARMLLM_EACH(ARMLLM_STORE_ROWS)
}

// Group scales of a vector of rows, bfloat16 or float32.
ARMLLM_INLINE svfloat32_t group_scales_sve(const uint8_t* scales, bool halves, int64_t row) {
  const svbool_t all = svptrue_b32();
  if (!halves) return svld1_f32(all, reinterpret_cast<const float*>(scales) + row);
  const svuint32_t bits = svld1uh_u32(all, reinterpret_cast<const uint16_t*>(scales) + row);
  return svreinterpret_f32_u32(svlsl_n_u32_x(all, bits, 16));
}

// total + scale · float(sum), rounded twice as in all variants
ARMLLM_INLINE svfloat32_t add_scaled(svfloat32_t total, svfloat32_t scale, svint32_t sum) {
  const svbool_t all = svptrue_b32();
  return svadd_f32_x(all, total, svmul_f32_x(all, scale, svcvt_f32_s32_x(all, sum)));
}

// Schemes with float group scales: V vectors per line, N tokens, of which `tokens` are stored.  kGroups is
// the number of groups of a scale if the compiler shall know it, otherwise 0.
template <int kGroups, bool kZeros, int V, int N>
void gemv_groups_sve_sdot(const uint8_t* panel, const PanelLayout& layout, const int8_t* const* x,
                          const int32_t* const* group_sums, int tokens, float* out) {
  static_assert(V * N <= kSlots);
  const bool halves = has_bf16_scales(layout.scheme);
  const int64_t step = kGroups ? kGroups : groups_per_scale(layout.scheme);
  const int8_t* values = reinterpret_cast<const int8_t*>(panel + layout.values);
  const uint8_t *scales = panel + layout.scales, *zero_points = panel + layout.zero_points;
  // Slot s has the totals of a vector of rows: with V = 1 of all 16, else of low nibbles' rows in even slots
  // and of high nibbles' rows in odd ones.
#define ARMLLM_BEGIN_TOTAL(s)                                    \
  [[maybe_unused]] svfloat32_t total##s = svdup_n_f32(0.0f);     \
  [[maybe_unused]] svint32_t a##s = svdup_n_s32(0), b##s = a##s; \
  [[maybe_unused]] const svuint8_t rows##s = rows_of_lanes(s % V);
  ARMLLM_EACH(ARMLLM_BEGIN_TOTAL)
  for (int64_t g = 0; g < layout.groups; scales += kPanel * (halves ? 2 : 4), zero_points += 8) {
    const int64_t end = kGroups == 1 || g + step < layout.groups ? g + step : layout.groups;
    int32_t correction[N] = {};  // −8 · Σ x
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t)
      for (int64_t i = g; i < end; ++i) correction[t] += group_sums[t][i];
#define ARMLLM_FIRST(s) \
  if constexpr (s < V * N) a##s = b##s = in_one_half(kZeros ? 0 : correction[s / V]);
    ARMLLM_EACH(ARMLLM_FIRST)
    for (; g < end; ++g, values += 4 * kLine) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        ARMLLM_EACH(ARMLLM_LINE)
      }
    }
    if constexpr (kZeros) {
      const svuint8_t stored = broadcast8(zero_points);
      const svuint8_t first = low_nibbles(stored), second = high_nibbles(stored);
#define ARMLLM_GROUP_ZERO(s) \
  if constexpr (s < V * N)   \
    add_zero_points(b##s, a##s, a##s, b##s, in_one_half(correction[s / V]), first, second, rows##s);
      ARMLLM_EACH(ARMLLM_GROUP_ZERO)
    } else {
#define ARMLLM_HIGH(s) \
  if constexpr (s < V * N) a##s = high_sum(a##s, b##s);
      ARMLLM_EACH(ARMLLM_HIGH)
    }
#define ARMLLM_ADD_SCALED(s, next)                                                                         \
  if constexpr (s < V * N) {                                                                               \
    const int64_t row = s % V * int64_t(svcntb()) / 8;                                                     \
    if constexpr (V == 1)                                                                                  \
      total##s = add_scaled(total##s, group_scales_sve(scales, halves, 0), sums_of_rows(b##s, a##s));      \
    if constexpr (V > 1 && s % 2 == 0) {                                                                   \
      total##s = add_scaled(total##s, group_scales_sve(scales, halves, row), sums_of_rows(b##s, b##next)); \
      total##next =                                                                                        \
          add_scaled(total##next, group_scales_sve(scales, halves, row + 8), sums_of_rows(a##s, a##next)); \
    }                                                                                                      \
  }
    ARMLLM_ADD_SCALED(0, 1) ARMLLM_ADD_SCALED(1, 2) ARMLLM_ADD_SCALED(2, 3) ARMLLM_ADD_SCALED(3, 3)
  }
#define ARMLLM_STORE_TOTAL(s)                                                          \
  if constexpr (s < V * N)                                                             \
    if (s / V < tokens) {                                                              \
      const int64_t row = s % V / 2 * 2 * int64_t(svcntb()) / 8 + (s % V % 2 ? 8 : 0); \
      svst1_f32(svptrue_b32(), out + s / V * kPanel + row, total##s);                  \
    }
  ARMLLM_EACH(ARMLLM_STORE_TOTAL)
}

// N tokens from `first` on; missing tokens repeat the last.  Returns N.
template <Scheme kScheme, int V, int N>
int gemv_i4_sve_sdot_padded(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                            int64_t first, int tokens, float* out) {
  const int8_t* values[N];
  const int32_t* group_sums[N];
  for (int t = 0; t < N; ++t) {
    const int64_t token = first + (t < tokens ? t : tokens - 1);
    values[t] = token_values(x, token);
    group_sums[t] = x.group_sums + token * x.row_groups();
  }
  if constexpr (!has_float_groups(kScheme)) {
    gemv_i4_sve_sdot<kScheme, V, N>(panel, layout, values, group_sums, tokens, out);
  } else {
    constexpr int kGroups = groups_per_scale(kScheme) == 1 ? 1 : 0;
    gemv_groups_sve_sdot<kGroups, has_zero_points(kScheme), V, N>(panel, layout, values, group_sums, tokens,
                                                                  out);
  }
  return N;
}

template <Scheme kScheme, int V>
void gemv_i4_sve_sdot_by_tokens(const uint8_t* panel, const PanelLayout& layout, const Activations& x,
                                int64_t first, int tokens, float* out) {
  constexpr int kMost = kSlots / V, kTwo = kMost == 1 ? 1 : 2;
  for (int t = 0; t < tokens;) {
    const int left = tokens - t;
    float* to = out + t * kPanel;
    if (left == 1) {
      t += gemv_i4_sve_sdot_padded<kScheme, V, 1>(panel, layout, x, first + t, left, to);
    } else if (left == 2) {
      t += gemv_i4_sve_sdot_padded<kScheme, V, kTwo>(panel, layout, x, first + t, left, to);
    } else {
      t += gemv_i4_sve_sdot_padded<kScheme, V, kMost>(panel, layout, x, first + t, left, to);
    }
  }
}

template <int V>
void gemv_i4_sve_sdot_by_scheme(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first,
                                int tokens, float* out) {
  const PanelLayout layout = panel_layout(scheme, x.groups * kGroup);
  if (scheme == Scheme::g32i)
    return gemv_i4_sve_sdot_by_tokens<Scheme::g32i, V>(panel, layout, x, first, tokens, out);
  if (scheme == Scheme::g32iz)
    return gemv_i4_sve_sdot_by_tokens<Scheme::g32iz, V>(panel, layout, x, first, tokens, out);
  if (scheme == Scheme::row)
    return gemv_i4_sve_sdot_by_tokens<Scheme::row, V>(panel, layout, x, first, tokens, out);
  if (has_float_groups(scheme)) {
    const bool zeros = has_zero_points(scheme), one = groups_per_scale(scheme) == 1;
    const auto by_tokens =
        one ? zeros ? gemv_i4_sve_sdot_by_tokens<Scheme::g32z, V> : gemv_i4_sve_sdot_by_tokens<Scheme::g32, V>
        : zeros ? gemv_i4_sve_sdot_by_tokens<Scheme::g64z, V>
                : gemv_i4_sve_sdot_by_tokens<Scheme::g64, V>;
    return by_tokens(panel, layout, x, first, tokens, out);
  }
  gemv_i4_sve_sdot_by_tokens<Scheme::rowz, V>(panel, layout, x, first, tokens, out);
}

// LinearKernels::gemv for INT4 schemes.
inline void gemv_i4_sve_sdot_by_length(Scheme scheme, const uint8_t* panel, const Activations& x,
                                       int64_t first, int tokens, float* out) {
  switch (vectors_a_line()) {
    case 4:
      return gemv_i4_sve_sdot_by_scheme<4>(scheme, panel, x, first, tokens, out);
    case 2:
      return gemv_i4_sve_sdot_by_scheme<2>(scheme, panel, x, first, tokens, out);
    default:
      return gemv_i4_sve_sdot_by_scheme<1>(scheme, panel, x, first, tokens, out);
  }
}

// LinearKernels::gemv for INT8 weights.
inline void gemv_i8_sve_sdot_by_length(const uint8_t* panel, const Activations& x, int64_t first, int tokens,
                                       float* out) {
  const PanelLayout layout = panel_layout(Scheme::i8, x.groups * kGroup);
  for (int t = 0; t < tokens; ++t, out += kPanel) {
    const int8_t* values = token_values(x, first + t);
    switch (vectors_a_line()) {
      case 4:
        gemv_i8_sve_sdot<4>(panel, layout, values, out);
        break;
      case 2:
        gemv_i8_sve_sdot<2>(panel, layout, values, out);
        break;
      default:
        gemv_i8_sve_sdot<1>(panel, layout, values, out);
    }
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
