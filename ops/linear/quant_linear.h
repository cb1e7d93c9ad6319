// Quantized linear layers: the micro-kernel table and the task sets.  packed_panel.h describes the packed weight.
#pragma once

#include "linear/packed_panel.h"
#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int kGemvTokens = 8;          // most tokens of one call of gemv
constexpr int64_t kMaxGemvTokens = 16;  // no variant's gemv_tokens is larger

// Quantized activations of one call.  `values` is row-major (one row of `groups`·32 bytes a token) when
// block = 1; with block = R, rows m·R … m·R + R − 1 are interleaved in chunks of 8 bytes:
//   byte (m, k) = (m / R)·R·Kp + (k / 8)·R·8 + (m % R)·8 + k % 8.   Rows past the last are zero.
struct Activations {
  int8_t* values = nullptr;
  float* scales = nullptr;        // one a token; NaN where the row held a NaN or an infinity
  int32_t* group_sums = nullptr;  // [tokens][row_groups()]: −8 · Σ values of the group; nullptr if not needed
  int64_t groups = 0;
  int64_t block = 1;
  int64_t skipped_groups = 0;  // groups of every row beyond those of this view
  // What comes next, for gemm to fetch while it computes: its own operands are in the cache.
  const uint8_t* prefetch = nullptr;
  int64_t prefetch_bytes = 0;

  int64_t row_groups() const { return groups + skipped_groups; }
  int64_t row_bytes() const { return row_groups() * kGroup; }
};

struct LinearKernels {
  int64_t gemm_block;   // Activations::block that gemm reads
  int64_t gemm_tokens;  // most tokens of one gemm call; a multiple of gemm_block
  int64_t gemm_panels;  // panels of one gemm call

  // Quantizes one row to INT8: q = round_half_even(x · (127 / amax)), scale = amax / 127.  Chunks of 8 bytes lie
  // `chunk_stride` bytes apart.  Writes groups·32 values (zeros past n).  amax below 1e-30 gives scale 0 and
  // zeros; a NaN or infinity gives scale NaN and zeros.  group_sums may be nullptr.
  float (*quantize)(const void* x, DType type, int64_t n, int64_t groups, int8_t* q, int64_t chunk_stride,
                    int32_t* group_sums);

  // 1 … kGemvTokens tokens against one panel, straight from the packed weights.  Activations::block is
  // gemv_block_of(); first_token is a multiple of it:
  // out[t·16 + r] = Σ_k w[r][k] · q[t][k], times the weight scale; without the activation scale.
  void (*gemv)(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token, int tokens,
               float* out);

  // Unpacks gemm_panels panels (fewer at the end: `panels`) to what the variant multiplies, INT8 in its own order.
  // `row_info` gets what gemm has to know besides, such as what it adds to each row's sum: 16 int32 a panel.  Float
  // group scales are folded (kFoldOne); `row_scales` gets the 16 row scales of each panel.
  // `w` holds gemm_panels · groups · gemm_group_bytes bytes.  Missing panels need not be written.
  void (*unpack)(Scheme scheme, const uint8_t* const* panel, int panels, int64_t groups, int8_t* w,
                 int32_t* row_info, float* row_scales);

  // out[t · out_stride + 16·p + r] = float(Σ_k) · row_scale for up to gemm_tokens tokens × `panels` panels.
  // first_token is a multiple of gemm_block.
  void (*gemm)(const int8_t* w, const int32_t* row_info, const float* row_scales, int panels,
               const Activations& x, int64_t first_token, int tokens, float* out, int64_t out_stride);

  // y[n] = acc[n] · x_scale (+ bias[n]) (+ residual[n]), each step rounded to float32, then to the output type.
  void (*epilogue)(const float* acc, int64_t n, float x_scale, const void* bias, DType bias_type,
                   const void* residual, void* y, DType type);

  // out[t · out_stride + r] += Σ c_group[r] · Σ x of the group: what gemv and gemm leave out of schemes with offsets.
  void (*add_offsets)(Scheme scheme, const uint8_t* panel, const Activations& x, int64_t first_token,
                      int tokens, float* out, int64_t out_stride);

