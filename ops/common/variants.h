// The kernel variants: one row an instruction-set level, each with the same tables of micro-kernels.
//
// A kernel family declares a struct of function pointers (`LinearKernels`, `NormKernels`, …) in its own header.
// Every variant namespace defines one constant of each.  `kernels()` is the row in use: the best that the CPU
// can run, or what ARMLLM_ISA names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace armllm {

struct LinearKernels;
struct DenseKernels;
struct AttentionKernels;
struct NormKernels;
struct RopeKernels;
struct ActivationKernels;
struct MoeKernels;

struct Variant {
  const char* name;
  uint64_t required;  // bits of cpu_features()
  const LinearKernels* linear;
  const DenseKernels* dense;
  const AttentionKernels* attention;
  const NormKernels* norm;
  const RopeKernels* rope;
  const ActivationKernels* activation;
  const MoeKernels* moe;
};

enum Feature : uint64_t {
  kAsimd = 1u << 0,
  kFp16 = 1u << 1,
  kDotprod = 1u << 2,
  kI8mm = 1u << 3,
  kBf16 = 1u << 4,
  kSve = 1u << 5,
  kSme2 = 1u << 6,
  kAvx2 = 1u << 16,
  kFma = 1u << 17,
  kF16c = 1u << 18,
  kAvx512 = 1u << 19,  // F, BW, VL, DQ
  kAvx512Vnni = 1u << 20,
  kAvx512Bf16 = 1u << 21,
};

uint64_t cpu_features();
std::vector<std::string> cpu_feature_names();

// Variants built for this architecture, best first, and whether this CPU can run them.
const std::vector<Variant>& all_variants();
bool runs_here(const Variant& variant);

// The variant in use.  The first call reads ARMLLM_ISA; an unknown name, or one that this CPU lacks, throws
// std::runtime_error with the list of what there is.
const Variant& variant();
// Forces a variant (tests, `ARMLLM_ISA`); the empty name goes back to the default.  Not thread safe.
void select_variant(const std::string& name);

}  // namespace armllm
