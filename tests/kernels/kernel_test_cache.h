// A paged cache of random keys and values.
#pragma once

#include "attention/paged_attention.h"
#include "kernel_test.h"

namespace armllm_test {

constexpr int64_t kBlock = 16, kBlocks = 20, kHeads = 2;

struct CacheKind {
  armllm::CacheType type;
  bool nibbles = false;
  bool holds(int64_t size) const { return !nibbles || size % armllm::kNibbleGroup == 0; }
};
constexpr CacheKind kCacheKinds[] = {{armllm::CacheType::f32},
                                     {armllm::CacheType::bf16},
                                     {armllm::CacheType::f16},
                                     {armllm::CacheType::i8},
                                     {armllm::CacheType::i8, true}};

// Random keys and values, including the padding of the layout.
struct Cache {
  std::vector<char> k, v;
  std::vector<float> k_scales, v_scales;  // of INT8 and INT4 caches; values up to about `size`
  std::vector<int32_t> blocks;

  Cache(const armllm::AttentionArgs& a, Random& random, float size) {
    const int64_t group = group_of(a.cache_type), heads = a.latent ? 1 : kHeads;
    const int64_t padded = a.latent ? a.head_size : armllm::round_up(a.head_size, group);
    if (a.nibbles) {
      fill_nibbles(k, kBlocks * heads * a.head_size / armllm::kNibbleGroup, random);
      fill_nibbles(v, kBlocks * heads * a.value_size / armllm::kNibbleGroup, random);
    } else {
      if (a.int8_latents)
        fill_int8_latents(k, padded, random, size);
      else
        fill(k, kBlocks * heads * kBlock * padded, a.cache_type, random, size);
      fill(v, kBlocks * heads * kBlock * a.value_size, a.cache_type, random, size);
    }
    for (int64_t i = 0; i < kBlocks * heads * kBlock; ++i) {
      k_scales.push_back(random.uniform(0.3f, 1.0f) * size / 127.0f);
      v_scales.push_back(random.uniform(0.3f, 1.0f) * size / 127.0f);
    }
    for (int64_t b = 0; b < kBlocks; ++b) blocks.push_back(int32_t((b * 7 + 3) % kBlocks));
  }

  void assign_to(armllm::AttentionArgs& a) const {
    a.k_cache = k.data();
    a.v_cache = v.data();
    a.k_scales = a.cache_type == armllm::CacheType::i8 ? k_scales.data() : nullptr;
    a.v_scales = a.cache_type == armllm::CacheType::i8 ? v_scales.data() : nullptr;
  }

 private:
  static void fill_int8_latents(std::vector<char>& bytes, int64_t width, Random& random, float size) {
    for (int64_t row = 0; row < kBlocks * kBlock; ++row) {
      fill(bytes, width, armllm::CacheType::i8, random, size);
      for (int i = 0; i < 2; ++i) {
        const float scale = random.uniform(0.3f, 1.0f) * size / 127.0f;
        const char* first = reinterpret_cast<const char*>(&scale);
        bytes.insert(bytes.end(), first, first + sizeof scale);
      }
    }
  }
  static void fill_nibbles(std::vector<char>& bytes, int64_t groups, Random& random) {
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < 16 * kBlock; ++i) bytes.push_back(char(random.below(256)));
      for (int64_t i = 0; i < kBlock; ++i)
        bytes.push_back(char(16 * (1 + random.below(8)) + random.below(16)));
      for (int64_t i = 0; i < kBlock; ++i) bytes.push_back(char(random.below(armllm::kNibbleGroup)));
      for (int64_t i = 0; i < kBlock; ++i) bytes.push_back(char(random.below(255) - 127));
    }
  }
  static void fill(std::vector<char>& bytes, int64_t n, armllm::CacheType type, Random& random, float size) {
    if (type == armllm::CacheType::i8) {
      for (int64_t i = 0; i < n; ++i) bytes.push_back(char(random.below(255) - 127));
      return;
    }
    Values values(static_cast<DType>(type), n, random, size);
    const char* first = static_cast<const char*>(values.data());
    bytes.assign(first, first + n * armllm::size_of(type));
  }
};

}  // namespace armllm_test
