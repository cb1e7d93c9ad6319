// Lazy ZA save of the SME calling convention: a caller may leave live data in ZA and the address of a save
// buffer in TPIDR2_EL0.
#if defined(ARMLLM_TEST_SME)
#include "kernel_test.h"
#include "linear/quant_linear.h"

namespace armllm_test {

using namespace armllm;

void test_za_is_saved(const Variant& tested, Report& report) {
  constexpr int64_t kMostBytes = 256 * 256;
  std::vector<uint8_t> za(kMostBytes, 0), saved(kMostBytes, 0);
  for (size_t i = 0; i < za.size(); ++i) za[i] = uint8_t(i * 7 + i / 251);
  int64_t bytes;
  asm volatile(".arch_extension sve\n.arch_extension sme\nrdsvl %0, #1" : "=r"(bytes));
  struct Save {
    void* buffer;
    uint16_t slices, reserved[3];
  } save{saved.data(), uint16_t(bytes), {}};

  const LinearKernels& kernels = *tested.linear;
  const int64_t groups = 2, k = groups * kGroup;
  std::vector<uint8_t> panel(size_t(panel_layout(Scheme::row, k).bytes), 0x11);
  std::vector<int8_t> values(size_t(kernels.gemm_block * k), 1);
  std::vector<int8_t> w(size_t(kernels.gemm_panels * kPanel * k));
  std::vector<int32_t> row_info(size_t(kernels.gemm_panels * kPanel));
  std::vector<float> scales(row_info.size()), out(size_t(kPanel), 0.0f);
  const uint8_t* pointer = panel.data();
  kernels.unpack(Scheme::row, &pointer, 1, groups, w.data(), row_info.data(), scales.data());
  const Activations x{values.data(), nullptr, nullptr, groups, kernels.gemm_block};

  asm volatile(
      "smstart za\n"
      "mov x10, %0\n"
      "mov w12, #0\n"
      "1:\n"
      "ldr za[w12, 0], [x10]\n"
      "add x10, x10, %1\n"
      "add w12, w12, #1\n"
      "cmp w12, %w1\n"
      "b.lt 1b\n"
      "msr S3_3_C13_C0_5, %2\n"
      :
      : "r"(za.data()), "r"(bytes), "r"(&save)
      : "x10", "x12", "cc", "memory");
  kernels.gemm(w.data(), row_info.data(), scales.data(), 1, x, 0, 1, out.data(), kPanel);
  uint64_t left;
  asm volatile("mrs %0, S3_3_C13_C0_5" : "=r"(left));
  report.expect(left == 0, "TPIDR2_EL0 is null once ZA is saved");
  report.expect(std::memcmp(za.data(), saved.data(), size_t(bytes * bytes)) == 0, "ZA is saved");
}

}  // namespace armllm_test
#endif
