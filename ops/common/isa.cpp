// isa_select, isa_list
#include <torch/csrc/stable/library.h>

#include <string>

#include "common/variants.h"

namespace armllm {
namespace {

std::string quoted(const std::vector<std::string>& names) {
  std::string text = "[";
  for (size_t i = 0; i < names.size(); ++i) text += (i ? ", \"" : "\"") + names[i] + "\"";
  return text + "]";
}

std::string isa_select(std::string name) {
  try {
    select_variant(name);
  } catch (const std::exception& error) {
    STD_TORCH_CHECK(false, error.what());
  }
  return variant().name;
}

std::string isa_list() {
  std::vector<std::string> built, runnable;
  for (const Variant& v : all_variants()) {
    built.emplace_back(v.name);
    if (runs_here(v)) runnable.emplace_back(v.name);
  }
  std::string selected;
  try {
    selected = variant().name;
  } catch (const std::exception& error) {
    STD_TORCH_CHECK(false, error.what());
  }
  return "{\"features\": " + quoted(cpu_feature_names()) + ", \"variants\": " + quoted(built) +
         ", \"runnable\": " + quoted(runnable) + ", \"selected\": \"" + selected + "\"}";
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CompositeExplicitAutograd, m) {
  m.impl("isa_select", TORCH_BOX(&armllm::isa_select));
  m.impl("isa_list", TORCH_BOX(&armllm::isa_list));
}
