// Sorts (token, expert) pairs by expert, lays out their intermediate results in memory, and divides the work
// into tiles.
#pragma once

#include "linear/tile_grid.h"
#include "moe/moe.h"

namespace armllm {

// The rows of one expert, consecutive in every buffer and in ascending order of tokens.
struct ExpertRows {
  int64_t expert, first_row, rows;
  int64_t block;                      // Activations::block; the rows are padded to a multiple of it
  TileGrid gate_up, down, down_rest;  // down_rest: `down` in the last pass
  int64_t gate_up_tile, down_tile, down_rest_tile;  // first tile of each
};

struct Grouping {
  int64_t experts;  // number of experts with rows
  int64_t rows;     // including padding
  int64_t gate_up_tiles, down_tiles, down_rest_tiles;
  int64_t threads;  // queried once, so that all workers divide later phases into the same tiles
  int64_t adapted;  // number of groups of rows with adapters
};

// Rows of one expert with the same adapter.
struct AdaptedRows {
  int64_t expert, slot, first, count;  // `first` counts rows with adapters
  int64_t inner_tiles, outer_tiles;    // of the sums of these rows and of those before
};

// Quantized rows of all experts; the block size differs by expert.
struct QuantRows {
  int8_t* values;
  float* scales;
  int32_t* group_sums;
  int64_t groups;
  bool sums;  // experts with many rows need group_sums too

  int64_t row_bytes() const { return groups * kGroup; }
  Activations of(const ExpertRows& e) const {
    return {values + e.first_row * row_bytes(), scales + e.first_row,
            sums || e.rows <= kMaxGemvTokens ? group_sums + e.first_row * groups : nullptr, groups, e.block};
  }
};

// `down` computes its output columns in passes, so that its results stay in cache until the weighted sum
// reads them.
struct DownPasses {
  int64_t panels;  // of the weight
  int64_t step;    // panels per pass; the last pass may have fewer
  int64_t count() const { return ceil_div(panels, step); }
  int64_t of(int64_t pass) const { return pass + 1 < count() ? step : panels - pass * step; }
};

// Upper bound of the padded rows for all kernel variants, so that memory sized for a variant fits any other.
int64_t most_rows(const MoeArgs& args);

DownPasses down_passes(const MoeArgs& args);

struct MoeMemory {
  Grouping* grouping;
  ExpertRows* expert;   // [grouping->experts]
  int64_t* count;       // [args.experts]
  int64_t* next_row;    // [args.experts]
  int32_t* pair_row;    // [tokens · top_k]; −1: the id is out of range
  int32_t* row_expert;  // [rows]: index into `expert`
  int64_t* rank_row;    // [ranks + 1]: first row of each rank's experts, and the end; one rank has all
  QuantRows hidden, intermediate;
  float* gated;    // [rows][gated_stride]: act(gate) · up
  float* down[2];  // [rows][down_stride] for even and odd passes; share memory with `hidden` and `gated`
  int64_t gated_stride, down_stride;
  DownPasses passes;
  // With adapters only; null otherwise.
  int32_t* row_slot;       // [rows]: the adapter's slot; −1: none
  int32_t* row_token;      // [rows], of rows with adapters
  int32_t* adapted_row;    // [pairs]: rows with adapters, by expert and slot
  int32_t* adapted_token;  // [pairs]: their tokens
  AdaptedRows* adapted;    // [grouping->adapted]
  float* inner_sums;       // [rows][lora.inner.most_rank]: x · Aᵀ
  float* outer_sums;       // [rows][lora.outer.most_rank]
  int64_t bytes;

  static MoeMemory at(const MoeArgs& args, void* scratch);
};

// Fills grouping, expert, pair_row, row_expert, and what says which rows have adapters.
void group_pairs(const MoeArgs& args, const MoeMemory& memory);

}  // namespace armllm