  // sums[i] += more[i]
  void (*accumulate)(float* sums, const float* more, int64_t n);

  bool gemv_interleaves = false;  // what gemv wants of Activations::block, see gemv_block_of()

  // Most tokens that go through gemv, kGemvTokens at a time from a panel in the cache, rather than pay for unpacking.
  int64_t gemv_tokens = kGemvTokens;

  // Of a panel unpacked, a group: INT8, if no more.
  int64_t gemm_group_bytes = kPanel * kGroup;

  // gemv of `panels` panels that lie `panel_stride` bytes apart: out[t · out_stride + 16·p + r].  Where it is nullptr,
  // gemv is called for each of them.
  void (*gemv_panels)(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
                      const Activations& x, int64_t first_token, int tokens, float* out,
                      int64_t out_stride) = nullptr;

  // The same of more than kGemvTokens tokens at once, up to gemv_tokens, for schemes g32i and i8, the tokens being one
  // block.  Where it is nullptr, they go through gemv.
  void (*gemv_wide)(Scheme scheme, const uint8_t* panel, int64_t panel_stride, int64_t panels,
                    const Activations& x, int tokens, float* out, int64_t out_stride) = nullptr;
};

// Whether gemv_wide takes so many tokens, of those that do not go through gemm.
static inline bool is_gemv_wide(const LinearKernels& kernels, Scheme scheme, int64_t tokens) {
  return kernels.gemv_wide != nullptr && tokens > kGemvTokens &&
         (scheme == Scheme::g32i || scheme == Scheme::i8);
}

// One block holds all tokens, in pairs; or a token is a block.
static inline int64_t gemv_block_of(const LinearKernels& kernels, Scheme scheme, int64_t tokens) {
  const bool interleaves = kernels.gemv_interleaves || is_gemv_wide(kernels, scheme, tokens);
  return tokens == 1 || !interleaves ? 1 : round_up(tokens, 2);
}

struct NormArgs;

// Where a linear layer's activations come from, if not from x as it is.
struct LinearInput {
  const NormArgs* norm = nullptr;  // an RMSNorm, one row a token, in the place of x; its `out` is not written
  // Or already quantized: rows of whole groups, and their scales.
  const int8_t* values = nullptr;
  int64_t value_stride = 0;
  const float* scales = nullptr;
};

// y = x · Wᵀ (+ bias) (+ residual)
struct LinearArgs {
  Rows x, out, residual;
  LinearInput input;
  const uint8_t* weight = nullptr;
  int64_t panel_stride = 0;  // bytes from one panel to the next
  Scheme scheme = Scheme::g32i;
  int64_t tokens = 0, in_features = 0, out_features = 0;
  const void* bias = nullptr;
  DType bias_type = DType::f32;
  void* scratch = nullptr;  // scratch_bytes(), 64-byte aligned
};

class QuantLinear final : public TaskSet {
 public:
  LinearArgs args;
  static int64_t scratch_bytes(int64_t tokens, int64_t in_features);
  int phases() const override;
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// y = act(x · Wgᵀ + bg) · (x · Wuᵀ + bu); panels of gate and up alternate in the weight: g0 u0 g1 u1 …
struct GatedLinearArgs {
  Rows x, out;
  LinearInput input;
  const uint8_t* weight = nullptr;
  int64_t panel_stride = 0;
  Scheme scheme = Scheme::g32i;
  int64_t tokens = 0, in_features = 0, out_features = 0;  // out_features: of gate alone
  Activation activation = Activation::silu;
  const void* gate_bias = nullptr;
  const void* up_bias = nullptr;
  DType bias_type = DType::f32;
  void* scratch = nullptr;
};

class QuantGatedLinear final : public TaskSet {
 public:
  GatedLinearArgs args;
  static int64_t scratch_bytes(int64_t tokens, int64_t in_features);
  int phases() const override;
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// y = x · Wᵀ (+ bias) with unquantized row-major weights: routers and other small layers.
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
