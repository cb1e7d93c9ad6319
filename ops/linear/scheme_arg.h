// Converts a scheme name, an argument of the ops, to the enum.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>

#include "linear/packed_panel.h"

namespace armllm {

inline Scheme scheme_of(const std::string& name) {
  for (const SchemeName& known : kSchemeNames)
    if (name == known.name) return known.scheme;
  STD_TORCH_CHECK(
      false, "unknown scheme '", name,
      "'; valid schemes: g32i, g32iz, row, rowz, i8, int6, int3; g32, g64, g128, each with z (zero points), "
      "b (bf16 scales), zb or m (offsets); int8g32, int8g64, int8g128, each also with m");
}

}  // namespace armllm
