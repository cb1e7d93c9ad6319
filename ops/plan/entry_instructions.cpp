// Instructions on compressed entries, and checks of their fields.
#include "attention/check_args.h"
#include "compress/compress.h"
#include "mla/mla.h"
#include "plan/instruction_builders.h"
#include "plan/layer_cache.h"
#include "plan/operand_checks.h"
#include "plan/state_layers.h"
#include "select/select.h"
#include "select/selection_args.h"

namespace armllm {
namespace {

constexpr int64_t kMostBlock = kSplit;  // positions

EntryPlaces places_of(int64_t rate, int64_t block_size) {
  return {rate, block_size, EntryPlaces::most_per_block(block_size, rate)};
}

// What a cache of entries, or of tokens if `rate` is 0, must be.
template <class Fields>
CacheNeed cache_of(const Fields& op, int64_t input, int64_t layer, int64_t width, int64_t rate) {
  STD_TORCH_CHECK(op.block_size > 0 && op.block_size <= kMostBlock && rate >= 0 && rate <= kMostWindow,
                  "plan: entries of ", rate, " positions in blocks of ", op.block_size);
  CacheNeed need;
  need.latent = true;
  need.k = input, need.layer = layer, need.head_size = width;
  need.rate = rate, need.block_size = op.block_size;
  need.block_table = op.block_table, need.query_start = op.query_start, need.seq_lens = op.seq_lens;
  return need;
}

}  // namespace

void check_fields(const Checks& c, const fields::compress_windows& op) {
  for (int64_t size : {op.rate, op.size}) c.positive(size, "a size of entries");
  STD_TORCH_CHECK((op.parts == 1 || op.parts == 2) && op.rate * op.parts <= kMostWindow,
                  "plan: an entry sums ", op.parts, " windows of ", op.rate, " tokens");
  STD_TORCH_CHECK(op.pairs <= op.size / 2, "plan: ", op.pairs, " pairs of an entry of ", op.size,
                  " elements are rotated");
  const double width = double(op.parts) * op.size;
  for (const View& view : {op.kv, op.gate}) c.needed(view, "operand"), c.rows(view, width);
  c.same_type({op.kv, op.gate});
  for (const View& view : {op.cos, op.sin}) c.needed(view, "rotation"), c.rows(view, op.pairs);
  for (const View& view : {op.bias, op.weight}) c.needed(view, "weight");
  c.vector(op.bias, op.rate * width, ElementType::f32);
  c.vector(op.weight, op.size, ElementType::f32);
  StateNeed need = state_need(op);
  need.type = op.kv.dtype();
  need.sizes = {op.rate * op.parts - 1, 2 * op.parts * op.size};
  c.state(need);
  c.cache(cache_of(op, op.entries, op.entries_layer, op.size, op.rate));
}

void check_fields(const Checks& c, const fields::select_entries& op) {
  c.written({op.out});
  for (int64_t size : {op.heads, op.head_size, op.rate}) c.positive(size, "a size of an indexer");
  check_most_selected(op.top_k, "plan: top_k of an indexer");
  c.rows(op.q, (op.heads - 1.0) * op.head_stride + op.head_size);
  c.rows(op.weights, op.heads);
  c.packed(op.out, op.top_k, ElementType::i32);
  c.needed(op.q, "q"), c.needed(op.out, "out"), c.needed(op.weights, "weights");
  c.cache(cache_of(op, op.cache, op.layer, op.head_size, op.rate));
}

void check_fields(const Checks& c, const fields::entry_attention& op) {
  c.written({op.out});
  for (int64_t size : {op.q_heads, op.size, op.window}) c.positive(size, "a size of attention to entries");
  const double width = double(op.q_heads) * op.size;
  for (const View& view : {op.q, op.out}) c.needed(view, "operand"), c.rows(view, width);
  c.same_type({op.q, op.out});
  c.vector(op.sinks, op.q_heads, ElementType::f32);
  if (op.top_k > 0) c.needed(op.selected, "selected");
  c.packed(op.selected, op.top_k, ElementType::i32);
  STD_TORCH_CHECK(op.top_k == 0 || op.rate > 0, "plan: entries are selected, and there are none");
  CacheNeed tokens = cache_of(op, op.cache, op.layer, op.size, 0);
  if (op.rate == 0) tokens.window = op.window;
  c.cache(tokens);
  if (op.rate > 0) c.cache(cache_of(op, op.entries, op.entries_layer, op.size, op.rate));
}

Instruction build(const fields::compress_windows& op) {
  auto task = std::make_unique<CompressWindows>();
  CompressArgs& args = task->args;
  args.places = places_of(op.rate, op.block_size);
  args.parts = op.parts;
  args.size = op.size;
  args.pairs = op.pairs;
  args.eps = op.eps;
  return simple(std::move(task), [op](CompressWindows& t, const Frame& frame) {
    CompressArgs& a = t.args;
    a.kv = frame.rows(op.kv);
    a.gate = frame.rows(op.gate);
    a.bias = frame.pointer<float>(op.bias);
    a.weight = frame.pointer<float>(op.weight);
    a.cos = frame.rows(op.cos);
    a.sin = frame.rows(op.sin);
    a.state = state_layer(frame.input(op.state), op.layer, size_of(op.kv.dtype()));
    a.steps = state_slots_of(frame, op);
    const Tensor& entries = frame.input(op.entries);
    a.entries = layer_of(entries, op.entries_layer);
    a.entry_type = dtype_of(entries, "entries");
    a.block_table = static_cast<const int32_t*>(frame.input(op.block_table).data_ptr());
    a.block_table_stride = frame.input(op.block_table).size(1);
    a.tokens = frame.tokens;
  });
}

Instruction build(const fields::select_entries& op) {
  auto task = std::make_unique<SelectTokens>();
  SelectTokens* set = task.get();
  SelectArgs& args = set->args;
  args.heads = op.heads;
  args.head_size = op.head_size;
  args.head_stride = op.head_stride;
  args.most = op.top_k;
  args.scale = op.scale;
  args.block_size = op.block_size;
  args.places = places_of(op.rate, op.block_size);
  Instruction instruction = with_scratch(
      std::move(task),
      [op](SelectTokens& t, const Frame& frame) {
        SelectArgs& a = t.args;
        const Tensor& cache = frame.input(op.cache);
        a.q = frame.rows(op.q);
        a.weights = frame.rows(op.weights);
        a.out = frame.pointer<int32_t>(op.out);
        a.keys = layer_of(cache, op.layer);
        a.key_type = dtype_of(cache, "cache");
        bind_sequences(frame, op, a);
      },
      [](const SelectArgs& a) { return SelectTokens::scratch_bytes(a); });
  instruction.still_valid = [set] { return set->args.max_seq_len == length_bound(set->args); };
  return instruction;
}

Instruction build(const fields::entry_attention& op) {
  auto task = std::make_unique<LatentAttention>();
  LatentAttention* set = task.get();
  AttentionArgs& args = set->attention.args;
  args.q_heads = op.q_heads;
  args.scale = op.scale;
  args.window = op.rate > 0 ? 0 : op.window;
  args.latent = true;
  args.kv_heads = 1;
  args.value_size = args.head_size = op.size;
  if (op.rate > 0) args.places = places_of(op.rate, op.block_size);
  Instruction instruction = simple(std::move(task), [op](LatentAttention& t, const Frame& frame) {
    AttentionArgs& a = t.attention.args;
    const Tensor& cache = frame.input(op.cache);
    a.q = frame.rows(op.q);
    a.out = frame.rows(op.out);
    a.sinks = frame.pointer<float>(op.sinks);
    a.k_cache = layer_of(cache, op.layer);
    a.cache_type = cache_type_of(cache);
    a.block_size = op.block_size;
    bind_sequences(frame, op, a);
    a.threads = team_size();
    if (op.rate == 0) return t.select(nullptr, 0);
    a.entries = layer_of(frame.input(op.entries), op.entries_layer);
    t.select_entries(op.window, op.top_k > 0 ? frame.pointer<int32_t>(op.selected) : nullptr, op.top_k);
  });
  instruction.still_valid = [set] {
    AttentionArgs given = set->attention.args;
    given.sequences = set->selection.sequences;
    return set->selection.max_seq_len == length_bound(given);
  };
  instruction.scratch_bytes = [set] { return set->scratch_bytes(); };
  instruction.set_scratch = [set](void* scratch) { set->set_scratch(scratch); };
  return instruction;
}

}  // namespace armllm
