// Attention of packed tokens over a paged KV cache.
//
// Cache layouts.  A register loaded from the cache is an operand of the CPU's widest dot product for its
// type:
//
//   f32, f16  k [block][kv head][head size][block size]  v [block][kv head][block size][value size]
//   bf16  k [block][kv head][head size / 4][block size][4]  v [block][kv head][block size / 4][value size][4]
//   int8  k [block][kv head][head size / 8][block size][8]  v [block][kv head][block size / 8][value size][8]
//         and float32 scales [block][kv head][block size] of keys and of values: one per token and head;
//         keys are rotated, see kernels/rotate_head.h
//   int4  k [block][kv head][head size / 32][19 · block size]
//         v [block][kv head][value size / 32][19 · block size]
//         and scales as for int8; see kernels/nibbles_as_int8.h
//
// Head sizes that are not a multiple of the group are padded with zeros.  Values past the end of a sequence
// are arbitrary, possibly NaN, also within its last group.
//
// The method is split-KV attention (Flash-Decoding) with fixed splits of kSplit positions, counted from
// position 0.  A split yields three results per query row: the maximum of the scores, the sum of exponentials
// and the weighted values.  Splits are merged in order.  Split boundaries and orders of summation depend only
// on the row.  A token's result therefore has the same bits in a prefill chunk, in a decode step, alone or in
// a batch, on any number of threads.
#pragma once

#include <atomic>

#include "attention/entry_places.h"
#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kSplit = 256;    // positions of a split; a multiple of every block size
constexpr int64_t kKeyLanes = 16;  // block sizes are multiples of this
constexpr int64_t kMostTileRows = 64;
constexpr int64_t kMostGroup = int64_t{1} << 20;  // query heads of a kv head
constexpr int64_t kNibbleGroup = 32;              // elements of an int4 cache that share a multiplier
constexpr int64_t kNibbleBytes = 19;              // bytes of such a group at one position
constexpr int64_t kMostNibbleHead = 1024;         // elements of a key or value in an int4 cache
constexpr int64_t kLatentBatch = 32;  // latents that are rearranged together: their rows stay in the L1 cache
constexpr int64_t kLatentScales = 2 * sizeof(float);  // bytes at the end of a row of an int8 cache of latents
constexpr int64_t kMostSpan = int64_t{1} << 24;       // positions of a block that block_attention chooses

enum class CacheType : int32_t { f32 = 0, bf16 = 1, f16 = 2, i8 = 3 };

constexpr int64_t size_of(CacheType type) {
  return type == CacheType::f32 ? 4 : type == CacheType::i8 ? 1 : 2;
}
// Group size: dimensions of a key, or positions of values, that are adjacent in memory.
constexpr int64_t group_of(CacheType type) {
  return type == CacheType::bf16 ? 4 : type == CacheType::i8 ? 8 : 1;
}

// Elements of a row of latents; those of an int8 cache are bytes and include the scales.
constexpr int64_t latent_width(CacheType type, int64_t size) {
  return type == CacheType::i8 ? size + kLatentScales : size;
}

struct KvWriteArgs {
  Rows k, v;  // [tokens][kv_heads · head size]
  void* k_cache = nullptr;
  void* v_cache = nullptr;
  float* k_scales = nullptr;  // for int8 and int4 caches
  float* v_scales = nullptr;
  CacheType cache_type = CacheType::f32;
  bool nibbles = false;            // an int4 cache: cache_type is i8
  const int64_t* slots = nullptr;  // [tokens]: block · block_size + offset; negative: do not write
  int64_t tokens = 0, kv_heads = 0, head_size = 0, value_size = 0, block_size = 0;
};

// Writes new latents to a cache of [block][block size][rank + rope size].  A row of an int8 cache is
//
//   rank integers of the latent, rope size integers of the rotated key, two float32 scales
//
// in this order, without padding.
struct LatentWriteArgs {
  Rows latent, rope;  // [tokens][rank], [tokens][rope size]
  void* cache = nullptr;
  CacheType cache_type = CacheType::f32;
  const int64_t* slots = nullptr;  // see KvWriteArgs
  int64_t tokens = 0, rank = 0, rope_size = 0;
};

// Consecutive tokens that attend to the same positions: the new tokens of a sequence, or a single token with
// positions or blocks of its own.
struct SequencePart {
  int64_t first_token, tokens;
  int64_t length;            // positions, the tokens' own included
  const int32_t* blocks;     // cache blocks of the positions in order
  const int32_t* positions;  // [length] of a single token, in ascending order; nullptr: 0 … length − 1
  int64_t end;               // one past the last position that the single token may attend to
  int64_t kv_head = -1;      // the only kv head that attends; negative: all
  // Nonnegative: a single token attends to so many last positions, then to compressed entries.  `positions`
  // are then the numbers of the entries; nullptr: 0, 1, …
  int64_t recent = -1;
};

