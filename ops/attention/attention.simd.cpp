// Attention of a tile of query rows over one split of keys, and the merge of splits.
#include "attention/kernels/latent_as_kv.h"
#include "attention/kernels/nibbles_as_int8.h"
#include "attention/kernels/product_lanes.h"
#include "attention/kernels/product_transposed.h"
#include "attention/kernels/softmax.h"
#include "attention/kernels/write_kv.h"
#include "attention/paged_attention.h"
#if defined(ARMLLM_VARIANT_amx)
#include "attention/kernels/x86/product_bf16_amx.h"
#elif defined(ARMLLM_VARIANT_avx512bf16)
#include "attention/kernels/x86/product_bf16_avx512.h"
#endif
#if defined(ARMLLM_VARIANT_avx512)
#include "attention/kernels/x86/product_i8_avx512.h"
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define ARMLLM_MMLA_BF16 1
#include "attention/kernels/arm/attend_bf16_bfmmla.h"
#endif
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define ARMLLM_FMA_F16 1
#include "attention/kernels/arm/attend_f16_fma.h"
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
#define ARMLLM_DOT_I8 1
#include "attention/kernels/arm/attend_i8_smmla_sdot.h"
#endif
#include "simd/exp.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int64_t kTile = 8 * kTileRows;  // query rows: enough to repay converting keys and values once
static_assert(kTile <= kMostTileRows, "kernels have room for at most kMostTileRows rows");

int64_t tile_rows(const AttentionArgs& args) {
#if defined(ARMLLM_MMLA_BF16)
  static_assert(MmlaBf16::kRows <= kMostTileRows, "kernels have room for at most kMostTileRows rows");
  if (args.cache_type == CacheType::bf16) return MmlaBf16::kRows;
#endif
#if defined(ARMLLM_FMA_F16)
  static_assert(FmaF16::kRows <= kMostTileRows, "kernels have room for at most kMostTileRows rows");
  if (args.cache_type == CacheType::f16) return FmaF16::kRows;
#endif
#if defined(ARMLLM_DOT_I8)
  static_assert(DotI8::kRows <= kMostTileRows, "kernels have room for at most kMostTileRows rows");
  if (args.cache_type == CacheType::i8) return DotI8::kRows;
#endif
  (void)args;
  return kTile;
}

// The products of each cache type.
using F32Products = Transposed<float>;
using F16Products = Transposed<f16>;
#if defined(ARMLLM_VARIANT_amx)
using Bf16Products = Grouped<TilesBf16>;
#elif defined(ARMLLM_VARIANT_avx512bf16)
using Bf16Products = Grouped<DotBf16>;
#else
using Bf16Products = Grouped<Lanes<bf16, 4, FloatWeights> >;
#endif
#if defined(ARMLLM_VARIANT_avx512)
using Int8Products = Grouped<DotInt8>;
#else
using Int8Products = Grouped<Lanes<int8_t, 8, ScaledWeights> >;
#endif

// Stores the results of a tile whose rows see no position of the split.
void store_no_result(const AttentionArgs& args, const AttentionTile& t) {
  for (int64_t i = 0; i < t.rows * value_stride(args.value_size); i += kLanes) store(t.values + i, zero());
  for (int64_t r = 0; r < t.rows; ++r) {
    t.maximum[r] = kNothing;
    t.sum[r] = 0.0f;
  }
}

template <typename P>
void attend_by(const AttentionArgs& args, const AttentionTile& t) {
  Split split(args, t);
  if (split.all.empty()) return store_no_result(args, t);
  split.look_ahead(args, t);
  P::score(args, t, split);
  for (int64_t row = 0; row < t.rows; row += P::kRows)
    Softmax<P>::soften_rows(args, t, split, row, smaller(P::kRows, t.rows - row));
  P::weigh(args, t, split);
}

// For kernels with their own softmax.
template <typename K>
void attend_with(const AttentionArgs& args, const AttentionTile& t) {
  const Split split(args, t);
  if (split.all.empty()) return store_no_result(args, t);
  K::attend(args, t, split);
}

void attend_cache(const AttentionArgs& args, const AttentionTile& t) {
#if defined(ARMLLM_MMLA_BF16)
  if (args.cache_type == CacheType::bf16 && MmlaBf16::takes(args)) return attend_with<MmlaBf16>(args, t);
#endif
#if defined(ARMLLM_FMA_F16)
  if (args.cache_type == CacheType::f16 && FmaF16::takes(args)) return attend_with<FmaF16>(args, t);
#endif
#if defined(ARMLLM_DOT_I8)
  if (args.cache_type == CacheType::i8 && DotI8::takes(args)) return attend_with<DotI8>(args, t);
#endif
  switch (args.cache_type) {
    case CacheType::f32:
      return attend_by<F32Products>(args, t);
    case CacheType::bf16:
      return attend_by<Bf16Products>(args, t);
    case CacheType::f16:
      return attend_by<F16Products>(args, t);
    case CacheType::i8:
      return attend_by<Int8Products>(args, t);
  }
}

