// Quantized linear layers: the micro-kernel table and the task sets. packed_panel.h specifies the packed
// weight.
#pragma once

#include "linear/packed_panel.h"
#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int kGemvTokens = 8;          // most tokens per call of gemv
constexpr int64_t kMaxGemvTokens = 16;  // upper bound of gemv_tokens over all variants

// Quantized activations of one call: one row per token, or rows 2t and 2t + 1 for the two digits of token t
// (LinearArgs::digits).  Kernels treat every row as a token, and so do their comments.
//
// With block = 1, `values` is row-major, `groups`·32 bytes per token.
// With block = R, rows m·R … m·R + R − 1 are interleaved in chunks of 8 bytes:
//
//   byte (m, k) = (m / R)·R·Kp + (k / 8)·R·8 + (m % R)·8 + k % 8
//
// Rows past the last are zero.
struct Activations {
  int8_t* values = nullptr;
  float* scales = nullptr;  // one per token; NaN if the row held a NaN or an infinity
  // [tokens][row_groups()]: −8 · Σ values of the group, the correction for nibbles stored as q + 8; may be
  // nullptr.
  int32_t* group_sums = nullptr;
  int64_t groups = 0;
  int64_t block = 1;
  int64_t skipped_groups = 0;  // groups per row outside of this view; row_groups() is the stride
  int64_t digits = 1;          // rows of one token
  // Memory of the next call's weights. gemm prefetches it while it computes, since its own operands are
  // cached.
  const uint8_t* prefetch = nullptr;
  int64_t prefetch_bytes = 0;

  int64_t row_groups() const { return groups + skipped_groups; }
  int64_t row_bytes() const { return row_groups() * kGroup; }
};

struct LinearKernels {
  int64_t gemm_block = 1;  // Activations::block that gemm reads; 1 or even
  int64_t gemm_tokens;     // most tokens of one gemm call; even, a multiple of gemm_block
  int64_t gemm_panels;     // panels of one gemm call

  // Quantizes one row to INT8: q = round_half_even(x · (127 / amax)), scale = amax / 127.  Chunks of 8 bytes
  // are `chunk_stride` bytes apart.  Writes groups·32 values, zeros past n. amax below 1e-30 results in
  // scale 0 and zeros, a NaN or infinity in scale NaN and zeros. group_sums may be nullptr.
  float (*quantize)(const void* x, DType type, int64_t n, int64_t groups, int8_t* q, int64_t chunk_stride,
                    int32_t* group_sums);

  // Multiplies 1 … kGemvTokens tokens by one panel, straight from the packed weights.  Activations::block is
  // gemv_block_of(); first_token is a multiple of it:
  //
  //   out[t·16 + r] = Σ_k w[r][k] · q[t][k], times the weight scale but not the activation scale
  void (*gemv)(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
               float* out);

  // Unpacks up to gemm_panels panels to INT8 in the order that the variant's gemm reads.  `row_info`, 16
  // int32 per panel, passes on variant-specific facts, such as corrections to row sums.  Float group scales
  // are folded (kFoldOne); `row_scales` receives the 16 row scales of each panel.  `w` holds gemm_panels ·
  // groups · gemm_group_bytes bytes; missing panels need not be written.
  void (*unpack)(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
                 int32_t* row_info, float* row_scales);

  // out[t · out_stride + 16·p + r] = float(Σ_k) · row_scale for up to gemm_tokens tokens × `panels` panels.
  // first_token is a multiple of gemm_block.
  void (*gemm)(const int8_t* w, const int32_t* row_info, const float* row_scales, int panels,
               const Activations& x, int64_t first_token, int tokens, float* out, int64_t out_stride);

  // y[n] = acc[n] · x_scale (+ bias[n]) (+ residual[n]); each step is rounded to float32, then to the output
  // type.
  void (*epilogue)(const float* acc, int64_t n, float x_scale, const void* bias, DType bias_type,
                   const void* residual, void* y, DType type);

  // out[t · out_stride + r] += Σ c_group[r] · Σ x over the group: the offset term, which gemv and gemm leave
  // out.
  void (*add_offsets)(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token,
                      int tokens, float* out, int64_t out_stride);

  // sums[i] += more[i]
  void (*accumulate)(float* sums, const float* more, int64_t n);

  // Converts a panel of a scheme that is_expanded() to the panel of computed_as(scheme) with the same
  // weights.
  void (*expand)(Scheme scheme, const uint8_t* panel, int64_t groups, uint8_t* expanded);

  // errors[i] = x[i] − scale · q[i] of a row that `quantize` wrote; the product is rounded to float32, too.
  void (*rounding_errors)(const void* x, DType type, int64_t n, const int8_t* q, int64_t chunk_stride,
                          float scale, float* errors);

  // Multiplies each group of 32 elements by the Hadamard matrix H (Sylvester's, of ones and minus ones) / 32;
  // n is a multiple of 32.  Every variant adds in the same order.  `out` may be x.
  void (*rotate)(const void* x, DType type, int64_t n, float* out);

  // sums[i] = sums[i] · scale + more[i] · more_scale, rounded three times; n is a multiple of 16.
  void (*add_digits)(float* sums, float scale, const float* more, float more_scale, int64_t n);

  bool gemv_interleaves = false;  // gemv reads interleaved activations, see gemv_block_of()

