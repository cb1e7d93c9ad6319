// Shared by all variants of the linear kernels: row quantization, the epilogue, reading a panel.
//
// Names of kernels: <phase>_<weights>_<instruction>[_<tokens>][_by_<parameter>]
//
//   phase        unpack, gemv, gemm; dot, which returns unscaled sums; dense, for unquantized weights;
//                with _panels, _rows, _segments or _step if it does not cover one panel over all of K
//   weights      g32i, row (row and rowz), groups (float group scales), grouped (g32i and groups: sums end
//                with each group), i4 (every INT4 scheme, chosen by template argument), int3, int6, i8, i16,
//                bf16; left out where a dispatcher covers every scheme
//   instruction  the multiplication: maddubs, madd, vpdpbusd, tdpbssd, smull, sdot, smmla, smopa, sve_sdot,
//                sve_smmla, bfmmla, fma
//   tokens       token counts that the kernel handles, where kernels share a phase: 2, 3_4, 5_8, 9_16
//   by_...       a dispatcher: turns scheme, token count or vector length into template arguments
//
// Functions with internal linkage that fill a variant's LinearKernels have the names of its members: gemv,
// gemv_panels, gemv_wide, unpack, gemm.  Files: read_panel_<isa>.h loads and widens panels, unpack_<isa>.h
// converts them for gemm; gemv_<instruction>.h and linear_<variant>.cpp hold the kernels.
#pragma once

#include "linear/quant_linear.h"
#include "runtime/types.h"

#ifndef ARMLLM_VARIANT
#error "linear/kernels/common.h is for kernel variants: compile with -DARMLLM_VARIANT=<name>"
#endif