void attend(const AttentionArgs& args, const AttentionTile& t) {
  if (args.nibbles) {
    NibbleSplit split(args, t);
    return attend_cache(split.args, split.tile);
  }
  if (!args.latent) return attend_cache(args, t);
  LatentSplit split(args, t);
  attend_cache(split.args, split.tile);
}

void load_query_as_is(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t,
                      int64_t row) {
#if defined(ARMLLM_MMLA_BF16)
  if (args.cache_type == CacheType::bf16 && MmlaBf16::takes(args))
    return MmlaBf16::load_query(args, token, head, t, row);
#endif
#if defined(ARMLLM_FMA_F16)
  if (args.cache_type == CacheType::f16 && FmaF16::takes(args))
    return FmaF16::load_query(args, token, head, t, row);
#endif
#if defined(ARMLLM_DOT_I8)
  if (args.cache_type == CacheType::i8 && DotI8::takes(args))
    return DotI8::load_query(args, token, head, t, row);
#endif
  switch (args.cache_type) {
    case CacheType::f32:
      return F32Products::load_query(args, token, head, t, row);
    case CacheType::bf16:
      return Bf16Products::load_query(args, token, head, t, row);
    case CacheType::f16:
      return F16Products::load_query(args, token, head, t, row);
    case CacheType::i8:
      return Int8Products::load_query(args, token, head, t, row);
  }
}

void load_query(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& t, int64_t row) {
  const int64_t padded = round_up(args.head_size, 8), rotation = rotation_of(padded);
  if (args.cache_type != CacheType::i8 || args.nibbles || rotation == 1)
    return load_query_as_is(args, token, head, t, row);
  RotatedHead query(args.q.at(token, head * args.head_size), args.q.type, args.head_size, padded,
                    1.0f / static_cast<float>(rotation));
  AttentionArgs rotated = args;
  rotated.q = Rows{query.data(), 0, DType::f32};
  rotated.head_size = padded;
  load_query_as_is(rotated, 0, 0, t, row);
}

float exp_of(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

void write(const KvWriteArgs& args, int64_t token, int64_t kv_head) {
  if (args.slots[token] < 0) return;
  (args.nibbles ? write_nibbles : write_cache)(args, token, kv_head);
}

// The results with the higher maximum have weight 1, so one exp() per row is enough.
void merge(float* maximum, float* sum, float* values, const float* m, const float* s, const float* v,
           int64_t value_size, int64_t rows) {
  const int64_t stride = value_stride(value_size);
  for (int64_t row = 0; row < rows; row += kLanes) {
    const int n = static_cast<int>(smaller(rows - row, kLanes));
    const F32 old_top = load_partial(maximum + row, n), new_top = load_partial(m + row, n);
    const F32 top = max(old_top, new_top), one = set1(1.0f), less = exp(-abs(new_top - old_top));
    const F32 old_weights = select_greater(new_top, old_top, less, one),
              weights = select_greater(new_top, old_top, one, less);
    float old_weight[kLanes], weight[kLanes];
    store(old_weight, old_weights);
    store(weight, weights);
    store_partial(maximum + row, top, n);
    store_partial(sum + row, fma(load_partial(s + row, n), weights, load_partial(sum + row, n) * old_weights),
                  n);
    for (int64_t r = 0; r < n; ++r) {
      float* to = values + (row + r) * stride;
      const float* from = v + (row + r) * stride;
      const F32 w = set1(weight[r]), old = set1(old_weight[r]);
      for (int64_t i = 0; i < value_size; i += kLanes)
        store(to + i, fma(load(from + i), w, load(to + i) * old));
    }
  }
}

template <typename T>
void finish_typed(const float* values, int64_t n, float factor, T* to) {
  const F32 f = set1(factor);
  for (int64_t i = 0; i < n; i += kLanes) {
    // Zero products of keys that this row does not see can change the sign of a zero.  Adding +0 makes every
    // zero positive.
    const F32 y = load(values + i) * f + zero();
    if (i + kLanes <= n)
      store(to + i, y);
    else
      store_partial(to + i, y, static_cast<int>(n - i));
  }
}

void finish(const AttentionArgs& args, int64_t token, int64_t head, float maximum, float sum,
            const float* values) {
  float factor = 1.0f;
  if (args.sinks != nullptr) {
    const float sink = args.sinks[token * args.sink_stride + head];
    const float top = maximum > sink ? maximum : sink;
    factor = exp_of(maximum - top);
    sum = sum * factor + exp_of(sink - top);
  }
  factor = sum == 0.0f ? 0.0f : factor / sum;
  char* to = args.out.at(token, head * args.value_size);
  switch (args.out.type) {
    case DType::f32:
      return finish_typed(values, args.value_size, factor, reinterpret_cast<float*>(to));
    case DType::bf16:
      return finish_typed(values, args.value_size, factor, reinterpret_cast<bf16*>(to));
    case DType::f16:
      return finish_typed(values, args.value_size, factor, reinterpret_cast<f16*>(to));
  }
}

}  // namespace

extern const AttentionKernels attention;
const AttentionKernels attention = {tile_rows, load_query, attend, merge, finish, write, write_latent};

}  // namespace armllm::ARMLLM_VARIANT
