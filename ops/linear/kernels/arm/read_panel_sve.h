// Loads and unpacks weight panels with SVE, for every vector length that divides a line of 64 bytes (128,
// 256, 512 bits).
#pragma once

#include <arm_sve.h>

#include "linear/kernels/common.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

#define ARMLLM_INLINE __attribute__((always_inline)) inline

constexpr int64_t kLine = 64;  // bytes per line of 8 rows × 8 k

ARMLLM_INLINE int64_t vectors_a_line() { return kLine / int64_t(svcntb()); }

ARMLLM_INLINE svuint8_t broadcast8(const void* from) {
  uint64_t eight;
  __builtin_memcpy(&eight, from, 8);
  return svreinterpret_u8(svdup_n_u64(eight));
}

// The 16 nibbles of a group's 8 bytes, repeated: rows 0 … 7 (low_nibbles) or rows 8 … 15 (high_nibbles).
ARMLLM_INLINE svuint8_t low_nibbles(svuint8_t bytes) { return svand_n_u8_x(svptrue_b8(), bytes, 15); }
ARMLLM_INLINE svuint8_t high_nibbles(svuint8_t bytes) { return svlsr_n_u8_x(svptrue_b8(), bytes, 4); }

// The zero points of a group of g32iz in panel row order.
ARMLLM_INLINE svuint8_t narrow_zero_points(const uint8_t* four) {
  const svbool_t all = svptrue_b8();
  uint32_t bits;
  __builtin_memcpy(&bits, four, 4);
  const svuint8_t row = svindex_u8(0, 1);
  const svuint8_t bytes = svtbl_u8(svreinterpret_u8(svdup_n_u32(bits)), svlsr_n_u8_x(all, row, 2));
  const svuint8_t shifted = svlsr_u8_x(all, bytes, svlsl_n_u8_x(all, svand_n_u8_x(all, row, 3), 1));
  return svadd_n_u8_x(all, svand_n_u8_x(all, shifted, 3), kLowestZeroPoint);
}

// The row, 0 … 7, of each byte of vector `v` of a line.
ARMLLM_INLINE svuint8_t rows_of_bytes(int64_t v) {
  return svlsr_n_u8_x(svptrue_b8(), svindex_u8(uint8_t(v * int64_t(svcntb())), 1), 3);
}

// out[i] = float(sum[i]) · scale[i]
ARMLLM_INLINE void store_scaled(svint32_t sum, const float* scale, float* out) {
  const svbool_t all = svptrue_b32();
  svst1_f32(all, out, svmul_f32_x(all, svcvt_f32_s32_x(all, sum), svld1_f32(all, scale)));
}

// Order of unpacked weights: tiles of `rows` rows over all of K, [tile][k / 8][row][8].
struct TileOrder {
  int64_t rows, steps;
  ARMLLM_INLINE int8_t* at(int8_t* w, int64_t row, int64_t step) const {
    return w + ((row / rows * steps + step) * rows + row % rows) * 8;
  }
};

// 0 … 7 of each quarter of a vector of 16-bit lanes, as many rows as it has quarters.
ARMLLM_INLINE svuint16_t rows_of_halves(int64_t v, int64_t half) {
  const uint64_t first = uint64_t(2 * v + half) * svcntd() / 2;
  return svadd_n_u16_x(svptrue_b16(), svlsr_n_u16_x(svptrue_b16(), svindex_u16(0, 1), 3), uint16_t(first));
}

// (q · factor + 128) >> 8 with one 16-bit factor per row.
ARMLLM_INLINE svint8_t fold(svint8_t q, svint16_t first, svint16_t second) {
  const svbool_t all = svptrue_b16();
  const svint16_t a = svmad_s16_x(all, svunpklo_s16(q), first, svdup_n_s16(128));
  const svint16_t b = svmad_s16_x(all, svunpkhi_s16(q), second, svdup_n_s16(128));
  return svuzp1_s8(svreinterpret_s8(svasr_n_s16_x(all, a, 8)), svreinterpret_s8(svasr_n_s16_x(all, b, 8)));
}

