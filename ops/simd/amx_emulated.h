// AMX instructions as functions, for tests on CPUs without AMX.  Each does what its page in the Intel 64 and
// IA-32 Architectures Software Developer's Manual, volume 2, specifies, and aborts where the CPU would fault.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace armllm {
namespace {

struct EmulatedTiles {
  static constexpr int kTiles = 8, kRows = 16, kBytes = 64;

  int rows[kTiles] = {}, row_bytes[kTiles] = {};  // 0: not configured
  alignas(64) uint8_t data[kTiles][kRows][kBytes] = {};

  static void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "AMX would fault: %s\n", what);
    std::abort();
  }
  void require_used(int tile) const { require(rows[tile] != 0, "a tile that is not configured"); }

  void configure(const uint8_t* memory) {
    require(memory[0] == 1 && memory[1] == 0, "LDTILECFG with an unknown palette or a nonzero start row");
    for (int i = 2; i < 16; ++i) require(memory[i] == 0, "LDTILECFG with reserved bytes");
    __builtin_memset(data, 0, sizeof data);
    for (int tile = 0; tile < 16; ++tile) {
      uint16_t bytes = 0;
      __builtin_memcpy(&bytes, memory + 16 + 2 * tile, 2);
      const int height = memory[48 + tile];
      require(tile < kTiles || (bytes == 0 && height == 0), "LDTILECFG of a nonexistent tile");
      require(bytes <= kBytes && height <= kRows && (bytes == 0) == (height == 0),
              "LDTILECFG of a tile that is too large or empty in one dimension");
      if (tile < kTiles) rows[tile] = height, row_bytes[tile] = bytes;
    }
  }
  void release() {
    __builtin_memset(rows, 0, sizeof rows);
    __builtin_memset(data, 0, sizeof data);
  }
  void zero(int tile) {
    require_used(tile);
    __builtin_memset(data[tile], 0, sizeof data[tile]);
  }
  void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int r = 0; r < rows[tile]; ++r)
      __builtin_memcpy(data[tile][r], static_cast<const char*>(from) + r * stride, row_bytes[tile]);
  }
  void store(int tile, void* to, int64_t stride) const {
    require_used(tile);
    for (int r = 0; r < rows[tile]; ++r)
      __builtin_memcpy(static_cast<char*>(to) + r * stride, data[tile][r], row_bytes[tile]);
  }

  void require_product(int sums, int a, int b) const {
    require_used(sums);
    require_used(a);
    require_used(b);
    require(sums != a && sums != b && a != b, "a product with the same tile twice");
    require(rows[sums] == rows[a] && row_bytes[sums] == row_bytes[b] && row_bytes[a] == 4 * rows[b],
            "a product of tiles with mismatched shapes");
  }
  void dot_int8(int sums, int a, int b) {  // TDPBSSD
    require_product(sums, a, b);
    for (int m = 0; m < rows[sums]; ++m)
      for (int n = 0; n < row_bytes[sums] / 4; ++n) {
        int32_t sum = 0;
        __builtin_memcpy(&sum, data[sums][m] + 4 * n, 4);
        for (int k = 0; k < row_bytes[a]; ++k)
          sum += int8_t(data[a][m][k]) * int8_t(data[b][k / 4][4 * n + k % 4]);
        __builtin_memcpy(data[sums][m] + 4 * n, &sum, 4);
      }
  }
  // TDPBF16PS: separate FMA chains for even and odd positions; denormals are zeros.
  void dot_bf16(int sums, int a, int b) {
    require_product(sums, a, b);
    for (int m = 0; m < rows[sums]; ++m)
      for (int n = 0; n < row_bytes[sums] / 4; ++n) {
        float parts[2] = {};
        for (int k = 0; k < row_bytes[a] / 2; ++k)
          parts[k % 2] = flushed(__builtin_fmaf(bf16_at(data[a][m] + 2 * k),
                                                bf16_at(data[b][k / 2] + 4 * n + 2 * (k % 2)), parts[k % 2]));
        float sum = 0;
        __builtin_memcpy(&sum, data[sums][m] + 4 * n, 4);
        sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
        __builtin_memcpy(data[sums][m] + 4 * n, &sum, 4);
      }
  }

 private:
  static float of_bits(uint32_t bits) {  // denormals are zeros
    constexpr uint32_t kExponent = 0x7f800000, kSign = 0x80000000;
    if ((bits & kExponent) == 0) bits &= kSign;
    float value = 0;
    __builtin_memcpy(&value, &bits, 4);
    return value;
  }
  static float flushed(float value) {
    uint32_t bits = 0;
    __builtin_memcpy(&bits, &value, 4);
    return of_bits(bits);
  }
  static float bf16_at(const uint8_t* from) {
    return of_bits(uint32_t(from[1]) << 24 | uint32_t(from[0]) << 16);
  }
};

inline EmulatedTiles& emulated_tiles() {
  thread_local EmulatedTiles all;
  return all;
}

}  // namespace
}  // namespace armllm

#define ARMLLM_TILE_LOAD(tile, from, stride) emulated_tiles().load(tile, from, stride)
#define ARMLLM_TILE_STORE(tile, to, stride) emulated_tiles().store(tile, to, stride)
#define ARMLLM_TILE_ZERO(tile) emulated_tiles().zero(tile)
#define ARMLLM_TILE_DOT_INT8(sums, a, b) emulated_tiles().dot_int8(sums, a, b)
#define ARMLLM_TILE_DOT_BF16(sums, a, b) emulated_tiles().dot_bf16(sums, a, b)
