#include "common/variants.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace armllm {

#define ARMLLM_DECLARE_VARIANT(name)         \
  namespace name {                           \
  extern const LinearKernels linear;         \
  extern const DenseKernels dense;           \
  extern const AttentionKernels attention;   \
  extern const NormKernels norm;             \
  extern const RopeKernels rope;             \
  extern const ActivationKernels activation; \
  extern const MoeKernels moe;               \
  }
#define ARMLLM_VARIANT_ROW(name, required)                                                    \
  Variant {                                                                                   \
    #name, required, &name::linear, &name::dense, &name::attention, &name::norm, &name::rope, \
        &name::activation, &name::moe                                                         \
  }

ARMLLM_DECLARE_VARIANT(scalar)
#if defined(__x86_64__)
ARMLLM_DECLARE_VARIANT(avx2)
ARMLLM_DECLARE_VARIANT(avx512)
#elif defined(__aarch64__)
ARMLLM_DECLARE_VARIANT(neon)
ARMLLM_DECLARE_VARIANT(dotprod)
ARMLLM_DECLARE_VARIANT(i8mm)
#endif

namespace {

struct NamedFeature {
  uint64_t bit;
  const char* name;
};
constexpr NamedFeature kFeatureNames[] = {
    {kAsimd, "asimd"},
    {kFp16, "fp16"},
    {kDotprod, "dotprod"},
    {kI8mm, "i8mm"},
    {kBf16, "bf16"},
    {kSve, "sve"},
    {kSme2, "sme2"},
    {kAvx2, "avx2"},
    {kFma, "fma"},
    {kF16c, "f16c"},
    {kAvx512, "avx512"},
    {kAvx512Vnni, "avx512_vnni"},
    {kAvx512Bf16, "avx512_bf16"},
};

uint64_t detect() {
  uint64_t found = 0;
#if defined(__aarch64__)
  const unsigned long hwcap = getauxval(AT_HWCAP);
  const unsigned long hwcap2 = getauxval(AT_HWCAP2);
  if (hwcap & HWCAP_ASIMD) found |= kAsimd;
  if (hwcap & HWCAP_ASIMDHP) found |= kFp16;
  if (hwcap & HWCAP_ASIMDDP) found |= kDotprod;
  if (hwcap & HWCAP_SVE) found |= kSve;
  if (hwcap2 & (1ul << 13)) found |= kI8mm;  // HWCAP2_I8MM
  if (hwcap2 & (1ul << 14)) found |= kBf16;  // HWCAP2_BF16
  if (hwcap2 & (1ul << 37)) found |= kSme2;  // HWCAP2_SME2
#elif defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) found |= kAvx2;
  if (__builtin_cpu_supports("fma")) found |= kFma;
  if (__builtin_cpu_supports("f16c")) found |= kF16c;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found |= kAvx512;
  if (__builtin_cpu_supports("avx512vnni")) found |= kAvx512Vnni;
  if (__builtin_cpu_supports("avx512bf16")) found |= kAvx512Bf16;
#endif
  return found;
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

}  // namespace

uint64_t cpu_features() {
  static const uint64_t features = detect();
  return features;
}

std::vector<std::string> cpu_feature_names() {
  std::vector<std::string> names;
  for (const NamedFeature& f : kFeatureNames)
    if (cpu_features() & f.bit) names.emplace_back(f.name);
  return names;
}

const std::vector<Variant>& all_variants() {
  static const std::vector<Variant> rows = {
#if defined(__x86_64__)
      ARMLLM_VARIANT_ROW(avx512, kAvx512 | kAvx512Vnni | kAvx2 | kFma | kF16c),
      ARMLLM_VARIANT_ROW(avx2, kAvx2 | kFma | kF16c),
#elif defined(__aarch64__)
      ARMLLM_VARIANT_ROW(i8mm, kAsimd | kFp16 | kDotprod | kI8mm | kBf16),
      ARMLLM_VARIANT_ROW(dotprod, kAsimd | kFp16 | kDotprod),
      ARMLLM_VARIANT_ROW(neon, kAsimd),
#endif
      ARMLLM_VARIANT_ROW(scalar, 0),
  };
  return rows;
}

bool runs_here(const Variant& v) { return (cpu_features() & v.required) == v.required; }

const Variant& variant() { return *selected(); }

void select_variant(const std::string& name) { selected() = name.empty() ? default_variant() : find(name); }

}  // namespace armllm
