// int4_moe, int4_moe_lora
#include <numeric>
#include <string>
#include <vector>

#include "collective/communicators.h"
#include "linear/scheme_arg.h"
#include "moe/moe.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

using torch::stable::contiguous;

void check_experts(const Tensor& weight, const char* name, const char* out, const char* in, int64_t panels,
                   Scheme scheme, int64_t in_features) {
  const int64_t bytes = panel_layout(scheme, in_features).bytes;
  STD_TORCH_CHECK(type_of(weight) == ScalarType::Byte && weight.dim() == 3, name,
                  " must be uint8 of shape (experts, panels, panel_bytes), as pack_int4 returns it");
  STD_TORCH_CHECK(weight.size(1) == panels, name, " has ", weight.size(1), " panels per expert; ", out,
                  " needs ", panels);
  STD_TORCH_CHECK(weight.size(2) == bytes, name, " has ", weight.size(2), " bytes per panel; ", in, " = ",
                  in_features, " needs ", bytes, ": was it packed with another shape or scheme?");
  STD_TORCH_CHECK(weight.stride(2) == 1, name, " must be contiguous in its last dimension");
}

void check_ranks(const MoeArgs& a, const std::vector<int64_t>& columns, int64_t all, const char* name) {
  int64_t sum = 0;
  for (const int64_t each : columns) {
    STD_TORCH_CHECK(each > 0, name, ": a rank has ", each, " columns; it needs at least one");
    sum += each;
  }
  STD_TORCH_CHECK(int64_t(columns.size()) == a.communicator->ranks() && sum == all, name, " has ", sum,
                  " columns of ", columns.size(), " ranks; there are ", all, " of ", a.communicator->ranks());
}

void check_rank_experts(const MoeArgs& a, int64_t own) {
  int64_t sum = 0;
  for (const int64_t each : a.rank_experts) {
    STD_TORCH_CHECK(each > 0, "rank_experts: a rank has ", each, " experts; it needs at least one");
    sum += each;
  }
  const Communicator& ranks = *a.communicator;
  STD_TORCH_CHECK(int64_t(a.rank_experts.size()) == ranks.ranks(), "rank_experts has ", a.rank_experts.size(),
                  " numbers for ", ranks.ranks(), " ranks");
  STD_TORCH_CHECK(own == a.rank_experts[ranks.rank()], "gate_up holds ", own, " experts; rank ", ranks.rank(),
                  " has ", a.rank_experts[ranks.rank()]);
  STD_TORCH_CHECK(fits_exchange(a), "rows of ", a.hidden, " do not fit the communicator's buffers of ",
                  ranks.buffer_bytes(), " bytes");
}

int64_t choices_per_token(const Tensor& t, const char* name, int64_t tokens) {
  STD_TORCH_CHECK(t.dim() >= 1, name, " must have shape (tokens, top_k)");
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  STD_TORCH_CHECK(rows == tokens, name, " has ", rows, " rows; x has ", tokens);
  return last_size(t);
}

template <typename T>
std::vector<int32_t> checked_ids(const Tensor& ids, int64_t top_k, int64_t experts, int64_t identities) {
  const T* p = static_cast<const T*>(ids.data_ptr());
  const int64_t last = experts + identities - 1;
  std::vector<int32_t> checked(ids.numel());
  for (int64_t i = 0; i < int64_t(checked.size()); ++i) {
    STD_TORCH_CHECK(p[i] >= 0 && p[i] <= last, "expert_ids names expert ", p[i], " as choice ", i % top_k,
                    " of token ", i / top_k, ", but gate_up holds experts 0 to ", experts - 1,
                    identities > 0 ? " and identities follow to " + std::to_string(last) : "");
    checked[i] = int32_t(p[i]);
  }
  return checked;
}

