// The registered op causal_conv.
#include <array>
#include <vector>

#include "dispatch/variants.h"
#include "recurrent/recurrent.h"
#include "recurrent/state_slots.h"

namespace armllm {
namespace {

constexpr int64_t kTokens = 32;     // per tile
constexpr int64_t kChannels = 512;  // per tile

Tensor causal_conv(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor state, Tensor state_slots,
                   Tensor query_start, Tensor seq_lens, bool silu, std::optional<Tensor> save_slots) {
  STD_TORCH_CHECK(x.dim() == 2, "x must have the shape (tokens, channels), not ", shape_of(x));
  const int64_t tokens = x.size(0), channels = x.size(1);
  STD_TORCH_CHECK(type_of(weight) == ScalarType::Float && weight.dim() == 2 && weight.size(1) == channels &&
                      weight.size(0) >= 1 && weight.size(0) <= kMostTaps,
                  "weight must be float32 of shape (taps, ", channels, ") with 1 to ", kMostTaps,
                  " taps, not of shape ", shape_of(weight));
  const int64_t taps = weight.size(0);
  if (bias)
    STD_TORCH_CHECK(type_of(*bias) == ScalarType::Float && bias->dim() == 1 && bias->size(0) == channels,
                    "bias must be float32 of shape (", channels, "), not of shape ", shape_of(*bias));
  STD_TORCH_CHECK(type_of(state) == type_of(x) && state.dim() == 3 && state.size(1) == taps - 1 &&
                      state.size(2) == channels && state.is_contiguous(),
                  "state must be contiguous, of the dtype of x and of shape (slots, ", taps - 1, ", ",
                  channels, "), not of shape ", shape_of(state));
  const StepTensors steps =
      check_steps(state_slots, query_start, seq_lens, save_slots, tokens, state.size(0));
  x = as_rows(x);
  weight = as_contiguous(weight);
  if (bias) bias = as_contiguous(*bias);
  Tensor out = new_tensor(x, {tokens, channels});

  CausalConv conv;
  CausalConvArgs& a = conv.args;
  a.x = rows_of(x, "x");
  a.weight = static_cast<const float*>(weight.data_ptr());
  a.bias = bias ? static_cast<const float*>(bias->data_ptr()) : nullptr;
  a.state = static_cast<char*>(state.data_ptr());
  a.out = rows_of(out, "out");
  a.steps = steps.view;
  a.tokens = tokens;
  a.channels = channels;
  a.taps = taps;
  a.silu = silu;
  if (tokens > 0 && channels > 0) run(conv);
  return out;
}

// Returns the row before or among a sequence's new tokens: −1 is the last row of its state.  Null: zeros.
const char* row_at(const CausalConvArgs& a, int64_t sequence, int64_t token) {
  if (token >= 0) return a.x.row(a.steps.first(sequence) + token);
  if (a.steps.is_new(sequence)) return nullptr;
  const int64_t row = a.steps.slots[sequence] * (a.taps - 1) + a.taps - 1 + token;
  return a.state + row * a.channels * size_of(a.x.type);
}

// Writes the last rows of the first `tokens` new tokens to a slot.  In the sequence's own slot they move to
// the front row by row, so that each is read before it is written.
void write_state(const CausalConvArgs& a, int64_t sequence, int64_t tokens, int64_t slot) {
  const int64_t bytes = a.channels * size_of(a.x.type);
  char* state = a.state + slot * (a.taps - 1) * bytes;
  for (int64_t row = 0; row < a.taps - 1; ++row) {
    const char* from = row_at(a, sequence, tokens - (a.taps - 1) + row);
    if (from)
      std::memmove(state + row * bytes, from, bytes);
    else
      std::memset(state + row * bytes, 0, bytes);
  }
}

void update_states(const CausalConvArgs& a, int64_t sequence) {
  const int64_t tokens = a.steps.tokens(sequence);
  const int64_t* saves = a.steps.saves ? a.steps.saves + a.steps.first(sequence) : nullptr;
  for (int64_t token = 0; saves && token < tokens; ++token)
    if (saves[token] >= 0) write_state(a, sequence, token + 1, saves[token]);
  if (tokens > 0) write_state(a, sequence, tokens, a.steps.slots[sequence]);
}

}  // namespace

int64_t CausalConv::tiles(int phase) const {
  if (phase == 1) return args.steps.sequences;
  int64_t blocks = 0;
  for (int64_t sequence = 0; sequence < args.steps.sequences; ++sequence)
    blocks += ceil_div(args.steps.tokens(sequence), kTokens);
  return blocks * ceil_div(args.channels, kChannels);
}

void CausalConv::tile(int phase, int64_t index) {
  if (phase == 1) return update_states(args, index);
  const int64_t parts = ceil_div(args.channels, kChannels), first_channel = index % parts * kChannels;
  int64_t block = index / parts, sequence = 0;
  for (;; ++sequence) {
    const int64_t blocks = ceil_div(args.steps.tokens(sequence), kTokens);
    if (block < blocks) break;
    block -= blocks;
  }
  const int64_t first = block * kTokens, left = args.steps.tokens(sequence) - first;
  const int64_t size = size_of(args.x.type), offset = first_channel * size;
  std::array<const char*, kTokens + kMostTaps> rows{};
  ConvPart part;
  part.tokens = left < kTokens ? left : kTokens;
  for (int64_t i = 0; i < part.tokens + args.taps - 1; ++i) {
    const char* row = row_at(args, sequence, first + i - (args.taps - 1));
    rows[i] = row ? row + offset : nullptr;
  }
  part.rows = rows.data();
  part.out = args.out.row(args.steps.first(sequence) + first) + offset;
  part.out_stride = args.out.stride;
  part.weight = args.weight + first_channel;
  part.weight_stride = args.channels;
  part.bias = args.bias ? args.bias + first_channel : nullptr;
  part.channels = args.channels - first_channel < kChannels ? args.channels - first_channel : kChannels;
  part.taps = args.taps;
  part.type = args.x.type;
  part.silu = args.silu;
  variant().recurrent->convolve(part);
}

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("causal_conv", TORCH_BOX(&armllm::causal_conv)); }
