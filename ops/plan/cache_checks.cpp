// Checks of the fields of instructions that read or write a cache of keys and values, or of latents.
#include "plan/instruction_fields.h"
#include "plan/operand_checks.h"
#include "select/select_blocks.h"
#include "select/selection_args.h"

namespace armllm {
namespace {

template <class Fields>
CacheNeed cache_of(const Fields& op) {
  CacheNeed need;
  need.k = op.k_cache, need.v = op.v_cache, need.layer = op.layer;
  need.k_scales = op.k_scales, need.v_scales = op.v_scales;
  need.head_size = op.head_size;
  return need;
}

template <class Fields>
void add_sequences(CacheNeed& need, const Fields& op) {
  need.block_table = op.block_table, need.query_start = op.query_start, need.seq_lens = op.seq_lens;
}

CacheNeed latents_of(int64_t input, int64_t layer, int64_t width) {
  CacheNeed need;
  need.latent = true;
  need.k = input, need.layer = layer, need.head_size = width;
  return need;
}

template <class Indexer>
void check_indexer(const Checks& c, const Indexer& op) {
  c.written({op.out});
  for (int64_t size : {op.heads, op.head_size}) c.positive(size, "a size of an indexer");
  check_most_selected(op.top_k, "plan: top_k of an indexer");
  c.rows(op.q, (op.heads - 1.0) * op.head_stride + op.head_size);
  c.needed(op.q, "q"), c.needed(op.out, "out");
  CacheNeed need = latents_of(op.cache, op.layer, op.head_size);
  add_sequences(need, op);
  c.cache(need);
}

}  // namespace

void check_fields(const Checks& c, const fields::kv_write& op) {
  c.positive(op.head_size, "head_size");
  c.input(op.slots, "slots");
  CacheNeed need = cache_of(op);
  need.k_room = c.room(op.k);
  need.v_room = c.room(op.v);
  need.slots = op.slots.index;
  c.cache(need);
}

void check_fields(const Checks& c, const fields::attention& op) {
  c.positive(op.head_size, "head_size");
  c.positive(op.q_heads, "q_heads");
  c.rows(op.q, double(op.q_heads) * op.head_size);
  c.same_type({op.q, op.out});
  c.float_rows(op.sinks, op.q_heads);
  STD_TORCH_CHECK((op.relative.space == Space::none) == (op.profiles.space == Space::none),
                  "plan: attention needs both factors and profiles of its bias, or none");
  if (op.profiles.space != Space::none) {
    c.positive(op.rank, "rank");
    c.positive(op.extent, "extent");
    c.vector(op.profiles, double(op.rank) * op.extent, ElementType::f32);
    c.float_rows(op.relative, double(op.q_heads) * op.rank);
  }
#define ARGUMENT(name) c.vector(op.name, op.q_heads, ElementType::f32);
  ARMLLM_PER_HEAD(ARGUMENT)
#undef ARGUMENT
  c.packed(op.later, 1, ElementType::i64);
  STD_TORCH_CHECK((op.ahead == 0 && op.later.space == Space::none) ||
                      (op.slopes.space == Space::none && op.relative.space == Space::none),
                  "plan: attention to ", op.ahead, " later positions has neither slopes nor profiles");
  c.vector(op.biases, double(op.q_heads) * (2.0 * op.reach + 1), ElementType::f32);
  c.needed(op.q, "q");
  CacheNeed need = cache_of(op);
  need.q_heads = op.q_heads;
  need.groups = {op.group_size, op.skipped_heads};
  need.k_room = need.head_size;
  need.v_room = c.room(op.out);
  add_sequences(need, op);
  need.window = op.window;
  c.cache(need);
}

void check_fields(const Checks& c, const fields::mla_write& op) {
  c.rows(op.latent, op.rank);
  c.rows(op.rope, op.rope_size);
  c.input(op.slots, "slots");
  if (op.rank > 0) c.needed(op.latent, "latent");
  if (op.rope_size > 0) c.needed(op.rope, "rope");
  CacheNeed need = latents_of(op.cache, op.layer, op.rank + op.rope_size);
  need.or_int8 = true;
  need.slots = op.slots.index;
  c.cache(need);
}

void check_fields(const Checks& c, const fields::mla_attention& op) {
  c.written({op.out});
  c.positive(op.q_heads, "q_heads");
  c.positive(op.latent_size, "latent_size");
  c.rows(op.latent, (op.q_heads - 1.0) * op.latent_head_stride + op.latent_size);
  c.rows(op.rope, (op.q_heads - 1.0) * op.rope_head_stride + op.rope_size);
  c.rows(op.out, double(op.q_heads) * op.latent_size);
  c.same_type({op.latent, op.rope, op.out});
  c.vector(op.sinks, op.q_heads, ElementType::f32);
  c.needed(op.latent, "latent"), c.needed(op.out, "out");
  if (op.rope_size > 0) c.needed(op.rope, "rope");
  if (op.top_k > 0) c.needed(op.selected, "selected");
  c.packed(op.selected, op.top_k, ElementType::i32);
  STD_TORCH_CHECK(op.top_k == 0 || op.window <= 0,
                  "plan: latent attention to selected positions has no window, not one of ", op.window);
  CacheNeed need = latents_of(op.cache, op.layer, op.latent_size + op.rope_size);
  need.or_int8 = true;
  add_sequences(need, op);
  need.window = op.window;
  c.cache(need);
}

void check_fields(const Checks& c, const fields::select_tokens& op) {
  check_indexer(c, op);
  c.rows(op.weights, op.heads);
  c.packed(op.out, op.top_k, ElementType::i32);
  c.needed(op.weights, "weights");
}

void check_fields(const Checks& c, const fields::select_blocks& op) {
  check_indexer(c, op);
  c.positive(op.span, "the span of a block");
  STD_TORCH_CHECK(op.span % kKeyRows == 0 && op.span <= kMostSpan && op.nearest >= 0,
                  "plan: an indexer selects blocks of ", op.span, " positions, ", op.nearest,
                  " of them always");
  c.packed(op.out, double(op.heads) * op.top_k, ElementType::i32);
}

void check_fields(const Checks& c, const fields::block_attention& op) {
  for (int64_t size : {op.head_size, op.q_heads, op.choosers, op.span, op.top_k})
    c.positive(size, "a size of block attention");
  STD_TORCH_CHECK(op.span <= kMostSpan, "plan: chosen blocks have ", op.span, " positions");
  c.rows(op.q, double(op.q_heads) * op.head_size);
  c.same_type({op.q, op.out});
  c.packed(op.chosen, double(op.choosers) * op.top_k, ElementType::i32);
  c.needed(op.q, "q"), c.needed(op.chosen, "chosen");
  CacheNeed need = cache_of(op);
  need.q_heads = op.q_heads;
  need.k_room = need.head_size;
  need.v_room = c.room(op.out);
  need.span = op.span;
  need.choosers = op.choosers;
  add_sequences(need, op);
  c.cache(need);
}

}  // namespace armllm
