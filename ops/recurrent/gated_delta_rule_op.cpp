// The registered op gated_delta_rule.
#include "dispatch/variants.h"
#include "recurrent/recurrent.h"
#include "recurrent/state_slots.h"

namespace armllm {
namespace {

constexpr int64_t kPreparedTokens = 16;  // per tile of phase 0

// Returns rows of tokens of a tensor (tokens, …).
Rows token_rows(Tensor& t, const char* name) {
  const int64_t tokens = t.size(0), width = tokens == 0 ? 0 : t.numel() / tokens;
  int64_t expected = 1;
  bool whole = true;
  for (int64_t d = t.dim() - 1; d > 0; --d) {
    whole = whole && (t.size(d) <= 1 || t.stride(d) == expected);
    expected *= t.size(d);
  }
  if (!whole) t = as_contiguous(t);
  return Rows{t.data_ptr(), tokens > 1 ? t.stride(0) : width, dtype_of(t, name)};
}

Tensor gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor state,
                        Tensor state_slots, Tensor query_start, Tensor seq_lens, double scale, bool normalize,
                        bool delta, std::optional<Tensor> save_slots) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3,
                  "q, k and v must have the shape (tokens, heads, size), not ", shape_of(q), ", ",
                  shape_of(k), " and ", shape_of(v));
  DeltaRule rule;
  DeltaRuleArgs& a = rule.args;
  a.tokens = q.size(0);
  a.key_heads = k.size(1);
  a.key_size = k.size(2);
  a.value_heads = v.size(1);
  a.value_size = v.size(2);
  STD_TORCH_CHECK(type_of(q) == type_of(k), "q and k must have one dtype");
  STD_TORCH_CHECK(shape_of(q) == shape_of(k), "q and k must have the same shape, not ", shape_of(q), " and ",
                  shape_of(k));
  STD_TORCH_CHECK(v.size(0) == a.tokens, "v has ", v.size(0), " tokens, and q has ", a.tokens);
  STD_TORCH_CHECK(a.key_heads > 0 && a.value_heads > 0 && a.value_heads % a.key_heads == 0,
                  "the heads of v, ", a.value_heads, ", must be a multiple of those of k, ", a.key_heads);
  STD_TORCH_CHECK(a.key_size > 0 && a.key_size <= kMostKeyChannels && a.value_size > 0,
                  "the heads of k have ", a.key_size, " channels, and those of v ", a.value_size, "; 1 to ",
                  kMostKeyChannels, " and at least 1 are expected");
  a.gate_per_channel = gate.dim() == 3;
  STD_TORCH_CHECK(gate.dim() >= 2 && gate.dim() <= 3 && gate.size(0) == a.tokens &&
                      gate.size(1) == a.value_heads && (!a.gate_per_channel || gate.size(2) == a.key_size),
                  "gate must have the shape (", a.tokens, ", ", a.value_heads, ") or (", a.tokens, ", ",
                  a.value_heads, ", ", a.key_size, "), not ", shape_of(gate));
  STD_TORCH_CHECK(beta.dim() == 2 && beta.size(0) == a.tokens && beta.size(1) == a.value_heads,
                  "beta must have the shape (", a.tokens, ", ", a.value_heads, "), not ", shape_of(beta));
  STD_TORCH_CHECK(holds_states(state) && state.dim() == 4 && state.size(1) == a.value_heads &&
                      state.size(2) == a.key_size && state.size(3) == a.value_size && state.is_contiguous(),
                  "state must be contiguous float32 or bfloat16 of shape (slots, ", a.value_heads, ", ",
                  a.key_size, ", ", a.value_size, "), not of shape ", shape_of(state));
  const StepTensors steps =
      check_steps(state_slots, query_start, seq_lens, save_slots, a.tokens, state.size(0));
  Tensor out = new_tensor(v, {a.tokens, a.value_heads, a.value_size});
  a.q = token_rows(q, "q");
  a.k = token_rows(k, "k");
  a.v = token_rows(v, "v");
  a.gate = token_rows(gate, "gate");
  a.beta = token_rows(beta, "beta");
  a.out = token_rows(out, "out");
  a.state = static_cast<char*>(state.data_ptr());
  a.state_type = dtype_of(state, "state");
  a.steps = steps.view;
  a.scale = static_cast<float>(scale);
  a.normalize = normalize;
  a.delta = delta;
  if (a.tokens == 0) return out;
  const Scratch scratch(rule.scratch_floats() * 4);
  a.prepared = static_cast<float*>(scratch.data());
  run(rule);
  return out;
}

}  // namespace

