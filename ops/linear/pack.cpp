// Packs plain quantized weights into panels.  packed_panel.h specifies the layout.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "linear/quant_linear.h"
#include "linear/scheme_arg.h"
#include "linear/value_positions.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

using torch::stable::contiguous;

void set_nibble(uint8_t& byte, bool high, int v) {
  byte = high ? uint8_t((byte & 0x0f) | (v & 15) << 4) : uint8_t((byte & 0xf0) | (v & 15));
}

// Stores u of a row's column k, 0 … 31, in a group of a panel of wide values.
void set_wide_bits(uint8_t* group, int bits, int64_t row, int64_t k, int u) {
  const int64_t line = k / 4, byte = row * 4 + k % 4, width = bits - 4, lines = 8 / width;
  set_nibble(group[line / 2 * 64 + byte], line % 2 != 0, u);
  uint8_t& high = group[256 + line / lines * 64 + byte];
  const int at = int(line % lines * width), mask = (1 << width) - 1;
  high = uint8_t((high & ~(mask << at)) | (u >> 4 & mask) << at);
}

// Stores u of a row's column k, 0 … 31, in a group of an int3 panel.
void set_three_bits(uint8_t* group, int64_t row, int64_t k, int u) {
  const int64_t line = k / 8, byte = row % 8 * 8 + k % 8, nibble = row / 8 * 4;
  uint8_t &low = group[line / 2 * 64 + byte], &high = group[128 + byte];
  const int at = int(nibble + line % 2 * 2), bit = int(nibble + line);
  low = uint8_t((low & ~(3 << at)) | (u & 3) << at);
  high = uint8_t((high & ~(1 << bit)) | (u >> 2 & 1) << bit);
}

// Sets bits of planes that are zero.
void set_plane_bits(uint8_t* section, int bits, int64_t group, int64_t row, int v) {
  const int planes = multiplier_planes(bits);
  for (int b = 0; b < planes; ++b)
    section[(group * planes + b) * 2 + row / 8] |= uint8_t((v >> b & 1) << (row % 8));
}

void set_narrow_zero_point(uint8_t* section, int64_t group, int64_t row, int zero) {
  uint8_t& four = section[group * 4 + row / 4];
  const int at = int(row % 4 * 2);
  four = uint8_t((four & ~(3 << at)) | ((zero - kLowestZeroPoint) & 3) << at);
}

constexpr int64_t kEight = 8;

// Stores values k … k + 7 of row r, of which q has the first `count` and the others are `zero`; returns false
// if one is out of range.  Each nibble's byte also holds a value of row r ± 8.
bool pack_eight(const int8_t* q, int64_t count, int zero, bool has_zero_point, int64_t r, int64_t k,
                uint8_t* values) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  uint64_t u = 0;
  if (count >= kEight) {
    std::memcpy(&u, q, kEight);
  } else if (count > 0) {
    std::memcpy(&u, q, size_t(count));
  }
  // sums of bytes: no carry leaves its byte
  if (!has_zero_point) u = ((u & 0x7f * kOnes) + 8 * kOnes) ^ (u & 0x80 * kOnes);
  if (count < kEight) {
    const uint64_t given = count > 0 ? (uint64_t(1) << 8 * count) - 1 : 0;
    u = (u & given) | (uint64_t(zero) * kOnes & ~given);
  }
  uint64_t bytes;
  uint8_t* at = values + nibble_position(r, k).byte;
  std::memcpy(&bytes, at, kEight);
  const uint64_t low = u & 0x0f * kOnes;
  bytes = r < 8 ? (bytes & 0xf0 * kOnes) | low : (bytes & 0x0f * kOnes) | (low ^ 8 * kOnes) << 4;
  std::memcpy(at, &bytes, kEight);
  return (u & 0xf0 * kOnes) == 0;
}

struct PlainWeight {
  const int8_t* q;
  const uint8_t* multipliers;  // schemes with multipliers only; int8 if they are signed
  const uint8_t* zero_points;
  const void* scales;  // f32 or bf16
  const float* offsets;
  int64_t rows, in_features;
};

