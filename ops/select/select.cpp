#include "select/select.h"

#include <algorithm>
#include <cstring>

#include "dispatch/variants.h"
#include "runtime/thread_scratch.h"

namespace armllm {
namespace {

constexpr int64_t kTokens = 8;   // tokens of a tile that scores, which share converted keys
constexpr int64_t kChunk = 256;  // positions of a tile that scores
constexpr int64_t kMostScores = int64_t{16} << 20;

int64_t most_keys(const SelectArgs& a) { return a.keys_of(a.max_seq_len); }

// Tokens of a wave.
int64_t wave_of(const SelectArgs& a) {
  const int64_t most = std::max<int64_t>(kMostScores / std::max<int64_t>(most_keys(a), 1), 1);
  return std::min(round_up(most, kTokens), round_up(a.tokens, kTokens));
}

// True if every token sees so few positions that it selects all of them.
bool selects_all(const SelectArgs& a) { return most_keys(a) <= a.most; }

float* scores_of(const SelectArgs& a, int64_t row) {
  return static_cast<float*>(a.scratch) + row * round_up(most_keys(a), kChunk);
}

// Converts the keys of a chunk of positions; the last panel is filled up with its last key.
void load_keys(const SelectArgs& a, int64_t sequence, int64_t begin, int64_t end, float* panels) {
  for (int64_t i = 0; i < round_up(end - begin, kScored); ++i) {
    const char* key = a.at(sequence, std::min(begin + i, end - 1));
    variant().select->load_key(a, key, panels + i / kScored * kScored * a.head_size, i % kScored);
  }
}

void score_chunk(const SelectArgs& a, int64_t first, int64_t row, int64_t chunk) {
  const int64_t begin = chunk * kChunk, end_token = std::min(first + row + kTokens, a.tokens);
  const int64_t panel_floats = kScored * a.head_size;
  float* panels = nullptr;
  int64_t loaded = -1;
  for (int64_t token = first + row; token < end_token; ++token) {
    const Seen seen = seen_by(a, token);
    if (seen.positions <= a.most || seen.positions <= begin) continue;
    if (panels == nullptr) {
      const int64_t floats = kChunk * a.head_size + a.heads * (a.head_size + 1);
      panels = reinterpret_cast<float*>(thread_memory(floats * static_cast<int64_t>(sizeof(float))));
    }
    if (loaded != seen.sequence)
      load_keys(a, seen.sequence, begin,
                std::min<int64_t>(begin + kChunk, a.keys_of(a.seq_lens[seen.sequence])), panels);
    loaded = seen.sequence;
    float* query = panels + kChunk * a.head_size;
    float* weights = query + a.heads * a.head_size;
    variant().select->load_query(a, token, query, weights);
    float* to = scores_of(a, token - first) + begin;
    const int64_t scored = round_up(std::min(seen.positions - begin, kChunk), kScored);
    for (int64_t i = 0; i < scored; i += kScored)
      variant().select->score(a, query, weights, panels + i / kScored * panel_floats, to + i);
  }
}

void select_row(const SelectArgs& a, int64_t token, const float* scores) {
  int32_t* out = a.out + token * a.most;
  const int64_t n = seen_by(a, token).positions;
  if (n > a.most) return select_highest(scores, n, a.most, out);
  for (int64_t i = 0; i < a.most; ++i) out[i] = i < n ? static_cast<int32_t>(i) : -1;
}

// Unsigned numbers in the order of floats; zeros are equal, and NaN is the highest.
uint32_t rank_of(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

}  // namespace

void select_highest(const float* scores, int64_t n, int64_t most, int32_t* positions) {
  // Radix selection: each pass finds the next bits of the lowest selected rank.
  constexpr int kBits[] = {11, 11, 10};
  uint32_t prefix = 0, mask = 0;
  int64_t missing = most;  // selected scores among those whose first bits are the prefix
  int shift = 32;
  for (const int bits : kBits) {
    shift -= bits;
    int64_t counts[1 << 11] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t rank = rank_of(scores[i]);
      if ((rank & mask) == prefix) ++counts[(rank >> shift) & ((1u << bits) - 1)];
    }
    uint32_t digit = (1u << bits) - 1;
    while (counts[digit] < missing) missing -= counts[digit--];
    prefix |= digit << shift;
    mask |= ((1u << bits) - 1) << shift;
  }
  for (int64_t i = 0, found = 0; found < most; ++i) {
    const uint32_t rank = rank_of(scores[i]);
    if (rank < prefix || (rank == prefix && missing == 0)) continue;
    if (rank == prefix) --missing;
    positions[found++] = static_cast<int32_t>(i);
  }
}

int64_t SelectTokens::scratch_bytes(const SelectArgs& a) {
  if (selects_all(a)) return 0;
  return wave_of(a) * round_up(most_keys(a), kChunk) * static_cast<int64_t>(sizeof(float));
}

int SelectTokens::phases() const {
  if (args.tokens == 0) return 0;
  return selects_all(args) ? 2 : static_cast<int>(2 * ceil_div(args.tokens, wave_of(args)));
}

int64_t SelectTokens::tiles(int phase) const {
  if (selects_all(args)) return phase == 0 ? 0 : ceil_div(args.tokens, kTokens);
  const int64_t wave = wave_of(args), tokens = std::min(args.tokens - phase / 2 * wave, wave);
  return phase % 2 == 0 ? ceil_div(tokens, kTokens) * ceil_div(most_keys(args), kChunk) : tokens;
}

void SelectTokens::tile(int phase, int64_t index) {
  if (selects_all(args)) {
    const int64_t end = std::min(args.tokens, (index + 1) * kTokens);
    for (int64_t token = index * kTokens; token < end; ++token) select_row(args, token, nullptr);
    return;
  }
  const int64_t first = phase / 2 * wave_of(args);
  if (phase % 2 == 1) return select_row(args, first + index, scores_of(args, index));
  const int64_t chunks = ceil_div(most_keys(args), kChunk);
  score_chunk(args, first, index / chunks * kTokens, index % chunks);
}

}  // namespace armllm
