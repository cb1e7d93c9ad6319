// Converts a scheme name, an argument of the ops, to the enum.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>

#include "linear/packed_panel.h"

namespace armllm {

inline Scheme scheme_of(const std::string& name) {
  for (const SchemeName& known : kSchemeNames)
    if (name == known.name) return known.scheme;
  std::string exact;
  for (const SchemeName& known : kSchemeNames)
    if (!has_float_groups(known.scheme)) exact += std::string(exact.empty() ? "" : ", ") + known.name;
  STD_TORCH_CHECK(false, "unknown scheme '", name, "'; valid schemes: ", exact,
                  "; g32, g64, g128, each with z (zero points), b (bf16 scales), zb or m (offsets); int8g32, "
                  "int8g64, int8g128, each also with m");
}

}  // namespace armllm