// Packs row `row` of the matrix as row `r` of a panel; returns false if a value is out of the scheme's range.
bool pack_row(const PlainWeight& s, const PanelLayout& layout, int64_t row, int64_t r, uint8_t* panel) {
  const SchemeTraits& traits = traits_of(layout.scheme);
  const int64_t groups = layout.groups, step = groups_per_scale(layout.scheme), columns = layout.scale_groups;
  const int8_t* q = s.q + row * s.in_features;
  uint8_t* values = panel + layout.values;
  bool in_range = true;
  for (int64_t c = 0; has_offsets(layout.scheme) && c < columns; ++c) {
    const float offset = s.offsets[row * columns + c];
    std::memcpy(panel + layout.offsets + (c * kPanel + r) * 4, &offset, 4);
    in_range &= std::isfinite(offset);
  }
  if (is_int8(layout.scheme)) {
    const int64_t span = step ? step * kGroup : layout.groups * kGroup;
    for (int64_t c = 0; c < columns; ++c) {
      uint8_t* part = panel + (step ? layout.values + c * int8_panel_bytes(step) : 0);
      const float scale = static_cast<const float*>(s.scales)[row * columns + c];
      std::memcpy(part + r * 4, &scale, 4);
      in_range &= !step || std::isfinite(scale);
      const int64_t end = std::min(span, s.in_features - c * span);
      for (int64_t k = 0; k < end; ++k) part[kPanel * 4 + int8_position(r, k)] = uint8_t(q[c * span + k]);
    }
    return in_range;
  }
  if (has_multipliers(layout.scheme)) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t stored = s.multipliers[row * groups + g];
      const bool negative = has_signed_multipliers(layout.scheme) && int8_t(stored) < 0;
      const int m = (negative ? -int8_t(stored) : stored) - 1;
      in_range &= m >= 0 && m < traits.largest_multiplier;
      if (negative) panel[layout.signs + g * 2 + r / 8] |= uint8_t(1 << r % 8);
      if (is_wide(layout.scheme)) {
        set_plane_bits(panel + layout.multipliers, traits.bits, g, r, m);
      } else {
        set_nibble(panel[layout.multipliers + g * 8 + r % 8], r >= 8, m);
      }
    }
  }
  if (is_expanded(layout.scheme)) {
    const int bias = value_bias(layout.scheme);
    for (int64_t k = 0; k < groups * kGroup; ++k) {
      const int value = k < s.in_features ? q[k] : 0;
      in_range &= value >= -bias && value < bias;
      uint8_t* group = values + k / kGroup * group_value_bytes(layout.scheme);
      if (is_wide(layout.scheme)) {
        set_wide_bits(group, traits.bits, r, k % kGroup, value + bias);
      } else {
        const bool negative = int3_negative(panel + layout.signs, k / kGroup, r);
        set_three_bits(group, r, k % kGroup, negative ? bias - 1 - value : value + bias);
      }
    }
    std::memcpy(panel + r * 4, static_cast<const float*>(s.scales) + row, 4);
    return in_range;
  }
  float largest = 0;
  const bool narrow = has_narrow_zero_points(layout.scheme);
  const int64_t span = narrow ? kGroup : step ? step * kGroup : groups * kGroup;  // of a zero point
  for (int64_t c = 0; c < (narrow ? groups : columns); ++c) {
    int zero = 8;
    if (narrow) {
      zero = s.zero_points[row * groups + c];
      in_range &= zero >= traits.least_zero_point && zero <= traits.largest_zero_point;
      set_narrow_zero_point(panel + layout.zero_points, c, r, zero);
    } else if (has_zero_points(layout.scheme)) {
      zero = s.zero_points[row * columns + c];
      in_range &= zero <= 15;
      set_nibble(panel[layout.zero_points + c * 8 + r % 8], r >= 8, zero);
    }
    const int64_t first = c * span, end = std::min(first + span, groups * kGroup);
    for (int64_t k = first; k < end; k += kEight)
      in_range &= pack_eight(q + k, s.in_features - k, zero, has_zero_points(layout.scheme), r, k, values);
    if (step == 0) continue;
    float scale;
    if (has_bf16_scales(layout.scheme)) {
      const uint16_t bits = static_cast<const uint16_t*>(s.scales)[row * columns + c];
      std::memcpy(panel + layout.scales + (c * kPanel + r) * 2, &bits, 2);
      scale = widen(bits);
    } else {
      scale = static_cast<const float*>(s.scales)[row * columns + c];
      std::memcpy(panel + layout.scales + (c * kPanel + r) * 4, &scale, 4);
    }
    in_range &= std::isfinite(scale);
    int peak = 0;
    for (int64_t k = first; k < std::min(end, s.in_features); ++k)
      peak = std::max(peak, std::abs(has_zero_points(layout.scheme) ? q[k] - zero : q[k]));
    largest = std::max(largest, std::fabs(scale) * float(peak));
  }
  const float row_scale = step ? largest / 127.0f : static_cast<const float*>(s.scales)[row];
  std::memcpy(panel + r * 4, &row_scale, 4);
  return in_range;
}

// Sets all values of a panel that is expanded to q = 0: only the highest bit of each is set.
void fill_with_zeros(const PanelLayout& layout, uint8_t* panel) {
  const int64_t low = is_wide(layout.scheme) ? 256 : 128, whole = group_value_bytes(layout.scheme);
  uint8_t* group = panel + layout.values;
  for (int64_t g = 0; g < layout.groups; ++g, group += whole) {
    std::memset(group, 0, size_t(low));
    std::memset(group + low, traits_of(layout.scheme).bits == 6 ? 0xaa : 0xff, size_t(whole - low));
  }
}

