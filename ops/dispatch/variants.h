// Kernel variants: one row per instruction-set level, each with the same tables of micro-kernels.
//
// A kernel family declares a struct of function pointers (`LinearKernels`, `NormKernels`, …) in its own
// header and has a line in ARMLLM_FAMILIES.  A variant's namespace defines a constant for each family that
// has kernels for this variant (ops/CMakeLists.txt compiles only those).  The row inherits its other tables
// from its base.  `variant()` is the row in use: the best variant that the CPU can run, or the variant named
// by ARMLLM_ISA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace armllm {

// X(table, family, kind of arithmetic in its inner loops)
#define ARMLLM_FAMILIES(X)                     \
  X(LinearKernels, linear, kIntegers)          \
  X(DenseKernels, dense, kFloats)              \
  X(AttentionKernels, attention, kFloats)      \
  X(NormKernels, norm, kLanes)                 \
  X(RopeKernels, rope, kLanes)                 \
  X(ActivationKernels, activation, kLanes)     \
  X(MoeKernels, moe, kLanes)                   \
  X(PointwiseKernels, pointwise, kLanes)       \
  X(RecurrentKernels, recurrent, kLanes)       \
  X(CompressKernels, compress, kLanes)         \
  X(RoundingKernels, rounding, kLanes)         \
  X(SelectKernels, select, kFloats)            \
  X(BlockSelectKernels, block_select, kFloats) \
  X(SampleKernels, sample, kLanes)             \
  X(LoraKernels, lora, kFloats)

// kLanes: row operations on the lanes of simd.h.
enum Arithmetic { kIntegers, kFloats, kLanes, kArithmetics };

#define ARMLLM_COUNT(Table, family, material) k_##family,
enum Family { ARMLLM_FAMILIES(ARMLLM_COUNT) kFamilies };
#undef ARMLLM_COUNT
#define ARMLLM_NAME(Table, family, material) #family,
constexpr const char* kFamilyNames[] = {ARMLLM_FAMILIES(ARMLLM_NAME)};
#undef ARMLLM_NAME

#define ARMLLM_DECLARE(Table, family, material) struct Table;
ARMLLM_FAMILIES(ARMLLM_DECLARE)
#undef ARMLLM_DECLARE

struct Variant {
  const char* name;
  uint64_t required;  // bits of cpu_features()
  bool preferred;     // false: this CPU can run it, but a lower variant is faster
  const char* instructions[kArithmetics];
  const char* table_owner[kFamilies];  // for each family, the variant that defines the table: this or a base
#define ARMLLM_MEMBER(Table, family, material) const Table* family;
  ARMLLM_FAMILIES(ARMLLM_MEMBER)
#undef ARMLLM_MEMBER
};

enum Feature : uint64_t {
  kAsimd = 1u << 0,
  kFp16 = 1u << 1,
  kDotprod = 1u << 2,
  kFhm = 1u << 3,
  kI8mm = 1u << 4,
  kBf16 = 1u << 5,
  kSve = 1u << 6,
  kSveI8mm = 1u << 7,
  kSve2 = 1u << 8,
  kSme = 1u << 9,
  kSme2 = 1u << 10,
  kAvx2 = 1u << 16,
  kFma = 1u << 17,
  kF16c = 1u << 18,
  kAvx512 = 1u << 19,  // F, BW, VL, DQ
  kAvx512Vnni = 1u << 20,
  kAvx512Bf16 = 1u << 21,
  kAmx = 1u << 22,
};

uint64_t cpu_features();
std::vector<std::string> feature_names(uint64_t features);
// Vector length in bits of SVE and of streaming SVE; 0 without the extension.
int sve_bits();
int sme_bits();

// Variants built for this architecture, best first.
const std::vector<Variant>& all_variants();
// True if this CPU can run the variant.
bool runs_here(const Variant& variant);

// The variant in use.  The first call reads ARMLLM_ISA.  If the name is unknown or this CPU cannot run the
// variant, it throws std::runtime_error with the list of variants.
const Variant& variant();
// Selects a variant, for tests; an empty name restores the default.  Not thread safe.
void select_variant(const std::string& name);

// The variant and instructions that a family uses, and the reason why no better variant is in use.
struct FamilyChoice {
  std::string family, variant, reason;
};
std::vector<FamilyChoice> family_choices();

}  // namespace armllm