std::vector<int32_t> expert_numbers(const Tensor& ids, const MoeArgs& a) {
  const int64_t k = a.top_k, experts = a.experts, identities = a.identity_experts;
  if (type_of(ids) == ScalarType::Int) return checked_ids<int32_t>(contiguous(ids), k, experts, identities);
  STD_TORCH_CHECK(type_of(ids) == ScalarType::Long, "expert_ids must be int64 or int32");
  return checked_ids<int64_t>(contiguous(ids), k, experts, identities);
}

std::optional<Tensor> checked_bias(const std::optional<Tensor>& bias, const char* name, int64_t elements) {
  if (!bias.has_value()) return bias;
  STD_TORCH_CHECK(bias->numel() == elements, name, " has ", bias->numel(), " elements, but the experts need ",
                  elements);
  return contiguous(*bias);
}

// The factors of adapters; see ExpertAdapters.
struct LoraTensors {
  Tensor inner_a, inner_b, inner_ranks, outer_a, outer_b, outer_ranks, adapters;
};

const int32_t* integers(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(type_of(t) == ScalarType::Int && t.dim() == 1 && t.is_contiguous(), name,
                  " must be a contiguous int32 vector");
  return static_cast<const int32_t*>(t.data_ptr());
}

void check_shape(const Tensor& t, const char* name, const std::vector<int64_t>& sizes) {
  bool same = t.defined() && t.is_contiguous() && t.dim() == int64_t(sizes.size());
  std::string shape;
  for (size_t d = 0; d < sizes.size(); ++d) {
    shape += (d ? ", " : "") + std::to_string(sizes[d]);
    same = same && t.size(d) == sizes[d];
  }
  STD_TORCH_CHECK(same, name, " must be contiguous, of shape (", shape, ")");
}

ExpertFactors factors_of(const ExpertAdapters& lora, const Tensor& a, const Tensor& b, const Tensor& ranks,
                         const std::string& which, int64_t parts, int64_t inputs, int64_t outputs) {
  const auto numbers = [&](int64_t columns) {
    return lora.integers ? ceil_div(columns, kLoraBlock) * int64_t(sizeof(LoraIntegers)) : columns;
  };
  const std::string name_a = which + "_a", name_b = which + "_b", name_ranks = which + "_ranks";
  STD_TORCH_CHECK(a.defined() && a.dim() == 4, name_a, " must have four dimensions");
  const int64_t rank = a.size(2);
  check_shape(a, name_a.c_str(), {lora.slots, lora.experts, rank, numbers(inputs)});
  check_shape(b, name_b.c_str(),
              {lora.slots, lora.experts, parts, ceil_div(outputs, kLoraBlock), rank, numbers(kLoraBlock)});
  for (const Tensor* t : {&a, &b})
    STD_TORCH_CHECK(
        lora.integers ? type_of(*t) == ScalarType::Char : dtype_of(*t, which.c_str()) == lora.type,
        "all factors must have the same dtype");
  ExpertFactors factors;
  factors.ranks = integers(ranks, name_ranks.c_str());
  STD_TORCH_CHECK(ranks.numel() == lora.slots, name_ranks, " must have one element for each of the ",
                  lora.slots, " slots");
  factors.a = static_cast<const char*>(a.data_ptr());
  factors.b = static_cast<const char*>(b.data_ptr());
  factors.most_rank = rank;
  factors.in_features = inputs;
  factors.out_features = outputs;
  factors.parts = parts;
  return factors;
}

ExpertAdapters adapters_of(const MoeArgs& args, const LoraTensors& t) {
  ExpertAdapters lora;
  STD_TORCH_CHECK(t.inner_a.defined() && t.inner_a.dim() == 4, "inner_a must have four dimensions");
  lora.integers = type_of(t.inner_a) == ScalarType::Char;
  if (!lora.integers) lora.type = dtype_of(t.inner_a, "inner_a");
  lora.slots = t.inner_a.size(0);
  lora.experts = args.experts;
  lora.adapters = integers(t.adapters, "adapters");
  lora.listed = t.adapters.numel();
  lora.inner = factors_of(lora, t.inner_a, t.inner_b, t.inner_ranks, "inner", args.gated ? 2 : 1, args.hidden,
                          args.intermediate);
  lora.outer =
      factors_of(lora, t.outer_a, t.outer_b, t.outer_ranks, "outer", 1, args.intermediate, args.hidden);
  if (lora.listed == 0) lora.adapters = nullptr;  // the pointer to no slots may be null anyway
  return lora;
}