// Packs rows first … first + 15 (fewer at the end) of a matrix; returns false if a value is out of range.
bool pack_panel(const PlainWeight& s, const PanelLayout& layout, int64_t first, uint8_t* panel) {
  const int64_t rows = std::min(kPanel, s.rows - first);
  std::memset(panel, 0, layout.values);
  if (has_narrow_zero_points(layout.scheme)) {
    std::memset(panel + layout.zero_points, 0xaa, layout.groups * 4);
  } else if (has_zero_points(layout.scheme)) {
    std::memset(panel + layout.zero_points, 0x88, layout.scale_groups * 8);
  }
  if (is_expanded(layout.scheme)) {
    fill_with_zeros(layout, panel);
  } else {
    std::memset(panel + layout.values, is_int8(layout.scheme) ? 0 : 0x08, layout.bytes - layout.values);
  }
  bool in_range = true;
  for (int64_t r = 0; r < rows; ++r) in_range &= pack_row(s, layout, first + r, r, panel);
  return in_range;
}

// Checks that t has the leading sizes of q, followed by `columns` unless that is 0.
void check_sizes(const Tensor& t, const Tensor& q, int64_t columns, const char* name, const char* unit) {
  const int64_t dims = q.dim() - (columns == 0 ? 1 : 0);
  bool same = t.dim() == dims;
  for (int64_t d = 0; same && d < q.dim() - 1; ++d) same = t.size(d) == q.size(d);
  if (columns == 0) {
    STD_TORCH_CHECK(same, name, " must have the leading sizes of q");
  } else {
    STD_TORCH_CHECK(same && t.size(dims - 1) == columns, name,
                    " must have the leading sizes of q and one column per group of ", unit, ": ", columns);
  }
}

const char* unit_of(Scheme scheme) {
  return groups_per_scale(scheme) == 4 ? "128" : groups_per_scale(scheme) == 2 ? "64" : "32";
}

// Names of the schemes that have a trait, such as "g32i, g32iz, int6 and int3".
std::string names_of(bool (*has_trait)(Scheme)) {
  std::string names, last;
  for (const SchemeName& one : kSchemeNames) {
    if (!has_trait(one.scheme)) continue;
    if (!last.empty()) names += (names.empty() ? "" : ", ") + last;
    last = one.name;
  }
  return names + " and " + last;
}

// The integers that a scheme takes, for messages.
std::string ranges_of(Scheme scheme) {
  if (has_narrow_zero_points(scheme)) return "q must be in 0..15, multipliers in 1..14, and zeros in 6..9";
  if (has_zero_points(scheme)) return "q and zeros must be in 0..15, and group scales must be finite";
  if (!is_expanded(scheme))
    return "q must be in -8..7, multipliers in 1..16, and group scales and offsets must be finite";
  const int bias = value_bias(scheme);
  const std::string largest = std::to_string(traits_of(scheme).largest_multiplier);
  return "q must be in " + std::to_string(-bias) + ".." + std::to_string(bias - 1) + ", and multipliers in " +
         (has_signed_multipliers(scheme) ? "-" + largest + "..-1 or " : "") + "1.." + largest;
}

