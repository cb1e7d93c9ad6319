// quantize, gemv, unpack + gemm, epilogue and add_offsets, for every scheme.
#include "kernel_test_panels.h"

namespace armllm_test {
namespace {

using namespace armllm;

void test_quantize(const LinearKernels& tested, const LinearKernels& truth, const char* name,
                   Report& report) {
  Random random(1);
  for (DType type : kTypes)
    for (int64_t n : {1, 15, 31, 32, 33, 100, 257})
      for (int kind = 0; kind < 5; ++kind)
        for (int64_t stride : {int64_t(8), tested.gemm_block * 8}) {
          const int64_t groups = ceil_div(n, kGroup);
          Values x(type, n, random);
          if (kind == 1) x.set(n / 2, std::nanf(""));
          if (kind == 2) x.set(n - 1, -INFINITY);
          if (kind == 3)
            for (int64_t i = 0; i < n; ++i) x.set(i, i % 2 ? 0.0f : -0.0f);
          if (kind == 4)
            for (int64_t i = 0; i < n; ++i) x.set(i, float(random.below(9)) - 4.0f + 0.5f * float(i % 2));
          std::vector<int8_t> q[2];
          std::vector<int32_t> group_sums[2];
          float scale[2];
          for (int i = 0; i < 2; ++i) {
            q[i].assign(size_t(groups * 4 * stride), 0x77);
            group_sums[i].assign(size_t(groups), -1);
            scale[i] = (i ? truth : tested)
                           .quantize(x.data(), type, n, groups, q[i].data(), stride, group_sums[i].data());
          }
          const bool scales =
              std::memcmp(&scale[0], &scale[1], 4) == 0 || (scale[0] != scale[0] && scale[1] != scale[1]);
          report.expect(scales && q[0] == q[1] && group_sums[0] == group_sums[1],
                        text("%s quantize type %d n %ld kind %d stride %ld", name, int(type), long(n), kind,
                             long(stride)));
        }
}

void test_gemv(const LinearKernels& tested, const LinearKernels& truth, const char* name, Report& report) {
  Random random(2);
  for (const auto& [scheme, scheme_name] : kernel_schemes())
    for (int64_t groups : {1, 2, 3, 4, 7, 8, 13, 262})  // the last one spans more than one segment of 8192 k
      for (int tokens = 1; tokens <= kGemvTokens; ++tokens)
        for (bool extreme : {false, true}) {
          const std::vector<uint8_t> panel = random_panel(scheme, groups, extreme, random);
          const int64_t first = gemv_block_of(tested, scheme, tokens);
          QuantizedRows x(first + tokens, groups, extreme, random);
          std::vector<float> out[2];
          for (int i = 0; i < 2; ++i) {
            const LinearKernels& kernels = i ? truth : tested;
            out[i].assign(size_t((tokens + 1) * kPanel), -7.0f);
            kernels.gemv(scheme, panel.data(), x.in_blocks(gemv_block_of(kernels, scheme, tokens)), first,
                         tokens, out[i].data());
          }
          report.expect(same_floats(out[0], out[1]), text("%s gemv scheme %s groups %ld tokens %d", name,
                                                          scheme_name, long(groups), tokens));
        }
}

// Three panels in one call equal three calls.
void test_gemv_panels(const LinearKernels& tested, const char* name, Report& report) {
  if (tested.gemv_panels == nullptr) return;
  constexpr int64_t kPanels = 3, kGap = 64, kStride = kPanels * kPanel + 5;
  Random random(5);
  for (const auto& [scheme, scheme_name] : kernel_schemes())
    for (int64_t groups : {1, 3, 4, 9, 16, 262})
      for (int tokens = 1; tokens <= kGemvTokens; ++tokens) {
        std::vector<uint8_t> panels;
        int64_t bytes = 0;
        for (int64_t p = 0; p < kPanels; ++p) {
          const std::vector<uint8_t> panel = random_panel(scheme, groups, false, random);
          panels.insert(panels.end(), panel.begin(), panel.end());
          bytes = int64_t(panel.size()) + kGap;
          panels.resize(size_t(bytes * (p + 1)));
        }
        QuantizedRows rows(tokens, groups, false, random);
        const Activations x = rows.in_blocks(gemv_block_of(tested, scheme, tokens));
        std::vector<float> out(size_t(tokens * kStride), -7.0f), expected = out;
        tested.gemv_panels(scheme, panels.data(), bytes, kPanels, x, 0, tokens, out.data(), kStride);
        for (int64_t p = 0; p < kPanels; ++p) {
          std::vector<float> one(size_t(tokens * kPanel));
          tested.gemv(scheme, panels.data() + p * bytes, x, 0, tokens, one.data());
          for (int64_t t = 0; t < tokens; ++t)
            std::copy_n(&one[size_t(t * kPanel)], kPanel, &expected[size_t(t * kStride + p * kPanel)]);
        }
        report.expect(same_floats(out, expected), text("%s gemv of panels, scheme %s groups %ld tokens %d",
                                                       name, scheme_name, long(groups), tokens));
      }
}

// gemv_wide equals gemv on one token at a time.
void test_gemv_wide(const LinearKernels& tested, const char* name, Report& report) {
  if (tested.gemv_wide == nullptr) return;
  constexpr int64_t kPanels = 3, kGap = 64, kStride = kPanels * kPanel + 5;
  Random random(6);
  for (Scheme scheme : {Scheme::g32i, Scheme::g32iz, Scheme::i8, Scheme::int6}) {
    if (scheme == Scheme::int6 && tested.int6_gemv_tokens < tested.gemv_tokens) continue;
    for (int64_t groups : {1, 2, 3, 16, 262})
      for (int64_t tokens = kGemvTokens + 1; tokens <= tested.gemv_tokens; ++tokens)
        for (bool extreme : {false, true}) {
          const int64_t bytes = panel_layout(scheme, groups * kGroup).bytes + kGap;
          std::vector<uint8_t> panels(size_t(bytes * kPanels));
          for (int64_t p = 0; p < kPanels; ++p) {
            const std::vector<uint8_t> panel = random_panel(scheme, groups, extreme, random);
            std::memcpy(&panels[size_t(p * bytes)], panel.data(), panel.size());
          }
          QuantizedRows rows(tokens, groups, extreme, random);
          std::vector<float> out(size_t((tokens + 1) * kStride), -7.0f), expected = out;
          const Activations alone = rows.in_blocks(1);
          for (int64_t p = 0; p < kPanels; ++p)
            for (int64_t t = 0; t < tokens; ++t)
              tested.gemv(scheme, panels.data() + p * bytes, alone, t, 1,
                          &expected[size_t(t * kStride + p * kPanel)]);
          const Activations x = rows.in_blocks(gemv_block_of(tested, scheme, tokens));
          tested.gemv_wide(scheme, panels.data(), bytes, kPanels, x, int(tokens), out.data(), kStride);
          report.expect(same_floats(out, expected), text("%s wide gemv, scheme %d groups %ld tokens %ld",
                                                         name, int(scheme), long(groups), long(tokens)));
        }
  }
}

// A panel is multiplied as its expanded panel is, for up to `most` tokens.
void test_direct_gemv(const LinearKernels& tested, Scheme scheme, int64_t most,
                      const std::vector<uint8_t>& panel, const std::vector<uint8_t>& expanded, int64_t groups,
                      bool extreme, const char* name, Report& report) {
  Random random{uint64_t(groups)};
  for (int tokens = 1; tokens <= std::min<int64_t>(most, kGemvTokens); ++tokens) {
    const int64_t first = gemv_block_of(tested, scheme, tokens);
    QuantizedRows rows(first + tokens, groups, extreme, random);
    const Activations x = rows.in_blocks(first);
    std::vector<float> out[2];
    for (int i = 0; i < 2; ++i) {
      out[i].assign(size_t((tokens + 1) * kPanel), -7.0f);
      tested.gemv(i ? computed_as(scheme) : scheme, (i ? expanded : panel).data(), x, first, tokens,
                  out[i].data());
    }
    report.expect(same_floats(out[0], out[1]), text("%s direct gemv, scheme %d groups %ld tokens %d", name,
                                                    int(scheme), long(groups), tokens));
  }
}

// Panels of wide values are expanded value by value.
void test_wide(Scheme scheme, const LinearKernels& tested, const char* name, Report& report) {
  const int bits = traits_of(scheme).bits;
  Random random(8);
  for (int64_t groups : {1, 2, 3, 4, 7, 16, 262})
    for (bool extreme : {false, true}) {
      const std::vector<uint8_t> panel = random_panel(scheme, groups, extreme, random);
      const PanelLayout layout = panel_layout(scheme, groups * kGroup);
      std::vector<uint8_t> expanded(size_t(int8_panel_bytes(groups)), 0x55), expected = expanded;
      std::memcpy(expected.data(), panel.data(), kPanel * 4);
      for (int64_t r = 0; r < kPanel; ++r)
        for (int64_t k = 0; k < groups * kGroup; ++k) {
          const uint8_t* group = panel.data() + layout.values + k / kGroup * group_value_bytes(scheme);
          const int m = plane_multiplier(panel.data() + layout.multipliers, bits, k / kGroup, r);
          expected[size_t(kPanel * 4 + k / 4 * 64 + r * 4 + k % 4)] =
              uint8_t((wide_bits(group, bits, r, k % kGroup) - value_bias(scheme)) * m);
        }
      tested.expand(scheme, panel.data(), groups, expanded.data());
      report.expect(expanded == expected, text("%s expand of %d bits, groups %ld", name, bits, long(groups)));
      test_direct_gemv(tested, scheme, direct_gemv_tokens(tested, scheme), panel, expanded, groups, extreme,
                       name, report);
    }
}

// Panels of scheme int3 are expanded value by value to panels of scheme g32i.
void test_int3(const LinearKernels& tested, const char* name, Report& report) {
  Random random(9);
  for (int64_t groups : {1, 2, 3, 4, 7, 16, 33, 262})
    for (bool extreme : {false, true}) {
      const std::vector<uint8_t> panel = random_panel(Scheme::int3, groups, extreme, random);
      const PanelLayout layout = panel_layout(Scheme::int3, groups * kGroup),
                        wide = panel_layout(Scheme::g32i, groups * kGroup);
      std::vector<uint8_t> expanded(size_t(wide.bytes), 0x55), expected(size_t(wide.bytes), 0);
      std::memcpy(expected.data(), panel.data(), size_t(wide.values));
      for (int64_t r = 0; r < kPanel; ++r)
        for (int64_t k = 0; k < groups * kGroup; ++k) {
          const int64_t g = k / kGroup;
          const uint8_t* group = panel.data() + layout.values + g * group_value_bytes(Scheme::int3);
          const int negative = int3_negative(panel.data() + layout.signs, g, r);
          const int q = int3_bits(group, r, k % kGroup) - 4 + negative;
          uint8_t& byte = expected[size_t(wide.values + k / 8 * 64 + r % 8 * 8 + k % 8)];
          byte |= uint8_t(r < 8 ? q + 8 : (q & 15) << 4);
        }
      tested.expand(Scheme::int3, panel.data(), groups, expanded.data());
      report.expect(expanded == expected, text("%s expand of int3, groups %ld", name, long(groups)));
      test_direct_gemv(tested, Scheme::int3, tested.int3_gemv_tokens, panel, expanded, groups, extreme, name,
                       report);
    }
}

std::vector<float> multiply(const LinearKernels& kernels, Scheme scheme,
                            const std::vector<std::vector<uint8_t>>& panels, QuantizedRows& rows,
                            int64_t first, int tokens) {
  const int64_t stride = int64_t(panels.size()) * kPanel + 3;
  std::vector<float> out(size_t((tokens + 1) * stride), -7.0f);
  const Activations x = rows.in_blocks(kernels.gemm_block);
  for (int64_t p = 0; p < int64_t(panels.size()); p += kernels.gemm_panels) {
    const uint8_t* pointers[64];
    const int count = int(std::min<int64_t>(kernels.gemm_panels, int64_t(panels.size()) - p));
    for (int i = 0; i < count; ++i) pointers[i] = panels[size_t(p + i)].data();
    std::vector<int8_t> w(size_t(kernels.gemm_panels * rows.groups * kernels.gemm_group_bytes));
    std::vector<int32_t> row_info(size_t(kernels.gemm_panels * kPanel));
    std::vector<float> scales(size_t(kernels.gemm_panels * kPanel));
    kernels.unpack(scheme, pointers, count, rows.groups, w.data(), row_info.data(), scales.data());
    for (int64_t t = 0; t < tokens; t += kernels.gemm_tokens)
      kernels.gemm(w.data(), row_info.data(), scales.data(), count, x, first + t,
                   int(std::min<int64_t>(kernels.gemm_tokens, tokens - t)),
                   &out[size_t(t * stride + p * kPanel)], stride);
  }
  return out;
}

void test_gemm(const LinearKernels& tested, const LinearKernels& truth, const char* name, Report& report) {
  Random random(3);
  for (const auto& [scheme, scheme_name] : kernel_schemes())
    for (int64_t groups : {1, 2, 19})
      for (int64_t panels : {int64_t(1), tested.gemm_panels + 1})
        for (int64_t tokens : {int64_t(1), int64_t(2), int64_t(3), int64_t(5), int64_t(7), int64_t(8),
                               int64_t(11), tested.gemm_tokens + 1})
          for (bool extreme : {false, true}) {
            std::vector<std::vector<uint8_t>> w;
            for (int64_t p = 0; p < panels; ++p) w.push_back(random_panel(scheme, groups, extreme, random));
            const int64_t first = tested.gemm_block;
            QuantizedRows x(first + tokens, groups, extreme, random);
            report.expect(same_floats(multiply(tested, scheme, w, x, first, int(tokens)),
                                      multiply(truth, scheme, w, x, first, int(tokens))),
                          text("%s gemm scheme %s groups %ld panels %ld tokens %ld", name, scheme_name,
                               long(groups), long(panels), long(tokens)));
          }
}

void test_epilogue(const LinearKernels& tested, const LinearKernels& truth, const char* name,
                   Report& report) {
  Random random(4);
  for (DType type : kTypes)
    for (DType bias_type : kTypes)
      for (int64_t n : {1, 16, 29, 70})
        for (int kind = 0; kind < 5; ++kind) {
          Values acc(DType::f32, n, random), bias(bias_type, n, random), residual(type, n, random);
          Values first(type, n), second(type, n);
          const float scale = kind == 4 ? std::nanf("") : 0.37f;
          for (int i = 0; i < 2; ++i)
            (i ? truth : tested)
                .epilogue(static_cast<const float*>(acc.data()), n, scale, kind & 1 ? bias.data() : nullptr,
                          bias_type, kind & 2 ? residual.data() : nullptr, (i ? second : first).data(), type);
          report.expect(first.same(second), text("%s epilogue types %d %d n %ld kind %d", name, int(type),
                                                 int(bias_type), long(n), kind));
        }
}

// Compared with sums in double, and bit for bit with the scalar variant.
void test_add_offsets(const LinearKernels& tested, const LinearKernels& truth, const char* name,
                      Report& report) {
  Random random(6);
  for (const auto& [scheme, scheme_name] : kSchemeNames) {
    if (!has_offsets(scheme)) continue;
    const int64_t step = groups_per_scale(scheme);
    for (int64_t groups : {1, 3, 4, 5, 17, 66}) {
      const PanelLayout layout = panel_layout(scheme, groups * kGroup);
      std::vector<uint8_t> panel(size_t(layout.bytes));
      std::vector<float> offsets(size_t(layout.scale_groups * kPanel));
      for (float& offset : offsets) offset = random.uniform(-0.1f, 0.1f);
      std::memcpy(&panel[size_t(layout.offsets)], offsets.data(), offsets.size() * 4);
      constexpr int kFirst = 1, kTokens = 3;
      constexpr int64_t kStride = kPanel + 5;
      QuantizedRows rows(kFirst + kTokens, groups, false, random);
      const Activations x = rows.in_blocks(tested.gemm_block);
      std::vector<float> out[2];
      for (int i = 0; i < 2; ++i) {
        out[i].assign(size_t(kTokens * kStride), 0.5f);
        (i ? truth : tested).add_offsets(scheme, panel.data(), x, kFirst, kTokens, out[i].data(), kStride);
      }
      bool close = same_floats(out[0], out[1]);
      for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t c = 0; c < kStride; ++c) {
          double expected = 0.5, size = 1.0;
          for (int64_t g = 0; c < kPanel && g < groups; ++g) {
            const double term = -0.125 * rows.group_sums[size_t((kFirst + t) * groups + g)] *
                                offsets[size_t(g / step * kPanel + c)];
            expected += term;
            size += std::fabs(term);
          }
          close &= std::fabs(out[0][size_t(t * kStride + c)] - expected) <= 1e-6 * size;
        }
      report.expect(close, text("%s add_offsets scheme %s groups %ld", name, scheme_name, long(groups)));
    }
  }
}

}  // namespace

void test_linear(const Variant& tested, const Variant& truth, Report& report) {
  test_quantize(*tested.linear, *truth.linear, tested.name, report);
  test_gemv(*tested.linear, *truth.linear, tested.name, report);
  test_gemv_panels(*tested.linear, tested.name, report);
  test_gemv_wide(*tested.linear, tested.name, report);
  for (const SchemeName& one : kSchemeNames)
    if (is_wide(one.scheme)) test_wide(one.scheme, *tested.linear, tested.name, report);
  test_int3(*tested.linear, tested.name, report);
  test_gemm(*tested.linear, *truth.linear, tested.name, report);
  test_epilogue(*tested.linear, *truth.linear, tested.name, report);
  test_add_offsets(*tested.linear, *truth.linear, tested.name, report);
}

}  // namespace armllm_test
