#include "attention/block_attention.h"

#include <algorithm>

namespace armllm {

void BlockAttention::choose(const int32_t* blocks) {
  AttentionArgs& a = attention.args;
  choice.blocks = blocks;
  choice.sequences = a.sequences;
  choice.max_seq_len = a.max_seq_len;
  a.parts = nullptr;
  if (!choice.is_needed()) return;
  a.sequences = most_parts();  // until the lengths are known
  a.max_seq_len = choice.dense_length();
}

int64_t BlockAttention::most_parts() const {
  return choice.sequences + attention.args.tokens * attention.args.kv_heads;
}

// Cache blocks of one part.
int64_t BlockAttention::table_size() const { return choice.most * (choice.span / attention.args.block_size); }

int64_t BlockAttention::scratch_bytes() const {
  AttentionArgs a = attention.args;
  if (!choice.is_needed()) return PagedAttention::scratch_bytes(a);
  a.sequences = most_parts();
  const int64_t tables = a.tokens * a.kv_heads * table_size() * static_cast<int64_t>(sizeof(int32_t));
  return round_up(PagedAttention::scratch_bytes(a), 64) +
         round_up(a.sequences * static_cast<int64_t>(sizeof(SequencePart)), 64) + tables;
}

void BlockAttention::set_scratch(void* scratch) {
  attention.args.scratch = scratch;
  if (!choice.is_needed()) return;
  AttentionArgs a = attention.args;
  a.sequences = most_parts();
  char* next = static_cast<char*>(scratch) + round_up(PagedAttention::scratch_bytes(a), 64);
  choice.parts = reinterpret_cast<SequencePart*>(next);
  next += round_up(a.sequences * static_cast<int64_t>(sizeof(SequencePart)), 64);
  choice.tables = reinterpret_cast<int32_t*>(next);
}

// The part of a token that sees the positions before `end`, and a kv head.  Writes its block table.
SequencePart BlockAttention::part_of(int64_t sequence, int64_t token, int64_t kv_head, int64_t end,
                                     int32_t* table) const {
  const AttentionArgs& a = attention.args;
  const int64_t head = kv_head / (a.kv_heads / choice.heads), last = ceil_div(end, choice.span) - 1;
  const int32_t* chosen = choice.blocks + (token * choice.heads + head) * choice.most;
  const int32_t* blocks = a.block_table + sequence * a.block_table_stride;
  int64_t length = 0, count = 0;
  for (int64_t i = 0; i <= std::min(last, choice.most - 1); ++i) {
    // The op checks choices, but plans may be damaged.
    const int64_t begin = std::clamp<int64_t>(chosen[i], 0, last) * choice.span;
    const int64_t seen = std::min(choice.span, end - begin);
    for (int64_t at = 0; at < seen; at += a.block_size) table[count++] = blocks[(begin + at) / a.block_size];
    length += seen;
  }
  return {token, 1, length, table, nullptr, length, kv_head};
}

// Divides the step into sequences that are attended to as a whole, and tokens and kv heads of the others.
void BlockAttention::divide() {
  AttentionArgs& a = attention.args;
  SequencePart* next = choice.parts;
  int32_t* table = choice.tables;
  for (int64_t b = 0; b < choice.sequences; ++b) {
    const int64_t first = a.query_start[b], tokens = a.query_start[b + 1] - first, length = a.seq_lens[b];
    if (length <= choice.dense_length()) {
      const int32_t* blocks = a.block_table + b * a.block_table_stride;
      *next++ = {first, tokens, length, blocks, nullptr, length};
      continue;
    }
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t head = 0; head < a.kv_heads; ++head, table += table_size())
        *next++ = part_of(b, first + t, head, length - tokens + t + 1, table);
  }
  a.parts = choice.parts;
  a.sequences = next - choice.parts;
  a.single_tokens = a.tokens == choice.sequences;
}

int64_t BlockAttention::tiles(int phase) const {
  if (phase > 0) return attention.tiles(phase - 1);
  return choice.is_needed() ? 1 : 0;
}

void BlockAttention::tile(int phase, int64_t index) {
  if (phase > 0) return attention.tile(phase - 1, index);
  divide();
}

}  // namespace armllm
