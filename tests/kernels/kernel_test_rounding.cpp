// The search for steps against the scalar kernels.
#include "kernel_test.h"
#include "rounding/step_search.h"

namespace armllm_test {

using namespace armllm;

void test_rounding(const Variant& tested, const Variant& truth, Report& report) {
  Random random(79);
  constexpr int64_t kRows = 3, kGroups = 5, kCandidates = 7;
  for (int64_t size : {1, 16, 29, 32, 128})
    for (bool weighted : {false, true})
      for (bool finite : {true, false}) {
        const int64_t all = kRows * kGroups;
        Values values(DType::f32, all * size, random), steps(DType::f32, kCandidates * all, random);
        Values zeros(DType::f32, kCandidates * all), factors(DType::f32, kGroups * size, random);
        for (int64_t i = 0; i < kCandidates * all; ++i) {
          zeros.set(i, float(i % 4));
          steps.set(i, 0.05f + std::fabs(steps.floats()[i]));
        }
        if (!finite) values.set(size / 2, std::nanf("")), steps.set(all + 3, INFINITY), steps.set(4, 0.0f);
        int32_t best[2][kRows * kGroups];
        for (int i = 0; i < 2; ++i) {
          StepSearchArgs a;
          a.values = values.floats(), a.steps = steps.floats(), a.zeros = zeros.floats();
          a.factors = weighted ? factors.floats() : nullptr;
          a.best = best[i];
          a.candidates = kCandidates, a.rows = kRows, a.groups = kGroups, a.size = size;
          a.lowest = -3, a.highest = 12;
          (i ? truth : tested).rounding->search_steps(a);
        }
        report.expect(std::equal(best[0], best[0] + all, best[1]),
                      text("%s steps size %ld weighted %d finite %d", tested.name, long(size), int(weighted),
                           int(finite)));
      }
}

}  // namespace armllm_test
