// Initial value of an FMA chain.  NEON FMA overwrites its accumulator, so a constant would be copied first,
// at the cost of an addition; there it is loaded each time, because loads use other pipes.
#pragma once

#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {
namespace {

struct AccumulatorInit {
  alignas(16) float lanes[4];
  constexpr explicit AccumulatorInit(float x) : lanes{x, x, x, x} {}
};

#if defined(__ARM_NEON) && !defined(ARMLLM_VARIANT_scalar)
__attribute__((always_inline)) inline float32x4_t load_init(const AccumulatorInit& at) {
  float32x4_t part;
  __asm__ volatile("ldr %q0, %1" : "=w"(part) : "m"(at.lanes));
  return part;
}
__attribute__((always_inline)) inline F32 init(const AccumulatorInit& at) {
  return {{load_init(at), load_init(at), load_init(at), load_init(at)}};
}
#else
__attribute__((always_inline)) inline F32 init(const AccumulatorInit& at) { return set1(at.lanes[0]); }
#endif

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
