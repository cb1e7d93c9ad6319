// Floating-point modes of a thread: rounding, and whether denormals are zeros.
//
// torch.set_flush_denormal changes the mode of one thread.  Workers adopt the mode of the calling thread, so
// that the bits of a result do not depend on the thread that computed it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace armllm {

struct FloatMode {
  uint64_t bits = 0;

  static FloatMode of_this_thread() {
    FloatMode mode;
#if defined(__x86_64__)
    constexpr unsigned kExceptions = 0x3f;  // flags of past operations, which are no part of the mode
    mode.bits = _mm_getcsr() & ~kExceptions;
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode.bits));
#endif
    return mode;
  }
  void use() const {
#if defined(__x86_64__)
    _mm_setcsr(static_cast<unsigned>(bits));
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" ::"r"(bits));
#endif
  }
};

class FloatModeScope {
 public:
  explicit FloatModeScope(FloatMode mode) : before_(FloatMode::of_this_thread()) {
    if (before_.bits != mode.bits) mode.use();
    changed_ = before_.bits != mode.bits;
  }
  ~FloatModeScope() {
    if (changed_) before_.use();
  }
  FloatModeScope(const FloatModeScope&) = delete;
  FloatModeScope& operator=(const FloatModeScope&) = delete;

 private:
  FloatMode before_;
  bool changed_;
};

}  // namespace armllm
