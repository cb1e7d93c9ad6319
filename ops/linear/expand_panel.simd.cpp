// Expands panels of wide values to panels of scheme i8, and those of int3 to g32i, with the same weights.
#include <utility>

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

// Bytes of wide values: masks of the rows whose multiplier, less 1, has a bit.
template <int kBits>
struct MultiplierMasks {
  Bytes bit[multiplier_planes(kBits)][kParts];

  explicit MultiplierMasks(const uint8_t* planes) {
    for (int b = 0; b < multiplier_planes(kBits); ++b) {
      uint16_t plane;
      __builtin_memcpy(&plane, planes + b * 2, 2);
      for (int part = 0; part < kParts; ++part) bit[b][part] = rows_of_plane<Rows32>(plane, part * kRows);
    }
  }

  inline Bytes times(Bytes q, int part) const {
    Bytes product = q;
    for (int b = 0; b < multiplier_planes(kBits); ++b, q += q) product += q & bit[b][part];
    return product;
  }
};

// Line kLine of INT8.
template <int kBits, int kLine>
inline void expand_line(const uint8_t* values, const MultiplierMasks<kBits>& masks, uint8_t* to) {
  constexpr int kWidth = kBits - 4, kLines = 8 / kWidth;  // high bits of a value, and lines that share a byte
  constexpr uint8_t kHighBits = ((1 << kWidth) - 1) << 4, kBias = 1 << (kBits - 1);
  const uint8_t *low = values + kLine / 2 * 64, *high = values + 256 + kLine / kLines * 64;
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const Bytes u = (shifted<kLine % 2 * 4>(load_bytes(low + part * kBytes)) & 15) |
                    (shifted<kLine % kLines * kWidth - 4>(load_bytes(high + part * kBytes)) & kHighBits);
    const Bytes w = masks.times(u - kBias, part);
    __builtin_memcpy(to + kLine * 64 + part * kBytes, &w, kBytes);
  }
}

template <int kBits, int... kLine>
inline void expand_group(const uint8_t* values, const MultiplierMasks<kBits>& masks, uint8_t* to,
                         std::integer_sequence<int, kLine...>) {
  (expand_line<kBits, kLine>(values, masks, to), ...);
}

template <int kBits>
void expand_wide(Scheme scheme, const uint8_t* panel, int64_t groups, uint8_t* expanded) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  __builtin_memcpy(expanded, panel, kPanel * sizeof(float));
  const uint8_t *planes = panel + layout.multipliers, *values = panel + layout.values;
  uint8_t* to = expanded + kPanel * sizeof(float);
  PanelStream<kBits, Prefetch::software_far> stream(panel, layout);
  for (int64_t g = 0; g < groups;
       ++g, planes += 2 * multiplier_planes(kBits), values += kBits * 64, to += 512) {
    stream.group();
    const MultiplierMasks<kBits> masks(planes);
    expand_group(values, masks, to, std::make_integer_sequence<int, 8>());
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

void expand_int3(Scheme scheme, const uint8_t* panel, int64_t groups, uint8_t* expanded) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
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
  const int bits = traits_of(scheme).bits;
  const auto expand = bits == 3 ? expand_int3 : bits == 5 ? expand_wide<5> : expand_wide<6>;
  expand(scheme, panel, groups, expanded);
}

}  // namespace armllm::ARMLLM_VARIANT
