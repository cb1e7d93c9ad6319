// Tiling of a product of quantized activations and packed panels, shared by linear layers, heads and experts.
#pragma once

#include <algorithm>

#include "linear/quant_linear.h"
#include "runtime/task_set.h"
#include "runtime/thread_scratch.h"
#include "runtime/types.h"

namespace armllm {

// Scratch bytes for the quantized activations of one call.
inline int64_t activation_bytes(int64_t tokens, int64_t in_features) {
  const int64_t groups = ceil_div(in_features, kGroup);
  // Upper bounds of every variant's block sizes.
  const int64_t rows = round_up(tokens, tokens <= kGemvTokens ? kGemvTokens : 64);
  return round_up(rows * groups * kGroup, 64) + round_up(rows * 4, 64) + round_up(rows * groups * 4, 64);
}

// Lays out the quantized activations in scratch memory.
inline Activations activations_in(void* scratch, int64_t tokens, int64_t in_features, Scheme scheme,
                                  const LinearKernels& kernels) {
  Activations x;
  x.groups = ceil_div(in_features, kGroup);
  const bool gemv = tokens <= kernels.gemv_tokens;
  x.block = gemv ? gemv_block_of(kernels, scheme, tokens) : kernels.gemm_block;
  const int64_t rows = round_up(tokens, x.block);
  char* p = static_cast<char*>(scratch);
  x.values = reinterpret_cast<int8_t*>(p);
  p += round_up(rows * x.groups * kGroup, 64);
  x.scales = reinterpret_cast<float*>(p);
  if (gemv || has_offsets(scheme)) x.group_sums = reinterpret_cast<int32_t*>(p + round_up(rows * 4, 64));
  return x;
}

// Rows per quantization tile, whole tokens; the last tile also writes the padding rows.
inline int64_t quantize_step(const Activations& x, int64_t rows) {
  return rows <= kMaxGemvTokens && x.group_sums ? x.digits : round_up(8, x.block);
}

// Calls quantize(token, values, chunk_stride, group_sums) → scale for every token of a tile.
template <typename Quantize>
void quantize_tile(const Activations& q, int64_t tokens, int64_t index, const Quantize& quantize) {
  const int64_t step = quantize_step(q, tokens), bytes = q.groups * kGroup;
  const int64_t begin = index * step;
  const int64_t end = begin + step < tokens ? begin + step : round_up(tokens, q.block);
  for (int64_t t = begin; t < end; ++t) {
    int8_t* values = q.values + t / q.block * q.block * bytes + t % q.block * 8;
    if (t < tokens) {
      int32_t* group_sums = q.group_sums ? q.group_sums + t * q.groups : nullptr;
      q.scales[t] = quantize(t, values, q.block * 8, group_sums);
    } else {
      for (int64_t c = 0; c < q.groups * 4; ++c) std::memset(values + c * q.block * 8, 0, 8);
    }
  }
}

// Output panels × tokens as tiles; tiles are multiples of `pair` panels, which keeps gate and up together.
struct TileGrid {
  int64_t panels = 0, panel_step = 1, tokens = 0, token_step = 1;

