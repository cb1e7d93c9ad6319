#include "dispatch/variants.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace armllm {

// Weak symbols: a variant defines only the tables of the families that are compiled for it.
#define ARMLLM_DECLARE_TABLE(Table, family, arithmetic) \
  extern const Table family __attribute__((weak, visibility("hidden")));
#define ARMLLM_DECLARE_VARIANT(name)    \
  namespace name {                      \
  ARMLLM_FAMILIES(ARMLLM_DECLARE_TABLE) \
  }
ARMLLM_DECLARE_VARIANT(scalar)
#if defined(__x86_64__)
ARMLLM_DECLARE_VARIANT(avx2)
ARMLLM_DECLARE_VARIANT(avx512)
ARMLLM_DECLARE_VARIANT(avx512bf16)
ARMLLM_DECLARE_VARIANT(amx)
#elif defined(__aarch64__)
ARMLLM_DECLARE_VARIANT(neon)
ARMLLM_DECLARE_VARIANT(dotprod)
ARMLLM_DECLARE_VARIANT(i8mm)
ARMLLM_DECLARE_VARIANT(sve)
ARMLLM_DECLARE_VARIANT(svei8mm)
ARMLLM_DECLARE_VARIANT(sme2)
#endif

namespace {

struct VariantRows {
  std::vector<Variant> built, absent;  // best first; absent variants are known but not compiled
};

// Adds a row.  The row inherits missing tables and instruction names from its base.
void add_row(VariantRows& rows, Variant row, const char* base) {
  bool built = false;
  for (const char* owner : row.table_owner) built = built || owner != nullptr;
  if (!built) {
    rows.absent.insert(rows.absent.begin(), row);
    return;
  }
  for (const Variant& below : rows.built) {
    if (std::strcmp(below.name, base) != 0) continue;
    for (int i = 0; i < kArithmetics; ++i)
      if (row.instructions[i] == nullptr) row.instructions[i] = below.instructions[i];
#define ARMLLM_INHERIT(Table, family, arithmetic) \
  if (row.family == nullptr)                      \
    row.family = below.family, row.table_owner[k_##family] = below.table_owner[k_##family];
    ARMLLM_FAMILIES(ARMLLM_INHERIT)
#undef ARMLLM_INHERIT
  }
  rows.built.insert(rows.built.begin(), row);
}

#define ARMLLM_OWN_TABLE(Table, table, arithmetic) \
  if (&own::table != nullptr) row.table = &own::table, row.table_owner[k_##table] = row.name;
#define ARMLLM_ADD(variant, base, required_features, is_preferred, ...)     \
  {                                                                         \
    namespace own = variant;                                                \
    Variant row{};                                                          \
    row.name = #variant;                                                    \
    row.required = required_features;                                       \
    row.preferred = is_preferred;                                           \
    const char* const instructions[] = {__VA_ARGS__};                       \
    std::copy(instructions, instructions + kArithmetics, row.instructions); \
    ARMLLM_FAMILIES(ARMLLM_OWN_TABLE)                                       \
    add_row(rows, row, base);                                               \
  }

// From worst to best.  Arguments of ARMLLM_ADD: name, base, required features, whether to prefer the variant
// where it runs, and the instructions of its integer products, float products and row operations.  nullptr
// means the instructions of the base.
VariantRows all_rows() {
  VariantRows rows;
  ARMLLM_ADD(scalar, "", 0, true, "plain C++", "plain C++", "plain C++")
#if defined(__x86_64__)
  constexpr uint64_t kHaswell = kAvx2 | kFma | kF16c, kCascadeLake = kHaswell | kAvx512 | kAvx512Vnni;
  ARMLLM_ADD(avx2, "scalar", kHaswell, true, "VPMADDUBSW", "FMA, 256 bits", "256 bits")
  ARMLLM_ADD(avx512, "avx2", kCascadeLake, true, "VPDPBUSD", "FMA, 512 bits", "512 bits")
  ARMLLM_ADD(avx512bf16, "avx512", kCascadeLake | kAvx512Bf16, true, nullptr, "VDPBF16PS", nullptr)
  ARMLLM_ADD(amx, "avx512bf16", kCascadeLake | kAvx512Bf16 | kAmx, true, "TDPBSSD", "TDPBF16PS", nullptr)
#elif defined(__aarch64__)
  constexpr uint64_t kV82 = kAsimd | kFp16 | kDotprod, kV86 = kV82 | kFhm | kI8mm | kBf16;
  // At 128 bits SVE is no wider than NEON and lacks indexed operands, so it is not preferred.
  constexpr int kWide = 256;
  const bool wide = sve_bits() >= kWide;
  ARMLLM_ADD(neon, "scalar", kAsimd, true, "SMULL", "FMLA", "NEON")
  ARMLLM_ADD(dotprod, "neon", kV82, true, "SDOT", "FMLA, FP16", nullptr)
  ARMLLM_ADD(sve, "neon", kAsimd | kFp16 | kSve, wide, "SVE SDOT", nullptr, nullptr)
  ARMLLM_ADD(i8mm, "dotprod", kV86, true, "SMMLA", "BFMMLA", "NEON, BF16")
  ARMLLM_ADD(svei8mm, "i8mm", kV86 | kSve | kSveI8mm, wide, "SVE SMMLA", nullptr, nullptr)
  ARMLLM_ADD(sme2, "i8mm", kV86 | kSme | kSme2, true, "SMOPA", nullptr, nullptr)
#endif
  std::stable_partition(rows.built.begin(), rows.built.end(), [](const Variant& v) { return v.preferred; });
  return rows;
}

const VariantRows& rows() {
  static const VariantRows all = all_rows();
  return all;
}

std::string known_variants() {
  std::string text;
  for (const Variant& v : all_variants()) {
    if (!text.empty()) text += ", ";
    text += v.name;
    if (!runs_here(v)) text += " (not on this CPU)";
  }
  return text;
}

const Variant* find_variant(const std::string& name) {
  for (const Variant& v : all_variants()) {
    if (name != v.name) continue;
    if (!runs_here(v))
      throw std::runtime_error(
          "kernel variant '" + name +
          "' needs CPU features that this machine lacks; choose from: " + known_variants());
    return &v;
  }
  throw std::runtime_error("unknown kernel variant '" + name + "'; choose from: " + known_variants());
}

const Variant* default_variant() {
  const char* forced = std::getenv("ARMLLM_ISA");
  // Python replaces ops by Triton kernels (ops/variants.py); this is the variant of the others.
  const bool triton = forced != nullptr && std::strcmp(forced, "triton") == 0;
  if (forced != nullptr && *forced != '\0' && !triton) return find_variant(forced);
  for (const Variant& v : all_variants())
    if (runs_here(v)) return &v;
  throw std::runtime_error("no kernel variant runs on this CPU");
}

const Variant*& selected() {
  static const Variant* current = default_variant();
  return current;
}

// The reason why `better`, which has its own kernels, is not in use.
std::string rejection_reason(const Variant& better) {
  std::string text = better.name;
  const std::vector<std::string> lacking = feature_names(better.required & ~cpu_features());
  for (size_t i = 0; i < lacking.size(); ++i) text += (i ? ", " : " needs ") + lacking[i];
  if (!lacking.empty()) return text;
  if (!better.preferred) return text + " not preferred: " + std::to_string(sve_bits()) + "-bit vectors";
  return text + " not selected";
}

}  // namespace

const std::vector<Variant>& all_variants() { return rows().built; }

bool runs_here(const Variant& v) { return (cpu_features() & v.required) == v.required; }

const Variant& variant() { return *selected(); }

void select_variant(const std::string& name) {
  selected() = name.empty() ? default_variant() : find_variant(name);
}

std::vector<FamilyChoice> family_choices() {
  std::vector<FamilyChoice> all;
  for (int i = 0; i < kFamilies; ++i) all.push_back({kFamilyNames[i], variant().table_owner[i], ""});
  constexpr Arithmetic kArithmetic[] = {
#define ARMLLM_ARITHMETIC(Table, family, arithmetic) arithmetic,
      ARMLLM_FAMILIES(ARMLLM_ARITHMETIC)
#undef ARMLLM_ARITHMETIC
  };
  for (int i = 0; i < kFamilies; ++i) {
    for (const Variant& v : all_variants())
      if (all[i].variant == v.name) all[i].reason = v.instructions[kArithmetic[i]];
    bool better = true;
    for (const Variant& v : all_variants()) {
      if (all[i].variant == v.name) {
        better = false;
      } else if (std::strcmp(v.table_owner[i], v.name) == 0 && (better || !v.preferred)) {
        all[i].reason += "; " + rejection_reason(v);
      }
    }
    for (const Variant& v : rows().absent)
      if (v.instructions[kArithmetic[i]] != nullptr && runs_here(v))
        all[i].reason += "; " + std::string(v.name) + " not built";
  }
  return all;
}

}  // namespace armllm