namespace armllm::ARMLLM_VARIANT {

// LinearKernels::quantize, rounding_errors, add_digits and epilogue (quantize_row.simd.cpp), and rotate
// (rotate_row.simd.cpp)
float linear_quantize(const void* x, DType type, int64_t n, int64_t groups, int8_t* q, int64_t chunk_stride,
                      int32_t* group_sums);
void linear_rounding_errors(const void* x, DType type, int64_t n, const int8_t* q, int64_t chunk_stride,
                            float scale, float* errors);
void linear_rotate(const void* x, DType type, int64_t n, float* out);
void linear_add_digits(float* sums, float scale, const float* more, float more_scale, int64_t n);
void linear_epilogue(const float* acc, int64_t n, float x_scale, const void* bias, DType bias_type,
                     const void* residual, void* y, DType type);

// LinearKernels::add_offsets and LinearKernels::accumulate (weight_offsets.simd.cpp)
void linear_add_offsets(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token,
                        int tokens, float* out, int64_t out_stride);
void linear_accumulate(float* sums, const float* more, int64_t n);

// LinearKernels::expand (expand_panel.simd.cpp)
void linear_expand(Scheme scheme, const uint8_t* panel, int64_t groups, uint8_t* expanded);

// The 16 fold factors of scale group `column`: round_half_even(s_group / s_row · kFoldOne) clamped to
// ±kFoldLimit, 0 if s_row is 0.  The folded weight is (q · factor + 128) >> 8 (packed_panel.simd.cpp).
void linear_fold_factors(const uint8_t* panel, const PanelLayout& layout, int64_t column, int16_t* factors);

// Converts one group of a panel of any scheme to INT8 in the order of scheme i8 (8 lines of 64 bytes): q
// minus its zero point, times its multiplier, and, with `fold`, times the fold factor of a float group scale.
void linear_group_int8(const uint8_t* panel, const PanelLayout& layout, int64_t group, bool fold,
                       int8_t* lines);

// LinearKernels::gemv for every scheme and any block, unoptimized.
void linear_gemv(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
                 float* out);

// The members of LinearKernels that are the same in every variant.  A variant sets gemm_tokens, gemm_panels,
// gemv, unpack and gemm, and what differs from the defaults.
static constexpr LinearKernels common_kernels() {
  LinearKernels k{};
  k.quantize = linear_quantize;
  k.epilogue = linear_epilogue;
  k.add_offsets = linear_add_offsets;
  k.accumulate = linear_accumulate;
  k.expand = linear_expand;
  k.rounding_errors = linear_rounding_errors;
  k.add_digits = linear_add_digits;
  k.rotate = linear_rotate;
  return k;
}

// LinearKernels::int6_gemv_tokens and int3_gemv_tokens of the variants with SDOT, which have kernels for a
// single token.
constexpr int64_t kSdotTokens = 1;

// The 16 row scales of a panel.
static inline const float* panel_scales(const uint8_t* panel) {
  return reinterpret_cast<const float*>(panel);
}

// Nibble `row` (0 … 15) of 8 bytes: one group of multipliers or of zero points.
static inline int panel_nibble(const uint8_t* eight, int row) {
  return row >= 8 ? eight[row - 8] >> 4 : eight[row] & 15;
}

static inline float panel_group_scale(const uint8_t* panel, const PanelLayout& layout, int64_t column,
                                      int row) {
  const int64_t index = column * kPanel + row;
  float scale;
  if (!has_bf16_scales(layout.scheme)) {
    __builtin_memcpy(&scale, panel + layout.scales + index * 4, 4);
    return scale;
  }
  uint16_t high;
  __builtin_memcpy(&high, panel + layout.scales + index * 2, 2);
  const uint32_t bits = uint32_t(high) << 16;
  __builtin_memcpy(&scale, &bits, 4);
  return scale;
}

// First byte of a token's quantized activations; its chunks of 8 bytes are block · 8 apart.
static inline const int8_t* token_values(const Activations& x, int64_t token) {
  return x.values + (token / x.block) * x.block * x.row_bytes() + (token % x.block) * 8;
}

// Prefetch strategy of gemv, which reads each byte of a panel once.
//
// hardware: INT8 weights of a single token leave the CPU time to run ahead, so its own prefetcher suffices,
// and while that sees one stream it is faster than software prefetches.  Jumping between values and scales or
// multipliers would break the stream, so those are touched first, in order.
//
// software_one: widening INT4 takes just long enough that the prefetcher falls behind; one prefetch of each
// line to L1 makes it keep up.
//
// Otherwise every line is prefetched in two steps, L2 and then L1, because L1 can track fewer outstanding
// misses than memory latency requires. software_near: for CPUs whose prefetcher works as well, but loses the
// stream at any other access between panels. software_far: several tokens keep every CPU too busy to run
// ahead.
enum class Prefetch { hardware, software_one, software_near, software_far };

template <int kLines, Prefetch kPrefetch>  // kLines: cache lines of values per group
struct PanelStream {
  static constexpr int64_t kNear = kPrefetch == Prefetch::software_near  ? 1024  // bytes ahead
                                   : kPrefetch == Prefetch::software_one ? 2048
                                                                         : 4096;
  static constexpr int64_t kFar = kPrefetch == Prefetch::software_near ? 4096 : 12288;
  const uint8_t* at;

  PanelStream(const uint8_t* panel, const PanelLayout& layout) : at(panel) {
    for (; at < panel + layout.values; at += 64) {
      prefetch(at);
      if (kPrefetch == Prefetch::software_far) continue;
      const uint8_t byte = *at;
      asm volatile("" ::"r"(byte));
    }
  }

  inline void group() {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) prefetch(at + i * 64);
    at += kLines * 64;
  }

 private:
  static inline void prefetch(const uint8_t* line) {
    if (kPrefetch == Prefetch::hardware) return;
    __builtin_prefetch(line + kNear, 0, 3);
    if (kPrefetch != Prefetch::software_one) __builtin_prefetch(line + kFar, 0, 2);
  }
};

}  // namespace armllm::ARMLLM_VARIANT
