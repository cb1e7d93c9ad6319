// What a chain of fma begins with: a constant that is loaded each time where loads are free and copies are not.  NEON
// overwrites the accumulator, and copying it there takes what a sum takes.
#pragma once

#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

struct Start {
  alignas(16) float of[4];
  constexpr explicit Start(float x) : of{x, x, x, x} {}
};

#if defined(__ARM_NEON) && !defined(ARMLLM_VARIANT_scalar)
__attribute__((always_inline)) inline float32x4_t loaded(const Start& at) {
  float32x4_t part;
  __asm__ volatile("ldr %q0, %1" : "=w"(part) : "m"(at.of));
  return part;
}
__attribute__((always_inline)) inline F32 start(const Start& at) {
  return {{loaded(at), loaded(at), loaded(at), loaded(at)}};
}
#else
__attribute__((always_inline)) inline F32 start(const Start& at) { return set1(at.of[0]); }
#endif

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
