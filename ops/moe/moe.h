// Mixture of Experts (MoE): routing, and all experts of a layer as one task set.
#pragma once

#include "collective/gather_columns.h"
#include "collective/gather_rows.h"
#include "linear/quant_linear.h"
#include "moe/expert_adapters.h"
#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

constexpr int64_t kMaxExperts = 1024;  // per router, because the scores are on the stack

enum class Scoring : int32_t {
#define SCORING(name, number) name = number,
#include "runtime/enums.def"
};

struct RouteArgs {
  Rows logits;
  float* weights = nullptr;                // [tokens][top_k]
  int32_t* ids = nullptr;                  // [tokens][top_k], best first
  const float* correction_bias = nullptr;  // added to the scores only for the choice (DeepSeek-V3)
  // Instead of the best experts, those that a table [vocabulary][top_k] has for the token's id (DeepSeek-V4).
  const int32_t* choices = nullptr;
  const int64_t* token_ids = nullptr;  // [tokens]
  int64_t vocabulary = 0;
  int64_t tokens = 0, experts = 0, top_k = 0, groups = 1, top_k_groups = 1;
  Scoring scoring = Scoring::softmax;
  bool renormalize = false;
  float scale = 1.0f;
  // Added to the sum of independent scores, which may all underflow to 0; the margin of sparsemixer.
  float epsilon = 1e-20f;
};

// Experts that the table has for a token; ids outside of it count as the first and the last of it.
inline const int32_t* chosen_experts(const RouteArgs& args, int64_t token) {
  const int64_t id = args.token_ids[token], last = args.vocabulary - 1;
  return args.choices + (id < 0 ? 0 : id > last ? last : id) * args.top_k;
}

class MoeRoute final : public TaskSet {
 public:
  RouteArgs args;
  int phases() const override { return 1; }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;
};

struct MoeKernels {
  // Chooses the experts of one token; see RouteArgs.
  void (*route)(const RouteArgs& args, int64_t token);
  // y[i] = Σ_j weights[j] · x[j][i] in the order of j.
  void (*combine)(const float* const* x, const float* weights, int64_t count, int64_t n, void* y, DType type);
  // y[i] = x[i]
  void (*widen)(const void* x, DType type, int64_t n, float* y);
};

// out[t] = Σ_j weights[t][j] · down_e( act(gate_e(x)) · up_e(x) ),  e = ids[t][j]
//
// Panels of gate and up alternate in `gate_up` (g0 u0 g1 u1 …).  The identity_experts ids that follow the
// experts' return x itself.  Ids outside both contribute nothing; the registered op rejects them.  With
// weigh_input the experts' inputs are x · weights[t][j], and the sum is unweighted.
//
// Of tensor parallel ranks, each computes some columns of act(gate) · up and some of the result.  Its weights
// have the panels of these columns only; its biases are whole.
//
// Or each rank has some whole experts.  The rows of `down` are exchanged, so that every rank adds up all rows
// of a token in the order of j: sums of each rank's rows would be rounded in another order.
struct MoeArgs {
  Rows x, out;
  const int32_t* ids = nullptr;    // [tokens][top_k]
  const float* weights = nullptr;  // [tokens][top_k]
  const uint8_t* gate_up = nullptr;
  const uint8_t* down = nullptr;
  int64_t gate_up_expert_stride = 0, down_expert_stride = 0;  // bytes
  int64_t gate_up_panel_stride = 0, down_panel_stride = 0;    // bytes
  Scheme scheme = Scheme::g32i;
  int64_t tokens = 0, experts = 0, identity_experts = 0, top_k = 0, hidden = 0, intermediate = 0;
  Activation activation = Activation::silu;
  float limit = 7.0f;        // of swiglu_clamped, silu_clamped, and of gates of silu_softcapped
  float up_limit = 7.0f;     // of silu_softcapped
  bool gated = true;         // false: `gate_up` has no gate, and the activation is act(up) · up
  bool weigh_input = false;  // weights multiply the experts' inputs instead of their outputs
  // Both weights are W · H, and inputs are rotated before they are quantized: see LinearArgs.  `hidden` and
  // `intermediate` are multiples of 32 then.
  bool rotated = false;
  // [experts][2][intermediate]: gate, then up; without a gate [experts][intermediate]
  const void* gate_up_bias = nullptr;
  const void* down_bias = nullptr;                    // [experts][hidden]
  std::shared_ptr<Communicator> communicator;         // null: this process computes all columns
  std::vector<int64_t> inner_columns, outer_columns;  // of each rank: of `intermediate` and of `hidden`
  std::vector<int64_t> rank_experts;                  // of each rank; empty: all ranks have all experts
  DType bias_type = DType::f32;
  ExpertAdapters lora;  // not with weigh_input, nor with a communicator
  void* scratch = nullptr;
};

// Columns or experts that this process computes.
struct RankShare {
  int64_t first, count;
  bool has(int64_t index) const { return index >= first && index < first + count; }
};

inline RankShare share_of(const MoeArgs& args, const std::vector<int64_t>& counts, int64_t all) {
  if (counts.empty()) return {0, all};
  const int64_t rank = args.communicator->rank();
  return {first_column(counts, rank), counts[rank]};
}
inline RankShare inner_share(const MoeArgs& a) { return share_of(a, a.inner_columns, a.intermediate); }
inline RankShare outer_share(const MoeArgs& a) { return share_of(a, a.outer_columns, a.hidden); }
inline RankShare expert_share(const MoeArgs& a) { return share_of(a, a.rank_experts, a.experts); }

// True if a row of the results fits a buffer for exchanges.
inline bool fits_exchange(const MoeArgs& a) {
  return a.hidden <= a.communicator->buffer_bytes() / int64_t(sizeof(float));
}

class QuantMoe final : public TaskSet {
 public:
  MoeArgs args;
  static int64_t scratch_bytes(const MoeArgs& args);
  int phases() const override;
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;

 private:
  int gather_phases() const;
  int phases_of_pass() const;

  mutable GatherColumns gather_;    // of act(gate) · up
  mutable GatherRows gather_rows_;  // of `down`, in a pass
};

}  // namespace armllm
