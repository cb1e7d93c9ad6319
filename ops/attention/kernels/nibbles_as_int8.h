// An int4 cache.  An element is n · s, with an integer n and the float32 scale s of a token and head.  Of 32
// elements, the largest one has an n of eight bits, which keeps outliers from coarsening the others.  Those
// have n = (q − z) · m: four bits q, and a zero point z of 0 to 15 and a multiplier m of 1 to 8 for all.
// |n| is at most 127, so a split expands to int8 without rounding, and all products with int8 caches work on
// it.
//
// The 19 · block size bytes of a block, kv head and group g hold
//
//   k  [2][block size][8]       byte (r, i, j): q of 32 g + 16 r + j (lower bits) and + 8, at position i
//   v  [block size / 8][16][8]  byte (p, c, i): q of 32 g + c (lower bits) and + 16, at position 8 p + i
//
// and then, each [block size]: z + 16 m; the number of the group's largest element; and its n.
#pragma once

#include <cmath>

#include "attention/kernels/kv_split.h"
#include "attention/kernels/write_kv.h"
#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr float kMostMultiplier = 8.0f, kMostNibble = 15.0f, kMostInt8 = 127.0f;

inline void load_floats(const char* x, DType type, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) {
    switch (type) {
      case DType::f32:
        store(to + i, load(reinterpret_cast<const float*>(x) + i));
        break;
      case DType::bf16:
        store(to + i, load(reinterpret_cast<const bf16*>(x) + i));
        break;
      case DType::f16:
        store(to + i, load(reinterpret_cast<const f16*>(x) + i));
        break;
    }
  }
}

// The integers of a token and head, in groups: q, and z + 16 m, number and n of the largest element.
struct Nibbles {
  uint8_t q[kMostNibbleHead];
  uint8_t factors[kMostNibbleHead / kNibbleGroup][3];
};

inline bool is_finite(const float* x, int64_t n) {
  int32_t most = 0;  // as integers, NaN > infinity > every finite magnitude
  for (int64_t i = 0; i < n; ++i) {
    int32_t size;
    __builtin_memcpy(&size, x + i, sizeof size);
    size &= 0x7fffffff;
    most = size > most ? size : most;
  }
  return most < kInfinityBits;
}

// Quantizes n values and returns the scale.  If a value is not finite, the scale is NaN.
inline float quantize_nibbles(const float* x, int64_t n, Nibbles& to) {
  const int64_t groups = n / kNibbleGroup;
  int64_t outlier[kMostNibbleHead / kNibbleGroup];
  float low[kMostNibbleHead / kNibbleGroup], range[kMostNibbleHead / kNibbleGroup];
  float most = 0.0f, widest = 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    const float* from = x + g * kNibbleGroup;
    float high = low[g] = 0.0f;
    outlier[g] = 0;
    for (int64_t i = 1; i < kNibbleGroup; ++i)
      if (std::fabs(from[i]) > std::fabs(from[outlier[g]])) outlier[g] = i;
    for (int64_t i = 0; i < kNibbleGroup; ++i) {
      if (i == outlier[g]) continue;
      low[g] = from[i] < low[g] ? from[i] : low[g];
      high = from[i] > high ? from[i] : high;
    }
    range[g] = high - low[g];
    widest = range[g] > widest ? range[g] : widest;
    const float size = std::fabs(from[outlier[g]]);
    most = size > most ? size : most;
  }
  const bool finite = is_finite(x, n) && widest < __builtin_inff();
  const float by_range = widest / (kMostMultiplier * kMostNibble), by_size = most / kMostInt8;
  const float scale = by_range > by_size ? by_range : by_size;
  if (!finite || most < kSmallestScaled) {
    __builtin_memset(to.q, 0, n);
    for (int64_t g = 0; g < groups; ++g) to.factors[g][0] = 16, to.factors[g][1] = to.factors[g][2] = 0;
    return finite ? 0.0f : __builtin_nanf("");
  }
  const float inverse = 1.0f / scale;
  for (int64_t g = 0; g < groups; ++g) {
    const float* from = x + g * kNibbleGroup;
    float multiplier = std::ceil(range[g] * inverse / kMostNibble);
    multiplier = multiplier < 1.0f ? 1.0f : multiplier > kMostMultiplier ? kMostMultiplier : multiplier;
    const float factor = inverse / multiplier;
    float zero = std::nearbyint(-low[g] * factor);
    zero = zero > kMostNibble ? kMostNibble : zero;
    for (int64_t i = 0; i < kNibbleGroup; ++i) {
      float value = std::nearbyint(from[i] * factor) + zero;
      value = value < 0.0f ? 0.0f : value > kMostNibble ? kMostNibble : value;
      to.q[g * kNibbleGroup + i] = static_cast<uint8_t>(value);
    }
    to.factors[g][0] = static_cast<uint8_t>(static_cast<int>(zero) + 16 * static_cast<int>(multiplier));
    to.factors[g][1] = static_cast<uint8_t>(outlier[g]);
    to.factors[g][2] = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(from[outlier[g]] * inverse)));
  }
  return scale;
}

