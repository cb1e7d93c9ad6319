#include "plan/step_checks.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <optional>

#include "attention/check_args.h"
#include "recurrent/state_slots.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

const Tensor& input_of(const std::vector<Tensor>& inputs, int64_t index) {
  STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(inputs.size()), "plan: it reads input ", index,
                  ", but the number of inputs is ", inputs.size());
  const Tensor& tensor = inputs[index];
  STD_TORCH_CHECK(tensor.defined() && tensor.is_cpu(), "plan: input ", index,
                  " must be a tensor in the memory of the CPU");
  return tensor;
}

Tensor layer_of(const Tensor& all, int64_t layer, int64_t input) {
  STD_TORCH_CHECK(all.dim() >= 1 && layer < all.size(0), "plan: it uses layer ", layer, " of input ", input,
                  ", a cache of shape ", shape_of(all));
  return torch::stable::select(all, 0, layer);
}

std::optional<Tensor> scales_of(const std::vector<Tensor>& inputs, int64_t index, int64_t layer) {
  if (index < 0) return std::nullopt;
  return layer_of(input_of(inputs, index), layer, index);
}

struct Blocks {
  int64_t blocks, block_size;
};

Blocks check_latents(const CacheNeed& need, const std::vector<Tensor>& inputs) {
  const Tensor cache = layer_of(input_of(inputs, need.k), need.layer, need.k);
  const CacheType type = latent_type_of(cache);
  if (!need.or_int8) dtype_of(cache, "cache");
  const int64_t width = latent_width(type, need.head_size);
  STD_TORCH_CHECK(cache.dim() == 3 && cache.size(2) == width && cache.is_contiguous(),
                  "plan: a layer of the cache must be contiguous and have shape (blocks, block size, ", width,
                  "), not ", shape_of(cache));
  if (need.rate > 0) {
    const int64_t rows = EntryPlaces::most_per_block(need.block_size, need.rate);
    STD_TORCH_CHECK(cache.size(1) == rows, "plan: a cache of entries must have ", rows,
                    " rows for each block of ", need.block_size, " positions, not ", cache.size(1));
    return {cache.size(0), need.block_size};
  }
  const int64_t block_size = cache.size(1);
  STD_TORCH_CHECK(need.block_size == 0 || block_size == need.block_size, "plan: a cache beside entries has ",
                  "blocks of ", block_size, " positions, not of ", need.block_size);
  STD_TORCH_CHECK(block_size > 0 && block_size % kKeyLanes == 0 && kSplit % block_size == 0, "block size ",
                  block_size, " is not one of 16, 32, 64, 128, 256");
  return {cache.size(0), block_size};
}

Blocks check_keys(const CacheNeed& need, const std::vector<Tensor>& inputs) {
  const CacheShape cache =
      check_cache(layer_of(input_of(inputs, need.k), need.layer, need.k),
                  layer_of(input_of(inputs, need.v), need.layer, need.v), need.head_size,
                  scales_of(inputs, need.k_scales, need.layer), scales_of(inputs, need.v_scales, need.layer));
  const int64_t heads = need.q_heads > 0 ? need.q_heads : cache.kv_heads;
  STD_TORCH_CHECK(need.groups.fit(heads, cache.kv_heads) && cache.value_size <= need.v_room / heads &&
                      (need.q_heads > 0 || need.head_size <= need.k_room / heads),
                  "plan: it was made for another cache than one with ", cache.kv_heads, " heads of size ",
                  need.head_size, " and values of size ", cache.value_size);
  STD_TORCH_CHECK(need.span % cache.block_size == 0, "block attention chooses blocks of ", need.span,
                  " positions, which must be a multiple of the cache's block size, ", cache.block_size);
  STD_TORCH_CHECK(need.choosers == 0 || cache.kv_heads % need.choosers == 0, "plan: ", need.choosers,
                  " heads choose blocks for ", cache.kv_heads, " kv heads");
  return {cache.blocks, cache.block_size};
}

