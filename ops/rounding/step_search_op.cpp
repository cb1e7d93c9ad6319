// search_steps
#include "dispatch/variants.h"
#include "rounding/step_search.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

constexpr float kMostLevel = 1 << 20;  // kernels round values up to 2^22

Tensor search_steps(Tensor values, Tensor steps, Tensor zeros, std::optional<Tensor> factors, int64_t lowest,
                    int64_t highest) {
  STD_TORCH_CHECK(values.dim() == 3 && type_of(values) == ScalarType::Float,
                  "values must be float32 of shape (rows, groups, size), not of shape ", shape_of(values));
  StepSearchArgs a;
  a.rows = values.size(0), a.groups = values.size(1), a.size = values.size(2);
  const auto check = [&](const Tensor& t, const char* name) {
    STD_TORCH_CHECK(
        type_of(t) == ScalarType::Float && t.dim() == 3 && t.size(1) == a.rows && t.size(2) == a.groups, name,
        " must be float32 of shape (candidates, ", a.rows, ", ", a.groups, "), not of shape ", shape_of(t));
  };
  check(steps, "steps"), check(zeros, "zeros");
  a.candidates = steps.size(0);
  STD_TORCH_CHECK(zeros.size(0) == a.candidates && a.candidates < (int64_t(1) << 31), "there are ",
                  a.candidates, " steps and ", zeros.size(0), " zero points for each group");
  if (factors)
    STD_TORCH_CHECK(type_of(*factors) == ScalarType::Float && factors->dim() == 2 &&
                        factors->size(0) == a.groups && factors->size(1) == a.size,
                    "factors must be float32 of shape (", a.groups, ", ", a.size, "), not of shape ",
                    shape_of(*factors));
  STD_TORCH_CHECK(-kMostLevel <= lowest && lowest <= highest && highest <= kMostLevel, "levels from ", lowest,
                  " to ", highest, " are no range within ±2^20");
  values = as_contiguous(values), steps = as_contiguous(steps), zeros = as_contiguous(zeros);
  if (factors) factors = as_contiguous(*factors);
  Tensor best = new_tensor(values, {a.rows, a.groups}, ScalarType::Int);
  a.values = static_cast<const float*>(values.data_ptr());
  a.steps = static_cast<const float*>(steps.data_ptr());
  a.zeros = static_cast<const float*>(zeros.data_ptr());
  a.factors = factors ? static_cast<const float*>(factors->data_ptr()) : nullptr;
  a.best = static_cast<int32_t*>(best.data_ptr());
  a.lowest = static_cast<float>(lowest), a.highest = static_cast<float>(highest);
  variant().rounding->search_steps(a);
  return best;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("search_steps", TORCH_BOX(&armllm::search_steps)); }