inline void write_nibbles(const KvWriteArgs& args, int64_t token, int64_t kv_head) {
  const int64_t slot = args.slots[token], size = args.block_size, at = slot % size;
  const int64_t head = slot / size * args.kv_heads + kv_head, group = kNibbleBytes * size;
  float x[kMostNibbleHead];
  Nibbles n;

  load_floats(args.k.at(token, kv_head * args.head_size), args.k.type, args.head_size, x);
  args.k_scales[head * size + at] = quantize_nibbles(x, args.head_size, n);
  uint8_t* to = static_cast<uint8_t*>(args.k_cache) + head * (args.head_size / kNibbleGroup) * group;
  for (int64_t g = 0; g < args.head_size / kNibbleGroup; ++g, to += group) {
    for (int64_t r = 0; r < 2; ++r)
      for (int64_t j = 0; j < 8; ++j) {
        const uint8_t* pair = n.q + g * kNibbleGroup + r * 16 + j;
        to[(r * size + at) * 8 + j] = static_cast<uint8_t>(pair[0] | pair[8] << 4);
      }
    for (int64_t i = 0; i < 3; ++i) to[(16 + i) * size + at] = n.factors[g][i];
  }

  load_floats(args.v.at(token, kv_head * args.value_size), args.v.type, args.value_size, x);
  args.v_scales[head * size + at] = quantize_nibbles(x, args.value_size, n);
  to = static_cast<uint8_t*>(args.v_cache) + head * (args.value_size / kNibbleGroup) * group;
  for (int64_t g = 0; g < args.value_size / kNibbleGroup; ++g, to += group) {
    for (int64_t c = 0; c < 16; ++c) {
      const uint8_t* pair = n.q + g * kNibbleGroup + c;
      to[(at / 8 * 16 + c) * 8 + at % 8] = static_cast<uint8_t>(pair[0] | pair[16] << 4);
    }
    for (int64_t i = 0; i < 3; ++i) to[(16 + i) * size + at] = n.factors[g][i];
  }
}

// Eight positions' zero points and multipliers, in the order of 64 bytes of a cache.
struct Factors {
  uint8_t zero[64], multiplier[64];
  // Byte i belongs to position i / 8 (keys) or i % 8 (values).
  template <bool kKeys>
  static Factors of(const uint8_t* positions) {
    Factors f;
    for (int64_t i = 0; i < 8; ++i) {
      uint64_t eight = positions[i] * 0x0101010101010101u;
      if (!kKeys) __builtin_memcpy(&eight, positions, 8);
      __builtin_memcpy(f.zero + 8 * i, &eight, 8);
    }
    for (int64_t i = 0; i < 64; ++i) {
      f.multiplier[i] = f.zero[i] >> 4;
      f.zero[i] &= 15;
    }
    return f;
  }
};

// Expands the lower and the upper bits of 64 bytes.
inline void expand_bytes(const uint8_t* __restrict from, const Factors& f, uint8_t* __restrict low,
                         uint8_t* __restrict high) {
  for (int64_t i = 0; i < 64; ++i) {
    low[i] = static_cast<uint8_t>(((from[i] & 15) - f.zero[i]) * f.multiplier[i]);
    high[i] = static_cast<uint8_t>(((from[i] >> 4) - f.zero[i]) * f.multiplier[i]);
  }
}

// One split of an int4 cache, presented as a complete int8 cache: the arguments and the tile to attend with.
struct NibbleSplit {
  AttentionArgs args;
  AttentionTile tile;

