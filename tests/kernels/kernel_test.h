// Compares the kernels of every variant that this CPU runs with the scalar kernels, bit for bit, and whole
// calls with the same work cut into several calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "dispatch/variants.h"
#include "runtime/types.h"

namespace armllm_test {

using armllm::DType;
using armllm::Variant;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  int64_t below(int64_t n) { return int64_t(bits() % uint64_t(n)); }
  float uniform(float low, float high) { return low + (high - low) * float(bits() >> 40) / float(1 << 24); }

 private:
  uint64_t state_;
};

// `n` values of a storage type, followed by guard elements that must not change.
class Values {
 public:
  Values(DType type, int64_t n)
      : type_(type), n_(n), bytes_(size_t((n + kGuard) * armllm::size_of(type)), 0x5a) {}
  Values(DType type, int64_t n, Random& random, float size = 4.0f) : Values(type, n) {
    for (int64_t i = 0; i < n; ++i) set(i, random.uniform(-size, size));
  }
  void* data() { return bytes_.data(); }
  float* floats() { return reinterpret_cast<float*>(bytes_.data()); }
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  DType type() const { return type_; }
  armllm::Rows rows(int64_t stride) { return {data(), stride, type_}; }

  void set(int64_t i, float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if (type_ == DType::f32) {
      std::memcpy(&bytes_[size_t(i) * 4], &word, 4);
    } else {
      const uint16_t half = type_ == DType::bf16 ? uint16_t(word >> 16) : to_half(value);
      std::memcpy(&bytes_[size_t(i) * 2], &half, 2);
    }
  }
  // True if all values have the same bits or are NaN in both.
  bool same(const Values& other) const {
    const int64_t size = armllm::size_of(type_);
    for (int64_t i = 0; i < n_; ++i) {
      const uint32_t a = word(i), b = other.word(i);
      if (a != b && !(is_nan(a) && is_nan(b))) return false;
    }
    return std::memcmp(&bytes_[size_t(n_ * size)], &other.bytes_[size_t(n_ * size)], size_t(kGuard * size)) ==
           0;
  }

  // Largest absolute difference; infinite for a NaN, or if guard elements past the values differ. float32
  // only.
  float distance(const Values& other) const {
    float most = 0.0f;
    for (int64_t i = 0; i < n_ + kGuard; ++i) {
      const uint32_t words[2] = {word(i), other.word(i)};
      float x[2];
      std::memcpy(x, words, 8);
      if (words[0] == words[1]) continue;
      const float between = std::fabs(x[0] - x[1]);
      if (i >= n_ || !(between < INFINITY)) return INFINITY;
      most = std::max(most, between);
    }
    return most;
  }

 private:
  static constexpr int64_t kGuard = 32;

  // Rounds to float16, ties to even.
  static uint16_t to_half(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    const uint32_t sign = word >> 16 & 0x8000, magnitude = word & 0x7fffffff;
    if (magnitude >= 0x7f800000) return uint16_t(sign | 0x7c00 | (magnitude > 0x7f800000 ? 0x200 : 0));
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyint(std::fabs(value) * 0x1p24f)));
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
  }
  uint32_t word(int64_t i) const {
    uint32_t out = 0;
    std::memcpy(&out, &bytes_[size_t(i * armllm::size_of(type_))], size_t(armllm::size_of(type_)));
    return out;
  }
  bool is_nan(uint32_t word) const {
    if (type_ == DType::f32) return (word & 0x7fffffff) > 0x7f800000;
    return (word & 0x7fff) > (type_ == DType::bf16 ? 0x7f80u : 0x7c00u);
  }

  DType type_;
  int64_t n_;
  std::vector<uint8_t> bytes_;
};

class Report {
 public:
  void expect(bool ok, const std::string& what) {
    ++checks_;
    if (ok) return;
    if (++failures_ <= 40) std::printf("FAILED %s\n", what.c_str());
  }
  int64_t checks() const { return checks_; }
  int64_t failures() const { return failures_; }

 private:
  int64_t checks_ = 0, failures_ = 0;
};

inline std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline std::string text(const char* format, ...) {
  char out[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(out, sizeof out, format, arguments);
  va_end(arguments);
  return out;
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

// One function per kernel family: compares the variant `tested` with `truth`.
void test_linear(const Variant& tested, const Variant& truth, Report& report);
void test_rows(const Variant& tested, const Variant& truth, Report& report);
void test_attention(const Variant& tested, const Variant& truth, Report& report);
void test_recurrent(const Variant& tested, const Variant& truth, Report& report);
void test_select(const Variant& tested, const Variant& truth, Report& report);
void test_compress(const Variant& tested, const Variant& truth, Report& report);
void test_rounding(const Variant& tested, const Variant& truth, Report& report);
// Compares kernels with float32 arithmetic.
void test_digits(const Variant& tested, Report& report);
// Compare work cut into several calls with one call.
void test_worker_governor(Report& report);
void test_work_ranges(Report& report);
void test_linear_parts(const Variant& tested, Report& report);
void test_row_parts(const Variant& tested, Report& report);
void test_attention_parts(const Variant& tested, Report& report);
// Built if ARMLLM_TEST_SME is set, i.e. if the assembler supports SME.
void test_za_is_saved(const Variant& tested, Report& report);

}  // namespace armllm_test
