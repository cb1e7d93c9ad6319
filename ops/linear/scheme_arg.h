// From the name of a scheme, as ops take it, to the scheme.
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
      "'; there are: g32i, row, rowz, i8, and g32, g64, g128 with z (zero points) and b (bf16 scales)");
}

}  // namespace armllm