Tensor moe(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down,
           int64_t intermediate, const std::string& scheme, const std::string& activation, double limit,
           std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, bool gated, bool weigh_input,
           int64_t identity_experts, double up_limit, bool rotated, int64_t communicator,
           std::vector<int64_t> inner_columns, std::vector<int64_t> outer_columns,
           std::vector<int64_t> rank_experts, const LoraTensors* lora) {
  STD_TORCH_CHECK(x.dim() >= 1 && last_size(x) >= 1, "x must have at least one dimension and one feature");
  STD_TORCH_CHECK(intermediate >= 1, "intermediate must be positive, not ", intermediate);
  QuantMoe set;
  MoeArgs& a = set.args;
  a.tokens = row_count(x);
  a.hidden = last_size(x);
  a.intermediate = intermediate;
  a.scheme = scheme_of(scheme);
  a.activation = activation_of(activation);
  a.limit = float(limit);
  a.up_limit = float(up_limit);
  const bool softcapped = a.activation == Activation::silu_softcapped;
  const bool limited =
      softcapped || a.activation == Activation::swiglu_clamped || a.activation == Activation::silu_clamped;
  STD_TORCH_CHECK(!limited || limit > 0, "limit must be positive, not ", limit);
  STD_TORCH_CHECK(!softcapped || up_limit > 0, "up_limit must be positive, not ", up_limit);
  a.gated = gated;
  a.weigh_input = weigh_input;
  a.rotated = rotated;
  STD_TORCH_CHECK(!rotated || (a.hidden % kGroup == 0 && intermediate % kGroup == 0),
                  "rotated experts need whole groups of ", kGroup, " features, not ", a.hidden, " and ",
                  intermediate);
  STD_TORCH_CHECK(identity_experts >= 0, "identity_experts must not be negative, not ", identity_experts);
  a.identity_experts = identity_experts;
  if (communicator != 0 && !rank_experts.empty()) {
    STD_TORCH_CHECK(inner_columns.empty() && outer_columns.empty(),
                    "ranks have columns of all experts, or whole experts: give one of both");
    a.communicator = communicator_of(communicator);
    a.rank_experts = std::move(rank_experts);
  } else if (communicator != 0) {
    a.communicator = communicator_of(communicator);
    a.inner_columns = std::move(inner_columns);
    a.outer_columns = std::move(outer_columns);
    check_ranks(a, a.inner_columns, intermediate, "inner_columns");
    check_ranks(a, a.outer_columns, a.hidden, "outer_columns");
  }
  const int64_t inner = inner_share(a).count, outer = outer_share(a).count;
  check_experts(gate_up, "gate_up", gated ? "intermediate (gate and up)" : "intermediate (without a gate)",
                "hidden", (gated ? 2 : 1) * ceil_div(inner, kPanel), a.scheme, a.hidden);
  check_experts(down, "down", "hidden", "intermediate", ceil_div(outer, kPanel), a.scheme, intermediate);
  a.experts = gate_up.size(0);
  STD_TORCH_CHECK(a.experts >= 1, "gate_up holds no experts");
  STD_TORCH_CHECK(down.size(0) == a.experts, "gate_up and down must hold the same number of experts, not ",
                  a.experts, " and ", down.size(0));
  if (!a.rank_experts.empty()) {
    check_rank_experts(a, a.experts);
    a.experts = std::accumulate(a.rank_experts.begin(), a.rank_experts.end(), int64_t{0});
  }
  a.top_k = choices_per_token(expert_ids, "expert_ids", a.tokens);
  STD_TORCH_CHECK(choices_per_token(expert_weights, "expert_weights", a.tokens) == a.top_k,
                  "expert_weights has ", last_size(expert_weights), " columns, but expert_ids has ", a.top_k);
  dtype_of(expert_weights, "expert_weights");
  const auto gate_up_terms =
      checked_bias(gate_up_bias, "gate_up_bias", a.experts * (gated ? 2 : 1) * intermediate);
  const auto down_terms = checked_bias(down_bias, "down_bias", a.experts * a.hidden);

  const Tensor rows = contiguous(x);
  std::vector<int64_t> sizes(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d) sizes[d] = x.size(d);
  sizes.back() = outer;
  Tensor out = new_tensor(x, sizes);
  if (lora != nullptr) a.lora = adapters_of(a, *lora);
  if (a.tokens == 0) return out;

  const std::vector<int32_t> ids = expert_numbers(expert_ids, a);
  const Tensor weights = contiguous(torch::stable::to(expert_weights, ScalarType::Float));
  a.x = rows_of(rows, "x");
  a.out = rows_of(out, "out");
  a.ids = ids.data();
  a.weights = static_cast<const float*>(weights.data_ptr());
  a.gate_up = static_cast<const uint8_t*>(gate_up.data_ptr());
  a.down = static_cast<const uint8_t*>(down.data_ptr());
  a.gate_up_expert_stride = gate_up.stride(0);
  a.gate_up_panel_stride = panel_stride_of(gate_up, 1, gate_up.size(2), "gate_up");
  a.down_expert_stride = down.stride(0);
  a.down_panel_stride = panel_stride_of(down, 1, down.size(2), "down");
  if (gate_up_terms.has_value()) {
    a.gate_up_bias = gate_up_terms->data_ptr();
    a.bias_type = dtype_of(*gate_up_terms, "gate_up_bias");
  }
  if (down_terms.has_value()) {
    const DType type = dtype_of(*down_terms, "down_bias");
    STD_TORCH_CHECK(!gate_up_terms.has_value() || type == a.bias_type,
                    "gate_up_bias and down_bias must have the same dtype");
    a.down_bias = down_terms->data_ptr();
    a.bias_type = type;
  }
  const Scratch scratch(QuantMoe::scratch_bytes(a));
  a.scratch = scratch.data();
  run(set);
  return out;
}