  // `digits`: tokens here are rows of Activations, and a tile holds all rows of a token.
  static TileGrid plan(const LinearKernels& kernels, int64_t panels, int64_t panel_bytes, int64_t tokens,
                       int64_t pair, int64_t digits = 1) {
    constexpr int64_t kTilesPerThread = 4;      // slack for work stealing when a thread is delayed
    constexpr int64_t kMaxGemvBytes = 1 << 20;  // amortizes claiming a tile
    constexpr int64_t kMinTokens = 64;          // unpacking is a few percent of a tile of this size
    TileGrid grid{panels, 1, tokens, tokens};
    const int64_t threads = team_size(), wanted = threads == 1 ? 1 : threads * kTilesPerThread;
    if (tokens <= kernels.gemv_tokens) {
      const int64_t most = std::max<int64_t>(kMaxGemvBytes / panel_bytes, 1);
      grid.panel_step = round_up(std::clamp<int64_t>(panels / (threads * kTilesPerThread), 1, most), pair);
      return grid;
    }
    const int64_t narrow = round_up(kernels.gemm_panels, pair), columns = ceil_div(panels, narrow);
    const int64_t chunks = std::clamp<int64_t>(ceil_div(wanted, columns), 1, ceil_div(tokens, kMinTokens));
    grid.token_step = round_up(ceil_div(tokens, chunks), std::max(kernels.gemm_block, digits));
    // Few tokens and many threads: narrower tiles are slower, but idle threads cost more.  Wide tiles
    // prefetch their next weights while they compute.
    const int64_t share = ceil_div(panels * chunks, threads);
    grid.panel_step =
        std::min(std::max<int64_t>(columns * chunks / wanted, 1) * narrow, round_up(share, pair));
    return grid;
  }

  int64_t columns() const { return ceil_div(panels, panel_step); }
  int64_t count() const { return tokens == 0 ? 0 : columns() * ceil_div(tokens, token_step); }
};

// The units that kernels multiply: whole panels, or, for INT8 with group scales, one group at a time as a
// panel of scheme i8 with its own scales.  Group results are added in group order for every batch size.
struct PanelParts {
  Scheme scheme;
  int64_t count, step, groups;  // step: groups of 32 per part
  int64_t first, bytes;         // byte offset of a panel's first part, and bytes from part to part

  PanelParts(Scheme whole, int64_t all)
      : scheme(whole), count(1), step(all), groups(all), first(0), bytes(0) {
    if (!has_int8_groups(whole)) return;
    const PanelLayout layout = panel_layout(whole, all * kGroup);
    scheme = Scheme::i8;
    count = layout.scale_groups;
    step = groups_per_scale(whole);
    first = layout.values;
    bytes = int8_panel_bytes(step);
  }

