// moe_route
#include <tuple>
#include <vector>

#include "dispatch/variants.h"
#include "moe/moe.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

constexpr int64_t kTileTokens = 8;

Scoring scoring_of(const std::string& name) {
  std::string known;
#define SCORING(scoring, number)                 \
  if (name == #scoring) return Scoring::scoring; \
  known += (known.empty() ? "" : ", ") + std::string(#scoring);
#include "runtime/enums.def"
  STD_TORCH_CHECK(false, "unknown scoring '", name, "'; choose from: ", known);
}

void check(const RouteArgs& args) {
  STD_TORCH_CHECK(args.experts >= 1 && args.experts <= kMaxExperts, "logits must have 1 to ", kMaxExperts,
                  " experts in the last dimension; there are ", args.experts);
  STD_TORCH_CHECK(args.groups >= 1 && args.experts % args.groups == 0, "groups = ", args.groups,
                  " does not divide the ", args.experts, " experts");
  STD_TORCH_CHECK(args.top_k_groups >= 1 && args.top_k_groups <= args.groups,
                  "top_k_groups = ", args.top_k_groups, " must lie in 1 to groups = ", args.groups);
  const int64_t eligible = args.groups == 1 ? args.experts : args.experts / args.groups * args.top_k_groups;
  STD_TORCH_CHECK(args.top_k >= 1 && args.top_k <= eligible, "top_k = ", args.top_k, " must lie in 1 to ",
                  eligible, ", the number of experts that may be chosen");
}

std::tuple<Tensor, Tensor> moe_route(Tensor given_logits, int64_t top_k, std::string scoring,
                                     bool renormalize, double scale, std::optional<Tensor> correction_bias,
                                     int64_t groups, int64_t top_k_groups, double epsilon,
                                     std::optional<Tensor> token_ids, std::optional<Tensor> choices) {
  dtype_of(given_logits, "logits");
  STD_TORCH_CHECK(given_logits.dim() >= 1, "logits must have at least one dimension");
  MoeRoute route;
  route.args.tokens = row_count(given_logits);
  route.args.experts = last_size(given_logits);
  route.args.top_k = top_k;
  route.args.groups = groups;
  route.args.top_k_groups = top_k_groups;
  route.args.scoring = scoring_of(scoring);
  route.args.renormalize = renormalize;
  route.args.scale = static_cast<float>(scale);
  route.args.epsilon = static_cast<float>(epsilon);
  check(route.args);
  const Tensor logits = as_rows(given_logits);  // may copy, which only checked sizes bound
  route.args.logits = rows_of(logits, "logits");
  Tensor bias;
  if (correction_bias) {
    STD_TORCH_CHECK(correction_bias->dim() == 1 && correction_bias->numel() == route.args.experts,
                    "correction_bias must have one value for each of the ", route.args.experts,
                    " experts; it has ", correction_bias->numel());
    STD_TORCH_CHECK(type_of(*correction_bias) == ScalarType::Float, "correction_bias must be float32");
    bias = as_contiguous(*correction_bias);
    route.args.correction_bias = static_cast<const float*>(bias.data_ptr());
  }
  STD_TORCH_CHECK(token_ids.has_value() == choices.has_value(),
                  "token_ids and choices must be given together, or neither of them");
  if (choices) {
    STD_TORCH_CHECK(type_of(*token_ids) == ScalarType::Long && token_ids->numel() == route.args.tokens,
                    "token_ids must be int64, one for each of the ", route.args.tokens, " tokens");
    STD_TORCH_CHECK(type_of(*choices) == ScalarType::Int && choices->dim() == 2 && choices->size(0) > 0 &&
                        choices->size(1) == top_k,
                    "choices must be int32 of shape (vocabulary, ", top_k, "), not of shape ",
                    shape_of(*choices));
    token_ids = as_contiguous(*token_ids);
    choices = as_contiguous(*choices);
    route.args.vocabulary = choices->size(0);
    route.args.choices = static_cast<const int32_t*>(choices->data_ptr());
    route.args.token_ids = static_cast<const int64_t*>(token_ids->data_ptr());
    for (int64_t token = 0; token < route.args.tokens; ++token)  // not the whole table, which may be large
      for (int64_t j = 0; j < top_k; ++j) {
        const int32_t expert = chosen_experts(route.args, token)[j];
        STD_TORCH_CHECK(expert >= 0 && expert < route.args.experts, "choices has expert ", expert,
                        " for token id ", route.args.token_ids[token], ", and there are ",
                        route.args.experts);
      }
  }
  std::vector<int64_t> shape;
  for (int64_t d = 0; d + 1 < logits.dim(); ++d) shape.push_back(logits.size(d));
  shape.push_back(top_k);
  Tensor weights = new_tensor(logits, shape, ScalarType::Float);
  Tensor ids = new_tensor(logits, shape, ScalarType::Int);
  route.args.weights = static_cast<float*>(weights.data_ptr());
  route.args.ids = static_cast<int32_t*>(ids.data_ptr());
  run(route);
  return {weights, ids};
}

}  // namespace

int64_t MoeRoute::tiles(int) const { return ceil_div(args.tokens, kTileTokens); }

void MoeRoute::tile(int, int64_t index) {
  const int64_t first = index * kTileTokens, last = first + kTileTokens;
  for (int64_t token = first; token < last && token < args.tokens; ++token) variant().moe->route(args, token);
}

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("moe_route", TORCH_BOX(&armllm::moe_route)); }