// Unpacks one vector's rows of all lines of a group.
template <bool kMultiplied, bool kFolded>
ARMLLM_INLINE void unpack_i4(const uint8_t* panel, const PanelLayout& layout, int64_t group, int64_t v,
                             const int16_t* folded, const TileOrder& order, int8_t* w) {
  const svbool_t all = svptrue_b8();
  const int64_t step = groups_per_scale(layout.scheme), column = step ? group / step : 0;
  const svuint8_t rows = rows_of_bytes(v);
  svint8_t first_zero = svdup_n_s8(8), second_zero = svdup_n_s8(0);  // high nibbles are stored minus 8
  if (has_narrow_zero_points(layout.scheme)) {
    const svuint8_t zeros = narrow_zero_points(panel + layout.zero_points + 4 * group);
    first_zero = svreinterpret_s8(svtbl_u8(zeros, rows));
    second_zero = svsub_n_s8_x(all, svreinterpret_s8(svtbl_u8(zeros, svadd_n_u8_x(all, rows, 8))), 8);
  } else if (has_zero_points(layout.scheme)) {
    const svuint8_t stored = svtbl_u8(broadcast8(panel + layout.zero_points + 8 * column), rows);
    first_zero = svreinterpret_s8(low_nibbles(stored));
    second_zero = svsub_n_s8_x(all, svreinterpret_s8(high_nibbles(stored)), 8);
  }
  svint8_t first_factor = svdup_n_s8(1), second_factor = first_factor;
  if constexpr (kMultiplied) {
    const svuint8_t stored = svtbl_u8(broadcast8(panel + layout.multipliers + 8 * group), rows);
    first_factor = svadd_n_s8_x(all, svreinterpret_s8(low_nibbles(stored)), 1);
    second_factor = svadd_n_s8_x(all, svreinterpret_s8(high_nibbles(stored)), 1);
  }
  svint16_t a0 = svdup_n_s16(0), a1 = a0, b0 = a0, b1 = a0;
  if constexpr (kFolded) {
    const svint16_t first = svld1rq_s16(svptrue_b16(), folded),
                    second = svld1rq_s16(svptrue_b16(), folded + 8);
    a0 = svtbl_s16(first, rows_of_halves(v, 0)), a1 = svtbl_s16(first, rows_of_halves(v, 1));
    b0 = svtbl_s16(second, rows_of_halves(v, 0)), b1 = svtbl_s16(second, rows_of_halves(v, 1));
  }
  const int64_t at = v * int64_t(svcntb());
  const int8_t* lines = reinterpret_cast<const int8_t*>(panel + layout.values + group * 4 * kLine) + at;
  int8_t* to = order.at(w, at / 8, 4 * group);
  int8_t* to8 = order.at(w, at / 8 + 8, 4 * group);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const svint8_t both = svld1_s8(all, lines + kLine * j);
    svint8_t first = svsub_s8_x(all, svand_n_s8_x(all, both, 15), first_zero);
    svint8_t second = svsub_s8_x(all, svasr_n_s8_x(all, both, 4), second_zero);
    if constexpr (kMultiplied) {
      first = svmul_s8_x(all, first, first_factor);
      second = svmul_s8_x(all, second, second_factor);
    }
    if constexpr (kFolded) first = fold(first, a0, a1), second = fold(second, b0, b1);
    svst1_s8(all, to + j * order.rows * 8, first);
    svst1_s8(all, to8 + j * order.rows * 8, second);
  }
}

// Lines are 16 rows × 4 k: words of two lines are zipped to rows of 8 k.
inline void unpack_i8(const uint8_t* panel, const PanelLayout& layout, const TileOrder& order, int8_t* w) {
  const svbool_t all = svptrue_b8();
  const int64_t length = int64_t(svcntb());
  for (int64_t s = 0; s < order.steps; ++s)
    for (int64_t at = 0; at < kLine; at += length) {
      const int32_t* lines = reinterpret_cast<const int32_t*>(panel + layout.values + 2 * s * kLine + at);
      const svint32_t a = svld1_s32(svptrue_b32(), lines), b = svld1_s32(svptrue_b32(), lines + kLine / 4);
      svst1_s8(all, order.at(w, at / 4, s), svreinterpret_s8(svzip1_s32(a, b)));
      svst1_s8(all, order.at(w, at / 4 + length / 8, s), svreinterpret_s8(svzip2_s32(a, b)));
    }
}

// LinearKernels::unpack to tiles of `tile_rows`, a multiple of a vector's rows and a divisor of a panel's.
inline void unpack_tiles(Scheme scheme, const uint8_t* const* panels, int count, int64_t groups,
                         int64_t tile_rows, int8_t* w, int32_t* row_info, float* row_scales) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  const TileOrder order{tile_rows, groups * 4};
  const int64_t vectors = vectors_a_line(), step = groups_per_scale(scheme);
  for (int p = 0; p < count; ++p, w += groups * 512, row_scales += kPanel, row_info += kPanel) {
    const uint8_t* panel = panels[p];
    for (int r = 0; r < kPanel; ++r) row_info[r] = 0;
    for (int r = 0; r < kPanel; ++r) row_scales[r] = panel_scales(panel)[r];
    if (scheme == Scheme::i8) {
      unpack_i8(panel, layout, order, w);
      continue;
    }
    int16_t folded[kPanel] = {};
    for (int64_t g = 0; g < groups; ++g) {
      if (step && g % step == 0) linear_fold_factors(panel, layout, g / step, folded);
      for (int64_t v = 0; v < vectors; ++v) {
        if (has_multipliers(scheme)) {
          unpack_i4<true, false>(panel, layout, g, v, folded, order, w);
        } else if (step) {
          unpack_i4<false, true>(panel, layout, g, v, folded, order, w);
        } else {
          unpack_i4<false, false>(panel, layout, g, v, folded, order, w);
        }
      }
    }
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