  int64_t groups_of(int64_t part) const { return std::min(step, groups - part * step); }
  const uint8_t* panel_part(const uint8_t* panel, int64_t part) const { return panel + first + part * bytes; }
  Activations activations_part(const Activations& x, int64_t part) const {
    if (count == 1) return x;
    Activations some = x;
    some.groups = groups_of(part);
    some.skipped_groups = groups - some.groups;
    some.values += part * step * kGroup * x.block;
    if (x.group_sums != nullptr) some.group_sums += part * step;
    return some;
  }
};

// Multiplies few tokens straight from the packed panels into rows[t · width + …].  `spare` holds two gemv
// results.
inline void multiply_few_tokens(const LinearKernels& kernels, Scheme scheme, const uint8_t* panel,
                                int64_t panel_stride, int64_t panels, const Activations& x, int64_t tokens,
                                float* spare, float* rows, int64_t width) {
  if (is_gemv_wide(kernels, scheme, tokens))
    return kernels.gemv_wide(scheme, panel, panel_stride, panels, x, int(tokens), rows, width);
  const PanelParts parts(scheme, x.groups);
  const int64_t calls = ceil_div(tokens, kGemvTokens), most = ceil_div(tokens, calls);
  for (int64_t first = 0; first < tokens; first += most) {
    const int count = int(std::min(most, tokens - first));
    float* out = rows + first * width;
    if (kernels.gemv_panels != nullptr && parts.scheme == scheme)
      kernels.gemv_panels(scheme, panel, panel_stride, panels, x, first, count, out, width);
  }
  for (int64_t p = 0; p < panels; ++p, panel += panel_stride, rows += kPanel) {
    for (int64_t first = 0; first < tokens; first += most) {
      const int count = int(std::min(most, tokens - first));
      float* out = rows + first * width;
      if (kernels.gemv_panels == nullptr || parts.scheme != scheme) {
        for (int64_t i = 0; i < parts.count; ++i) {
          float* sums = i == 0 ? spare : spare + kGemvTokens * kPanel;
          kernels.gemv(parts.scheme, parts.panel_part(panel, i), parts.activations_part(x, i), first, count,
                       sums);
          if (i != 0) kernels.accumulate(spare, sums, count * kPanel);
        }
        for (int64_t t = 0; t < count; ++t) std::memcpy(out + t * width, spare + t * kPanel, kPanel * 4);
      }
      if (has_offsets(scheme)) kernels.add_offsets(scheme, panel, x, first, count, out, width);
    }
  }
}

// Bytes of an expanded panel; 0 if the kernels read the panels themselves for `tokens` tokens.
inline int64_t expanded_panel_bytes(const LinearKernels& kernels, Scheme scheme, int64_t groups,
                                    int64_t tokens) {
  return !is_expanded(scheme) || tokens <= direct_gemv_tokens(kernels, scheme)
             ? 0
             : panel_layout(computed_as(scheme), groups * kGroup).bytes;
}

// Computes one tile and calls `finish(token, first_panel, panels, acc)` for each of its rows; acc holds 16
// floats per panel, scaled by the weight scale.  Rows are finished in order; two rows of one token keep their
// acc until both are finished.
template <typename Finish>
void multiply_tile(const LinearKernels& kernels, const TileGrid& grid, Scheme scheme, const uint8_t* weight,
                   int64_t panel_stride, const Activations& x, int64_t index, const Finish& finish) {
  const int64_t columns = grid.columns();
  const int64_t first_panel = index % columns * grid.panel_step;
  const int64_t panels = std::min(grid.panel_step, grid.panels - first_panel);
  const uint8_t* panel = weight + first_panel * panel_stride;

  if (grid.tokens <= kernels.gemv_tokens) {
    constexpr int64_t kSpare = 2 * kGemvTokens * kPanel;
    const int64_t expanded_bytes = expanded_panel_bytes(kernels, scheme, x.groups, grid.tokens);
    const int64_t width = panels * kPanel;
    char* memory = thread_memory(expanded_bytes + (grid.tokens * width + kSpare) * 4);
    uint8_t* expanded = reinterpret_cast<uint8_t*>(memory);
    float* spare = reinterpret_cast<float*>(memory + expanded_bytes);
    float* rows = spare + kSpare;
    if (expanded_bytes == 0)
      multiply_few_tokens(kernels, scheme, panel, panel_stride, panels, x, grid.tokens, spare, rows, width);
    for (int64_t p = 0; expanded_bytes != 0 && p < panels; ++p) {
      kernels.expand(scheme, panel + p * panel_stride, x.groups, expanded);
      multiply_few_tokens(kernels, computed_as(scheme), expanded, expanded_bytes, 1, x, grid.tokens, spare,
                          rows + p * kPanel, width);
    }
    for (int64_t t = 0; t < grid.tokens; ++t) finish(t, first_panel, panels, rows + t * width);
    return;
  }

  constexpr int64_t kPartTokens = 32;  // keeps their results in L1 from part to part
  const PanelParts parts(computed_as(scheme), x.groups);
  const int64_t most = parts.count == 1 ? kernels.gemm_tokens : std::min(kPartTokens, kernels.gemm_tokens);
  const int64_t step = kernels.gemm_panels, group_bytes = kernels.gemm_group_bytes;
  const int64_t wide = round_up(step, 2), stride = wide * kPanel;  // keeps gate and up together
  const int64_t expanded_bytes = expanded_panel_bytes(kernels, scheme, x.groups, grid.tokens);
  char* memory = thread_memory(step * expanded_bytes + wide * x.groups * group_bytes +
                               parts.count * stride * 8 + most * stride * (parts.count == 1 ? 4 : 8));
  uint8_t* expanded = reinterpret_cast<uint8_t*>(memory);
  memory += step * expanded_bytes;
  int8_t* values = reinterpret_cast<int8_t*>(memory);
  int32_t* row_info = reinterpret_cast<int32_t*>(memory + wide * x.groups * group_bytes);
  float* scales = reinterpret_cast<float*>(row_info + parts.count * stride);
  float* acc = scales + parts.count * stride;
  float* more = acc + most * stride;  // results of every part but the first
  const auto part_values = [&](int64_t part, int64_t p) {
    return values + (part * parts.step * wide + p * parts.groups_of(part)) * group_bytes;
  };
  const int64_t begin = index / columns * grid.token_step,
                end = std::min(begin + grid.token_step, grid.tokens);
  Activations now = x;
  for (int64_t first = 0; first < panels; first += wide) {
    const int64_t count = std::min(wide, panels - first);
    const uint8_t* here = panel + first * panel_stride;
    for (int64_t i = 0; i < parts.count; ++i)
      for (int64_t p = 0; p < count; p += step) {
        const uint8_t* part[64];
        const int64_t some = std::min(step, count - p), at = i * stride + p * kPanel;
        for (int64_t n = 0; n < some; ++n) {
          part[n] = parts.panel_part(here + (p + n) * panel_stride, i);
          if (expanded_bytes == 0) continue;
          kernels.expand(scheme, part[n], x.groups, expanded + n * expanded_bytes);
          part[n] = expanded + n * expanded_bytes;
        }
        kernels.unpack(parts.scheme, part, int(some), parts.groups_of(i), part_values(i, p), row_info + at,
                       scales + at);
      }
    now.prefetch = here + count * panel_stride;
    now.prefetch_bytes = std::min(wide, panels - first - count) * panel_stride;
    for (int64_t t = begin; t < end; t += most) {
      const int64_t tokens = std::min(most, end - t);
      for (int64_t i = 0; i < parts.count; ++i) {
        Activations some = parts.activations_part(now, i);
        for (int64_t p = 0; p < count; p += step) {
          const int64_t at = i * stride + p * kPanel;
          kernels.gemm(part_values(i, p), row_info + at, scales + at, int(std::min(step, count - p)), some, t,
                       int(tokens), (i == 0 ? acc : more) + p * kPanel, stride);
          some.prefetch_bytes = now.prefetch_bytes = 0;
        }
        if (i != 0) kernels.accumulate(acc, more, tokens * stride);
      }
      for (int64_t p = 0; has_offsets(scheme) && p < count; ++p)
        kernels.add_offsets(scheme, here + p * panel_stride, x, t, int(tokens), acc + p * kPanel, stride);
      for (int64_t n = 0; n < tokens; ++n) finish(t + n, first_panel + first, count, acc + n * stride);
    }
  }
}

// Computes one tile like multiply_tile, and calls `finish(token, first_panel, panels, acc, scale)` for each
// token; its digits are added up, and `scale` is what its sums have yet to be multiplied by.
template <typename Finish>
void multiply_token_tile(const LinearKernels& kernels, const TileGrid& grid, Scheme scheme,
                         const uint8_t* weight, int64_t panel_stride, const Activations& x, int64_t index,
                         const Finish& finish) {
  if (x.digits == 1)
    return multiply_tile(kernels, grid, scheme, weight, panel_stride, x, index,
                         [&](int64_t token, int64_t panel, int64_t panels, const float* acc) {
                           finish(token, panel, panels, acc, x.scales[token]);
                         });
  float* first_digit = nullptr;
  multiply_tile(kernels, grid, scheme, weight, panel_stride, x, index,
                [&](int64_t row, int64_t panel, int64_t panels, float* acc) {
                  if (row % 2 == 0) {
                    first_digit = acc;
                    return;
                  }
                  kernels.add_digits(first_digit, x.scales[row - 1], acc, x.scales[row], panels * kPanel);
                  finish(row / 2, panel, panels, first_digit, 1.0f);
                });
}

}  // namespace armllm
