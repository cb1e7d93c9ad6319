// Registers the ops isa_select and isa_list.
#include <torch/csrc/stable/library.h>

#include <string>

#include "dispatch/variants.h"

namespace armllm {
namespace {

std::string quoted(const std::vector<std::string>& names) {
  std::string text = "[";
  for (size_t i = 0; i < names.size(); ++i) text += (i ? ", \"" : "\"") + names[i] + "\"";
  return text + "]";
}

std::string described(const std::vector<FamilyChoice>& families) {
  std::string text = "{";
  for (size_t i = 0; i < families.size(); ++i)
    text += (i ? ", \"" : "\"") + families[i].family + "\": {\"variant\": \"" + families[i].variant +
            "\", \"why\": \"" + families[i].reason + "\"}";
  return text + "}";
}

std::string tables_of(const Variant& v) {
  std::string text = "{";
  for (int i = 0; i < kFamilies; ++i)
    text += std::string(i ? ", \"" : "\"") + kFamilyNames[i] + "\": \"" + v.table_owner[i] + "\"";
  return text + "}";
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
  std::string tables;
  for (const Variant& v : all_variants()) {
    tables += (built.empty() ? "{\"" : ", \"") + std::string(v.name) + "\": " + tables_of(v);
    built.emplace_back(v.name);
    if (runs_here(v)) runnable.emplace_back(v.name);
  }
  std::string selected, families;
  try {
    selected = variant().name;
    families = described(family_choices());
  } catch (const std::exception& error) {
    STD_TORCH_CHECK(false, error.what());
  }
  return "{\"features\": " + quoted(feature_names(cpu_features())) + ", \"variants\": " + quoted(built) +
         ", \"runnable\": " + quoted(runnable) + ", \"selected\": \"" + selected +
         "\", \"families\": " + families + ", \"tables\": " + tables +
         "}, \"sve_bits\": " + std::to_string(sve_bits()) + ", \"sme_bits\": " + std::to_string(sme_bits()) +
         "}";
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CompositeExplicitAutograd, m) {
  m.impl("isa_select", TORCH_BOX(&armllm::isa_select));
  m.impl("isa_list", TORCH_BOX(&armllm::isa_list));
}
