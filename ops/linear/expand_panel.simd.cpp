// Expands panels of scheme int6 to panels of scheme i8, and those of int3 to g32i, with the same weights.
#include "linear/kernels/common.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

// As many bytes as a vector register of the variant holds; the compiler's vectors serve every CPU.
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kParts = 64 / kBytes;  // vectors of a line
constexpr int kRows = kBytes / 4;    // a line holds four k of each row

using Bytes __attribute__((vector_size(kBytes))) = uint8_t;
using Words __attribute__((vector_size(kBytes))) = uint16_t;
using Rows32 __attribute__((vector_size(kBytes))) = uint32_t;
using Rows64 __attribute__((vector_size(kBytes))) = uint64_t;

inline Bytes load_bytes(const uint8_t* p) {
  Bytes v;
  __builtin_memcpy(&v, p, kBytes);
  return v;
}

// Bytes shifted right, or left if kBits is negative.  The bits that come from the neighbor are masked later.
template <int kBits>
inline Bytes shifted(Bytes v) {
  Words words = reinterpret_cast<Words&>(v);
  if constexpr (kBits >= 0) {
    words = words >> kBits;
  } else {
    words = words << -kBits;
  }
  return reinterpret_cast<Bytes&>(words);
}

// All ones in lane i where bit first + i of a plane is set.  A lane holds the bytes of one row.
template <typename Rows>
inline Bytes rows_of_plane(uint32_t plane, int first) {
  Rows bits;
  for (int i = 0; i < int(sizeof(Rows) / sizeof(bits[0])); ++i) bits[i] = 1u << i;
  const auto set = ((bits & (plane >> first)) != 0);
  return reinterpret_cast<const Bytes&>(set);
}

// q · m, where m is 1, plus 1 in rows of `one`, plus 2 in rows of `two`.
inline Bytes multiplied(Bytes q, Bytes one, Bytes two) { return q + (q & one) + ((q + q) & two); }

// One line of INT8 from its bits 0 … 3 and 4 … 5, which are kLow and kHigh bits too far left.
template <int kLow, int kHigh>
inline void expand_line(const uint8_t* low, const uint8_t* high, const Bytes* one, const Bytes* two,
                        uint8_t* to) {
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const Bytes u = (shifted<kLow>(load_bytes(low + part * kBytes)) & 15) |
                    (shifted<kHigh>(load_bytes(high + part * kBytes)) & 48);
    const Bytes w = multiplied(u - 32, one[part], two[part]);
    __builtin_memcpy(to + part * kBytes, &w, kBytes);
  }
}

void expand_int6(const uint8_t* panel, int64_t groups, uint8_t* expanded) {
  const PanelLayout layout = panel_layout(Scheme::int6, groups * kGroup);
  __builtin_memcpy(expanded, panel, kPanel * sizeof(float));
  const uint8_t* planes = panel + layout.multipliers;
  const uint8_t* values = panel + layout.values;
  uint8_t* to = expanded + kPanel * sizeof(float);
  PanelStream<6, Prefetch::software_far> stream(panel, layout);
  for (int64_t g = 0; g < groups; ++g, planes += 4, values += group_value_bytes(Scheme::int6), to += 512) {
    stream.group();
    uint16_t plane[2];
    __builtin_memcpy(plane, planes, 4);
    Bytes one[kParts], two[kParts];
    for (int part = 0; part < kParts; ++part) {
      one[part] = rows_of_plane<Rows32>(plane[0], part * kRows);
      two[part] = rows_of_plane<Rows32>(plane[1], part * kRows);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const uint8_t *low = values + half * 128, *high = values + 256 + half * 64;
      uint8_t* lines = to + half * 256;
      expand_line<0, -4>(low, high, one, two, lines);
      expand_line<4, -2>(low, high, one, two, lines + 64);
      expand_line<0, 0>(low + 64, high, one, two, lines + 128);
      expand_line<4, 2>(low + 64, high, one, two, lines + 192);
    }
  }
}

// The difference between a byte of g32i and one that holds the u of int3 in both nibbles: 4 in the low
// nibble, −4 in the high one, and one more in both for rows with negative multipliers.
inline Bytes nibble_offsets(const uint8_t* signs, int part) {
  const int first = part * (kBytes / 8);
  return (rows_of_plane<Rows64>(signs[0], first) & 0x01) + (rows_of_plane<Rows64>(signs[1], first) & 0x10) +
         0xc4;
}

// One line of nibbles from its bits 0 and 1, kLow too far left, and its bit 2, kHigh too far left.
template <int kLow, int kHigh>
inline Bytes nibbles(Bytes low, Bytes high, Bytes offsets) {
  return ((shifted<kLow>(low) & 0x33) | (shifted<kHigh>(high) & 0x44)) + offsets;
}

void expand_int3(const uint8_t* panel, int64_t groups, uint8_t* expanded) {
  const PanelLayout layout = panel_layout(Scheme::int3, groups * kGroup);
  __builtin_memcpy(expanded, panel, size_t(layout.signs));  // scales and multipliers are those of g32i
  const uint8_t *signs = panel + layout.signs, *values = panel + layout.values;
  uint8_t* to = expanded + layout.signs;
  PanelStream<3, Prefetch::software_far> stream(panel, layout);
  for (int64_t g = 0; g < groups; ++g, signs += 2, values += 192, to += 256) {
    stream.group();
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const uint8_t* from = values + part * kBytes;
      const Bytes first = load_bytes(from), second = load_bytes(from + 64), high = load_bytes(from + 128);
      const Bytes offsets = nibble_offsets(signs, part);
      const Bytes lines[] = {nibbles<0, -2>(first, high, offsets), nibbles<2, -1>(first, high, offsets),
                             nibbles<0, 0>(second, high, offsets), nibbles<2, 1>(second, high, offsets)};
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line)
        __builtin_memcpy(to + line * 64 + part * kBytes, &lines[line], kBytes);
    }
  }
}

}  // namespace

void linear_expand(Scheme scheme, const uint8_t* panel, int64_t groups, uint8_t* expanded) {
  (scheme == Scheme::int6 ? expand_int6 : expand_int3)(panel, groups, expanded);
}

}  // namespace armllm::ARMLLM_VARIANT
