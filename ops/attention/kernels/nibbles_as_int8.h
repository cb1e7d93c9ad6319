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
#include "attention/kernels/rotate_head.h"
#include "attention/kernels/write_kv.h"
#include "attention/paged_attention.h"
#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

constexpr float kMostMultiplier = 8.0f, kMostNibble = 15.0f, kMostInt8 = 127.0f;

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

  load_floats(args.k.at(token, kv_head * args.head_size), args.k.type, args.head_size, 1.0f, x);
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

  load_floats(args.v.at(token, kv_head * args.value_size), args.v.type, args.value_size, 1.0f, x);
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

// A register of bytes, and the same as words.
#if defined(__AVX512BW__)
constexpr int64_t kBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kBytes = 32;
#else
constexpr int64_t kBytes = 16;
#endif
using Bytes = uint8_t __attribute__((vector_size(kBytes)));
using Words = uint16_t __attribute__((vector_size(kBytes)));
constexpr int64_t kPositions = kBytes / 8;  // of keys in a register

inline Bytes load_bytes(const uint8_t* from) {
  Bytes x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
inline void store_bytes(uint8_t* to, Bytes x) { __builtin_memcpy(to, &x, sizeof x); }

inline Bytes upper_bits(Bytes x) { return reinterpret_cast<Bytes>(reinterpret_cast<Words>(x) >> 4) & 15; }

// a · b in every byte.  x86 multiplies no bytes, but words.
inline Bytes multiply_bytes(Bytes a, Bytes b) {
#if defined(__x86_64__)
  const Words x = reinterpret_cast<Words>(a), y = reinterpret_cast<Words>(b);
  return reinterpret_cast<Bytes>((((x & 0xff) * (y & 0xff)) & 0xff) | ((x & 0xff00) * (y >> 8)));
#else
  return a * b;
#endif
}

// Bytes of positions: each one eight times, as in keys.
inline Bytes repeat_each(const uint8_t* from) {
#if defined(__AVX512BW__)
  long long eight;
  __builtin_memcpy(&eight, from, sizeof eight);
  const __m512i order =
      _mm512_set_epi64(0x0707070707070707, 0x0606060606060606, 0x0505050505050505, 0x0404040404040404,
                       0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
  return reinterpret_cast<Bytes>(_mm512_shuffle_epi8(_mm512_set1_epi64(eight), order));
#elif defined(__AVX2__)
  int four;
  __builtin_memcpy(&four, from, sizeof four);
  const __m256i order = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
  return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(_mm256_set1_epi32(four), order));
#else
  Bytes x;
  for (int64_t i = 0; i < kBytes; ++i) x[i] = from[i / 8];
  return x;
#endif
}

// Eight positions' bytes again and again, as in values.
inline Bytes repeat_all(const uint8_t* from) {
  uint64_t eight;
  __builtin_memcpy(&eight, from, sizeof eight);
  using Eights = uint64_t __attribute__((vector_size(kBytes)));
  return reinterpret_cast<Bytes>(Eights{} + eight);
}

// Zero points, multipliers and largest elements of a group at the positions of a register.
struct Factors {
  Bytes zero, multiplier, number, largest;
  Factors(Bytes factor, Bytes number_of_largest, Bytes n)
      : zero(factor & 15), multiplier(upper_bits(factor)), number(number_of_largest), largest(n) {}
  // n of elements with these bits; `elements` are their numbers within the group.
  Bytes expand(Bytes bits, Bytes elements) const {
    const Bytes n = multiply_bytes(bits - zero, multiplier);
    const Bytes is_largest = reinterpret_cast<Bytes>(elements == number);
    return (largest & is_largest) | (n & ~is_largest);
  }
};

// One split of an int4 cache, presented as a complete int8 cache: the arguments and the tile to attend with.
struct NibbleSplit {
  AttentionArgs args;
  AttentionTile tile;

  NibbleSplit(const AttentionArgs& of, const AttentionTile& t) : args(of), tile(t) {
    for (int64_t r = 0; r < t.rows; ++r) {
      first_[r] = t.first[r] - t.split_begin;
      last_[r] = t.last[r] - t.split_begin;
      if (t.position != nullptr) position_[r] = t.position[r] - t.split_begin;
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
    if (t.position != nullptr) tile.position = position_;
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
  int64_t first_[kMostTileRows], last_[kMostTileRows], position_[kMostTileRows];
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
    Bytes key_element, value_element;  // the numbers of the first elements in a register
    for (int64_t i = 0; i < kBytes; ++i) {
      key_element[i] = static_cast<uint8_t>(i % 8);
      value_element[i] = static_cast<uint8_t>(i / 8);
    }
    for (int64_t g = 0; g < of.head_size / kNibbleGroup; ++g, from += kNibbleBytes * size)
      for (int64_t i = 0; i < size; i += kPositions) {
        const uint8_t* of_positions = from + 16 * size + i;
        const Factors factors(repeat_each(of_positions), repeat_each(of_positions + size),
                              repeat_each(of_positions + 2 * size));
        for (uint8_t r = 0; r < 2; ++r) {
          const Bytes bits = load_bytes(from + (r * size + i) * 8), elements = key_element + uint8_t(16 * r);
          uint8_t* low = to + (4 * g + 2 * r) * kSplit * 8 + i * 8;
          store_bytes(low, factors.expand(bits & 15, elements));
          store_bytes(low + kSplit * 8, factors.expand(upper_bits(bits), elements + uint8_t(8)));
        }
      }
    from = values_of(of, head);
    to = values + position * of.value_size;
    for (int64_t g = 0; g < of.value_size / kNibbleGroup; ++g, from += kNibbleBytes * size)
      for (int64_t i = 0; i < size; i += 8) {
        const uint8_t* of_positions = from + 16 * size + i;
        const Factors factors(repeat_all(of_positions), repeat_all(of_positions + size),
                              repeat_all(of_positions + 2 * size));
        uint8_t* low = to + i * of.value_size + g * kNibbleGroup * 8;
        Bytes elements = value_element;
        for (int64_t at = 0; at < 128; at += kBytes, elements += uint8_t(kBytes / 8)) {
          const Bytes bits = load_bytes(from + i * 16 + at);
          store_bytes(low + at, factors.expand(bits & 15, elements));
          store_bytes(low + 128 + at, factors.expand(upper_bits(bits), elements + uint8_t(16)));
        }
      }
  }
};

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
