#include "moe/moe.h"
#include "simd/exp.h"
#include "simd/ragged_blocks.h"
#include "simd/softplus.h"

namespace armllm::ARMLLM_VARIANT {

extern const MoeKernels moe;

namespace {

constexpr float kInfinity = __builtin_inff();

// The largest `wanted` of the offered values, largest first.  Equal values stay in the order of their offers.
struct Best {
  float* values;
  int32_t* ids;
  int64_t wanted;
  int64_t count = 0;

  void offer(float value, int32_t id) {
    if (!(value > -kInfinity)) value = -kInfinity;  // NaN ranks below every number, but can fill a slot
    if (count == wanted) {
      if (!(value > values[count - 1])) return;
    } else {
      ++count;
    }
    int64_t place = count - 1;
    for (; place > 0 && value > values[place - 1]; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = id;
  }
};

// Writes whole blocks; values past the end are zero.
template <typename T>
void widen_row(const T* x, int64_t n, float* out) {
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE { store(out + i, load_lanes(x + i, lanes)); });
}

// Converts all logits to float32; `out` has room for whole blocks.
void widen(const Rows& logits, int64_t row, int64_t n, float* out) {
  switch (logits.type) {
    case DType::f32:
      return widen_row(reinterpret_cast<const float*>(logits.row(row)), n, out);
    case DType::bf16:
      return widen_row(reinterpret_cast<const bf16*>(logits.row(row)), n, out);
    case DType::f16:
      return widen_row(reinterpret_cast<const f16*>(logits.row(row)), n, out);
  }
}

// Writes out[i] = e^(x[i] − highest), in whole blocks, and returns the sum of the first n in a fixed order.
float exponentials(const float* x, int64_t n, float* out) {
  F32 highest = set1(-kInfinity);
  for (int64_t i = 0; i < n; i += kLanes)
    highest = max(highest, select_first(static_cast<int>(n - i), load(x + i), highest));
  const F32 top = set1(reduce_max(highest));
  F32 sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 e = exp(load(x + i) - top);
    store(out + i, e);
    sum = sum + select_first(static_cast<int>(n - i), e, zero());
  }
  return reduce_add(sum);
}

void sigmoids(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, sigmoid(load(x + i)));
}

void softplus_roots(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, sqrt(softplus(load(x + i))));
}

// A bound that at least `wanted` ≤ 16 of the values reach.  The values are viewed as 16 columns, and the
// bound is the `wanted`-th largest of the columns' maxima.
float reached_by(const float* values, int64_t n, int64_t wanted) {
  F32 columns = set1(-kInfinity);
  for (int64_t i = 0; i < n; i += kLanes)
    columns = max(select_first(static_cast<int>(n - i), load(values + i), columns), columns);
  float tops[kLanes], best[kLanes];
  int32_t ids[kLanes];
  store(tops, columns);
  Best kept{best, ids, wanted};
  for (int i = 0; i < kLanes; ++i) kept.offer(tops[i], i);
  return best[wanted - 1];
}

// Offers the values in order and skips values that cannot be among the best.  Reads whole blocks.
void offer_all(Best& best, const float* values, int64_t n) {
  if (best.wanted > kLanes || n <= kLanes) {
    for (int64_t e = 0; e < n; ++e) best.offer(values[e], static_cast<int32_t>(e));
    return;
  }
  const float bound = reached_by(values, n, best.wanted);
  // If fewer than `wanted` values are above −∞, NaN and −∞ must fill the other slots.
  const bool all = !(bound > -kInfinity);
  const F32 least = set1(bound);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i;
    uint32_t mask = all ? 0xffffu : static_cast<uint32_t>(greater_equal_mask(load(values + i), least));
    if (left < kLanes) mask &= (1u << left) - 1u;
    for (; mask != 0; mask &= mask - 1) {
      const int64_t e = i + __builtin_ctz(mask);
      best.offer(values[e], static_cast<int32_t>(e));
    }
  }
}

// DeepSeek-V3 (sigmoid) ranks a group by the sum of its two best scores, DeepSeek-V2 (softmax) by its best
// score.
float group_score(const float* choice, int64_t n, Scoring scoring) {
  float values[2];
  int32_t ids[2];
  Best best{values, ids, scoring == Scoring::sigmoid && n > 1 ? 2 : 1};
  for (int64_t i = 0; i < n; ++i) best.offer(choice[i], static_cast<int32_t>(i));
  return best.wanted == 2 ? values[0] + values[1] : values[0];
}