Tensor int4_moe(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down,
                int64_t intermediate, std::string scheme, std::string activation, double limit,
                std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, bool gated,
                bool weigh_input, int64_t identity_experts, double up_limit, bool rotated,
                int64_t communicator, std::vector<int64_t> inner_columns, std::vector<int64_t> outer_columns,
                std::vector<int64_t> rank_experts) {
  return moe(x, expert_ids, expert_weights, gate_up, down, intermediate, scheme, activation, limit,
             gate_up_bias, down_bias, gated, weigh_input, identity_experts, up_limit, rotated, communicator,
             std::move(inner_columns), std::move(outer_columns), std::move(rank_experts), nullptr);
}

Tensor int4_moe_lora(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down,
                     int64_t intermediate, std::string scheme, std::string activation, Tensor inner_a,
                     Tensor inner_b, Tensor inner_ranks, Tensor outer_a, Tensor outer_b, Tensor outer_ranks,
                     Tensor adapters, double limit, std::optional<Tensor> gate_up_bias,
                     std::optional<Tensor> down_bias, bool gated, int64_t identity_experts, double up_limit,
                     bool rotated) {
  const LoraTensors lora = {inner_a, inner_b, inner_ranks, outer_a, outer_b, outer_ranks, adapters};
  return moe(x, expert_ids, expert_weights, gate_up, down, intermediate, scheme, activation, limit,
             gate_up_bias, down_bias, gated, false, identity_experts, up_limit, rotated, 0, {}, {}, {},
             &lora);
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("int4_moe", TORCH_BOX(&armllm::int4_moe));
  m.impl("int4_moe_lora", TORCH_BOX(&armllm::int4_moe_lora));
}
