#include "dispatch/variants.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace armllm {

// Weak: a variant defines only the tables of those families for which it was compiled.
#define ARMLLM_DECLARE_TABLE(Table, family, material) \
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

struct Rows {
  std::vector<Variant> built, absent;  // best first; absent: known, but not compiled
};

// A row starts as a copy of its base's.
void add(Rows& rows, Variant own, const char* base) {
  bool built = false;
  for (const char* from : own.from) built = built || from != nullptr;
  if (!built) {
    rows.absent.insert(rows.absent.begin(), own);
    return;
  }
  for (const Variant& below : rows.built) {
    if (std::strcmp(below.name, base) != 0) continue;
    for (int i = 0; i < kMaterials; ++i)
      if (own.work[i] == nullptr) own.work[i] = below.work[i];
#define ARMLLM_INHERIT(Table, family, material) \
  if (own.family == nullptr) own.family = below.family, own.from[k_##family] = below.from[k_##family];
    ARMLLM_FAMILIES(ARMLLM_INHERIT)
#undef ARMLLM_INHERIT
  }
  rows.built.insert(rows.built.begin(), own);
}

#define ARMLLM_OWN_TABLE(Table, table, material) \
  if (&own::table != nullptr) row.table = &own::table, row.from[k_##table] = row.name;
#define ARMLLM_ADD(variant, base, required_features, is_preferred, ...) \
  {                                                                     \
    namespace own = variant;                                            \
    Variant row{};                                                      \
    row.name = #variant;                                                \
    row.required = required_features;                                   \
    row.preferred = is_preferred;                                       \
    const char* const work[] = {__VA_ARGS__};                           \
    std::copy(work, work + kMaterials, row.work);                       \
    ARMLLM_FAMILIES(ARMLLM_OWN_TABLE)                                   \
    add(rows, row, base);                                               \
  }

// Worst first.  Of each row: name, base, what it needs, whether it is the better choice where it runs, and the
// instructions of its products of integers, of floats, and of its row operations where they are not the base's.
Rows all_rows() {
  Rows rows;
  ARMLLM_ADD(scalar, "", 0, true, "plain C++", "plain C++", "plain C++")
#if defined(__x86_64__)
  constexpr uint64_t kHaswell = kAvx2 | kFma | kF16c, kCascadeLake = kHaswell | kAvx512 | kAvx512Vnni;
  ARMLLM_ADD(avx2, "scalar", kHaswell, true, "VPMADDUBSW", "FMA, 256 bits", "256 bits")
  ARMLLM_ADD(avx512, "avx2", kCascadeLake, true, "VPDPBUSD", "FMA, 512 bits", "512 bits")
  ARMLLM_ADD(avx512bf16, "avx512", kCascadeLake | kAvx512Bf16, true, nullptr, "VDPBF16PS", nullptr)
  ARMLLM_ADD(amx, "avx512bf16", kCascadeLake | kAvx512Bf16 | kAmx, true, "TDPBSSD", "TDPBF16PS", nullptr)
#elif defined(__aarch64__)
  constexpr uint64_t kV82 = kAsimd | kFp16 | kDotprod, kV86 = kV82 | kFhm | kI8mm | kBf16;
  // At 128 bits SVE does what NEON does, without its indexed operands.
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

const Rows& rows() {
  static const Rows all = all_rows();
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

const Variant* find(const std::string& name) {
  for (const Variant& v : all_variants()) {
    if (name != v.name) continue;
    if (!runs_here(v))
      throw std::runtime_error(
          "kernel variant '" + name +
          "' needs CPU features that this machine lacks; there are: " + known_variants());
    return &v;
  }
  throw std::runtime_error("unknown kernel variant '" + name + "'; there are: " + known_variants());
}

const Variant* default_variant() {
  const char* forced = std::getenv("ARMLLM_ISA");
  if (forced != nullptr && *forced != '\0') return find(forced);
  for (const Variant& v : all_variants())
    if (runs_here(v)) return &v;
  throw std::runtime_error("no kernel variant runs on this CPU");
}

const Variant*& selected() {
  static const Variant* current = default_variant();
  return current;
}

// Why `better`, which has kernels of its own, is not in use.
std::string refusal(const Variant& better) {
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

void select_variant(const std::string& name) { selected() = name.empty() ? default_variant() : find(name); }

std::vector<Choice> choices() {
  std::vector<Choice> all;
  for (int i = 0; i < kFamilies; ++i) all.push_back({kFamilyNames[i], variant().from[i], ""});
  constexpr Material kMaterial[] = {
#define ARMLLM_MATERIAL(Table, family, material) material,
      ARMLLM_FAMILIES(ARMLLM_MATERIAL)
#undef ARMLLM_MATERIAL
  };
  for (int i = 0; i < kFamilies; ++i) {
    for (const Variant& v : all_variants())
      if (all[i].variant == v.name) all[i].why = v.work[kMaterial[i]];
    bool better = true;
    for (const Variant& v : all_variants()) {
      if (all[i].variant == v.name) {
        better = false;
      } else if (std::strcmp(v.from[i], v.name) == 0 && (better || !v.preferred)) {
        all[i].why += "; " + refusal(v);
      }
    }
    for (const Variant& v : rows().absent)
      if (v.work[kMaterial[i]] != nullptr && runs_here(v))
        all[i].why += "; " + std::string(v.name) + " not built";
  }
  return all;
}

}  // namespace armllm