const Tensor& vector_of(const std::vector<Tensor>& inputs, int64_t index, ScalarType type, int64_t dims,
                        const char* name) {
  const Tensor& t = input_of(inputs, index);
  STD_TORCH_CHECK(type_of(t) == type && t.dim() == dims && t.is_contiguous(), "plan: input ", index, ", ",
                  name, ", must be contiguous ", type == ScalarType::Int ? "int32" : "int64", " with ", dims,
                  " dimensions, not of shape ", shape_of(t));
  return t;
}

void check_slots(const StepValues::Slots& s) {
  for (int64_t t = 0; t < s.tokens; ++t)
    STD_TORCH_CHECK(s.slots[t] < s.room, "slot ", s.slots[t], " of token ", t, " is past the cache of ",
                    s.room, " positions");
}

void check_values(const StepValues::Sequences& s) {
  AttentionArgs args = s.args;
  check_sequences(args, s.blocks);
}

AttentionArgs sequences_of(const CacheNeed& need, const std::vector<Tensor>& inputs, int64_t tokens,
                           int64_t block_size) {
  const Tensor& lengths = vector_of(inputs, need.seq_lens, ScalarType::Int, 1, "the lengths of sequences");
  const Tensor& starts = vector_of(inputs, need.query_start, ScalarType::Int, 1, "the starts of sequences");
  const Tensor& table = vector_of(inputs, need.block_table, ScalarType::Int, 2, "the block table");
  const int64_t sequences = lengths.numel();
  STD_TORCH_CHECK(starts.numel() == sequences + 1 && table.size(0) == sequences, "plan: ", sequences,
                  " lengths of sequences need ", sequences + 1,
                  " starts and as many rows of the block table, not ", starts.numel(), " and ",
                  table.size(0));
  AttentionArgs a;
  a.block_table = static_cast<const int32_t*>(table.data_ptr());
  a.block_table_stride = table.size(1);
  a.query_start = static_cast<const int32_t*>(starts.data_ptr());
  a.seq_lens = static_cast<const int32_t*>(lengths.data_ptr());
  a.sequences = sequences;
  a.tokens = tokens;
  a.block_size = block_size;
  a.window = need.window;
  a.max_seq_len = std::numeric_limits<int64_t>::max();
  return a;
}

void check_states(const StepValues::States& s) { check_state_slots(s.steps, s.tokens, s.slots); }

StepValues::States states_of(const StateNeed& need, const std::vector<Tensor>& inputs, int64_t tokens) {
  const Tensor& state = input_of(inputs, need.state);
  const DType type = dtype_of(state, "a state");
  bool fits = (type == need.type || (need.or_bf16 && type == DType::bf16)) && state.is_contiguous() &&
              state.dim() == static_cast<int64_t>(need.sizes.size()) + 2 && need.layer < state.size(0);
  for (size_t i = 0; fits && i < need.sizes.size(); ++i) fits = state.size(i + 2) == need.sizes[i];
  STD_TORCH_CHECK(fits, "plan: input ", need.state, ", states of shape ", shape_of(state),
                  ", is not what layer ", need.layer, " of its recurrent layers needs");
  const Tensor& slots = vector_of(inputs, need.state_slots, ScalarType::Long, 1, "the slots of states");
  const Tensor& lengths = vector_of(inputs, need.seq_lens, ScalarType::Int, 1, "the lengths of sequences");
  const Tensor& starts = vector_of(inputs, need.query_start, ScalarType::Int, 1, "the starts of sequences");
  StepValues::States found;
  found.steps.slots = static_cast<const int64_t*>(slots.data_ptr());
  found.steps.query_start = static_cast<const int32_t*>(starts.data_ptr());
  found.steps.seq_lens = static_cast<const int32_t*>(lengths.data_ptr());
  found.steps.sequences = slots.numel();
  found.steps.saves = saves_of(input_of(inputs, need.save_slots), tokens);
  STD_TORCH_CHECK(lengths.numel() == slots.numel() && starts.numel() == slots.numel() + 1,
                  "plan: ", slots.numel(),
                  " slots of states need as many lengths of sequences, and one start more, not ",
                  lengths.numel(), " and ", starts.numel());
  found.tokens = tokens;
  found.slots = state.size(1);
  return found;
}