void choose(const RouteArgs& args, const float* choice, float* values, int32_t* ids) {
  Best best{values, ids, args.top_k};
  if (args.groups <= 1) return offer_all(best, choice, args.experts);
  const int64_t size = args.experts / args.groups;
  float group_values[kMaxExperts];
  int32_t group_ids[kMaxExperts];
  Best groups{group_values, group_ids, args.top_k_groups};
  for (int64_t g = 0; g < args.groups; ++g)
    groups.offer(group_score(choice + g * size, size, args.scoring), static_cast<int32_t>(g));
  bool kept[kMaxExperts] = {};
  for (int64_t j = 0; j < groups.count; ++j) kept[group_ids[j]] = true;
  for (int64_t e = 0; e < args.experts; ++e)
    if (kept[e / size]) best.offer(choice[e], static_cast<int32_t>(e));
}

// Softmax over only the chosen logits.
void weigh_among_themselves(float* weights, int64_t count) {
  float padded[kMaxExperts], shares[kMaxExperts];
  store(padded, zero());  // the compiler cannot know that count > 0
  for (int64_t j = 0; j < count; ++j) padded[j] = weights[j];
  for (int64_t j = count; j % kLanes != 0; ++j) padded[j] = 0.0f;
  const float sum = exponentials(padded, count, shares);
  for (int64_t j = 0; j < count; ++j) weights[j] = shares[j] / sum;
}

// Replaces logits by their sigmoids.
void squash(float* weights, int64_t count) {
  float padded[kMaxExperts];
  store(padded, zero());  // the compiler cannot know that count > 0
  for (int64_t j = 0; j < count; ++j) padded[j] = weights[j];
  for (int64_t j = count; j % kLanes != 0; ++j) padded[j] = 0.0f;
  sigmoids(padded, count, padded);
  for (int64_t j = 0; j < count; ++j) weights[j] = padded[j];
}

// The sum of e^(x[i] − chosen) over logits whose relative distance from the chosen one is at most `margin`.
float sum_near(const float* x, int64_t n, float chosen, float margin) {
  const F32 top = set1(chosen);
  F32 sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 logit = load(x + i), far = (top - logit) / max(abs(logit), top);
    const F32 e = select_greater(far, set1(margin), zero(), exp(logit - top));
    sum = sum + select_first(static_cast<int>(n - i), e, zero());
  }
  return reduce_add(sum);
}

// SparseMixer (arXiv 2409.12136): each chosen expert has its share of a softmax over the logits near its own,
// without those of the experts that were chosen before it.
void weigh_among_near(float* logits, const int32_t* ids, int64_t count, int64_t n, float margin,
                      float* weights) {
  for (int64_t j = 0; j < count; ++j) {
    weights[j] = 1.0f / sum_near(logits, n, weights[j], margin);
    logits[ids[j]] = -kInfinity;
  }
}

