// Checks of an instruction's fields against the memory of its plan.  Plans are read from disk too, so nothing
// that a program says is trusted.
#include <cstring>

#include "collective/communicators.h"
#include "lora/lora.h"
#include "plan/instruction_fields.h"
#include "plan/operand_checks.h"
#include "plan/state_layers.h"
#include "pointwise/pointwise.h"
#include "recurrent/recurrent.h"

namespace armllm {
namespace {

int64_t panels_of(int64_t rows) { return ceil_div(rows, kPanel); }

template <class Norm>
void check_norm(const Checks& c, const Norm& op) {
  c.written({op.out, op.sum});
  c.positive(op.width, "width");
  c.positive(op.rows_per_token, "rows_per_token");
  for (const View& view : {op.x, op.out, op.residual, op.sum})
    c.rows(view, double(op.width) * op.rows_per_token);
  c.same_type({op.x, op.out, op.residual, op.sum});
  const bool residual = op.residual.space != Space::none;
  STD_TORCH_CHECK(residual == (op.sum.space != Space::none) && (!residual || op.rows_per_token == 1),
                  "plan: a norm with a residual needs a sum, and one row per token");
  c.floats(op.weight, op.width);
  c.floats(op.bias, op.width);
  c.vector(op.bias, op.width, op.weight.type);
  c.needed(op.x, "x");
}

template <class Layer>
void check_layer(const Checks& c, const Layer& op, int64_t panels) {
  c.written({op.out});
  c.positive(op.in_features, "in_features");
  c.positive(op.out_features, "out_features");
  c.rows(op.x, op.in_features);
  c.rows(op.out, op.out_features);
  c.panels(op.weight, 1, 0, panels, op.panel_stride, op.scheme, op.in_features);
  STD_TORCH_CHECK(op.digits == 1 || op.digits == 2, "plan: a layer has ", op.digits,
                  " digits; it can have 1 or 2");
  STD_TORCH_CHECK(!op.rotated || op.in_features % kGroup == 0, "plan: a rotated layer has ", op.in_features,
                  " features; they must be a multiple of ", kGroup);
  c.needed(op.out, "out"), c.needed(op.weight, "weight");
}

void check_parts(const Checks& c, const fields::linear& op) {
  check_layer(c, op, panels_of(op.out_features));
  c.rows(op.residual, op.out_features);
  c.same_type({op.out, op.residual});
  c.floats(op.bias, op.out_features);
}

void check_parts(const Checks& c, const fields::gated_linear& op) {
  check_layer(c, op, 2 * panels_of(op.out_features));
  c.floats(op.gate_bias, op.out_features);
  c.floats(op.up_bias, op.out_features);
  c.vector(op.up_bias, op.out_features, op.gate_bias.type);
}

template <class Pair>
void check_pair(const Checks& c, const Pair& op) {
  check_norm(c, op.norm);
  c.needed(op.norm.weight, "weight");
  check_parts(c, op.layer);
  STD_TORCH_CHECK(op.norm.width == op.layer.in_features && op.norm.rows_per_token == 1,
                  "plan: a norm of width ", op.norm.width, " precedes a layer of ", op.layer.in_features,
                  " inputs");
}

template <class Heads>
void check_heads(const Checks& c, const Heads& op) {
  c.written({op.out});
  for (int64_t size : {op.heads, op.in_features, op.out_features}) c.positive(size, "a size of heads");
  c.rows(op.x, (op.heads - 1.0) * op.x_head_stride + op.in_features);
  c.rows(op.out, double(op.heads) * op.out_features);
  c.needed(op.x, "x"), c.needed(op.out, "out"), c.needed(op.weight, "weight");
}

// The factors of a product, for `count` matrices of so many inputs and outputs each.
void check_factors(const Checks& c, const View& a, const View& b, bool integers, double count,
                   int64_t most_rank, int64_t inputs, int64_t outputs, int64_t parts) {
  const double ranks = count * most_rank;
  const int64_t groups = ceil_div(inputs, kLoraBlock), blocks = ceil_div(outputs, kLoraBlock);
  if (integers) {
    c.constant(a, ranks * groups * sizeof(LoraIntegers));
    c.constant(b, ranks * parts * blocks * sizeof(LoraIntegers));
  } else {
    c.floats(a, ranks * inputs);
    c.floats(b, ranks * parts * blocks * kLoraBlock);
  }
  c.same_type({a, b});
}

void check_adapters(const Checks& c, const fields::moe& op, const fields::adapted_experts& lora) {
  for (int64_t size : {lora.slots, lora.inner_rank, lora.outer_rank, lora.listed})
    c.positive(size, "a size of adapters");
  STD_TORCH_CHECK(op.communicator == 0 && !op.weigh_input,
                  "plan: experts of ranks, or with weighed inputs, have adapters");
  const double count = double(lora.slots) * op.experts;
  check_factors(c, lora.inner_a, lora.inner_b, lora.integers, count, lora.inner_rank, op.hidden,
                op.intermediate, op.gated ? 2 : 1);
  check_factors(c, lora.outer_a, lora.outer_b, lora.integers, count, lora.outer_rank, op.intermediate,
                op.hidden, 1);
  c.same_type({lora.inner_a, lora.outer_a});
  c.vector(lora.inner_ranks, lora.slots, ElementType::i32);
  c.vector(lora.outer_ranks, lora.slots, ElementType::i32);
  c.vector(lora.adapters, lora.listed, ElementType::i32);
  c.needed(lora.inner_a, "inner_a"), c.needed(lora.inner_b, "inner_b");
  c.needed(lora.outer_a, "outer_a"), c.needed(lora.outer_b, "outer_b");
  c.needed(lora.inner_ranks, "inner_ranks"), c.needed(lora.outer_ranks, "outer_ranks");
  c.needed(lora.adapters, "adapters");
}

void check_ranks(const Checks& c, const fields::moe& op, int64_t ranks) {
  double inner = 0, outer = 0;
  for (const fields::expert_part& part : op.ranks) {
    c.positive(part.inner, "the columns of a rank"), c.positive(part.outer, "the columns of a rank");
    inner += part.inner, outer += part.outer;
  }
  STD_TORCH_CHECK(
      static_cast<int64_t>(op.ranks.size()) == ranks && inner == op.intermediate && outer == op.hidden,
      "plan: the columns of ", op.ranks.size(), " ranks are not those of the experts");
}

void check_rank_experts(const Checks& c, const fields::moe& op, const Communicator& communicator) {
  double all = 0;
  for (const fields::expert_count& part : op.rank_experts) {
    c.positive(part.experts, "the experts of a rank");
    all += part.experts;
  }
  STD_TORCH_CHECK(static_cast<int64_t>(op.rank_experts.size()) == communicator.ranks() && all == op.experts &&
                      op.ranks.empty(),
                  "plan: the experts of ", op.rank_experts.size(), " ranks are not those of the layer");
  STD_TORCH_CHECK(op.hidden <= communicator.buffer_bytes() / int64_t(sizeof(float)), "plan: rows of ",
                  op.hidden, " do not fit the buffers that ranks exchange");
}

}  // namespace

void check_fields(const Checks& c, const fields::embed& op) {
  c.written({op.out});
  c.positive(op.width, "width");
  c.positive(op.vocab_size, "vocab_size");
  c.rows(op.out, op.width);
  c.packed(op.ids, 1, ElementType::i64);
  c.table(op.table, op.vocab_size, op.width);
  c.same_type({op.out, op.table});
  c.needed(op.out, "out"), c.needed(op.ids, "ids"), c.needed(op.table, "table");
}

void check_fields(const Checks& c, const fields::split_embed& op) {
  c.written({op.out});
  c.positive(op.width, "width");
  c.positive(op.vocab_size, "vocab_size");
  c.rows(op.out, op.width);
  c.packed(op.ids, 1, ElementType::i64);
  c.panels(op.weight, 1, 0, panels_of(op.vocab_size), op.panel_stride, op.scheme, op.width);
  c.constant(op.rest, double(op.vocab_size) * op.width);
  STD_TORCH_CHECK(!op.rotated || op.width % kGroup == 0, "plan: a rotated embedding has the width ", op.width,
                  "; it must be a multiple of ", kGroup);
  c.needed(op.out, "out"), c.needed(op.ids, "ids"), c.needed(op.weight, "weight"), c.needed(op.rest, "rest");
}

void check_fields(const Checks& c, const fields::rms_norm& op) {
  check_norm(c, op);
  c.needed(op.out, "out"), c.needed(op.weight, "weight");
}

void check_fields(const Checks& c, const fields::layer_norm& op) {
  check_norm(c, op);
  c.needed(op.out, "out");
}

void check_fields(const Checks& c, const fields::linear& op) {
  check_parts(c, op);
  c.needed(op.x, "x");
}

void check_fields(const Checks& c, const fields::gated_linear& op) {
  check_parts(c, op);
  c.needed(op.x, "x");
}

void check_fields(const Checks& c, const fields::norm_linear& op) { check_pair(c, op); }
void check_fields(const Checks& c, const fields::norm_gated_linear& op) { check_pair(c, op); }

void check_fields(const Checks& c, const fields::dense_linear& op) {
  c.written({op.out});
  c.positive(op.in_features, "in_features");
  c.positive(op.out_features, "out_features");
  c.rows(op.x, op.in_features);
  c.rows(op.out, op.out_features);
  c.table(op.weight, op.out_features, op.in_features);
  c.floats(op.bias, op.out_features);
  c.needed(op.x, "x"), c.needed(op.out, "out"), c.needed(op.weight, "weight");
}

void check_fields(const Checks& c, const fields::lora& op) {
  for (int64_t size : {op.slots, op.most_rank, op.listed}) c.positive(size, "a size of adapters");
  c.vector(op.adapters, op.listed, ElementType::i32);
  c.needed(op.adapters, "adapters");
  STD_TORCH_CHECK(!op.layers.empty(), "plan: adapters of no layer");
  for (const fields::adapted_layer& layer : op.layers) {
    c.written({layer.out});
    for (int64_t size : {layer.in_features, layer.out_features}) c.positive(size, "a size of adapters");
    c.rows(layer.x, layer.in_features);
    c.rows(layer.out, layer.out_features);
    check_factors(c, layer.a, layer.b, op.integers, double(op.slots), op.most_rank, layer.in_features,
                  layer.out_features, 1);
    c.vector(layer.ranks, op.slots, ElementType::i32);
    c.needed(layer.x, "x"), c.needed(layer.out, "out"), c.needed(layer.a, "a"), c.needed(layer.b, "b");
    c.needed(layer.ranks, "ranks");
  }
}

void check_fields(const Checks& c, const fields::lora_embed& op) {
  for (int64_t size : {op.slots, op.most_rank, op.listed, op.vocab_size, op.width})
    c.positive(size, "a size of adapters");
  c.written({op.out});
  c.packed(op.ids, 1, ElementType::i64);
  c.rows(op.out, op.width);
  const double ranks = double(op.slots) * op.most_rank;
  const int64_t blocks = ceil_div(op.width, kLoraBlock);
  c.floats(op.table, ranks * op.vocab_size);
  if (op.integers) {
    c.constant(op.b, ranks * blocks * sizeof(LoraIntegers));
  } else {
    c.floats(op.b, ranks * blocks * kLoraBlock);
  }
  c.vector(op.ranks, op.slots, ElementType::i32);
  c.vector(op.adapters, op.listed, ElementType::i32);
  c.needed(op.ids, "ids"), c.needed(op.out, "out"), c.needed(op.table, "table"), c.needed(op.b, "b");
  c.needed(op.ranks, "ranks"), c.needed(op.adapters, "adapters");
}

void check_fields(const Checks& c, const fields::meet& op) {
  c.positive(op.bytes_per_token, "the bytes of a token that ranks share");
  c.share(communicator_of(op.communicator), op.bytes_per_token);
}

void check_fields(const Checks& c, const fields::gather_columns& op) {
  const std::shared_ptr<Communicator> communicator = communicator_of(op.communicator);
  const int64_t ranks = communicator->ranks();
  STD_TORCH_CHECK(static_cast<int64_t>(op.parts.size()) == ranks, "plan: columns of ", op.parts.size(),
                  " ranks are gathered, and there are ", ranks);
  double all = 0;
  for (const fields::rank_part& part : op.parts) {
    c.positive(part.columns, "the columns of a rank");
    all += part.columns;
  }
  c.written({op.out});
  c.rows(op.x, op.parts[communicator->rank()].columns);
  c.rows(op.out, all);
  c.same_type({op.x, op.out});
  c.needed(op.x, "x"), c.needed(op.out, "out");
  if (op.out.space != Space::shared) return;
  int64_t before = 0;
  for (int64_t rank = 0; rank < communicator->rank(); ++rank) before += op.parts[rank].columns;
  STD_TORCH_CHECK(op.x.space == Space::shared && op.x.index == op.out.index &&
                      op.x.column == op.out.column + before && op.x.stride == op.out.stride,
                  "plan: a rank's columns are not in their place among those of all ranks");
  c.shared_by(communicator);
}

void check_fields(const Checks& c, const fields::moe& op) {
  c.written({op.out});
  for (int64_t size : {op.experts, op.top_k, op.hidden, op.intermediate})
    c.positive(size, "a size of experts");
  STD_TORCH_CHECK(op.identity_experts >= 0 && op.identity_experts <= kMaxExperts,
                  "plan: ", op.identity_experts, " experts return their input");
  STD_TORCH_CHECK(!op.rotated || (op.hidden % kGroup == 0 && op.intermediate % kGroup == 0),
                  "plan: rotated experts have ", op.hidden, " and ", op.intermediate,
                  " features, which are no whole groups");
  const int64_t parts = op.gated ? 2 : 1;
  int64_t inner = op.intermediate, outer = op.hidden, experts = op.experts;
  if (op.communicator == 0) {
    STD_TORCH_CHECK(op.ranks.empty() && op.rank_experts.empty(),
                    "plan: the ranks of experts do not communicate");
  } else if (const auto communicator = communicator_of(op.communicator); !op.rank_experts.empty()) {
    check_rank_experts(c, op, *communicator);
    experts = op.rank_experts[communicator->rank()].experts;
  } else {
    check_ranks(c, op, communicator->ranks());
    inner = op.ranks[communicator->rank()].inner;
    outer = op.ranks[communicator->rank()].outer;
  }
  c.rows(op.x, op.hidden);
  c.rows(op.out, outer);
  c.packed(op.ids, op.top_k, ElementType::i32);
  c.packed(op.weights, op.top_k, ElementType::f32);
  c.panels(op.gate_up, experts, op.gate_up_expert_stride, parts * panels_of(inner), op.gate_up_panel_stride,
           op.scheme, op.hidden);
  c.panels(op.down, experts, op.down_expert_stride, panels_of(outer), op.down_panel_stride, op.scheme,
           op.intermediate);
  c.floats(op.gate_up_bias, double(op.experts) * parts * op.intermediate);
  c.floats(op.down_bias, double(op.experts) * op.hidden);
  c.vector(op.down_bias, double(op.experts) * op.hidden, op.gate_up_bias.type);
  c.needed(op.x, "x"), c.needed(op.out, "out"), c.needed(op.ids, "ids"), c.needed(op.weights, "weights");
  c.needed(op.gate_up, "gate_up"), c.needed(op.down, "down");
  STD_TORCH_CHECK(op.lora.size() <= 1, "plan: experts have ", op.lora.size(), " lists of adapters");
  for (const fields::adapted_experts& lora : op.lora) check_adapters(c, op, lora);
}

void check_fields(const Checks& c, const fields::route& op) {
  c.written({op.weights, op.ids});
  c.disjoint(op.weights, op.ids, op.top_k);
  for (int64_t size : {op.experts, op.top_k, op.groups, op.top_k_groups})
    c.positive(size, "a size of a router");
  STD_TORCH_CHECK(op.experts <= kMaxExperts && op.experts % op.groups == 0 && op.top_k_groups <= op.groups &&
                      op.top_k <= op.experts / op.groups * op.top_k_groups,
                  "plan: a router chooses ", op.top_k, " of ", op.experts, " experts in ", op.top_k_groups,
                  " of ", op.groups, " groups");
  c.rows(op.logits, op.experts);
  c.packed(op.weights, op.top_k, ElementType::f32);
  c.packed(op.ids, op.top_k, ElementType::i32);
  c.vector(op.correction_bias, op.experts, ElementType::f32);
  STD_TORCH_CHECK((op.choices.space == Space::none) == (op.token_ids.space == Space::none),
                  "plan: a router needs both token ids and their experts, or none");
  if (op.choices.space != Space::none) {
    c.positive(op.vocabulary, "the size of a vocabulary");
    c.input(op.token_ids, "token ids");
    c.vector(op.choices, double(op.vocabulary) * op.top_k, ElementType::i32);
    for (int64_t i = 0; i < op.vocabulary * op.top_k; ++i) {
      int32_t expert;
      std::memcpy(&expert, c.data(op.choices) + i * sizeof(expert), sizeof(expert));
      STD_TORCH_CHECK(expert >= 0 && expert < op.experts, "plan: a router of ", op.experts,
                      " experts chooses expert ", expert);
    }
  }
  c.needed(op.logits, "logits"), c.needed(op.weights, "weights"), c.needed(op.ids, "ids");
}

void check_fields(const Checks& c, const fields::rope_table& op) {
  c.written({op.cos, op.sin});
  c.positive(op.half, "half");
  c.positive(op.numbers, "numbers");
  c.packed(op.positions, static_cast<double>(op.numbers), ElementType::i64);
  c.vector(op.inv_freq, op.half, ElementType::f32);
  c.vector(op.axes, op.half, ElementType::i64);
  for (int64_t i = 0; op.axes.space != Space::none && i < op.half; ++i) {
    int64_t axis;
    std::memcpy(&axis, c.data(op.axes) + i * sizeof(axis), sizeof(axis));
    STD_TORCH_CHECK(axis >= 0 && axis < op.numbers, "plan: a pair turns by number ", axis, " of ", op.numbers,
                    " of a position");
  }
  c.packed(op.cos, op.half, ElementType::f32);
  c.packed(op.sin, op.half, ElementType::f32);
  c.needed(op.positions, "positions"), c.needed(op.inv_freq, "inv_freq");
  c.needed(op.cos, "cos"), c.needed(op.sin, "sin");
}

void check_fields(const Checks& c, const fields::rope& op) {
  c.written({op.q, op.k});
  STD_TORCH_CHECK(op.rotary >= 0 && op.rotary % 2 == 0 && op.rotary <= op.head_size &&
                      (op.pairs != RopePairs::unzipped || op.rotary <= kMostUnzipped),
                  "plan: ", op.rotary, " rotary dimensions of a head of ", op.head_size);
  if (op.q_heads > 0) c.needed(op.q, "q"), c.heads(op.q, op.q_heads, op.q_head_stride, op.head_size);
  if (op.k_heads > 0) c.needed(op.k, "k"), c.heads(op.k, op.k_heads, op.k_head_stride, op.head_size);
  c.packed(op.cos, op.rotary / 2, ElementType::f32);
  c.packed(op.sin, op.rotary / 2, ElementType::f32);
  c.needed(op.cos, "cos"), c.needed(op.sin, "sin");
}

void check_fields(const Checks& c, const fields::gated_act& op) {
  c.written({op.out});
  c.positive(op.width, "width");
  for (const View& view : {op.gate, op.up, op.out}) c.rows(view, op.width), c.needed(view, "operand");
  c.same_type({op.gate, op.up, op.out});
}

void check_fields(const Checks& c, const fields::add& op) {
  c.written({op.out});
  c.positive(op.width, "width");
  for (const View& view : {op.a, op.b, op.out}) c.rows(view, op.width);
  c.rows(op.row_factor, 1);
  c.same_type({op.a, op.b, op.out, op.row_factor});
  c.needed(op.b, "b"), c.needed(op.out, "out");
}

void check_fields(const Checks& c, const fields::int8_heads& op) {
  check_heads(c, op);
  c.panels(op.weight, op.heads, op.head_stride, panels_of(op.out_features), op.panel_stride, Scheme::i8,
           op.in_features);
}

void check_fields(const Checks& c, const fields::dense_heads& op) {
  check_heads(c, op);
  c.table(op.weight, double(op.heads) * op.out_features, op.in_features);
}

void check_fields(const Checks& c, const fields::sinkhorn& op) {
  c.written({op.out});
  c.needed(op.x, "x"), c.needed(op.out, "out");
  c.positive(op.size, "size");
  STD_TORCH_CHECK(op.size <= kMostMatrixRows && op.rounds >= 0 && op.rounds <= kMostRounds,
                  "plan: a matrix of ", op.size, " rows is normalized ", op.rounds, " times; up to ",
                  kMostMatrixRows, " rows and ", kMostRounds, " times are expected");
  for (const View& view : {op.x, op.out}) {
    STD_TORCH_CHECK(view.type == ElementType::f32, "plan: a matrix must have the type float32");
    c.rows(view, double(op.size) * op.size);
  }
}

void check_fields(const Checks& c, const fields::reorder& op) {
  c.written({op.out});
  c.positive(op.width, "width");
  c.rows(op.x, op.width);
  c.rows(op.out, op.width);
  c.same_type({op.x, op.out});
  c.vector(op.permutation, op.width, ElementType::i32);
  c.needed(op.x, "x"), c.needed(op.out, "out"), c.needed(op.permutation, "permutation");
  for (int64_t i = 0; i < op.width; ++i) {
    int32_t column;
    std::memcpy(&column, c.data(op.permutation) + i * sizeof(column), sizeof(column));
    STD_TORCH_CHECK(column >= 0 && column < op.width, "plan: a permutation of ", op.width,
                    " columns has column ", column);
  }
}

void check_fields(const Checks& c, const fields::best_tokens& op) {
  c.written({op.ids});
  c.positive(op.vocab_size, "vocab_size");
  STD_TORCH_CHECK(op.first >= 0 && op.first <= std::numeric_limits<int32_t>::max() - op.vocab_size,
                  "plan: the first token of a rank is ", op.first);
  if (op.communicator != 0) communicator_of(op.communicator);
  c.rows(op.logits, op.vocab_size);
  c.packed(op.ids, 1, ElementType::i64);
  c.needed(op.logits, "logits"), c.needed(op.ids, "ids");
}

void check_fields(const Checks& c, const fields::pointwise& op) {
  c.written({op.out});
  c.needed(op.out, "out");
  c.grid(op.out, op.heads, op.out_head_stride, op.width, op.out_column_stride);
  const int64_t operands = static_cast<int64_t>(op.operands.size()),
                steps = static_cast<int64_t>(op.steps.size());
  STD_TORCH_CHECK(operands + steps >= 1 && operands + steps <= kMostValues,
                  "plan: an elementwise program has ", operands + steps, " values; 1 to ", kMostValues,
                  " are expected");
  for (const fields::operand& x : op.operands) {
    c.needed(x.x, "operand");
    const double elements = (op.heads - 1.0) * x.head_stride + (op.width - 1.0) * x.column_stride + 1;
    STD_TORCH_CHECK(x.by_token == (x.x.space != Space::constant),
                    "plan: constants, and only they, are the same for all tokens");
    if (x.by_token)
      c.numbers(x.x, elements);
    else
      c.floats(x.x, elements);
  }
  for (int64_t i = 0; i < steps; ++i)
    for (int64_t value : {op.steps[i].a, op.steps[i].b, op.steps[i].c})
      STD_TORCH_CHECK(value < operands + i || (value == 0 && op.steps[i].op == PointwiseOp::number),
                      "plan: step ", i, " of an elementwise program reads value ", value,
                      ", which is not computed before it");
}

void check_fields(const Checks& c, const fields::causal_conv& op) {
  c.written({op.out});
  c.positive(op.channels, "channels");
  STD_TORCH_CHECK(op.taps >= 1 && op.taps <= kMostTaps, "plan: a convolution has ", op.taps, " taps; 1 to ",
                  kMostTaps, " are expected");
  c.rows(op.x, op.channels);
  c.rows(op.out, op.channels);
  c.same_type({op.x, op.out});
  c.vector(op.weight, double(op.taps) * op.channels, ElementType::f32);
  c.vector(op.bias, op.channels, ElementType::f32);
  c.needed(op.x, "x"), c.needed(op.out, "out"), c.needed(op.weight, "weight");
  StateNeed need = state_need(op);
  need.type = op.x.dtype();
  need.sizes = {op.taps - 1, op.channels};
  c.state(need);
}

void check_fields(const Checks& c, const fields::gated_delta_rule& op) {
  c.written({op.out});
  for (int64_t size : {op.key_heads, op.value_heads, op.key_size, op.value_size})
    c.positive(size, "a size of heads");
  STD_TORCH_CHECK(op.value_heads % op.key_heads == 0 && op.key_size <= kMostKeyChannels,
                  "plan: ", op.key_heads, " heads of ", op.key_size, " key channels for ", op.value_heads,
                  " values");
  const double keys = double(op.key_heads) * op.key_size, values = double(op.value_heads) * op.value_size;
  c.rows(op.q, keys);
  c.rows(op.k, keys);
  c.rows(op.v, values);
  c.rows(op.gate, double(op.value_heads) * (op.gate_per_channel ? op.key_size : 1));
  c.rows(op.beta, op.value_heads);
  c.rows(op.out, values);
  c.same_type({op.v, op.out});
  for (const View& view : {op.q, op.k, op.v, op.gate, op.beta, op.out}) c.needed(view, "operand");
  StateNeed need = state_need(op);
  need.or_bf16 = true;
  need.sizes = {op.value_heads, op.key_size, op.value_size};
  c.state(need);
}

void check_fields(const Checks& c, const fields::selective_scan& op) {
  c.written({op.out});
  c.positive(op.channels, "channels");
  STD_TORCH_CHECK(op.states >= 1 && op.states <= kMostStates, "plan: a scan has ", op.states,
                  " states of a channel; 1 to ", kMostStates, " are expected");
  for (const View& view : {op.x, op.dt, op.out}) c.needed(view, "operand"), c.rows(view, op.channels);
  for (const View& view : {op.b, op.c}) c.rows(view, op.states);
  c.same_type({op.x, op.out});
  c.needed(op.a, "a");
  c.vector(op.a, double(op.states) * op.channels, ElementType::f32);
  StateNeed need = state_need(op);
  need.or_bf16 = true;
  need.sizes = {op.states, op.channels};
  c.state(need);
}

}  // namespace armllm
