// compress_windows
#include "attention/check_args.h"
#include "compress/compress.h"
#include "recurrent/state_slots.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

void compress_windows(Tensor kv, Tensor gate, Tensor bias, Tensor weight, Tensor cos, Tensor sin,
                      Tensor state, Tensor entries, Tensor block_table, Tensor state_slots,
                      Tensor query_start, Tensor seq_lens, int64_t block_size, double eps,
                      std::optional<Tensor> save_slots) {
  STD_TORCH_CHECK(type_of(weight) == ScalarType::Float && weight.dim() == 1 && weight.size(0) > 0,
                  "weight must be float32 of shape (size), not of shape ", shape_of(weight));
  const int64_t size = weight.size(0);
  STD_TORCH_CHECK(kv.dim() == 2 && (kv.size(1) == size || kv.size(1) == 2 * size),
                  "kv must have shape (tokens, size) or (tokens, 2 · size) with the size ", size,
                  " of weight, not ", shape_of(kv));
  const int64_t tokens = kv.size(0), width = kv.size(1), parts = width / size;
  STD_TORCH_CHECK(
      gate.dim() == 2 && gate.size(0) == tokens && gate.size(1) == width && type_of(gate) == type_of(kv),
      "gate must have the dtype and the shape ", shape_of(kv), " of kv, not ", shape_of(gate));
  STD_TORCH_CHECK(type_of(bias) == ScalarType::Float && bias.dim() == 2 && bias.size(1) == width &&
                      bias.size(0) > 0 && bias.size(0) * parts <= kMostWindow,
                  "bias must be float32 of shape (rate, ", width, "), and an entry may sum ", kMostWindow,
                  " tokens, not of shape ", shape_of(bias));
  const int64_t rate = bias.size(0);
  STD_TORCH_CHECK(cos.dim() == 2 && cos.size(0) == tokens && 2 * cos.size(1) <= size && sin.dim() == 2 &&
                      sin.size(0) == tokens && sin.size(1) == cos.size(1),
                  "cos and sin must have shape (", tokens, ", pairs) with at most ", size / 2, " pairs, not ",
                  shape_of(cos), " and ", shape_of(sin));
  STD_TORCH_CHECK(type_of(state) == type_of(kv) && state.dim() == 3 && state.size(1) == rate * parts - 1 &&
                      state.size(2) == 2 * width && state.is_contiguous(),
                  "state must be contiguous, of the dtype of kv and of shape (slots, ", rate * parts - 1,
                  ", ", 2 * width, "), not of shape ", shape_of(state));
  STD_TORCH_CHECK(block_size > 0, "block_size is ", block_size, "; it must be positive");
  const int64_t per_block = EntryPlaces::most_per_block(block_size, rate);
  STD_TORCH_CHECK(entries.dim() == 3 && entries.size(1) == per_block && entries.size(2) == size &&
                      entries.is_contiguous(),
                  "entries must be contiguous of shape (blocks, ", per_block, ", ", size, ") for blocks of ",
                  block_size, " positions, not of shape ", shape_of(entries));
  const StepTensors steps =
      check_steps(state_slots, query_start, seq_lens, save_slots, tokens, state.size(0));
  block_table = int32_table(block_table, steps.view.sequences);
  AttentionArgs places;
  set_sequences(places, block_table, steps.query_start, steps.seq_lens);
  places.tokens = tokens;
  places.block_size = block_size;
  places.max_seq_len = std::numeric_limits<int64_t>::max();
  check_sequences(places, entries.size(0));
  kv = as_rows(kv), gate = as_rows(gate), cos = as_rows(cos), sin = as_rows(sin);
  bias = as_contiguous(bias), weight = as_contiguous(weight);

  CompressWindows set;
  CompressArgs& a = set.args;
  a.kv = rows_of(kv, "kv");
  a.gate = rows_of(gate, "gate");
  a.bias = static_cast<const float*>(bias.data_ptr());
  a.weight = static_cast<const float*>(weight.data_ptr());
  a.cos = rows_of(cos, "cos");
  a.sin = rows_of(sin, "sin");
  a.state = static_cast<char*>(state.data_ptr());
  a.entries = static_cast<char*>(entries.data_ptr());
  a.entry_type = dtype_of(entries, "entries");
  a.places = {rate, block_size, per_block};
  a.block_table = places.block_table;
  a.block_table_stride = places.block_table_stride;
  a.steps = steps.view;
  a.tokens = tokens;
  a.parts = parts;
  a.size = size;
  a.pairs = cos.size(1);
  a.eps = static_cast<float>(eps);
  if (tokens > 0) run(set);
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("compress_windows", TORCH_BOX(&armllm::compress_windows));
}
