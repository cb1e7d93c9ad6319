// An indexer's keys in a paged cache, and the positions that a new token sees.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/entry_places.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kMostSelected = 1 << 16;  // by one query: a larger result would not fit into memory

struct CachedKeys {
  const void* keys = nullptr;  // [block][block size][head size]
  DType key_type = DType::f32;
  const int32_t* block_table = nullptr;  // as in AttentionArgs
  int64_t block_table_stride = 0;
  const int32_t* query_start = nullptr;
  const int32_t* seq_lens = nullptr;
  int64_t sequences = 0, tokens = 0;
  int64_t head_size = 0, block_size = 0;
  EntryPlaces places;       // of keys that each stand for several positions; a rate of 0: of one
  int64_t max_seq_len = 0;  // upper bound of seq_lens; determines the scratch size

  // Keys that the first positions of a sequence have.
  int64_t keys_of(int64_t positions) const { return places.rate > 0 ? positions / places.rate : positions; }
  const char* at(int64_t sequence, int64_t key) const {
    const int32_t* blocks = block_table + sequence * block_table_stride;
    const int64_t slot =
        places.rate > 0 ? places.row(blocks, key) : blocks[key / block_size] * block_size + key % block_size;
    return static_cast<const char*>(keys) + slot * head_size * size_of(key_type);
  }
};

// A new token, its sequence and the number of keys that it sees.
struct Seen {
  int64_t token, sequence, positions;
};

inline Seen seen_by(const CachedKeys& a, int64_t token) {
  const int32_t* starts = a.query_start;
  const int64_t sequence = std::upper_bound(starts, starts + a.sequences + 1, token) - starts - 1;
  return {token, sequence, a.keys_of(a.seq_lens[sequence] - starts[sequence + 1] + token + 1)};
}

}  // namespace armllm
