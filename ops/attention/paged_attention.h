// Attention of packed tokens against a paged cache of keys and values.
//
// Layouts.  A register that is loaded from the cache is an operand of the CPU's widest dot product:
//
//   f32, f16  k [block][kv head][head size][block size]  v [block][kv head][block size][value size]
//   bf16  k [block][kv head][head size / 4][block size][4]  v [block][kv head][block size / 4][value size][4]
//   int8  k [block][kv head][head size / 8][block size][8]  v [block][kv head][block size / 8][value size][8]
//         with float32 scales [block][kv head][block size] of keys and of values: one per token and head
//
// Head sizes that are no multiple of the group are padded with zeros.  A group's values past the end of a
// sequence may be anything, NaN included.
//
// Split-KV attention (Flash-Decoding) with fixed splits of kSplit positions, counted from position 0.  The
// result of a split is, for each query row, the maximum, the sum of exponentials and the weighted values;
// splits are merged in order.  Split borders and orders of summation depend on the row alone.  A token's
// result therefore has the same bits in a prefill chunk, in a decode step, alone or in a batch, on any number
// of threads.
#pragma once

#include <atomic>

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kSplit = 256;    // positions; a multiple of every block size
constexpr int64_t kKeyLanes = 16;  // block sizes are multiples of it
constexpr int64_t kMostTileRows = 64;

enum class CacheType : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

constexpr int64_t size_of(CacheType type) {
  return type == CacheType::f32 ? 4 : type == CacheType::i8 ? 1 : 2;
}
// Dimensions of a key, or positions of values, that are adjacent in memory.
constexpr int64_t group_of(CacheType type) {
  return type == CacheType::bf16 ? 4 : type == CacheType::i8 ? 8 : 1;
}

struct KvWriteArgs {
  Rows k, v;  // [tokens][kv_heads · head size]
  void* k_cache = nullptr;
  void* v_cache = nullptr;
  float* k_scales = nullptr;  // of int8 caches
  float* v_scales = nullptr;
  CacheType cache_type = CacheType::f32;
  const int64_t* slots = nullptr;  // [tokens]: block · block_size + offset; negative: not written
  int64_t tokens = 0, kv_heads = 0, head_size = 0, value_size = 0, block_size = 0;
};

// New latents into a cache of [block][block size][rank + rope size].
struct LatentWriteArgs {
  Rows latent, rope;  // [tokens][rank], [tokens][rope size]
  void* cache = nullptr;
  DType cache_type = DType::f32;
  const int64_t* slots = nullptr;  // as of KvWriteArgs
  int64_t tokens = 0, rank = 0, rope_size = 0;
};

struct AttentionArgs {
  Rows q, out;  // [tokens][q_heads · head size], [tokens][q_heads · value size]
  const void* k_cache = nullptr;
  const void* v_cache = nullptr;
  const float* k_scales = nullptr;  // of int8 caches
  const float* v_scales = nullptr;
  CacheType cache_type = CacheType::f32;
  bool latent = false;  // k_cache is [block][block size][head size]; a value is the first part of a key
  const int32_t* block_table = nullptr;  // [sequences][block_table_stride]
  int64_t block_table_stride = 0;
  const int32_t* query_start = nullptr;  // [sequences + 1] first packed token of each sequence
  const int32_t* seq_lens = nullptr;     // [sequences] positions in the cache, this step's tokens included
  int64_t sequences = 0, tokens = 0;
  int64_t q_heads = 0, kv_heads = 0, head_size = 0, value_size = 0, block_size = 0;
  float scale = 1.0f;
  int64_t window = 0;            // > 0: a query at position p sees p − window + 1 … p
  float softcap = 0.0f;          // > 0: s ← softcap · tanh(s / softcap)
  const float* sinks = nullptr;  // [q_heads] extra logits that take weight and give no value
  int64_t threads = 1;           // that will work on it: affects tile sizes, never bits
  int64_t max_seq_len = 0;       // upper bound of seq_lens, for scratch
  void* scratch = nullptr;
};

// The split that is attended to next, which is prefetched meanwhile.
struct SplitAhead {
  const int32_t* blocks = nullptr;  // block table, from that split's first position on
  int64_t begin = 0, end = 0;       // what is seen of it; the same: nothing is known
  int64_t kv_head = 0;