// q is (N, K), or (E, N, K) for experts.
Tensor pack(const Tensor& q, const std::optional<Tensor>& multipliers, const Tensor& scales, Scheme scheme,
            const std::optional<Tensor>& zeros, const std::optional<Tensor>& offsets) {
  STD_TORCH_CHECK(type_of(q) == ScalarType::Char && (q.dim() == 2 || q.dim() == 3),
                  "q must be int8 of shape (N, K), or (E, N, K) for experts");
  if (has_bf16_scales(scheme)) {
    STD_TORCH_CHECK(type_of(scales) == ScalarType::BFloat16,
                    "scales must be bfloat16 for schemes that end in 'b'");
  } else {
    STD_TORCH_CHECK(type_of(scales) == ScalarType::Float, "scales must be float32");
  }
  STD_TORCH_CHECK(multipliers.has_value() == has_multipliers(scheme), "multipliers are required by schemes ",
                  names_of(has_multipliers), ", and invalid for other schemes");
  STD_TORCH_CHECK(
      zeros.has_value() == has_zero_points(scheme),
      "zeros are required by schemes with a 'z' (g32iz, rowz, g32z, …) and invalid for other schemes");
  STD_TORCH_CHECK(offsets.has_value() == has_offsets(scheme),
                  "offsets are required by schemes with an 'm' (g32m, …) and invalid for other schemes");
  const int64_t rows = q.size(q.dim() - 2), in_features = last_size(q);
  STD_TORCH_CHECK(rows >= 1 && in_features >= 1, "q must have at least one row and one column");
  const PanelLayout layout = panel_layout(scheme, in_features);
  const int64_t columns = has_float_groups(scheme) ? layout.scale_groups : 0;
  check_sizes(scales, q, columns, "scales", unit_of(scheme));
  const Tensor values = contiguous(q), dense_scales = contiguous(scales);
  std::optional<Tensor> factors, zero_points, weight_offsets;
  if (multipliers.has_value()) {
    const bool is_signed = has_signed_multipliers(scheme);
    STD_TORCH_CHECK(type_of(*multipliers) == (is_signed ? ScalarType::Char : ScalarType::Byte),
                    "multipliers must be ", is_signed ? "int8 for scheme int3" : "uint8");
    check_sizes(*multipliers, q, layout.groups, "multipliers", "32");
    factors = contiguous(*multipliers);
  }
  if (zeros.has_value()) {
    STD_TORCH_CHECK(type_of(*zeros) == ScalarType::Byte, "zeros must be uint8");
    check_sizes(*zeros, q, has_narrow_zero_points(scheme) ? layout.groups : columns, "zeros",
                unit_of(scheme));
    zero_points = contiguous(*zeros);
  }
  if (offsets.has_value()) {
    STD_TORCH_CHECK(type_of(*offsets) == ScalarType::Float, "offsets must be float32");
    check_sizes(*offsets, q, columns, "offsets", unit_of(scheme));
    weight_offsets = contiguous(*offsets);
  }
  const int64_t experts = q.dim() == 3 ? q.size(0) : 1, panels = ceil_div(rows, kPanel);
  std::vector<int64_t> sizes{panels, layout.bytes};
  if (q.dim() == 3) sizes.insert(sizes.begin(), experts);
  Tensor packed = new_tensor(q, sizes, ScalarType::Byte);
  const PlainWeight plain{
      static_cast<const int8_t*>(values.data_ptr()),
      factors.has_value() ? static_cast<const uint8_t*>(factors->data_ptr()) : nullptr,
      zero_points.has_value() ? static_cast<const uint8_t*>(zero_points->data_ptr()) : nullptr,
      dense_scales.data_ptr(),
      weight_offsets.has_value() ? static_cast<const float*>(weight_offsets->data_ptr()) : nullptr,
      rows,
      in_features};
  uint8_t* out = static_cast<uint8_t*>(packed.data_ptr());
  std::atomic<bool> in_range{true};
  const int64_t scale_bytes = layout.scale_groups * (has_bf16_scales(scheme) ? 2 : 4);
  torch::stable::parallel_for(0, experts * panels, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t before = i / panels * rows;  // rows of preceding experts
      PlainWeight s = plain;
      s.q += before * in_features;
      s.scales = static_cast<const char*>(s.scales) + before * scale_bytes;
      if (s.multipliers != nullptr) s.multipliers += before * layout.groups;
      if (s.zero_points != nullptr) s.zero_points += before * zero_point_columns(layout);
      if (s.offsets != nullptr) s.offsets += before * layout.scale_groups;
      if (!pack_panel(s, layout, i % panels * kPanel, out + i * layout.bytes)) in_range.store(false);
    }
  });
  STD_TORCH_CHECK(in_range.load(), ranges_of(scheme));
  return packed;
}

Tensor pack_int4(Tensor q, std::optional<Tensor> multipliers, Tensor scales, std::string scheme,
                 std::optional<Tensor> zeros, std::optional<Tensor> offsets) {
  const Scheme kind = scheme_of(scheme);
  STD_TORCH_CHECK(kind != Scheme::i8, "scheme 'i8' is INT8: use pack_int8");
  return pack(q, multipliers, scales, kind, zeros, offsets);
}

Tensor pack_int8(Tensor q, Tensor scales) {
  return pack(q, std::nullopt, scales, Scheme::i8, std::nullopt, std::nullopt);
}

std::vector<int64_t> panel_sections(std::string scheme, int64_t in_features) {
  constexpr int64_t kMost = int64_t{1} << 40;  // sizes in bytes fit 64 bits
  STD_TORCH_CHECK(in_features >= 0 && in_features <= kMost, "in_features must be a size of a weight, not ",
                  in_features);
  const PanelLayout p = panel_layout(scheme_of(scheme), in_features);
  return {p.groups, p.scale_groups, p.scales, p.offsets, p.multipliers,
          p.signs,  p.zero_points,  p.values, p.bytes};
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CompositeExplicitAutograd, m) {
  m.impl("panel_sections", TORCH_BOX(&armllm::panel_sections));
}

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("pack_int4", TORCH_BOX(&armllm::pack_int4));
  m.impl("pack_int8", TORCH_BOX(&armllm::pack_int8));
}
