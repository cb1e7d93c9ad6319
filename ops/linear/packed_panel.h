// The packed weight: quantization schemes, and the byte layout of a panel.
//
// A weight of N rows is ceil(N / 16) panels of 16 output rows.  A panel is one contiguous block of bytes, and
// every kernel variant reads the same bytes.  Its sections, in this order, each aligned to 64 bytes (the zero
// points of g32iz follow its multipliers without a gap):
//
//   row scales    16 × f32; for float-group schemes: max over the row of |q · s_group| / 127
//   group scales  S × 16 × f32, or bf16 if the scheme ends in `b`    (float-group schemes)
//   offsets       S × 16 × f32    (schemes with `m`)
//   multipliers   G × 8 bytes, byte b of a group: low nibble |m[b]| − 1, high nibble |m[b + 8]| − 1
//                 (g32i, g32iz, int3)
//                 G × P × u16, P = 8 − bits, bit r of the b-th: bit b of m[r] − 1    (wide values)
//   signs         G × u16, bit r of a group: m[r] is negative    (int3)
//   zero points   S × 8 bytes, byte b: low nibble z[b], high nibble z[b + 8]    (schemes with `z`)
//                 G × u32, bits 2·r and 2·r + 1 of a group: z[r] − 6    (g32iz)
//   values        G × 64 bytes for each bit of a value
//
// G = ceil(K / 32) groups.  S is the number of scales per row: ceil(G / 1, 2, 4) for g32, g64, g128, and 1
// for `rowz`. INT8 with group scales (int8g32 …) consists of the offsets, if any, and then S panels of scheme
// i8, one per scale: the row scales of such a panel are the scales of its group.
//
//   scheme   w                            q           accumulation over k
//   g32i     s_row · m_group · q          −8 … 7      exact integers
//   g32iz    s_row · m · (q − z_group)    0 … 15      exact integers; m = m_group in 1 … 14, z in 6 … 9, so
//                                                       that m · (q − z) is INT8
//   row      s_row · q                    −8 … 7      exact integers
//   rowz     s_row · (q − z_row)          0 … 15      exact integers
//   g32 …    s_group · q                  −8 … 7      gemv: exact in a group, total = total + s · float(sum)
//   g32z …   s_group · (q − z_group)      0 … 15        in group order; gemm: folded to INT8, see kFoldOne
//   g32m …   s_group · q + c_group        −8 … 7      as g32; then float offset · activation sum, in gemm too
//   i8       s_row · q                    −128 … 127  exact integers
//   int6     s_row · m_group · q          −32 … 31    exact integers; m in 1 … 4, so that m · q is INT8
//   int5     s_row · m_group · q          −16 … 15    exact integers; m in 1 … 8
//   int3     s_row · m_group · q          −4 … 3      exact integers; m in ±1 … ±16
//   int8g32  s_group · q                  −128 … 127  exact in a group; float sums in group order everywhere
//   int8g32m s_group · q + c_group        −128 … 127  as int8g32; then the offsets
//
// Nibbles: a byte holds two rows at the same k, and 16 bytes hold 2 rows × 8 k, one SMMLA operand.  Line j of
// 4 of a group, byte 8·r + i (r = 0 … 7, i = 0 … 7), k = 8·j + i:
//
//   low nibble    u[r][k], 0 … 15: q + 8, or q for schemes with zero points
//   high nibble   u[r + 8][k] − 8 in two's complement
//
// As a signed number the byte is 16·(u[r + 8] − 8) + u[r].  With A the dot product of x with whole bytes and
// B with low nibbles, two weights cost a single unpacking operation:  Σ (u_high − 8)·x = (A − B) / 16 and Σ
// u_low·x = B.  INT8: line j of 8 of a group, byte 4·r + i: q[r][4·j + i].
//
// Wide values, of 5 or 6 bits: u = q + 16 or q + 32, in the order of INT8.  Four lines of 64 bytes hold bits
// 0 … 3: the low nibbles of line j those of INT8 line 2·j, the high nibbles those of line 2·j + 1.  Two lines
// follow with bits 4 and 5: bits 2·i and 2·i + 1 of a byte of line j are those of INT8 line 4·j + i; of five
// bits one line, of which bit i of a byte is bit 4 of INT8 line i.
//
// int3: u = q + 4, or 3 − q where m is negative, so that |m|·(u − 4 + (m < 0)) is m·q.  The order is that of
// nibbles: the low nibble of a byte for row r, the high nibble for row r + 8.  Two lines of 64 bytes hold
// bits 0 and 1: those of line j of nibbles are bits 2·(j % 2) and 2·(j % 2) + 1 of each nibble of line j / 2.
// The third line holds bit 2: that of line j is bit j of each nibble.
//
// Columns past K and rows past N hold the value zero.
#pragma once

