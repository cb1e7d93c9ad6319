// Detection of CPU features and vector lengths.
#include <string>
#include <vector>

#include "dispatch/variants.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace armllm {
namespace {

struct NamedFeature {
  uint64_t bit;
  const char* name;
};
constexpr NamedFeature kFeatureNames[] = {
    {kAsimd, "asimd"},
    {kFp16, "fp16"},
    {kDotprod, "dotprod"},
    {kFhm, "fhm"},
    {kI8mm, "i8mm"},
    {kBf16, "bf16"},
    {kSve, "sve"},
    {kSveI8mm, "sve_i8mm"},
    {kSve2, "sve2"},
    {kSme, "sme"},
    {kSme2, "sme2"},
    {kAvx2, "avx2"},
    {kFma, "fma"},
    {kF16c, "f16c"},
    {kAvx512, "avx512"},
    {kAvx512Vnni, "avx512_vnni"},
    {kAvx512Bf16, "avx512_bf16"},
    {kAmx, "amx"},
};

constexpr int kSveLength = 51, kSmeLength = 64;

// Vector length in bits according to prctl PR_SVE_GET_VL or PR_SME_GET_VL; 0 on failure.
int vector_bits([[maybe_unused]] int option) {
#if defined(__aarch64__)
  constexpr int kLengthMask = 0xffff;
  const int length = prctl(option, 0, 0, 0, 0);
  return length < 0 ? 0 : 8 * (length & kLengthMask);
#else
  return 0;
#endif
}

// Kernels divide cache lines of 64 bytes into whole vectors.  No existing CPU has other vector lengths.
[[maybe_unused]] bool usable(int bits) { return bits == 128 || bits == 256 || bits == 512; }

#if defined(__x86_64__)
// True if the CPU has AMX and Linux grants this process the tile state, which it saves only on request.
bool has_amx() {
#if defined(ARMLLM_EMULATE_AMX)
  return true;
#endif
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA (Linux 5.16)
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

uint64_t detect() {
  uint64_t features = 0;
#if defined(__aarch64__)
  const unsigned long hwcap = getauxval(AT_HWCAP);
  const unsigned long hwcap2 = getauxval(AT_HWCAP2);
  if (hwcap & HWCAP_ASIMD) features |= kAsimd;
  if (hwcap & HWCAP_ASIMDHP) features |= kFp16;
  if (hwcap & HWCAP_ASIMDDP) features |= kDotprod;
  if (hwcap & HWCAP_SVE) features |= kSve;
  // Bit numbers, because old system headers lack the names HWCAP_ASIMDFHM and HWCAP2_…
  if (hwcap & (1ul << 23)) features |= kFhm;
  if (hwcap2 & (1ul << 1)) features |= kSve2;
  if (hwcap2 & (1ul << 9)) features |= kSveI8mm;
  if (hwcap2 & (1ul << 13)) features |= kI8mm;
  if (hwcap2 & (1ul << 14)) features |= kBf16;
  if (hwcap2 & (1ul << 23)) features |= kSme;
  if (hwcap2 & (1ul << 37)) features |= kSme2;
  if (!usable(vector_bits(kSveLength))) features &= ~uint64_t(kSve | kSveI8mm | kSve2);
  if (!usable(vector_bits(kSmeLength))) features &= ~uint64_t(kSme | kSme2);
#elif defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) features |= kAvx2;
  if (__builtin_cpu_supports("fma")) features |= kFma;
  if (__builtin_cpu_supports("f16c")) features |= kF16c;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    features |= kAvx512;
  if (__builtin_cpu_supports("avx512vnni")) features |= kAvx512Vnni;
  if (__builtin_cpu_supports("avx512bf16")) features |= kAvx512Bf16;
  if (has_amx()) features |= kAmx;
#endif
  return features;
}

}  // namespace

uint64_t cpu_features() {
  static const uint64_t features = detect();
  return features;
}

std::vector<std::string> feature_names(uint64_t features) {
  std::vector<std::string> names;
  for (const NamedFeature& f : kFeatureNames)
    if (features & f.bit) names.emplace_back(f.name);
  return names;
}

int sve_bits() { return cpu_features() & kSve ? vector_bits(kSveLength) : 0; }
int sme_bits() { return cpu_features() & kSme ? vector_bits(kSmeLength) : 0; }

}  // namespace armllm
