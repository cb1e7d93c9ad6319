// Plain quantised weights to packed panels, and back to float32.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common/tensors.h"
#include "linear/linear.h"

namespace armllm {
namespace {

using torch::stable::contiguous;

// Where row r's value k lies in the values of a panel: nibble j·64 + 4·(r) + i, low or high; see linear.h.
struct Place {
  int64_t byte;
  bool high;
};

Place nibble_place(int64_t row, int64_t k) {
  const int64_t line = k / 8, within = k % 8;
  return {line * 64 + row * 4 + within % 4, within >= 4};
}

int64_t int8_place(int64_t row, int64_t k) { return k / 4 * 64 + row * 4 + k % 4; }

struct Source {
  const int8_t* q;
  const uint8_t* multipliers;  // g32i only
  const float* scales;
  int64_t rows, in_features;
  Scheme scheme;
};

// Packs rows first … first + 15 (fewer at the end) of one matrix; false where a value does not fit the scheme.
bool pack_panel(const Source& s, const PanelLayout& layout, int64_t first, uint8_t* panel) {
  const int64_t rows = std::min(kPanel, s.rows - first), groups = layout.groups;
  bool fits = true;
  std::memset(panel, 0, layout.values);
  uint8_t* values = panel + layout.values;
  std::memset(values, s.scheme == Scheme::i8 ? 0 : 0x88, layout.bytes - layout.values);
  float* scales = reinterpret_cast<float*>(panel);
  for (int64_t r = 0; r < rows; ++r) {
    const int8_t* q = s.q + (first + r) * s.in_features;
    if (s.scheme == Scheme::g32) {
      for (int64_t g = 0; g < groups; ++g) scales[g * kPanel + r] = s.scales[(first + r) * groups + g];
    } else {
      scales[r] = s.scales[first + r];
    }
    if (s.scheme == Scheme::g32i) {
      for (int64_t g = 0; g < groups; ++g) {
        const int m = s.multipliers[(first + r) * groups + g] - 1;
        fits &= m >= 0 && m <= 15;
        panel[layout.multipliers + g * 8 + r / 2] |= uint8_t((m & 15) << (r & 1 ? 4 : 0));
      }
    }
    if (s.scheme == Scheme::i8) {
      for (int64_t k = 0; k < s.in_features; ++k) values[int8_place(r, k)] = uint8_t(q[k]);
      continue;
    }
    for (int64_t k = 0; k < s.in_features; ++k) {
      const int v = q[k] + 8;
      fits &= v >= 0 && v <= 15;
      const Place p = nibble_place(r, k);
      values[p.byte] = p.high ? uint8_t((values[p.byte] & 0x0f) | (v & 15) << 4)
                              : uint8_t((values[p.byte] & 0xf0) | (v & 15));
    }
  }
  return fits;
}

void unpack_panel(Scheme scheme, const PanelLayout& layout, const uint8_t* panel, int64_t rows,
                  int64_t in_features, float* out) {
  const float* scales = reinterpret_cast<const float*>(panel);
  const uint8_t* values = panel + layout.values;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < in_features; ++k) {
      const int64_t g = k / kGroup;
      int q;
      if (scheme == Scheme::i8) {
        q = int8_t(values[int8_place(r, k)]);
      } else {
        const Place p = nibble_place(r, k);
        q = (p.high ? values[p.byte] >> 4 : values[p.byte] & 15) - 8;
      }
      if (scheme == Scheme::g32i) {
        const uint8_t pair = panel[layout.multipliers + g * 8 + r / 2];
        q *= (r & 1 ? pair >> 4 : pair & 15) + 1;
      }
      out[r * in_features + k] = float(q) * (scheme == Scheme::g32 ? scales[g * kPanel + r] : scales[r]);
    }
  }
}

void check_sizes(const Tensor& t, const Tensor& q, int64_t last, const char* name) {
  const int64_t dims = q.dim() - (last == 0 ? 1 : 0);
  bool same = t.dim() == dims;
  for (int64_t d = 0; same && d < q.dim() - 1; ++d) same = t.size(d) == q.size(d);
  if (same && last != 0) same = t.size(dims - 1) == last;
  STD_TORCH_CHECK(same, name, " must have the leading sizes of q",
                  last != 0 ? " and one column a group of 32" : "");
}