// Prepared floats: of each token and key head q, k and their product, then of each token and value head its
// decays.
int64_t DeltaRule::scratch_floats() const {
  return args.tokens * (args.key_heads * (2 * args.key_size + 1) + args.value_heads * args.gates());
}

float* DeltaRule::keys_of(int64_t token, int64_t head) const {
  return args.prepared + (token * args.key_heads + head) * (2 * args.key_size + 1);
}

float* DeltaRule::decays_of(int64_t token, int64_t head) const {
  return keys_of(args.tokens, 0) + (token * args.value_heads + head) * args.gates();
}

int64_t DeltaRule::tiles(int phase) const {
  if (phase == 0) return ceil_div(args.tokens, kPreparedTokens);
  return args.steps.sequences * args.value_heads *
         ceil_div(args.value_size, variant().recurrent->delta_columns);
}

void DeltaRule::tile(int phase, int64_t index) {
  const RecurrentKernels& kernels = *variant().recurrent;
  if (phase == 0) {
    const int64_t first = index * kPreparedTokens, last = first + kPreparedTokens;
    for (int64_t token = first; token < last && token < args.tokens; ++token) {
      for (int64_t head = 0; head < args.key_heads; ++head) {
        float* q = keys_of(token, head);
        kernels.prepare(args, token, head, q, q + args.key_size, q + 2 * args.key_size);
      }
      kernels.decay(args.gate.row(token), args.gate.type, args.value_heads * args.gates(),
                    decays_of(token, 0));
    }
    return;
  }
  const int64_t parts = ceil_div(args.value_size, kernels.delta_columns),
                column = index % parts * kernels.delta_columns;
  const int64_t head = index / parts % args.value_heads, sequence = index / parts / args.value_heads;
  const int64_t first = args.steps.first(sequence);
  DeltaPart part;
  part.tokens = args.steps.tokens(sequence);
  if (part.tokens == 0) return;
  part.q = keys_of(first, head / (args.value_heads / args.key_heads));
  part.k = part.q + args.key_size;
  part.qk = part.k + args.key_size;
  part.key_stride = args.key_heads * (2 * args.key_size + 1);
  part.decay = decays_of(first, head);
  part.decay_stride = args.value_heads * args.gates();
  part.decay_per_channel = args.gate_per_channel;
  part.beta = args.beta.at(first, head);
  part.beta_type = args.beta.type;
  part.beta_stride = args.beta.stride * size_of(args.beta.type);
  part.type = args.v.type;
  part.v = args.v.at(first, head * args.value_size + column);
  part.v_stride = args.v.stride * size_of(args.v.type);
  part.out = args.out.at(first, head * args.value_size + column);
  part.out_stride = args.out.stride * size_of(args.out.type);
  const int64_t head_size = args.key_size * args.value_size, size = size_of(args.state_type);
  part.state_type = args.state_type;
  part.slots = args.state + (head * head_size + column) * size;
  part.slot_stride = args.value_heads * head_size;
  part.state = part.slots + args.steps.slots[sequence] * part.slot_stride * size;
  part.saves = args.steps.saves ? args.steps.saves + first : nullptr;
  part.key_size = args.key_size;
  part.value_size = args.value_size;
  part.columns =
      args.value_size - column < kernels.delta_columns ? args.value_size - column : kernels.delta_columns;
  part.is_new = args.steps.is_new(sequence);
  part.delta = args.delta;
  kernels.delta_rule(part);
}

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("gated_delta_rule", TORCH_BOX(&armllm::gated_delta_rule));
}
