// Loads and widens weight panels with NEON. 16 bytes of nibbles hold 2 rows × 8 k twice: rows 2v and 2v + 1
// in the low nibbles, rows 2v + 8 and 2v + 9 in the high ones (packed_panel.h).
#pragma once

#include <arm_neon.h>

#include "linear/kernels/common.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_INLINE __attribute__((always_inline)) inline
#define ARMLLM_INLINE_LAMBDA __attribute__((always_inline))

// For tiles that use nearly every register: GCC's pre-allocation scheduler hoists loads until accumulators
// spill.
#if defined(__GNUC__) && !defined(__clang__)
#define ARMLLM_IN_WRITTEN_ORDER __attribute__((optimize("no-schedule-insns")))
#else
#define ARMLLM_IN_WRITTEN_ORDER
#endif

ARMLLM_INLINE int8x16_t load_values(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }

// Loads 32 bytes with one LDP: GCC 12 often leaves two separate loads.
ARMLLM_INLINE void load_two(const void* p, int8x16_t& a, int8x16_t& b) {
#if defined(__GNUC__) && !defined(__clang__)
  using Lane = int8x16_t __attribute__((aligned(1), may_alias));
  const Lane* at = static_cast<const Lane*>(p);
  __asm__("ldp %q0, %q1, %2" : "=w"(a), "=w"(b) : "Ump"(at[0]), "m"(at[1]));
#else
  a = load_values(p);
  b = load_values(static_cast<const int8_t*>(p) + 16);
#endif
}

// The low nibbles, 0 … 15.
ARMLLM_INLINE int8x16_t low_nibbles(int8x16_t bytes) { return vandq_s8(bytes, vdupq_n_s8(15)); }

// Loads 8 bytes into both halves.
ARMLLM_INLINE int8x16_t broadcast8(const void* p) {
  int64_t eight;
  __builtin_memcpy(&eight, p, 8);
  return vreinterpretq_s8_s64(vdupq_n_s64(eight));
}

