// Compression of windows of tokens to entries of a paged cache.
//
// The entry of a window is Σ softmax(gate + bias) · kv over its tokens, channel by channel, then an RMS norm
// and a rotation of its last channels.  With two parts, kv and gate have two values of each channel: an entry
// sums the first part of the tokens of the window before, and the second part of its own.
#pragma once

#include "attention/entry_places.h"
#include "recurrent/recurrent.h"
#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kMostWindow = 1 << 16;  // tokens that an entry sums

struct CompressArgs {
  Rows kv, gate;                  // [tokens][parts · size], of one dtype
  const float* bias = nullptr;    // [rate][parts · size], added to the gates
  const float* weight = nullptr;  // [size], of the norm
  Rows cos, sin;                  // [tokens][pairs]: rotation of the entry that a token completes
  char* state = nullptr;          // [slots][span - 1][2][parts · size] in the dtype of kv: a ring of rows
  char* entries = nullptr;        // [block][per block][size]
  DType entry_type = DType::f32;
  EntryPlaces places;
  const int32_t* block_table = nullptr;  // [sequences][block_table_stride]
  int64_t block_table_stride = 0;
  StateSlots steps;
  int64_t tokens = 0, parts = 0, size = 0, pairs = 0;
  float eps = 0.0f;

  int64_t rate() const { return places.rate; }
  int64_t span() const { return places.rate * parts; }  // tokens that an entry sums
  int64_t width() const { return parts * size; }
};

// One entry.
struct CompressPart {
  const char* const* kv = nullptr;  // [rows], of the part that counts
  const char* const* gate = nullptr;
  const float* const* bias = nullptr;
  const float* weight = nullptr;
  const char *cos = nullptr, *sin = nullptr;
  char* out = nullptr;
  float* pooled = nullptr;  // scratch [size]
  int64_t rows = 0, size = 0, pairs = 0;
  DType type = DType::f32, cos_type = DType::f32, sin_type = DType::f32, out_type = DType::f32;
  float eps = 0.0f;
};

struct CompressKernels {
  void (*compress)(const CompressPart& part);
};

// Phase 0 writes the entries, phase 1 the new states: entries read the old ones.  Saved states come before a
// sequence's own, which they read.
class CompressWindows final : public TaskSet {
 public:
  CompressArgs args;
  int phases() const override { return 2; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
