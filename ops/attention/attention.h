// Attention of packed tokens against a paged cache of keys and values.
//
// Key blocks are stored transposed, [block][kv head][head size][block size], so that one register holds one
// dimension of consecutive keys; value blocks are [block][kv head][block size][value size].
//
// The keys of a sequence are taken in fixed splits of kSplit positions, counted from position 0.  A split gives
// for each query row its maximum, its sum of exponentials and its weighted values; splits are merged in order.
// Both the split borders and every order of summation depend on the row alone, so that a token's result has the
// same bits in a prefill chunk, in a decode step, alone or in a batch, on any number of threads.
#pragma once

#include "common/tasks.h"
#include "common/types.h"

namespace armllm {

constexpr int64_t kSplit = 256;    // positions; a multiple of every block size
constexpr int64_t kKeyLanes = 16;  // block sizes are multiples of it

struct KvWriteArgs {
  Rows k, v;  // [tokens][kv_heads · head size]
  void* k_cache = nullptr;
  void* v_cache = nullptr;
  DType cache_type = DType::f32;
  const int64_t* slots = nullptr;  // [tokens]: block · block_size + offset; negative: not written
  int64_t tokens = 0, kv_heads = 0, head_size = 0, value_size = 0, block_size = 0;
};

struct AttentionArgs {
  Rows q, out;  // [tokens][q_heads · head size], [tokens][q_heads · value size]
  const void* k_cache = nullptr;
  const void* v_cache = nullptr;
  DType cache_type = DType::f32;
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
  int64_t threads = 1;           // that will work on it: sizes tiles, decides no bit
  int64_t max_seq_len = 0;       // upper bound of seq_lens, for scratch
  void* scratch = nullptr;
};

// A run of query rows that share one kv head, against one split of keys.
struct AttentionTile {
  const float* q = nullptr;  // [rows][head_size], scaled
  int64_t rows = 0;
  const int64_t* first = nullptr;   // [rows] first visible position
  const int64_t* last = nullptr;    // [rows] one past the last visible position, never past the sequence
  int64_t split_begin = 0;          // the split is split_begin … split_begin + kSplit − 1
  const int32_t* blocks = nullptr;  // block table of the sequence
  int64_t kv_head = 0;
  // results; a row that sees nothing of the split gets sum 0 and values 0
  float* maximum = nullptr;  // [rows]
  float* sum = nullptr;      // [rows]
  float* values = nullptr;   // [rows][value_stride(value_size)], unnormalised
  // scratch
  float* scores = nullptr;  // [rows][kScoreStride]
  float* panel = nullptr;   // panel_floats(head_size)
};

constexpr int64_t kChunk = 64;                 // positions that are converted to float32 at a time
constexpr int64_t kScoreStride = kSplit + 16;  // not a power of two: rows would share cache sets
constexpr float kNothing = -3.402823466e+38f;  // maximum of no scores: finite, so that differences are no NaN
inline int64_t value_stride(int64_t value_size) { return round_up(value_size, 16); }
inline int64_t panel_floats(int64_t head_size) { return kChunk * (head_size < kChunk ? kChunk : head_size); }

struct AttentionKernels {
  int64_t tile_rows;  // best number of query rows of a tile
  // q[i] = float(args.q) · scale of one token and head.
  void (*load_query)(const AttentionArgs& args, int64_t token, int64_t head, float* q);
  void (*attend)(const AttentionArgs& args, const AttentionTile& tile);
  // Adds a split's result (m, s, v) to a row's, which starts as (kNothing, 0, zeros).
  void (*merge)(float* maximum, float* sum, float* values, float m, float s, const float* v,
                int64_t value_size);
  // Takes in the sink, divides by the sum and rounds to the output.
  void (*finish)(const AttentionArgs& args, int64_t token, int64_t head, float maximum, float sum,
                 const float* values);
  void (*write)(const KvWriteArgs& args, int64_t token, int64_t kv_head);
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
};

}  // namespace armllm