ARMLLM_INLINE int8x16_t zip1_words(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
ARMLLM_INLINE int8x16_t zip2_words(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
ARMLLM_INLINE int32x4_t zip1_doubles(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
ARMLLM_INLINE int32x4_t zip2_doubles(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}

// The nibbles of 8 bytes (multipliers or zero points) in panel row order.  Reads 16 bytes, which is safe
// because the values follow.
ARMLLM_INLINE uint8x16_t row_nibbles(const uint8_t* eight) {
  const uint8x16_t bytes = vld1q_u8(eight);
  return vcombine_u8(vget_low_u8(vandq_u8(bytes, vdupq_n_u8(15))), vget_low_u8(vshrq_n_u8(bytes, 4)));
}

// The zero points of a group of g32iz in panel row order.
ARMLLM_INLINE uint8x16_t narrow_zero_points(const uint8_t* four) {
  uint32_t bits;
  __builtin_memcpy(&bits, four, 4);
  const uint8x16_t row_bytes = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const int8x16_t shifts = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
  const uint8x16_t bytes = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(bits)), row_bytes);
  return vaddq_u8(vandq_u8(vshlq_u8(bytes, shifts), vdupq_n_u8(3)), vdupq_n_u8(kLowestZeroPoint));
}

// Repeats bytes 2·pair and 2·pair + 1 of 16 eight times each, as the rows of 16 bytes of values are laid out.
ARMLLM_INLINE uint8x16_t pair_bytes(uint8x16_t rows, int pair) {
  const uint8x16_t first = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  return vqtbl1q_u8(rows, vaddq_u8(first, vdupq_n_u8(uint8_t(2 * pair))));
}

// INT8 weights of kPairs row pairs of a panel, starting at row 8 · kHigh + 2 · first, for the exact INT4
// schemes; multiplied by the group multipliers, group by group.
template <Scheme kScheme, bool kHigh, int kPairs>
class Int8Pairs {
 public:
  ARMLLM_INLINE Int8Pairs(const uint8_t* panel, const PanelLayout& layout, int first)
      : values_(panel + layout.values + 16 * first),
        rows_(panel + layout.multipliers),
        zeros_(panel + layout.zero_points),
        first_(first) {
    if constexpr (kScheme == Scheme::rowz) set(row_nibbles(panel + layout.zero_points));
  }

  ARMLLM_INLINE void enter(int64_t group) {
    if constexpr (kMultiplied) {
      const uint8x16_t m = vaddq_u8(row_nibbles(rows_ + 8 * group), vdupq_n_u8(1));
      set(m);
      if constexpr (kZeros) {
        const uint8x16_t z = narrow_zero_points(zeros_ + 4 * group);
        set_products(vmulq_u8(m, kHigh ? vsubq_u8(z, vdupq_n_u8(8)) : z));
      }
    }
    group_ = values_ + 256 * group;
  }

  ARMLLM_INLINE int8x16_t at(int line, int pair) const {
    const int8x16_t bytes = load_values(group_ + 64 * line + 16 * pair);
    return kHigh ? high(bytes, pair) : low(bytes, pair);
  }
  ARMLLM_INLINE int8x16_t low(int8x16_t bytes, int pair) const {
    if constexpr (kZeros) return finish(low_nibbles(bytes), pair);
    return finish(vsubq_s8(low_nibbles(bytes), kScheme == Scheme::rowz ? row_values_[pair] : vdupq_n_s8(8)),
                  pair);
  }
  ARMLLM_INLINE int8x16_t high(int8x16_t bytes, int pair) const {
    const int8x16_t u = vshrq_n_s8(bytes, 4);
    return finish(kScheme == Scheme::rowz ? vsubq_s8(u, row_values_[pair]) : u, pair);
  }

 private:
  static constexpr bool kMultiplied = has_multipliers(kScheme), kZeros = has_narrow_zero_points(kScheme);

  ARMLLM_INLINE void set(uint8x16_t rows) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      row_values_[p] = vreinterpretq_s8_u8(pair_bytes(rows, 4 * kHigh + first_ + p));
      // High nibbles are stored as u − 8.
      if (kHigh && kScheme == Scheme::rowz) row_values_[p] = vsubq_s8(row_values_[p], vdupq_n_s8(8));
    }
  }
  ARMLLM_INLINE void set_products(uint8x16_t rows) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p)
      row_products_[p] = vreinterpretq_s8_u8(pair_bytes(rows, 4 * kHigh + first_ + p));
  }
  ARMLLM_INLINE int8x16_t finish(int8x16_t q, int pair) const {
    if constexpr (kZeros) return vsubq_s8(vmulq_s8(q, row_values_[pair]), row_products_[pair]);
    return kMultiplied ? vmulq_s8(q, row_values_[pair]) : q;
  }

  const uint8_t* values_;
  const uint8_t* rows_;
  const uint8_t* zeros_;
  const uint8_t* group_ = nullptr;
  int first_;
  int8x16_t row_values_[kPairs];    // multipliers, or zero points
  int8x16_t row_products_[kPairs];  // their products (g32iz); those of high nibbles with z − 8
};

// out[0 … 3] = float(sum) · scale
ARMLLM_INLINE void store_scaled(float* out, int32x4_t sum, const float* scale) {
  vst1q_f32(out, vmulq_f32(vcvtq_f32_s32(sum), vld1q_f32(scale)));
}

// Float group scales of rows `row` … `row` + 3.
ARMLLM_INLINE float32x4_t group_scales(const uint8_t* scales, bool halves, int row) {
  if (!halves) return vld1q_f32(reinterpret_cast<const float*>(scales) + row);
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(scales) + row), 16));
}

// Widens 4 of 16 bytes, from byte `row` on, to 32 bits.
ARMLLM_INLINE int32x4_t widen4(uint8x16_t bytes, int row) {
  const uint8x16_t first = {0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255};
  return vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vqaddq_u8(first, vdupq_n_u8(uint8_t(row)))));
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
