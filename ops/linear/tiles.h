// How a product of quantised activations and packed panels is cut into tiles; shared by all that multiply by panels.
#pragma once

#include <algorithm>

#include "common/tasks.h"
#include "common/thread_memory.h"
#include "common/types.h"
#include "linear/linear.h"

namespace armllm {

// Quantised activations of one call inside its scratch memory.
inline int64_t activation_bytes(int64_t tokens, int64_t in_features) {
  const int64_t groups = ceil_div(in_features, kGroup);
  // No variant's blocks are larger, and none's limit of gemv.
  const bool gemv = tokens <= kMostGemvTokens;
  const int64_t rows = round_up(tokens, tokens <= kGemvTokens ? kGemvTokens : 64);
  return round_up(rows * groups * kGroup, 64) + round_up(rows * 4, 64) +
         (gemv ? round_up(rows * groups * 4, 64) : 0);
}

inline Activations activations_in(void* scratch, int64_t tokens, int64_t in_features,
                                  const LinearKernels& kernels) {
  Activations x;
  x.groups = ceil_div(in_features, kGroup);
  const bool gemv = tokens <= kernels.gemv_tokens;
  x.block = gemv ? gemv_block_of(kernels, tokens) : kernels.gemm_block;
  const int64_t rows = round_up(tokens, x.block);
  char* p = static_cast<char*>(scratch);
  x.values = reinterpret_cast<int8_t*>(p);
  p += round_up(rows * x.groups * kGroup, 64);
  x.scales = reinterpret_cast<float*>(p);
  if (gemv) x.group_offsets = reinterpret_cast<int32_t*>(p + round_up(rows * 4, 64));
  return x;
}

// Rows that one quantising tile takes; the last one takes the padding rows as well.
inline int64_t quantize_step(const Activations& x) { return x.group_offsets ? 1 : round_up(8, x.block); }

// Calls quantize(token, values, chunk_stride, group_offsets) → scale for every token of a tile.
template <typename Quantize>
void quantize_tile(const Activations& q, int64_t tokens, int64_t index, const Quantize& quantize) {
  const int64_t step = quantize_step(q), bytes = q.groups * kGroup;
  const int64_t begin = index * step;
  const int64_t end = begin + step < tokens ? begin + step : round_up(tokens, q.block);
  for (int64_t t = begin; t < end; ++t) {
    int8_t* values = q.values + t / q.block * q.block * bytes + t % q.block * 8;
    if (t < tokens) {
      int32_t* offsets = q.group_offsets ? q.group_offsets + t * q.groups : nullptr;
      q.scales[t] = quantize(t, values, q.block * 8, offsets);
    } else {
      for (int64_t c = 0; c < q.groups * 4; ++c) std::memset(values + c * q.block * 8, 0, 8);
    }
  }
}

// Output panels × tokens as tiles.  `pair` keeps gate and up panels together.
struct TileGrid {
  int64_t panels = 0, panel_step = 1, tokens = 0, token_step = 1;

  static TileGrid plan(const LinearKernels& kernels, int64_t panels, int64_t panel_bytes, int64_t tokens,
                       int64_t pair) {
    constexpr int64_t kTilesPerThread = 4;       // lets threads that were held up be overtaken
    constexpr int64_t kMostGemvBytes = 1 << 18;  // enough to hide what taking a tile costs
    constexpr int64_t kFewestTokens = 64;        // unpacking is a few per cent of a tile of so many tokens
    TileGrid grid{panels, 1, tokens, tokens};
    const int64_t threads = team_size(), wanted = threads == 1 ? 1 : threads * kTilesPerThread;
    if (tokens <= kernels.gemv_tokens) {
      const int64_t most = std::max<int64_t>(kMostGemvBytes / panel_bytes, 1);
      grid.panel_step = round_up(std::clamp<int64_t>(panels / (threads * kTilesPerThread), 1, most), pair);
      return grid;
    }
    const int64_t narrow = round_up(kernels.gemm_panels, pair), columns = ceil_div(panels, narrow);
    const int64_t chunks = std::clamp<int64_t>(ceil_div(wanted, columns), 1, ceil_div(tokens, kFewestTokens));
    grid.token_step = round_up(ceil_div(tokens, chunks), kernels.gemm_block);
    // Few tokens and many threads: narrower tiles are slower ones, but idle threads are slower still.  Wide ones fetch
    // their next weights while they compute.
    const int64_t share = ceil_div(panels * chunks, threads);
    grid.panel_step =
        std::min(std::max<int64_t>(columns * chunks / wanted, 1) * narrow, round_up(share, pair));
    return grid;
  }