// q is (N, K), or (E, N, K) for experts.
Tensor pack(const Tensor& q, const std::optional<Tensor>& multipliers, const Tensor& scales, Scheme scheme) {
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Char && (q.dim() == 2 || q.dim() == 3),
                  "q must be int8 of shape (N, K), or (E, N, K) for experts");
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Float, "scales must be float32");
  STD_TORCH_CHECK(multipliers.has_value() == (scheme == Scheme::g32i),
                  "multipliers are for scheme g32i, and only for it");
  const int64_t rows = q.size(q.dim() - 2), in_features = last_size(q);
  STD_TORCH_CHECK(rows >= 1 && in_features >= 1, "q must have at least one row and one column");
  const PanelLayout layout = panel_layout(scheme, in_features);
  check_sizes(scales, q, scheme == Scheme::g32 ? layout.groups : 0, "scales");
  const Tensor values = contiguous(q), row_scales = contiguous(scales);
  std::optional<Tensor> factors;
  if (multipliers.has_value()) {
    STD_TORCH_CHECK(multipliers->scalar_type() == ScalarType::Byte, "multipliers must be uint8");
    check_sizes(*multipliers, q, layout.groups, "multipliers");
    factors = contiguous(*multipliers);
  }
  const int64_t experts = q.dim() == 3 ? q.size(0) : 1, panels = ceil_div(rows, kPanel);
  std::vector<int64_t> sizes{panels, layout.bytes};
  if (q.dim() == 3) sizes.insert(sizes.begin(), experts);
  Tensor packed = torch::stable::new_empty(q, sizes, ScalarType::Byte);
  const Source source{static_cast<const int8_t*>(values.data_ptr()),
                      factors.has_value() ? static_cast<const uint8_t*>(factors->data_ptr()) : nullptr,
                      static_cast<const float*>(row_scales.data_ptr()),
                      rows,
                      in_features,
                      scheme};
  uint8_t* out = static_cast<uint8_t*>(packed.data_ptr());
  std::atomic<bool> fits{true};
  const int64_t scale_columns = scheme == Scheme::g32 ? layout.groups : 1;
  torch::stable::parallel_for(0, experts * panels, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t before = i / panels * rows;  // rows of the experts before this one
      Source s = source;
      s.q += before * in_features;
      s.scales += before * scale_columns;
      if (s.multipliers != nullptr) s.multipliers += before * layout.groups;
      if (!pack_panel(s, layout, i % panels * kPanel, out + i * layout.bytes)) fits.store(false);
    }
  });
  STD_TORCH_CHECK(fits.load(), "q must lie in -8..7 and multipliers in 1..16");
  return packed;
}

Tensor pack_int4(Tensor q, std::optional<Tensor> multipliers, Tensor scales, std::string scheme) {
  const Scheme kind = scheme_of(scheme);
  STD_TORCH_CHECK(kind != Scheme::i8, "scheme 'i8' is INT8: use pack_int8");
  return pack(q, multipliers, scales, kind);
}

Tensor pack_int8(Tensor q, Tensor scales) { return pack(q, std::nullopt, scales, Scheme::i8); }

Tensor unpack_weight(Tensor weight, int64_t out_features, int64_t in_features, std::string scheme) {
  const Scheme kind = scheme_of(scheme);
  STD_TORCH_CHECK(in_features >= 1 && out_features >= 1, "out_features and in_features must be positive");
  const PanelLayout layout = panel_layout(kind, in_features);
  const int64_t dims = weight.dim(), panels = ceil_div(out_features, kPanel);
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Byte && (dims == 2 || dims == 3),
                  "weight must be uint8 of shape (panels, panel_bytes), or (E, panels, panel_bytes)");
  STD_TORCH_CHECK(weight.size(dims - 2) == panels && weight.size(dims - 1) == layout.bytes &&
                      weight.stride(dims - 1) == 1,
                  "weight has ", weight.size(dims - 2), " panels of ", weight.size(dims - 1), " bytes; (",
                  out_features, ", ", in_features, ") in scheme ", scheme, " needs ", panels, " of ",
                  layout.bytes);
  const int64_t experts = dims == 3 ? weight.size(0) : 1, expert_stride = dims == 3 ? weight.stride(0) : 0;
  const int64_t panel_stride = weight.stride(dims - 2);
  std::vector<int64_t> sizes{out_features, in_features};
  if (dims == 3) sizes.insert(sizes.begin(), experts);
  Tensor result = torch::stable::new_empty(weight, sizes, ScalarType::Float);
  const uint8_t* in = static_cast<const uint8_t*>(weight.data_ptr());
  float* out = static_cast<float*>(result.data_ptr());
  torch::stable::parallel_for(0, experts * panels, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t expert = i / panels, panel = i % panels;
      unpack_panel(kind, layout, in + expert * expert_stride + panel * panel_stride,
                   std::min(kPanel, out_features - panel * kPanel), in_features,
                   out + (expert * out_features + panel * kPanel) * in_features);
    }
  });
  return result;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("pack_int4", TORCH_BOX(&armllm::pack_int4));
  m.impl("pack_int8", TORCH_BOX(&armllm::pack_int8));
  m.impl("unpack_weight", TORCH_BOX(&armllm::unpack_weight));
}
