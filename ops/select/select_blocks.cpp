#include "select/select_blocks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "dispatch/variants.h"
#include "runtime/thread_scratch.h"
#include "select/select.h"

namespace armllm {
namespace {

constexpr int64_t kTokens = 8;       // tokens of a tile that scores, which share keys in a near cache
constexpr int64_t kPositions = 512;  // positions of such a tile, unless a block has more
constexpr int64_t kMostScores = int64_t{16} << 20;
constexpr int64_t kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t blocks_of(const BlockSelectArgs& a, int64_t positions) { return ceil_div(positions, a.span); }
int64_t blocks_a_tile(const BlockSelectArgs& a) { return std::max<int64_t>(kPositions / a.span, 1); }
int64_t most_blocks(const BlockSelectArgs& a) { return blocks_of(a, a.max_seq_len); }

// Tokens of a wave.
int64_t wave_of(const BlockSelectArgs& a) {
  const int64_t most = std::max<int64_t>(kMostScores / std::max<int64_t>(most_blocks(a) * a.heads, 1), 1);
  return std::min(round_up(most, kTokens), round_up(a.tokens, kTokens));
}

// True if every token sees so few blocks that it selects all of them.
bool selects_all(const BlockSelectArgs& a) { return most_blocks(a) <= a.most; }

// Scores of a token of the wave and a head, one for each block.
float* scores_of(const BlockSelectArgs& a, int64_t row, int64_t head) {
  return static_cast<float*>(a.scratch) + (row * a.heads + head) * most_blocks(a);
}

// The largest of kLanes numbers; NaN is the largest of all.
float largest(const float* lanes) {
  float found = lanes[0];
  for (int64_t i = 1; i < kLanes; ++i)
    if (!std::isnan(found) && !(lanes[i] <= found)) found = lanes[i];
  return found;
}

// Writes the scores of a token and a block for all heads.
void score_block(const BlockSelectArgs& a, const Seen& seen, int64_t block, const float* queries,
                 float* maxima, int64_t row) {
  const int64_t begin = block * a.span, end = std::min(begin + a.span, seen.positions);
  std::fill_n(maxima, a.heads * kLanes, -kInfinity);
  for (int64_t position = begin; position < end; position += kKeyRows)
    variant().block_select->raise_maxima(a, queries, a.at(seen.sequence, position),
                                         std::min(end - position, kKeyRows), maxima);
  for (int64_t h = 0; h < a.heads; ++h) scores_of(a, row, h)[block] = largest(maxima + h * kLanes);
}

void score_blocks(const BlockSelectArgs& a, int64_t first, int64_t row, int64_t tile) {
  const int64_t width = round_up(a.head_size, kLanes), begin = tile * blocks_a_tile(a);
  float* queries = nullptr;
  for (const int64_t end_row = row + kTokens; row < end_row && first + row < a.tokens; ++row) {
    const Seen seen = seen_by(a, first + row);
    const int64_t blocks = blocks_of(a, seen.positions), end = std::min(begin + blocks_a_tile(a), blocks);
    if (blocks <= a.most || begin >= end) continue;
    if (queries == nullptr) {
      const int64_t floats = a.heads * (width + kLanes);
      queries = reinterpret_cast<float*>(thread_memory(floats * static_cast<int64_t>(sizeof(float))));
    }
    variant().block_select->load_queries(a, first + row, queries);
    for (int64_t block = begin; block < end; ++block) {
      if (block < blocks - a.nearest) {
        score_block(a, seen, block, queries, queries + a.heads * width, row);
        continue;
      }
      for (int64_t h = 0; h < a.heads; ++h) scores_of(a, row, h)[block] = kInfinity;
    }
  }
}

void select_row(const BlockSelectArgs& a, int64_t token, int64_t row) {
  const int64_t blocks = blocks_of(a, seen_by(a, token).positions);
  for (int64_t h = 0; h < a.heads; ++h) {
    int32_t* out = a.out + (token * a.heads + h) * a.most;
    if (blocks > a.most) {
      select_highest(scores_of(a, row, h), blocks, a.most, out);
      continue;
    }
    for (int64_t i = 0; i < a.most; ++i) out[i] = i < blocks ? static_cast<int32_t>(i) : -1;
  }
}

}  // namespace

int64_t SelectBlocks::scratch_bytes(const BlockSelectArgs& a) {
  if (selects_all(a)) return 0;
  return wave_of(a) * a.heads * most_blocks(a) * static_cast<int64_t>(sizeof(float));
}

int SelectBlocks::phases() const {
  if (args.tokens == 0) return 0;
  return selects_all(args) ? 2 : static_cast<int>(2 * ceil_div(args.tokens, wave_of(args)));
}

int64_t SelectBlocks::tiles(int phase) const {
  if (selects_all(args)) return phase == 0 ? 0 : ceil_div(args.tokens, kTokens);
  const int64_t wave = wave_of(args), tokens = std::min(args.tokens - phase / 2 * wave, wave);
  const int64_t groups = ceil_div(tokens, kTokens);
  return phase % 2 == 0 ? groups * ceil_div(most_blocks(args), blocks_a_tile(args)) : groups;
}

void SelectBlocks::tile(int phase, int64_t index) {
  const int64_t first = selects_all(args) ? 0 : phase / 2 * wave_of(args);
  if (phase % 2 == 0) {
    const int64_t tiles = ceil_div(most_blocks(args), blocks_a_tile(args));
    return score_blocks(args, first, index / tiles * kTokens, index % tiles);
  }
  const int64_t end = std::min(args.tokens - first, (index + 1) * kTokens);
  for (int64_t row = index * kTokens; row < end; ++row) select_row(args, first + row, row);
}

}  // namespace armllm