#include "runtime/types.h"

namespace armllm {

constexpr int64_t kPanel = 16;  // output rows per panel
constexpr int64_t kGroup =
    32;  // columns per group: the unit of the layout, independent of the span of a scale

enum class Scheme : int32_t {
#define SCHEME(name, number, ...) name = number,
#include "linear/schemes.def"
};

struct SchemeName {
  Scheme scheme;
  const char* name;
};

constexpr SchemeName kSchemeNames[] = {
#define SCHEME(name, number, ...) {Scheme::name, #name},
#include "linear/schemes.def"
};

// A row of schemes.def.
struct SchemeTraits {
  int bits;
  int64_t span;
  DType scale_type;
  bool offsets;
  int least_multiplier, largest_multiplier;
  int least_zero_point, largest_zero_point;
  Scheme computed_as;
};

struct SchemeTable {
  SchemeTraits of[128];
};

// All static: every variant compiles this header with its own flags, and the linker must not merge the
// copies.

static constexpr SchemeTable scheme_table() {
  SchemeTable table{};
#define SCHEME(name, number, bits, span, type, offsets, least, largest, least_zero, largest_zero, computed) \
  table.of[number] = {bits,    span,       DType::type,  offsets != 0,    least,                            \
                      largest, least_zero, largest_zero, Scheme::computed};
#include "linear/schemes.def"
  return table;
}
static constexpr SchemeTable kSchemeTable = scheme_table();

static constexpr const SchemeTraits& traits_of(Scheme s) { return kSchemeTable.of[static_cast<int32_t>(s)]; }
static constexpr bool has_zero_points(Scheme s) { return traits_of(s).largest_zero_point != 0; }
static constexpr bool has_bf16_scales(Scheme s) { return traits_of(s).scale_type == DType::bf16; }
static constexpr bool has_offsets(Scheme s) { return traits_of(s).offsets; }
static constexpr bool is_int8(Scheme s) { return traits_of(s).bits == 8; }
static constexpr bool has_multipliers(Scheme s) { return traits_of(s).largest_multiplier != 0; }
static constexpr bool has_signed_multipliers(Scheme s) { return traits_of(s).least_multiplier < 0; }
// One zero point of two bits for each group: what is stored is less by kLowestZeroPoint.
static constexpr bool has_narrow_zero_points(Scheme s) { return traits_of(s).least_zero_point != 0; }
constexpr int kLowestZeroPoint = 6;

// Groups of 32 that share a float scale; 0 for one scale per row, where sums stay integers to the end.
static constexpr int64_t groups_per_scale(Scheme s) { return traits_of(s).span / kGroup; }
static constexpr bool has_float_groups(Scheme s) { return groups_per_scale(s) != 0; }
static constexpr bool has_int8_groups(Scheme s) { return is_int8(s) && has_float_groups(s); }

// The scheme whose kernels multiply a weight.
static constexpr Scheme computed_as(Scheme s) { return traits_of(s).computed_as; }
static constexpr bool is_expanded(Scheme s) { return computed_as(s) != s; }

// Values of more than four bits in the order of INT8: their multipliers times values of `bits` fit INT8.
static constexpr bool is_wide(Scheme s) { return is_expanded(s) && computed_as(s) == Scheme::i8; }
static constexpr int multiplier_planes(int bits) { return 8 - bits; }
// Values are stored as q plus this, if they are not INT8.
static constexpr int value_bias(Scheme s) { return has_zero_points(s) ? 0 : 1 << (traits_of(s).bits - 1); }

struct PanelLayout {
  Scheme scheme;
  int64_t groups;        // G
  int64_t scale_groups;  // S; 1 for one scale per row
  int64_t scales;        // byte offset of the group scales (float-group schemes)
  int64_t offsets;       // byte offset (schemes with offsets)
  int64_t multipliers;   // byte offset (schemes with multipliers)
  int64_t signs;         // byte offset (schemes with signed multipliers)
  int64_t zero_points;   // byte offset (schemes with zero points)
  int64_t values;        // byte offset of nibbles, int8 lines or per-group i8 panels
  int64_t bytes;
};

// Bytes of values per group of 32 columns.
static constexpr int64_t group_value_bytes(Scheme s) { return kPanel * kGroup * traits_of(s).bits / 8; }

// Bytes of a panel of scheme i8 with `groups` groups.
static constexpr int64_t int8_panel_bytes(int64_t groups) { return kPanel * 4 + groups * 512; }

static inline PanelLayout panel_layout(Scheme scheme, int64_t in_features) {
  const int64_t groups = ceil_div(in_features, kGroup), step = groups_per_scale(scheme);
  PanelLayout p{scheme, groups, step ? ceil_div(groups, step) : 1, kPanel * 4, 0, 0, 0, 0, 0, 0};
  if (has_int8_groups(scheme)) {
    p.scales = p.values = has_offsets(scheme) ? p.scale_groups * kPanel * 4 : 0;
    p.bytes = p.values + p.scale_groups * kPanel * 4 + groups * 512;
    return p;
  }
  int64_t at = p.scales;
  if (step) at += round_up(p.scale_groups * kPanel * (has_bf16_scales(scheme) ? 2 : 4), 64);
  p.offsets = at;
  if (has_offsets(scheme)) at += p.scale_groups * kPanel * 4;
  p.multipliers = p.signs = at;
  if (has_multipliers(scheme))
    at += round_up(groups * (is_wide(scheme) ? 2 * multiplier_planes(traits_of(scheme).bits) : 8), 64);
  if (has_signed_multipliers(scheme)) {
    p.signs = at;
    at += round_up(groups * 2, 64);
  }
  p.zero_points = at;
  if (has_narrow_zero_points(scheme)) {
    p.zero_points = p.multipliers + groups * 8;  // one section with the multipliers: less padding
    at = p.multipliers + round_up(groups * 12, 64);
  } else if (has_zero_points(scheme)) {
    at += round_up(p.scale_groups * 8, 64);
  }
  p.values = at;
  p.bytes = at + groups * group_value_bytes(scheme);
  return p;
}

// Zero points per row of a scheme that has them.
static inline int64_t zero_point_columns(const PanelLayout& layout) {
  return has_narrow_zero_points(layout.scheme) ? layout.groups : layout.scale_groups;
}

// Zero point, 6 … 9, of a row in a group of a g32iz panel.
static inline int narrow_zero_point(const uint8_t* zero_points, int64_t group, int64_t row) {
  return kLowestZeroPoint + (zero_points[group * 4 + row / 4] >> (row % 4 * 2) & 3);
}

// u of column k, 0 … 31, of a row in a group of a panel of wide values.
static inline int wide_bits(const uint8_t* group, int bits, int64_t row, int64_t k) {
  const int64_t line = k / 4, byte = row * 4 + k % 4, width = bits - 4, lines = 8 / width;
  const int low = group[line / 2 * 64 + byte] >> (line % 2 * 4) & 15;
  return low | (group[256 + line / lines * 64 + byte] >> (line % lines * width) & ((1 << width) - 1)) << 4;
}

// Multiplier of a row in a group of a panel of wide values.
static inline int plane_multiplier(const uint8_t* multipliers, int bits, int64_t group, int64_t row) {
  const int planes = multiplier_planes(bits);
  int m = 1;
  for (int b = 0; b < planes; ++b)
    m += (multipliers[(group * planes + b) * 2 + row / 8] >> (row % 8) & 1) << b;
  return m;
}

// True if the multiplier of a row in a group of an int3 panel is negative.
static inline bool int3_negative(const uint8_t* signs, int64_t group, int64_t row) {
  return (signs[group * 2 + row / 8] >> (row % 8) & 1) != 0;
}

// u of column k, 0 … 31, of a row in a group of an int3 panel.
static inline int int3_bits(const uint8_t* group, int64_t row, int64_t k) {
  const int64_t line = k / 8, byte = row % 8 * 8 + k % 8, nibble = row / 8 * 4;
  const int low = group[line / 2 * 64 + byte] >> (nibble + line % 2 * 2) & 3;
  return low | (group[128 + byte] >> (nibble + line) & 1) << 2;
}

// Folding of float group scales by gemm: with f = round_half_even(s_group / s_row · kFoldOne), 0 if s_row is
// 0, the weight is (q · f + 128) >> 8 (arithmetic shift), INT8 in units of s_row, and the same bits in every
// variant.
// q · s_group| ≤ 127 · s_row keeps the product within 16 bits; f reaches the clamp only in all-zero groups.
constexpr float kFoldOne = 256.0f;
constexpr float kFoldLimit = 32512.0f;

}  // namespace armllm