bool alike(const StepValues::Sequences& a, const StepValues::Sequences& b) {
  const AttentionArgs &x = a.args, &y = b.args;
  return a.blocks == b.blocks && x.block_table == y.block_table && x.query_start == y.query_start &&
         x.seq_lens == y.seq_lens && x.block_size == y.block_size && x.window == y.window;
}

}  // namespace

void StepNeeds::add(const RowsNeed& need) {
  for (RowsNeed& known : rows) {
    if (known.input != need.input) continue;
    known.first = std::max(known.first, need.first);
    known.more = std::max(known.more, need.more);
    return;
  }
  rows.push_back(need);
}

void StepNeeds::add(const CacheNeed& need) {
  for (CacheNeed& known : caches) {
    if (!known.alike(need)) continue;
    known.layer = std::max(known.layer, need.layer);
    known.k_room = std::min(known.k_room, need.k_room);
    known.v_room = std::min(known.v_room, need.v_room);
    return;
  }
  caches.push_back(need);
}

void StepNeeds::add(const StateNeed& need) {
  for (StateNeed& known : states) {
    if (!known.alike(need)) continue;
    known.layer = std::max(known.layer, need.layer);
    return;
  }
  states.push_back(need);
}

void check_inputs(const StepNeeds& needs, const std::vector<Tensor>& inputs, int64_t tokens) {
  for (const RowsNeed& need : needs.rows) {
    const Tensor& tensor = input_of(inputs, need.input);
    const double wanted = tokens == 0 ? 0 : double(tokens - 1) * need.more + need.first;
    STD_TORCH_CHECK(tensor.numel() >= wanted && tensor.is_contiguous(), "plan: input ", need.input, " has ",
                    tensor.numel(), " elements for ", tokens, " tokens; it must be contiguous with ",
                    need.first, " for each token");
  }
}

StepValues check_step(const StepNeeds& needs, const std::vector<Tensor>& inputs, int64_t tokens) {
  StepValues values;
  for (const CacheNeed& need : needs.caches) {
    const Blocks cache = need.latent ? check_latents(need, inputs) : check_keys(need, inputs);
    if (need.slots >= 0) {
      const Tensor& slots = input_of(inputs, need.slots);
      STD_TORCH_CHECK(type_of(slots) == ScalarType::Long && slots.numel() >= tokens && slots.is_contiguous(),
                      "plan: input ", need.slots, " must be contiguous int64 with a slot for each of ",
                      tokens, " tokens");
      const StepValues::Slots given{static_cast<const int64_t*>(slots.data_ptr()), tokens,
                                    cache.blocks * cache.block_size};
      if (std::find(values.slots.begin(), values.slots.end(), given) != values.slots.end()) continue;
      check_slots(given);
      values.slots.push_back(given);
    } else {
      const StepValues::Sequences given{sequences_of(need, inputs, tokens, cache.block_size), cache.blocks};
      if (std::any_of(values.sequences.begin(), values.sequences.end(),
                      [&](const StepValues::Sequences& known) { return alike(known, given); }))
        continue;
      check_values(given);
      values.sequences.push_back(given);
    }
  }
  for (const StateNeed& need : needs.states) {
    const StepValues::States given = states_of(need, inputs, tokens);
    if (std::find(values.states.begin(), values.states.end(), given) != values.states.end()) continue;
    check_states(given);
    values.states.push_back(given);
  }
  return values;
}

bool are_valid(const StepValues& values) {
  try {
    std::for_each(values.slots.begin(), values.slots.end(), check_slots);
    std::for_each(values.sequences.begin(), values.sequences.end(), check_values);
    std::for_each(values.states.begin(), values.states.end(), check_states);
  } catch (const std::exception&) {  // the same check then reports it
    return false;
  }
  return true;
}

}  // namespace armllm
