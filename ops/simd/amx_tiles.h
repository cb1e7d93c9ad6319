// AMX: tile registers of 16 rows × 64 bytes.  Intel 64 and IA-32 Architectures Software Developer's Manual,
// volume 1, chapter 18.
//
// Inline assembly, because GCC's intrinsics do not declare which memory they read.
#pragma once

#include <cstdint>

#if defined(ARMLLM_EMULATE_AMX)
#include "simd/amx_emulated.h"
#else
#define ARMLLM_TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(from), "r"(int64_t(stride)) : "memory")
#define ARMLLM_TILE_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"(int64_t(stride)) : "memory")
#define ARMLLM_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile::)
// sums += a · b for 16 × 64 INT8 and 64 × 16, or 16 × 32 bfloat16 and 32 × 16.
#define ARMLLM_TILE_DOT_INT8(sums, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sums::)
#define ARMLLM_TILE_DOT_BF16(sums, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums::)
#endif

namespace armllm {
namespace {

// Operand of LDTILECFG: the rows and row bytes in use of each tile.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = tile_rows == 0 ? 0 : 64;
  }
  void use() const {
#if defined(ARMLLM_EMULATE_AMX)
    emulated_tiles().configure(&palette);
#else
    asm volatile("ldtilecfg %0" ::"m"(*this));
#endif
  }
};

// Releases the tiles; otherwise the kernel would save them at each context switch of a thread that is done
// with them.
inline void release_tiles() {
#if defined(ARMLLM_EMULATE_AMX)
  emulated_tiles().release();
#else
  asm volatile("tilerelease" ::);
#endif
}

}  // namespace
}  // namespace armllm