  // Up to this many tokens go through gemv, kGemvTokens at a time per cached panel: unpacking for gemm would
  // cost more.
  int64_t gemv_tokens = kGemvTokens;

  // Bytes per group of an unpacked panel; INT8 unless the variant unpacks to wider operands.
  int64_t gemm_group_bytes = kPanel * kGroup;

  // gemv of `panels` panels, `panel_stride` bytes apart: out[t · out_stride + 16·p + r].  If nullptr, gemv is
  // called per panel.
  void (*gemv_panels)(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
                      const Activations& x, int64_t first_token, int tokens, float* out,
                      int64_t out_stride) = nullptr;

  // The same for more than kGemvTokens and up to gemv_tokens tokens that form one block; schemes g32i, g32iz
  // and i8 only.  If nullptr, these tokens go through gemv.
  void (*gemv_wide)(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
                    const Activations& x, int tokens, float* out, int64_t out_stride) = nullptr;

  // gemv and gemv_wide read panels of schemes int6 and int3 for up to this many tokens. For more, they are
  // expanded in cache, and so are those of other schemes for any number.
  int64_t int6_gemv_tokens = 0;
  int64_t int3_gemv_tokens = 0;
};

// Most tokens for which the kernels read panels of a scheme that is expanded.
static inline int64_t direct_gemv_tokens(const LinearKernels& kernels, Scheme scheme) {
  return scheme == Scheme::int6   ? kernels.int6_gemv_tokens
         : scheme == Scheme::int3 ? kernels.int3_gemv_tokens
                                  : 0;
}

// True if gemv_wide handles this token count; assumes that the count does not go through gemm.
static inline bool is_gemv_wide(const LinearKernels& kernels, Scheme scheme, int64_t tokens) {
  const Scheme computed = computed_as(scheme);
  return kernels.gemv_wide != nullptr && tokens > kGemvTokens &&
         (computed == Scheme::g32i || computed == Scheme::g32iz || computed == Scheme::i8);
}

// Activations::block that gemv reads: all tokens in one block, rounded up to a pair, or one token per block.
static inline int64_t gemv_block_of(const LinearKernels& kernels, Scheme scheme, int64_t tokens) {
  const bool interleaves = kernels.gemv_interleaves || is_gemv_wide(kernels, scheme, tokens);
  return tokens == 1 || !interleaves ? 1 : round_up(tokens, 2);
}

struct NormArgs;

// Source of a linear layer's activations, if not x itself.
struct LinearInput {
  const NormArgs* norm = nullptr;  // an RMSNorm instead of x, one row per token; its `out` is not written
  // Or activations that are quantized already: rows of whole groups, and their scales.
  const int8_t* values = nullptr;
  int64_t value_stride = 0;
  const float* scales = nullptr;
};

// y = x · Wᵀ (+ bias) (+ residual)
//
// With two digits, a token's activations become two INT8 rows: q0 = round(x / s0), and the rounding errors
// x − s0 · q0 as q1 with a scale s1 of their own, together about 15 bits.  The sums are exact for exact
// schemes, and are added as float32 before the bias: acc0 · s0 + acc1 · s1.
struct LinearArgs {
  Rows x, out, residual;
  LinearInput input;
  const uint8_t* weight = nullptr;
  int64_t panel_stride = 0;  // bytes from one panel to the next
  Scheme scheme = Scheme::g32i;
  int64_t tokens = 0, in_features = 0, out_features = 0;
  int64_t digits = 1;  // 1 or 2; 1 if the input is quantized already
  // The weight is W · H, group by group, and activations are rotated before they are quantized:
  // (x · H / 32) · (W · H)ᵀ = x · Wᵀ.  Loud channels are spread over their group, so that INT8 loses less of
  // the others.
  bool rotated = false;  // false if the input is quantized already; in_features is a multiple of 32
  const void* bias = nullptr;
  DType bias_type = DType::f32;
  void* scratch = nullptr;  // scratch_bytes(), 64-byte aligned
};

class QuantLinear final : public TaskSet {
 public:
  LinearArgs args;
  static int64_t scratch_bytes(int64_t tokens, int64_t in_features, int64_t digits);
  int phases() const override;
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// y = act(x · Wgᵀ + bg) · (x · Wuᵀ + bu); gate and up panels alternate in the weight: g0 u0 g1 u1 …
struct GatedLinearArgs {
  Rows x, out;
  LinearInput input;
  const uint8_t* weight = nullptr;
  int64_t panel_stride = 0;
  Scheme scheme = Scheme::g32i;
  int64_t tokens = 0, in_features = 0, out_features = 0;  // out_features: rows of gate alone
  int64_t digits = 1;
  bool rotated = false;
  Activation activation = Activation::silu;
  const void* gate_bias = nullptr;
  const void* up_bias = nullptr;
  DType bias_type = DType::f32;
  void* scratch = nullptr;
};

class QuantGatedLinear final : public TaskSet {
 public:
  GatedLinearArgs args;
  static int64_t scratch_bytes(int64_t tokens, int64_t in_features, int64_t digits);
  int phases() const override;
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// y = x · Wᵀ (+ bias) with unquantized row-major weights, for routers and other small layers.
struct DenseLinearArgs {
  Rows x, out, weight;
  const void* bias = nullptr;
  DType bias_type = DType::f32;
  int64_t tokens = 0, in_features = 0, out_features = 0;
};

class DenseLinear final : public TaskSet {
 public:
  DenseLinearArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
