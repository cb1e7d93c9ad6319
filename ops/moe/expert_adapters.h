// Low-rank additions to the products of experts: each token may have an adapter of its own.
//
// They are added before the activation, and before the results of experts are summed.
#pragma once

#include "lora/lora.h"
#include "runtime/types.h"

namespace armllm {

// Factors of one of the two products: of gate and up, or of down.
struct ExpertFactors {
  const char* a = nullptr;  // [slots][experts][most_rank][in_features]
  const char* b = nullptr;  // [slots][experts][parts][blocks of kLoraBlock columns][most_rank][kLoraBlock]
  const int32_t* ranks = nullptr;  // [slots]; 0: the adapter leaves this product alone
  int64_t most_rank = 0, in_features = 0, out_features = 0, parts = 1;  // parts: 2 of gate and up
};

struct ExpertAdapters {
  ExpertFactors inner, outer;
  const int32_t* adapters = nullptr;  // [listed]: slot of each token; null: there are none
  int64_t listed = 0, slots = 0, experts = 0;
  DType type = DType::f32;  // of all factors, unless they are integers, see LoraArgs
  bool integers = false;
};

// Throws if a token's slot or a rank is out of range.
void check_adapters(const ExpertAdapters& adapters, int64_t tokens);

// An expert's factors in a slot, as arguments of the kernels of linear layers.
LoraArgs expert_factors(const ExpertAdapters& adapters, const ExpertFactors& factors, int64_t slot,
                        int64_t expert, int64_t part = 0);

// Adds `n` columns from `first` on of sums · B to the floats block[first % kLoraBlock …].  The columns lie
// within a block of B; `layer` is one of expert_factors.
void add_block(LoraArgs layer, const float* sums, int64_t first, int64_t n, float* block);

}  // namespace armllm
