//   kernel_test [VARIANT…]   tests the named variants; by default all that the CPU runs
//   kernel_test_emulated     the same for the variants whose instructions are emulated
//   kernel_test --selected   prints the variant that ARMLLM_ISA and the CPU select
#include "kernel_test.h"

#include <exception>

// True if the variant is tested when no variant is named.
static bool is_tested_by_default([[maybe_unused]] const armllm::Variant& v) {
#if defined(ARMLLM_EMULATE_AMX)
  return std::string(v.name) == "amx";
#else
  return true;
#endif
}

int main(int count, char** names) {
  using namespace armllm_test;
  using namespace armllm;
  if (count == 2 && std::string(names[1]) == "--selected") {
    try {
      std::printf("%s\n", armllm::variant().name);
      return 0;
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
      return 2;
    }
  }
  const Variant* truth = nullptr;
  for (const Variant& v : armllm::all_variants())
    if (std::string(v.name) == "scalar") truth = &v;
  std::vector<std::string> missing(names + 1, names + count);
  Report report;
  test_worker_governor(report);
  test_work_ranges(report);
  for (const Variant& v : armllm::all_variants()) {
    bool wanted = count == 1 && is_tested_by_default(v);
    if (!armllm::runs_here(v)) {
      if (wanted) std::printf("%s: does not run on this CPU\n", v.name);
      continue;
    }
    for (std::string& name : missing)
      if (name == v.name) wanted = true, name.clear();
    if (!wanted) continue;
    const int64_t before = report.checks(), failed = report.failures();
    // Inherited tables are tested with the base.
    const auto has_own_table = [&](Family family) { return std::string(v.table_owner[family]) == v.name; };
    if (has_own_table(k_linear)) test_linear_parts(v, report);
    if (has_own_table(k_linear)) test_digits(v, report);
    if (has_own_table(k_norm) || has_own_table(k_dense)) test_row_parts(v, report);
    if (has_own_table(k_attention)) test_attention_parts(v, report);
    if (has_own_table(k_linear) && &v != truth) test_linear(v, *truth, report);
    if (has_own_table(k_norm) && &v != truth) test_rows(v, *truth, report);
    if (has_own_table(k_attention) && &v != truth) test_attention(v, *truth, report);
    if (has_own_table(k_recurrent)) test_recurrent(v, *truth, report);
    if (has_own_table(k_select) && &v != truth) test_select(v, *truth, report);
    if (has_own_table(k_compress) && &v != truth) test_compress(v, *truth, report);
    if (has_own_table(k_rounding) && &v != truth) test_rounding(v, *truth, report);
#if defined(ARMLLM_TEST_SME)
    if (std::string(v.name) == "sme2") test_za_is_saved(v, report);
#endif
    std::printf("%s: %ld checks, %ld failed\n", v.name, long(report.checks() - before),
                long(report.failures() - failed));
  }
  for (const std::string& name : missing)
    report.expect(name.empty(), "variant " + name + " does not run on this CPU");
  return report.failures() == 0 && report.checks() > 0 ? 0 : 1;
}