  NibbleSplit(const AttentionArgs& of, const AttentionTile& t) : args(of), tile(t) {
    for (int64_t r = 0; r < t.rows; ++r) {
      first_[r] = t.first[r] - t.split_begin;
      last_[r] = t.last[r] - t.split_begin;
    }
    uint8_t* keys = reinterpret_cast<uint8_t*>(t.split);
    uint8_t* values = keys + kSplit * of.head_size;
    float* scales = reinterpret_cast<float*>(values + kSplit * of.value_size);
    args.nibbles = false;
    args.block_size = kSplit;
    args.kv_heads = 1;
    args.k_cache = keys;
    args.v_cache = values;
    args.k_scales = scales;
    args.v_scales = scales + kSplit;
    tile.split_begin = 0;
    tile.first = first_;
    tile.last = last_;
    tile.blocks = &only_;
    tile.kv_head = 0;
    tile.is_near = true;
    tile.next = SplitAhead{};  // not expanded yet
    const Span span = visible(t, 0, t.rows);
    if (span.empty()) return;
    const int32_t* table = t.blocks + t.split_begin / of.block_size;
    for (int64_t b = span.begin / of.block_size; b * of.block_size < span.end; ++b)
      expand_block(of, table[b] * of.kv_heads + t.kv_head, b * of.block_size, keys, values, scales);
    for (int64_t b = t.next.begin / of.block_size; b * of.block_size < t.next.end; ++b)
      fetch_block(of, t.next.blocks[b] * of.kv_heads + t.next.kv_head);
  }
  NibbleSplit(const NibbleSplit&) = delete;

 private:
  int64_t first_[kMostTileRows], last_[kMostTileRows];
  int32_t only_ = 0;

  static const uint8_t* keys_of(const AttentionArgs& of, int64_t head) {
    return static_cast<const uint8_t*>(of.k_cache) +
           head * (of.head_size / kNibbleGroup) * kNibbleBytes * of.block_size;
  }
  static const uint8_t* values_of(const AttentionArgs& of, int64_t head) {
    return static_cast<const uint8_t*>(of.v_cache) +
           head * (of.value_size / kNibbleGroup) * kNibbleBytes * of.block_size;
  }

  static void fetch_block(const AttentionArgs& of, int64_t head) {
    const char *k = reinterpret_cast<const char*>(keys_of(of, head)),
               *v = reinterpret_cast<const char*>(values_of(of, head));
    const int64_t group = kNibbleBytes * of.block_size;
    Split::fetch_bytes(k, k + of.head_size / kNibbleGroup * group);
    Split::fetch_bytes(v, v + of.value_size / kNibbleGroup * group);
    __builtin_prefetch(of.k_scales + head * of.block_size);
    __builtin_prefetch(of.v_scales + head * of.block_size);
  }

  // Expands the block that begins at a position of the split.
  static void expand_block(const AttentionArgs& of, int64_t head, int64_t position, uint8_t* keys,
                           uint8_t* values, float* scales) {
    const int64_t size = of.block_size;
    __builtin_memcpy(scales + position, of.k_scales + head * size, size * sizeof(float));
    __builtin_memcpy(scales + kSplit + position, of.v_scales + head * size, size * sizeof(float));
    const uint8_t* from = keys_of(of, head);
    uint8_t* to = keys + position * 8;
    for (int64_t g = 0; g < of.head_size / kNibbleGroup; ++g, from += kNibbleBytes * size)
      for (int64_t i = 0; i < size; i += 8) {
        const Factors factors = Factors::of<true>(from + 16 * size + i);
        for (int64_t r = 0; r < 2; ++r) {
          uint8_t* low = to + (4 * g + 2 * r) * kSplit * 8 + i * 8;
          expand_bytes(from + (r * size + i) * 8, factors, low, low + kSplit * 8);
        }
        for (int64_t j = i; j < i + 8; ++j) {
          const int64_t c = from[17 * size + j] % kNibbleGroup;
          to[(4 * g + c / 8) * kSplit * 8 + j * 8 + c % 8] = from[18 * size + j];
        }
      }
    from = values_of(of, head);
    to = values + position * of.value_size;
    for (int64_t g = 0; g < of.value_size / kNibbleGroup; ++g, from += kNibbleBytes * size)
      for (int64_t i = 0; i < size; i += 8) {
        const Factors factors = Factors::of<false>(from + 16 * size + i);
        const uint8_t* bytes = from + i * 16;
        uint8_t* low = to + i * of.value_size + g * kNibbleGroup * 8;
        expand_bytes(bytes, factors, low, low + 128);
        expand_bytes(bytes + 64, factors, low + 64, low + 192);
        for (int64_t j = 0; j < 8; ++j)
          low[from[17 * size + i + j] % kNibbleGroup * 8 + j] = from[18 * size + i + j];
      }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