  int64_t columns() const { return ceil_div(panels, panel_step); }
  int64_t count() const { return tokens == 0 ? 0 : columns() * ceil_div(tokens, token_step); }
};

// Computes one tile and hands every row of it to `finish(token, first_panel, panels, acc)`; acc holds 16 floats a
// panel, scaled by the weight.
template <typename Finish>
void multiply_tile(const LinearKernels& kernels, const TileGrid& grid, Scheme scheme, const uint8_t* weight,
                   int64_t panel_stride, const Activations& x, int64_t index, const Finish& finish) {
  const int64_t columns = grid.columns();
  const int64_t first_panel = index % columns * grid.panel_step;
  const int64_t panels = std::min(grid.panel_step, grid.panels - first_panel);
  const uint8_t* panel = weight + first_panel * panel_stride;

  if (grid.tokens <= kernels.gemv_tokens) {
    float* acc =
        reinterpret_cast<float*>(thread_memory(grid.tokens * panels * kPanel * 4 + kGemvTokens * kPanel * 4));
    float* rows = acc + kGemvTokens * kPanel;
    const int64_t calls = ceil_div(grid.tokens, kGemvTokens), most = ceil_div(grid.tokens, calls);
    if (kernels.gemv_panels != nullptr) {
      for (int64_t first = 0; first < grid.tokens; first += most)
        kernels.gemv_panels(scheme, panel, panel_stride, panels, x, first,
                            int(std::min(most, grid.tokens - first)), rows + first * panels * kPanel,
                            panels * kPanel);
    } else {
      for (int64_t p = 0; p < panels; ++p) {
        for (int64_t first = 0; first < grid.tokens; first += most) {
          const int64_t count = std::min(most, grid.tokens - first);
          kernels.gemv(scheme, panel + p * panel_stride, x, first, int(count), acc);
          for (int64_t t = 0; t < count; ++t)
            std::memcpy(rows + ((first + t) * panels + p) * kPanel, acc + t * kPanel, kPanel * 4);
        }
      }
    }
    for (int64_t t = 0; t < grid.tokens; ++t) finish(t, first_panel, panels, rows + t * panels * kPanel);
    return;
  }

  const int64_t step = kernels.gemm_panels, panel_values = x.groups * kernels.gemm_group_bytes;
  const int64_t wide = round_up(step, 2), stride = wide * kPanel;  // gate and up stay together
  char* memory = thread_memory(wide * (panel_values + kPanel * 8) + kernels.gemm_tokens * stride * 4);
  int8_t* w = reinterpret_cast<int8_t*>(memory);
  int32_t* offsets = reinterpret_cast<int32_t*>(memory + wide * panel_values);
  float* scales = reinterpret_cast<float*>(offsets + stride);
  float* acc = scales + stride;
  const int64_t begin = index / columns * grid.token_step,
                end = std::min(begin + grid.token_step, grid.tokens);
  Activations now = x;
  for (int64_t first = 0; first < panels; first += wide) {
    const int64_t count = std::min(wide, panels - first);
    for (int64_t p = 0; p < count; p += step) {
      const uint8_t* group[64];
      const int64_t some = std::min(step, count - p);
      for (int64_t i = 0; i < some; ++i) group[i] = panel + (first + p + i) * panel_stride;
      kernels.unpack(scheme, group, int(some), x.groups, w + p * panel_values, offsets + p * kPanel,
                     scales + p * kPanel);
    }
    now.ahead = panel + (first + count) * panel_stride;
    now.ahead_bytes = std::min(wide, panels - first - count) * panel_stride;
    for (int64_t t = begin; t < end; t += kernels.gemm_tokens) {
      const int64_t tokens = std::min(kernels.gemm_tokens, end - t);
      for (int64_t p = 0; p < count; p += step) {
        kernels.gemm(w + p * panel_values, offsets + p * kPanel, scales + p * kPanel,
                     int(std::min(step, count - p)), now, t, int(tokens), acc + p * kPanel, stride);
        now.ahead_bytes = 0;
      }
      for (int64_t i = 0; i < tokens; ++i) finish(t + i, first_panel + first, count, acc + i * stride);
    }
  }
}

}  // namespace armllm
