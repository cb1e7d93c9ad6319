// A pause of a few cycles for loops that wait for another thread.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace armllm {

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");  // `yield` is a no-op on Neoverse; `isb` does stall the pipeline
#endif
}

}  // namespace armllm