void route(const RouteArgs& args, int64_t token) {
  float logits[kMaxExperts], scores[kMaxExperts], choices[kMaxExperts];
  float* weights = args.weights + token * args.top_k;
  int32_t* ids = args.ids + token * args.top_k;
  const int64_t n = args.experts;
  store(logits, zero());  // the compiler cannot know that n > 0
  widen(args.logits, token, n, logits);
  const bool biased = args.correction_bias != nullptr;
  // A softmax over all experts, renormalized over the chosen experts, equals a softmax over the chosen
  // experts.
  const bool among = args.scoring == Scoring::topk_softmax ||
                     (args.scoring == Scoring::softmax && args.renormalize && !biased);
  float total = 1.0f;
  if (args.scoring == Scoring::softmax && !among) total = exponentials(logits, n, scores);
  if (args.scoring == Scoring::sigmoid) sigmoids(logits, n, scores);
  if (args.scoring == Scoring::sqrt_softplus) softplus_roots(logits, n, scores);
  const bool by_logits =
      among || args.scoring == Scoring::topk_sigmoid || args.scoring == Scoring::sparsemixer;
  const float* known = by_logits ? logits : scores;
  // Without a bias, logits have the same order as their softmax, and stay distinct where small scores
  // underflow.
  const float* choice = args.scoring == Scoring::softmax ? logits : known;
  if (biased) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const F32 share = args.scoring == Scoring::softmax ? load(known + i) / set1(total) : load(known + i);
      const int lanes = n - i < kLanes ? static_cast<int>(n - i) : kLanes;
      store(choices + i, share + load_lanes(args.correction_bias + i, lanes));
    }
    choice = choices;
  }
  if (args.choices != nullptr) {
    const int32_t* known_ids = chosen_experts(args, token);
    for (int64_t j = 0; j < args.top_k; ++j) ids[j] = known_ids[j];
  } else {
    choose(args, choice, weights, ids);
  }
  for (int64_t j = 0; j < args.top_k; ++j) weights[j] = known[ids[j]] / total;
  if (args.scoring == Scoring::topk_sigmoid) squash(weights, args.top_k);
  if (args.scoring == Scoring::sparsemixer)
    weigh_among_near(logits, ids, args.top_k, n, args.epsilon, weights);
  if (among) {
    weigh_among_themselves(weights, args.top_k);
  } else if (args.renormalize) {
    const bool independent = args.scoring == Scoring::sigmoid || args.scoring == Scoring::topk_sigmoid ||
                             args.scoring == Scoring::sqrt_softplus;
    float sum = independent ? args.epsilon : 0.0f;
    for (int64_t j = 0; j < args.top_k; ++j) sum += weights[j];
    for (int64_t j = 0; j < args.top_k; ++j) weights[j] = weights[j] / sum;
  }
  for (int64_t j = 0; j < args.top_k; ++j) weights[j] = weights[j] * args.scale;
}

// Sums kCount rows, or `count` rows if kCount is 0.  With a fixed number, the weights stay in registers
// instead of being loaded for every block.
template <int kCount, typename T>
void combine_rows(const float* const* x, const float* weights, int64_t count, int64_t n, T* y) {
  F32 weight[kCount + 1];
  const float* from[kCount + 1];
  for (int j = 0; j < kCount; ++j) weight[j] = set1(weights[j]), from[j] = x[j];
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE {
    F32 sum = zero();
    for (int j = 0; j < kCount; ++j) sum = fma(weight[j], load_lanes(from[j] + i, lanes), sum);
    for (int64_t j = kCount; j < count; ++j) sum = fma(set1(weights[j]), load_lanes(x[j] + i, lanes), sum);
    store_lanes(y + i, sum, lanes);
  });
}

template <typename T>
void combine_as(const float* const* x, const float* weights, int64_t count, int64_t n, T* y) {
  switch (count) {
    case 2:
      return combine_rows<2>(x, weights, 2, n, y);
    case 4:
      return combine_rows<4>(x, weights, 4, n, y);
    case 8:
      return combine_rows<8>(x, weights, 8, n, y);
    default:
      return combine_rows<0>(x, weights, count, n, y);
  }
}

void combine(const float* const* x, const float* weights, int64_t count, int64_t n, void* y, DType type) {
  switch (type) {
    case DType::f32:
      return combine_as(x, weights, count, n, static_cast<float*>(y));
    case DType::bf16:
      return combine_as(x, weights, count, n, static_cast<bf16*>(y));
    case DType::f16:
      return combine_as(x, weights, count, n, static_cast<f16*>(y));
  }
}

template <typename T>
void widen_as(const T* x, int64_t n, float* y) {
  for_blocks(
      n, [&](int64_t i, int lanes) ARMLLM_INLINE { store_lanes(y + i, load_lanes(x + i, lanes), lanes); });
}

void widen(const void* x, DType type, int64_t n, float* y) {
  switch (type) {
    case DType::f32:
      return widen_as(static_cast<const float*>(x), n, y);
    case DType::bf16:
      return widen_as(static_cast<const bf16*>(x), n, y);
    case DType::f16:
      return widen_as(static_cast<const f16*>(x), n, y);
  }
}

}  // namespace

const MoeKernels moe = {route, combine, widen};

}  // namespace armllm::ARMLLM_VARIANT
