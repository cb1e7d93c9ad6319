#include "mla/mla.h"

#include <algorithm>
#include <cstring>

#include "dispatch/variants.h"

namespace armllm {
namespace {

constexpr int64_t kTokens = 16;  // per tile of LatentWrite
constexpr int64_t kRows = 64;    // query rows per tile of the phase that joins queries

int64_t query_rows(const LatentAttention& set) {
  return set.attention.args.tokens * set.attention.args.q_heads;
}

}  // namespace

void LatentAttention::select(const int32_t* positions, int64_t most) {
  AttentionArgs& a = attention.args;
  selection = {positions, most, a.sequences, a.max_seq_len, nullptr, 0};
  a.parts = nullptr;
  if (!selection.is_needed()) return;
  a.sequences = most_parts();  // until the lengths are known
  a.max_seq_len = most;
}

void LatentAttention::select_entries(int64_t recent, const int32_t* entries, int64_t most) {
  AttentionArgs& a = attention.args;
  selection = {entries, most, a.sequences, a.max_seq_len, nullptr, recent};
  a.parts = nullptr;
  a.sequences = most_parts();  // until the lengths are known
  const int64_t seen = a.max_seq_len / a.places.rate;
  a.max_seq_len = std::min(recent, a.max_seq_len) + (entries == nullptr ? seen : std::min(most, seen));
}

// Each token of a long sequence is a part of its own.
int64_t LatentAttention::most_parts() const { return selection.sequences + attention.args.tokens; }

int64_t LatentAttention::scratch_bytes() const {
  AttentionArgs a = attention.args;
  const int64_t parts = selection.is_needed() ? most_parts() : 0;
  if (parts > 0) a.sequences = parts;
  return round_up(PagedAttention::scratch_bytes(a), 64) + parts * static_cast<int64_t>(sizeof(SequencePart));
}

void LatentAttention::set_scratch(void* scratch) {
  AttentionArgs a = attention.args;
  if (selection.is_needed()) a.sequences = most_parts();
  attention.args.scratch = scratch;
  char* parts = static_cast<char*>(scratch) + round_up(PagedAttention::scratch_bytes(a), 64);
  selection.parts = reinterpret_cast<SequencePart*>(parts);
}

// Makes each token a part.
void LatentAttention::divide_entries() {
  AttentionArgs& a = attention.args;
  SequencePart* next = selection.parts;
  for (int64_t b = 0; b < selection.sequences; ++b) {
    const int32_t* blocks = a.block_table + b * a.block_table_stride;
    for (int64_t t = a.query_start[b]; t < a.query_start[b + 1]; ++t) {
      const int64_t end = a.seq_lens[b] - a.query_start[b + 1] + t + 1;
      const int64_t recent = std::min(end, selection.recent), seen = end / a.places.rate;
      const int32_t* chosen = selection.positions;
      const int64_t count = chosen == nullptr ? seen : std::min(seen, selection.most);
      if (chosen != nullptr) chosen += t * selection.most;
      *next++ = {t, 1, recent + count, blocks, chosen, end, -1, recent};
    }
  }
  a.parts = selection.parts;
  a.sequences = next - selection.parts;
  a.single_tokens = true;
}

// Divides the step into sequences that are attended to as a whole, and the single tokens of the others.
void LatentAttention::divide() {
  if (selection.recent > 0) return divide_entries();
  AttentionArgs& a = attention.args;
  SequencePart* next = selection.parts;
  for (int64_t b = 0; b < selection.sequences; ++b) {
    const int64_t first = a.query_start[b], tokens = a.query_start[b + 1] - first, length = a.seq_lens[b];
    const int32_t* blocks = a.block_table + b * a.block_table_stride;
    if (length <= selection.most) {
      *next++ = {first, tokens, length, blocks, nullptr, length};
      continue;
    }
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t end = length - tokens + t + 1;
      const int32_t* positions = selection.positions + (first + t) * selection.most;
      *next++ = {first + t, 1, std::min(end, selection.most), blocks, positions, end};
    }
  }
  a.parts = selection.parts;
  a.sequences = next - selection.parts;
  a.single_tokens = a.tokens == a.sequences;
}

int64_t LatentAttention::tiles(int phase) const {
  if (phase > 1) return attention.tiles(phase - 2);
  if (phase == 0) return selection.is_needed() ? 1 : 0;
  return joined == nullptr ? 0 : ceil_div(query_rows(*this), kRows);
}

void LatentAttention::tile(int phase, int64_t index) {
  if (phase > 1) return attention.tile(phase - 2, index);
  if (phase == 0) return divide();
  const int64_t heads = attention.args.q_heads, element = size_of(attention.args.q.type);
  const int64_t end = std::min(query_rows(*this), (index + 1) * kRows);
  for (int64_t row = index * kRows; row < end; ++row) {
    char* to = static_cast<char*>(joined) + row * (latent.size + rope.size) * element;
    std::memcpy(to, latent.at(row / heads, row % heads, element), latent.size * element);
    std::memcpy(to + latent.size * element, rope.at(row / heads, row % heads, element), rope.size * element);
  }
}

int64_t LatentWrite::tiles(int) const { return ceil_div(args.tokens, kTokens); }

void LatentWrite::tile(int, int64_t index) {
  const int64_t end = std::min(args.tokens, (index + 1) * kTokens);
  for (int64_t t = index * kTokens; t < end; ++t) variant().attention->write_latent(args, t);
}

}  // namespace armllm
