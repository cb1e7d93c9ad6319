#include "linear/dense.h"

#include "simd/ragged_blocks.h"
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "linear/kernels/arm/dense_bfmmla.h"
#endif

namespace armllm::ARMLLM_VARIANT {

extern const DenseKernels dense;

namespace {

constexpr int64_t kBlock = 512;  // columns that are widened at a time

// Register tile: tokens × outputs, and outputs for a single token.
#if defined(ARMLLM_VARIANT_avx512)
constexpr int kTileTokens = 4, kTileOutputs = 4, kSingleOutputs = 8;
#else
constexpr int kTileTokens = 2, kTileOutputs = 2, kSingleOutputs = 4;
#endif

struct Tile {
  float x[kDenseTokens][kBlock];
  float sums[kDenseTokens][kDenseOutputs][kLanes];
};

using Products = float[kDenseTokens][kDenseOutputs];

template <typename T>
void widen_as(const T* x, int64_t n, float* out) {
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE { store(out + i, load_lanes(x + i, lanes)); });
}

void widen(const Rows& x, int64_t row, int64_t column, int64_t n, float* out) {
  const char* from = x.at(row, column);
  switch (x.type) {
    case DType::f32:
      return widen_as(reinterpret_cast<const float*>(from), n, out);
    case DType::bf16:
      return widen_as(reinterpret_cast<const bf16*>(from), n, out);
    case DType::f16:
      return widen_as(reinterpret_cast<const f16*>(from), n, out);
  }
}

// Accumulates Tokens × Outputs dot products over n columns.
template <typename W, int Tokens, int Outputs>
inline void accumulate(Tile& tile, int token, int output, const W* const* weight, int64_t n) {
  F32 sums[Tokens][Outputs];
  for (int t = 0; t < Tokens; ++t)
    for (int o = 0; o < Outputs; ++o) sums[t][o] = load(tile.sums[token + t][output + o]);
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE {
    F32 x[Tokens];
    for (int t = 0; t < Tokens; ++t) x[t] = load(tile.x[token + t] + i);
    for (int o = 0; o < Outputs; ++o) {
      const F32 w = load_lanes(weight[output + o] + i, lanes);
      for (int t = 0; t < Tokens; ++t) sums[t][o] = fma(x[t], w, sums[t][o]);
    }
  });
  for (int t = 0; t < Tokens; ++t)
    for (int o = 0; o < Outputs; ++o) store(tile.sums[token + t][output + o], sums[t][o]);
}

template <typename W>
void accumulate_block(Tile& tile, int tokens, int outputs, const W* const* weight, int64_t n) {
  if (tokens == 1) {
    for (int o = 0; o < outputs; o += kSingleOutputs) accumulate<W, 1, kSingleOutputs>(tile, 0, o, weight, n);
    return;
  }
  for (int o = 0; o < outputs; o += kTileOutputs)
    for (int t = 0; t < tokens; t += kTileTokens)
      accumulate<W, kTileTokens, kTileOutputs>(tile, t, o, weight, n);
}

template <typename W>
void dense_fma(const DenseLinearArgs& args, int64_t first_token, int tokens, int64_t first_output,
               int outputs, Products& out) {
  Tile tile;
  for (auto& row : tile.sums)
    for (auto& sum : row) store(sum, zero());
  for (int64_t k = 0; k < args.in_features; k += kBlock) {
    const int64_t left = args.in_features - k, n = left < kBlock ? left : kBlock;
    // Micro tiles at the edge repeat the last row; the extra results are discarded.
    for (int t = 0; t < kDenseTokens; ++t)
      if (t < tokens || (tokens > 1 && t < round_up(tokens, kTileTokens)))
        widen(args.x, first_token + (t < tokens ? t : tokens - 1), k, n, tile.x[t]);
    const W* weight[kDenseOutputs];
    for (int o = 0; o < kDenseOutputs; ++o)
      weight[o] =
          reinterpret_cast<const W*>(args.weight.at(first_output + (o < outputs ? o : outputs - 1), k));
    accumulate_block(tile, tokens, outputs, weight, n);
  }
  for (int t = 0; t < tokens; ++t)
    for (int o = 0; o < outputs; ++o) out[t][o] = reduce_add(load(tile.sums[t][o]));
}

template <typename T>
void write(const Products& products, const float* bias, int tokens, int outputs, const Rows& out,
           int64_t first_token, int64_t first_output) {
  for (int t = 0; t < tokens; ++t)
    store_partial(reinterpret_cast<T*>(out.at(first_token + t, first_output)), load(products[t]) + load(bias),
                  outputs);
}

void dense_by_type(const DenseLinearArgs& args, int64_t first_token, int tokens, int64_t first_output,
                   int outputs, Products& out) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  if (args.x.type == DType::bf16 && args.weight.type == DType::bf16)
    return dense_bf16_bfmmla(args, first_token, tokens, first_output, outputs, out);
#endif
  switch (args.weight.type) {
    case DType::f32:
      return dense_fma<float>(args, first_token, tokens, first_output, outputs, out);
    case DType::bf16:
      return dense_fma<bf16>(args, first_token, tokens, first_output, outputs, out);
    case DType::f16:
      return dense_fma<f16>(args, first_token, tokens, first_output, outputs, out);
  }
}

void tile(const DenseLinearArgs& args, int64_t first_token, int tokens, int64_t first_output, int outputs) {
  Products products = {};
  dense_by_type(args, first_token, tokens, first_output, outputs, products);
  float bias[kDenseOutputs] = {};
  if (args.bias != nullptr) {
    const Rows row{const_cast<void*>(args.bias), args.out_features, args.bias_type};
    widen(row, 0, first_output, outputs, bias);
  }
  switch (args.out.type) {
    case DType::f32:
      return write<float>(products, bias, tokens, outputs, args.out, first_token, first_output);
    case DType::bf16:
      return write<bf16>(products, bias, tokens, outputs, args.out, first_token, first_output);
    case DType::f16:
      return write<f16>(products, bias, tokens, outputs, args.out, first_token, first_output);
  }
}

static_assert(kDenseOutputs == kLanes && kDenseOutputs % kSingleOutputs == 0 &&
              kDenseTokens % kTileTokens == 0 && kBlock % kLanes == 0);

}  // namespace

const DenseKernels dense = {tile};

}  // namespace armllm::ARMLLM_VARIANT
