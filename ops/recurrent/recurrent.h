// Recurrent layers over packed tokens of many sequences, each with a state of its own: causal convolution,
// gated delta rule, selective scan.
#pragma once

#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kMostTaps = 8;           // of a causal convolution
constexpr int64_t kMostKeyChannels = 512;  // dk of a gated delta rule: 16 columns of its state stay in L1

constexpr int64_t kMostStates = 256;   // of a channel of a selective scan
constexpr int64_t kScanChannels = 16;  // per tile of a selective scan: one vector

// The sequences of a step and the slots of their states.
struct StateSlots {
  const int64_t* slots = nullptr;        // [sequences]
  const int32_t* query_start = nullptr;  // [sequences + 1]
  const int32_t* seq_lens = nullptr;     // [sequences], including the new tokens
  // [tokens]: the slot to which the state after a token is also written, −1: to none.  Null: no slots.
  const int64_t* saves = nullptr;
  int64_t sequences = 0;

  int64_t first(int64_t sequence) const { return query_start[sequence]; }
  int64_t tokens(int64_t sequence) const { return query_start[sequence + 1] - query_start[sequence]; }
  // True if nothing came before: the content of the slot is of an earlier sequence.
  bool is_new(int64_t sequence) const { return seq_lens[sequence] == tokens(sequence); }
};

struct CausalConvArgs {
  Rows x;                         // [tokens][channels]
  const float* weight = nullptr;  // [taps][channels]
  const float* bias = nullptr;    // [channels], or null
  char* state = nullptr;          // [slots][taps - 1][channels], in the dtype of x
  Rows out;
  StateSlots steps;
  int64_t tokens = 0, channels = 0, taps = 0;
  bool silu = false;
};

// Rows of one sequence and some of its channels.
struct ConvPart {
  const char* const* rows = nullptr;  // taps − 1 rows before the first token, and one of each token
  char* out = nullptr;
  int64_t out_stride = 0, tokens = 0;  // in elements
  const float* weight = nullptr;
  const float* bias = nullptr;
  int64_t channels = 0, weight_stride = 0, taps = 0;
  DType type = DType::f32;
  bool silu = false;
};

struct DeltaRuleArgs {
  Rows q, k;              // [tokens][key_heads · key_size]
  Rows v;                 // [tokens][value_heads · value_size]
  Rows gate;              // [tokens][value_heads], or [tokens][value_heads · key_size]; logarithms
  Rows beta;              // [tokens][value_heads]
  char* state = nullptr;  // [slots][value_heads][key_size][value_size], in float32 or bfloat16
  Rows out;               // [tokens][value_heads · value_size]
  StateSlots steps;
  int64_t tokens = 0, key_heads = 0, value_heads = 0, key_size = 0, value_size = 0;
  DType state_type = DType::f32;
  bool gate_per_channel = false;
  bool normalize = false;     // divides q and k by their lengths
  bool delta = true;          // false: values are added as they are, as in Mamba-2
  float scale = 1.0f;         // of q
  float* prepared = nullptr;  // scratch, see DeltaRule

  int64_t gates() const { return gate_per_channel ? key_size : 1; }
};

// One head of one sequence, and some columns of its state.
struct DeltaPart {
  const float* q = nullptr;  // [key_size] of the first token
  const float* k = nullptr;
  const float* qk = nullptr;     // product of q and k, one float
  const float* decay = nullptr;  // [gates] factors
  int64_t key_stride = 0,
          decay_stride = 0;  // floats from one token to the next, of q, k and qk, and of decay
  const char* beta = nullptr;
  const char* v = nullptr;
  char* out = nullptr;
  int64_t beta_stride = 0, v_stride = 0, out_stride = 0;  // bytes from one token to the next
  DType type = DType::f32, beta_type = DType::f32, state_type = DType::f32;
  char* state = nullptr;           // rows of value_size elements
  const int64_t* saves = nullptr;  // of the first token, see StateSlots
  char* slots = nullptr;           // the state of slot 0, and elements from one slot to the next
  int64_t slot_stride = 0;
  int64_t tokens = 0, key_size = 0, value_size = 0, columns = 0;
  bool decay_per_channel = false, is_new = false, delta = true;
};

struct SelectiveScanArgs {
  Rows x, dt;                // [tokens][channels]
  const float* a = nullptr;  // [states][channels]
  Rows b, c;                 // [tokens][states], or null: ones
  char* state = nullptr;     // [slots][states][channels], in float32 or bfloat16
  Rows out;                  // [tokens][channels]
  StateSlots steps;
  int64_t tokens = 0, channels = 0, states = 0;
  DType state_type = DType::f32;
  bool normalize = false;  // multiplies x by √(1 − decay²), except in the first token of a sequence
};

// One sequence and up to kScanChannels channels; rows begin at its first token and at its first channel.
struct ScanPart {
  Rows x, dt, b, c, out;
  const float* a = nullptr;
  char* state = nullptr;
  const int64_t* saves = nullptr;  // of the first token, see StateSlots
  char* slots = nullptr;           // the state of slot 0, and elements from one slot to the next
  int64_t slot_stride = 0;
  int64_t stride = 0;  // elements from one state of a channel to the next, in `a` and in `state`
  int64_t tokens = 0, states = 0;
  int channels = 0;
  DType state_type = DType::f32;
  bool is_new = false, normalize = false;
};

struct RecurrentKernels {
  void (*convolve)(const ConvPart& part);
  // Writes scaled q, k and their product of one token and head to `prepared`.
  void (*prepare)(const DeltaRuleArgs& args, int64_t token, int64_t head, float* q, float* k, float* qk);
  // Writes e^gate.
  void (*decay)(const void* gate, DType type, int64_t n, float* out);
  // Runs up to delta_columns() columns through all tokens of the part.
  void (*delta_rule)(const DeltaPart& part);
  int64_t delta_columns;
  void (*scan)(const ScanPart& part);
};

// Phase 0 computes the outputs, phase 1 the new states: outputs of several tiles read the old ones.  Saved
// states come before a sequence's own, which they read.
class CausalConv final : public TaskSet {
 public:
  CausalConvArgs args;
  int phases() const override { return 2; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

// Phase 0 prepares keys, queries and decays, phase 1 runs the recurrence.
class DeltaRule final : public TaskSet {
 public:
  DeltaRuleArgs args;
  int phases() const override { return 2; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
  // Floats that `args.prepared` needs.
  int64_t scratch_floats() const;

 private:
  float* keys_of(int64_t token, int64_t head) const;
  float* decays_of(int64_t token, int64_t head) const;
};

class SelectiveScan final : public TaskSet {
 public:
  SelectiveScanArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

}  // namespace armllm