// Query heads that read the same kv head.  Ranks may share out the heads of a group: query head h reads kv
// head (h + skipped) / size.
struct HeadGroups {
  int64_t size = 0;     // of a whole group; 0: q_heads / kv_heads, and none is skipped
  int64_t skipped = 0;  // heads of the first group that another rank has

  bool operator==(const HeadGroups& o) const { return size == o.size && skipped == o.skipped; }
  bool fit(int64_t q_heads, int64_t kv_heads) const {
    if (size == 0) return skipped == 0 && q_heads % kv_heads == 0;
    return size > 0 && size <= kMostGroup && skipped >= 0 && skipped < size && q_heads > 0 &&
           ceil_div(skipped + q_heads, size) == kv_heads;
  }
};

// Arguments with a number for each query head.  An instruction has a view of the same name for each, which is
// checked and bound as this list says.
//
//   slopes: ALiBi: s ← s + slope · (key position − query position)
#define ARMLLM_PER_HEAD(ARGUMENT) ARGUMENT(slopes)

struct AttentionArgs {
  Rows q, out;  // [tokens][q_heads · head size], [tokens][q_heads · value size]
  const void* k_cache = nullptr;
  const void* v_cache = nullptr;
  const float* k_scales = nullptr;  // for int8 and int4 caches
  const float* v_scales = nullptr;
  CacheType cache_type = CacheType::f32;
  bool nibbles = false;       // an int4 cache: cache_type is i8, which its splits are expanded to
  bool latent = false;        // k_cache is [block][block size][head size]; a value is the first part of a key
  bool int8_latents = false;  // rows as in LatentWriteArgs: cache_type is bf16, which they are expanded to
  const void* entries = nullptr;  // of a latent cache: compressed entries [block][per block][head size]
  EntryPlaces places;             // of the entries
  const int32_t* block_table = nullptr;  // [sequences][block_table_stride]
  int64_t block_table_stride = 0;
  const int32_t* query_start = nullptr;  // [sequences + 1] first packed token of each sequence
  const int32_t* seq_lens = nullptr;     // [sequences] positions in the cache, including this step's tokens
  int64_t sequences = 0, tokens = 0;
  const SequencePart* parts = nullptr;  // [sequences] instead of query_start, seq_lens and the block table
  bool single_tokens = false;           // true if each part has one token, whose keys are then prefetched
  int64_t q_heads = 0, kv_heads = 0, head_size = 0, value_size = 0, block_size = 0;
  HeadGroups groups;
  float scale = 1.0f;
  int64_t window = 0;  // > 0: a query at position p sees only p − window + 1 … p
  int64_t ahead = 0;   // a query at position p also sees p + 1 … p + ahead, as far as its sequence goes
  const int64_t* later = nullptr;  // [tokens] like `ahead`, of each token; the larger one counts
  float softcap = 0.0f;            // > 0: s ← softcap · tanh(s / softcap)
  // Extra logits that enter the softmax sum but carry no value: [q_heads], or such rows of each token.
  const float* sinks = nullptr;
  int64_t sink_stride = 0;  // from one token's row to the next; 0: the same for all tokens
#define ARGUMENT(name) const float* name = nullptr;  // [q_heads]
  ARMLLM_PER_HEAD(ARGUMENT)
#undef ARGUMENT
  // Learned bias of distance: s ← s + Σᵣ relative[token][head][r] · profiles[r][extent − 1 − distance] for
  // distances below the extent.
  const float* relative = nullptr;  // [tokens][q_heads][rank]; tokens are relative_stride apart
  const float* profiles = nullptr;  // [rank][extent]
  int64_t relative_stride = 0, rank = 0, extent = 0;
  // [q_heads][2 · reach + 1] learned bias of distance to both sides: s ← s + biases[head][reach + d] for a
  // key d positions after the query, and the first or the last one beyond the reach.
  const float* biases = nullptr;
  int64_t reach = 0;
  int64_t threads = 1;      // size of the thread team: affects tile sizes, never bits
  int64_t max_seq_len = 0;  // upper bound of seq_lens; determines the scratch size
  void* scratch = nullptr;
};

// True if scores depend on the distance of a key from the query.
inline bool adds_bias(const AttentionArgs& a) {
  return a.slopes != nullptr || a.relative != nullptr || a.biases != nullptr;
}