  bool empty() const { return begin >= end; }
};

// A run of query rows that share one kv head, against one split of keys.  Memory that it is given for `rows`
// rows has room for an even number of them.
struct AttentionTile {
  void* query = nullptr;  // rows · query_bytes(head size), in the order that load_query gave them
  int64_t rows = 0;
  const int64_t* first = nullptr;   // [rows] first visible position
  const int64_t* last = nullptr;    // [rows] one past the last visible position, never past the sequence
  int64_t split_begin = 0;          // the split is split_begin … split_begin + kSplit − 1
  const int32_t* blocks = nullptr;  // block table of the sequence
  int64_t kv_head = 0;
  // What is known of the order of reading, so that memory is never waited for.
  bool is_near = false;  // it has been fetched as `next` of another
  SplitAhead next;
  // results; a row that sees nothing of the split gets sum 0 and values 0
  float* maximum = nullptr;  // [rows]
  float* sum = nullptr;      // [rows]
  float* values = nullptr;   // [rows][value_stride(value_size)], unnormalized
  // scratch
  float* scores = nullptr;  // [rows][kScoreStride]
  void* weights = nullptr;  // rows · kWeightBytes: what the scores become, for products of fewer bits
  float* panel = nullptr;   // panel_floats(head_size)
  char* edges = nullptr;    // edge_bytes(value_size)
  char* split = nullptr;    // split_bytes(args)
};

constexpr int64_t kChunk = 64;                 // positions that are converted to float32 at a time
constexpr int64_t kScoreStride = kSplit + 16;  // not a power of two: rows would share cache sets
constexpr int64_t kWeightBytes = 2 * kSplit + 64;
constexpr float kNothing = -3.402823466e+38f;  // maximum of no scores: finite, so that differences are no NaN
inline int64_t value_stride(int64_t value_size) { return round_up(value_size, 16); }
inline int64_t query_bytes(int64_t head_size) { return round_up(head_size, 16) * 4 + 64; }
inline int64_t panel_floats(int64_t head_size) {
  return kChunk * (head_size < kChunk ? kChunk : round_up(head_size, 16));
}
// Two groups of values and the scales of a split.
inline int64_t edge_bytes(int64_t value_size) {
  return round_up(16 * value_size, 64) + 2 * kSplit * static_cast<int64_t>(sizeof(float));
}

// Where a split of latents is laid out as keys and values.
inline int64_t split_bytes(const AttentionArgs& a) {
  return a.latent ? kSplit * (round_up(a.head_size, 16) + a.value_size) * size_of(a.cache_type) + 64 : 0;
}

struct AttentionKernels {
  int64_t (*tile_rows)(const AttentionArgs& args);  // best number of query rows of a tile, an even one
  // Puts the query of one token and head into row `row` of tile.query, as the cache type's products take it.
  void (*load_query)(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& tile,
                     int64_t row);
  void (*attend)(const AttentionArgs& args, const AttentionTile& tile);
  // Adds a split's results (m, s, v) to those of `rows` rows, which start as (kNothing, 0, zeros).
  void (*merge)(float* maximum, float* sum, float* values, const float* m, const float* s, const float* v,
                int64_t value_size, int64_t rows);
  // Takes in the sink, divides by the sum and rounds to the output.
  void (*finish)(const AttentionArgs& args, int64_t token, int64_t head, float maximum, float sum,
                 const float* values);
  void (*write)(const KvWriteArgs& args, int64_t token, int64_t kv_head);
  void (*write_latent)(const LatentWriteArgs& args, int64_t token);
};

class KvWrite final : public TaskSet {
 public:
  KvWriteArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

class PagedAttention final : public TaskSet {
 public:
  AttentionArgs args;
  static int64_t scratch_bytes(const AttentionArgs& args);  // reads sizes only, no metadata
  int phases() const override { return 3; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;

 private:
  // Of a decode step, all of whose tiles take pieces until none is left: pieces taken, and tiles that are
  // over.
  std::atomic<int64_t> taken_{0}, over_{0};
};

}  // namespace armllm
