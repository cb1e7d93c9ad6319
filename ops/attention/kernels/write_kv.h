// Writes new keys and values to the cache, one token and head at a time.
#pragma once

#include "attention/kernels/rotate_head.h"
#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr float kSmallestScaled = 1e-30f;  // 127 / x is finite for larger x

// Writes x[i] as T to to[i / G · step + i % G], padded with zeros to a multiple of G.
template <int G, typename X, typename T>
void spread(const X* x, int64_t n, T* to, int64_t step) {
  T lanes[kLanes];
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    store(lanes, count == kLanes ? load(x + i) : load_partial(x + i, static_cast<int>(count)));
    for (int64_t l = 0; l < round_up(count, G); l += G)
      __builtin_memcpy(to + (i + l) / G * step, lanes + l, G * sizeof(T));
  }
}

template <int G, typename T>
void spread_any(const char* x, DType type, int64_t n, T* to, int64_t step) {
  switch (type) {
    case DType::f32:
      return spread<G>(reinterpret_cast<const float*>(x), n, to, step);
    case DType::bf16:
      return spread<G>(reinterpret_cast<const bf16*>(x), n, to, step);
    case DType::f16:
      return spread<G>(reinterpret_cast<const f16*>(x), n, to, step);
  }
}

// The scale of n values and 1 / scale.  If a value is NaN or infinite, the scale is NaN and the inverse is 0,
// so that zeros are stored.
struct Scale {
  float scale, inverse;
};
template <typename X>
Scale scale_of(const X* x, int64_t n) {
  // As integers, NaN > infinity > every finite magnitude.
  I32 top = set1i(0);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 v = n - i >= kLanes ? load(x + i) : load_partial(x + i, static_cast<int>(n - i));
    top = max_i32(top, bits(abs(v)));
  }
  const int32_t top_bits = reduce_max_i32(top);
  float amax;
  __builtin_memcpy(&amax, &top_bits, sizeof amax);
  if (top_bits >= kInfinityBits) return {__builtin_nanf(""), 0.0f};
  if (amax < kSmallestScaled) return {0.0f, 0.0f};
  return {amax / 127.0f, 127.0f / amax};
}

template <int G, typename X>
float spread_int8(const X* x, int64_t n, int8_t* to, int64_t step) {
  const Scale s = scale_of(x, n);
  const F32 inverse = set1(s.inverse);
  int8_t lanes[kLanes];
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    const F32 v = count == kLanes ? load(x + i) : load_partial(x + i, static_cast<int>(count));
    store_i8(lanes, s.inverse == 0.0f ? set1i(0) : round_to_int(v * inverse));
    for (int64_t l = 0; l < round_up(count, G); l += G)
      __builtin_memcpy(to + (i + l) / G * step, lanes + l, G);
  }
  return s.scale;
}

template <int G>
float spread_int8_any(const char* x, DType type, int64_t n, int8_t* to, int64_t step) {
  switch (type) {
    case DType::f32:
      return spread_int8<G>(reinterpret_cast<const float*>(x), n, to, step);
    case DType::bf16:
      return spread_int8<G>(reinterpret_cast<const bf16*>(x), n, to, step);
    default:
      return spread_int8<G>(reinterpret_cast<const f16*>(x), n, to, step);
  }
}

// Address of a token's key and value in the cache, in groups of G.  The dimensions of a key are adjacent;
// those of a value are G elements from each other.
template <int G, typename T>
struct Place {
  T *k, *v;
  int64_t k_step, v_step;
  Place(const KvWriteArgs& args, int64_t slot, int64_t kv_head) {
    const int64_t size = args.block_size, offset = slot % size;
    const int64_t head = slot / size * args.kv_heads + kv_head;
    k = static_cast<T*>(args.k_cache) + head * round_up(args.head_size, G) * size + offset * G;
    v = static_cast<T*>(args.v_cache) + (head * size + offset / G * G) * args.value_size + offset % G;
    k_step = size * G;
    v_step = G;
  }
};

template <int G, typename T>
void write_typed(const KvWriteArgs& args, int64_t token, int64_t kv_head) {
  const Place<G, T> to(args, args.slots[token], kv_head);
  spread_any<G>(args.k.at(token, kv_head * args.head_size), args.k.type, args.head_size, to.k, to.k_step);
  spread_any<1>(args.v.at(token, kv_head * args.value_size), args.v.type, args.value_size, to.v, to.v_step);
}

// Rotates a key, writes its integers and returns their scale.
inline float spread_key(const KvWriteArgs& args, int64_t token, int64_t kv_head, int8_t* to, int64_t step) {
  const char* key = args.k.at(token, kv_head * args.head_size);
  const int64_t padded = round_up(args.head_size, 8);
  if (rotation_of(padded) == 1) return spread_int8_any<8>(key, args.k.type, args.head_size, to, step);
  RotatedHead head(key, args.k.type, args.head_size, padded, 1.0f);
  return spread_int8<8>(head.data(), padded, to, step);
}

inline void write_int8(const KvWriteArgs& args, int64_t token, int64_t kv_head) {
  const int64_t slot = args.slots[token], size = args.block_size;
  const Place<8, int8_t> to(args, slot, kv_head);
  const int64_t scale = (slot / size * args.kv_heads + kv_head) * size + slot % size;
  args.k_scales[scale] = spread_key(args, token, kv_head, to.k, to.k_step);
  args.v_scales[scale] = spread_int8_any<1>(args.v.at(token, kv_head * args.value_size), args.v.type,
                                            args.value_size, to.v, to.v_step);
}

inline void write_cache(const KvWriteArgs& args, int64_t token, int64_t kv_head) {
  switch (args.cache_type) {
    case CacheType::f32:
      return write_typed<1, float>(args, token, kv_head);
    case CacheType::bf16:
      return write_typed<4, bf16>(args, token, kv_head);
    case CacheType::f16:
      return write_typed<1, f16>(args, token, kv_head);
    case CacheType::i8:
      return write_int8(args, token, kv_head);
  }
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