// The split that is attended to next.  It is prefetched while the current split is attended to.
struct SplitAhead {
  const int32_t* blocks = nullptr;  // block table from the first position of the split on
  int64_t begin = 0, end = 0;       // visible positions, from the split's first; none: unknown
  int64_t kv_head = 0;

  bool empty() const { return begin >= end; }
};

// Consecutive query rows that share one kv head, and one split of keys.  Buffers of `rows` rows have room for
// `rows` rounded up to an even number.
struct AttentionTile {
  void* query = nullptr;  // rows · query_bytes(head size), in the format of load_query
  int64_t rows = 0;
  const int64_t* first = nullptr;  // [rows] first visible position
  const int64_t* last = nullptr;   // [rows] one past the last visible position; never past the sequence
  const float* slopes = nullptr;   // [rows] slope of each row's head; nullptr: no bias
  const float* const* relative = nullptr;  // [rows] factors of the profiles; nullptr: no bias
  const float* const* biases = nullptr;    // [rows] biases of each row's head; nullptr: no bias
  const int64_t* position = nullptr;       // [rows] of each row's token; nullptr: one before `last`
  int64_t split_begin = 0;                 // the split is split_begin … split_begin + kSplit − 1
  const int32_t* blocks = nullptr;         // block table of the sequence
  // Of latents: the positions that are attended to, or −1 − n for entry n; nullptr: all positions in order.
  const int32_t* positions = nullptr;
  int64_t kv_head = 0;
  // Prefetching, so that kernels do not wait for memory.
  bool is_near = false;  // true if the split was prefetched as `next` of the previous one
  SplitAhead next;
  // Results.  A row that sees no position of the split gets sum 0 and values 0.
  float* maximum = nullptr;  // [rows]
  float* sum = nullptr;      // [rows]
  float* values = nullptr;   // [rows][value_stride(value_size)], unnormalized
  // Scratch.
  float* scores = nullptr;  // [rows][kScoreStride]
  void* weights = nullptr;  // rows · kWeightBytes: softmax weights in fewer than 32 bits
  float* panel = nullptr;   // panel_floats(head_size)
  char* edges = nullptr;    // edge_bytes(value_size)
  char* split = nullptr;    // split_bytes(args)
};

constexpr int64_t kChunk = 64;                 // positions that are converted to float32 together
constexpr int64_t kScoreStride = kSplit + 16;  // a power of two would put all rows in the same cache sets
constexpr int64_t kWeightBytes = 2 * kSplit + 64;
constexpr float kNothing = -3.402823466e+38f;  // maximum without scores; finite: differences are not NaN
inline int64_t value_stride(int64_t value_size) { return round_up(value_size, 16); }
inline int64_t query_bytes(int64_t head_size) { return round_up(head_size, 16) * 4 + 64; }
inline int64_t panel_floats(int64_t head_size) {
  return kChunk * (head_size < kChunk ? kChunk : round_up(head_size, 16));
}
// Room for two groups of values and the scales of a split.
inline int64_t edge_bytes(int64_t value_size) {
  return round_up(16 * value_size, 64) + 2 * kSplit * static_cast<int64_t>(sizeof(float));
}

// Room for a split of latents or of an int4 cache, rearranged as keys and values.
inline int64_t split_bytes(const AttentionArgs& a) {
  if (a.nibbles) return kSplit * (a.head_size + a.value_size + 2 * static_cast<int64_t>(sizeof(float))) + 64;
  const int64_t row = round_up(a.head_size, 16) * size_of(a.cache_type);
  return a.latent ? kSplit * (row + a.value_size * size_of(a.cache_type)) + 64 +
                        (a.int8_latents ? kLatentBatch * row : 0)
                  : 0;
}

struct AttentionKernels {
  int64_t (*tile_rows)(const AttentionArgs& args);  // best number of query rows of a tile; even
  // Writes the query of one token and head to row `row` of tile.query, in the format of the cache type's
  // products.
  void (*load_query)(const AttentionArgs& args, int64_t token, int64_t head, const AttentionTile& tile,
                     int64_t row);
  void (*attend)(const AttentionArgs& args, const AttentionTile& tile);
  // Merges the results (m, s, v) of a split into the results of `rows` rows, initially (kNothing, 0, zeros).
  void (*merge)(float* maximum, float* sum, float* values, const float* m, const float* s, const float* v,
                int64_t value_size, int64_t rows);
  // Adds the sink to the sum, divides by the sum and rounds to the output.
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
  void abandon() override { taken_ = over_ = 0; }

 private:
  // In a decode step, each tile takes pieces of work until none is left.  taken_: pieces taken so far.
  // over_: tiles that have finished.
  std::atomic<int64_t> taken_{0}, over_{0};
};

}  // namespace armllm
