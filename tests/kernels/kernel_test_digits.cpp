// Kernels of linear layers with two INT8 digits per activation: bits follow from their formulas, and the two
// rows of a token stay together whatever the tiles.
#include "kernel_test_panels.h"
#include "linear/tile_grid.h"

namespace armllm_test {
namespace {

// float32 arithmetic, one rounding at a time: a product or sum of two floats, rounded from double, is rounded
// correctly, and compilers cannot contract it.
float product(float a, float b) { return float(double(a) * double(b)); }
float sum(float a, float b) { return float(double(a) + double(b)); }

float value_of(const Values& x, int64_t i) {
  const uint8_t* at = x.bytes().data() + i * size_of(x.type());
  uint32_t word = 0;
  std::memcpy(&word, at, size_t(size_of(x.type())));
  if (x.type() == DType::bf16) word <<= 16;
  if (x.type() == DType::f16) {
    const int exponent = int(word >> 10 & 31), fraction = int(word & 1023);
    const float size = exponent == 0    ? std::ldexp(float(fraction), -24)
                       : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                        : std::ldexp(float(fraction + 1024), exponent - 25);
    return word & 0x8000 ? -size : size;
  }
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// Kinds of rows: 0, 1 random; 2 with a NaN; 3 with an infinity; 4 zeros; 5 tiny; 6 the largest finite values.
Values row_of(DType type, int64_t n, int kind, Random& random) {
  Values x(type, n, random);
  if (kind == 2) x.set(n / 2, std::nanf(""));
  if (kind == 3) x.set(n - 1, -INFINITY);
  for (int64_t i = 0; i < n && kind >= 4; ++i)
    x.set(i, kind == 4 ? (i % 2 ? 0.0f : -0.0f) : (i % 2 ? 1.0f : -1.0f) * (kind == 5 ? 1e-37f : 3.3e38f));
  if (kind == 6 && type == DType::f16)
    for (int64_t i = 0; i < n; ++i) x.set(i, i % 2 ? 65504.0f : -65504.0f);
  return x;
}

void test_rounding_errors(const LinearKernels& kernels, const char* name, Report& report) {
  Random random(41);
  for (DType type : kTypes)
    for (int64_t n : {1, 7, 8, 15, 16, 31, 32, 33, 100, 257})
      for (int kind = 0; kind < 7; ++kind)
        for (int64_t stride : {int64_t(8), kernels.gemm_block * 8}) {
          Values x = row_of(type, n, kind, random);
          const int64_t groups = ceil_div(n, kGroup);
          std::vector<int8_t> q(size_t(groups * 4 * stride), 0x77);
          const float scale = kernels.quantize(x.data(), type, n, groups, q.data(), stride, nullptr);
          Values errors(DType::f32, n), expected(DType::f32, n);
          kernels.rounding_errors(x.data(), type, n, q.data(), stride, scale,
                                  static_cast<float*>(errors.data()));
          bool small = true;
          for (int64_t i = 0; i < n; ++i) {
            const float digit = float(q[size_t(i / 8 * stride + i % 8)]);
            const float error =
                sum(product(value_of(x, i), 0.5f), -product(product(scale, 0.5f), digit)) * 2.0f;
            expected.set(i, error);
            small &=
                kind == 2 || kind == 3 ? error != error : !(std::fabs(error) > 0.501f * scale) || kind == 5;
          }
          report.expect(errors.same(expected) && small,
                        text("%s rounding errors type %d n %ld kind %d stride %ld", name, int(type), long(n),
                             kind, long(stride)));
        }
}

// Rotates a row by the definition: sums and differences of elements 16, 8, 4, 2 and 1 apart.
void test_rotation(const LinearKernels& kernels, const char* name, Report& report) {
  Random random(43);
  for (DType type : kTypes)
    for (int64_t n : {32, 64, 96, 288})
      for (int kind = 0; kind < 7; ++kind) {
        Values x = row_of(type, n, kind, random);
        Values rotated(DType::f32, n), expected(DType::f32, n);
        for (int64_t i = 0; i < n; ++i) expected.set(i, product(value_of(x, i), 1.0f / kGroup));
        for (int64_t apart = kGroup / 2; apart > 0; apart /= 2)
          for (int64_t i = 0; i < n; ++i) {
            if ((i & apart) != 0) continue;
            const float low = value_of(expected, i), high = value_of(expected, i + apart);
            expected.set(i, sum(low, high));
            expected.set(i + apart, sum(low, -high));
          }
        kernels.rotate(x.data(), type, n, static_cast<float*>(rotated.data()));
        bool finite = true;
        for (int64_t i = 0; i < n; ++i) finite &= std::isfinite(value_of(rotated, i));
        report.expect(kind == 2 || kind == 3 ? !finite : finite && rotated.same(expected),
                      text("%s rotation type %d n %ld kind %d", name, int(type), long(n), kind));
      }
}

void test_add_digits(const LinearKernels& kernels, const char* name, Report& report) {
  Random random(42);
  for (int64_t panels : {1, 2, 3, 8})
    for (int kind = 0; kind < 4; ++kind) {
      const int64_t n = panels * kPanel;
      Values sums(DType::f32, n, random), more(DType::f32, n, random), expected(DType::f32, n);
      const float scale = kind == 1 ? std::nanf("") : kind == 2 ? 0.0f : 0.037f, more_scale = 0.00029f;
      if (kind == 3) sums.set(n / 2, INFINITY), more.set(n - 1, std::nanf(""));
      for (int64_t i = 0; i < n; ++i)
        expected.set(i, sum(product(value_of(sums, i), scale), product(value_of(more, i), more_scale)));
      const Values before = more;
      kernels.add_digits(static_cast<float*>(sums.data()), scale, static_cast<const float*>(more.data()),
                         more_scale, n);
      report.expect(sums.same(expected) && more.same(before),
                    text("%s sum of digits, %ld panels, kind %d", name, long(panels), kind));
    }
}

// A gemm call that begins at an even row and ends at an even row, or at the last, holds whole tokens.
void test_even_steps(const LinearKernels& kernels, const char* name, Report& report) {
  report.expect((kernels.gemm_block == 1 || kernels.gemm_block % 2 == 0) && kernels.gemm_tokens % 2 == 0 &&
                    kernels.gemm_tokens % kernels.gemm_block == 0,
                text("%s rows per gemm call", name));
}

// A panel of any scheme, with finite scales and offsets.
std::vector<uint8_t> random_weights(Scheme scheme, int64_t groups, Random& random) {
  const PanelLayout layout = panel_layout(scheme, groups * kGroup);
  std::vector<uint8_t> panel =
      random_panel(has_int8_groups(scheme) ? Scheme::i8 : scheme, groups, false, random);
  panel.resize(size_t(layout.bytes), 0x2a);
  const auto put_floats = [&](int64_t at, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float value = random.uniform(-0.1f, 0.1f);
      std::memcpy(&panel[size_t(at + i * 4)], &value, 4);
    }
  };
  if (has_offsets(scheme)) put_floats(layout.offsets, layout.scale_groups * kPanel);
  for (int64_t part = 0; has_int8_groups(scheme) && part < layout.scale_groups; ++part)
    put_floats(layout.values + part * int8_panel_bytes(groups_per_scale(scheme)), kPanel);
  return panel;
}

// Layers of tokens with two digits, cut into tiles: each token is finished once per panel, with the sums of
// its two rows as if each row were a token of its own.
void test_token_tiles(const LinearKernels& kernels, const char* name, Report& report) {
  constexpr int64_t groups = 9, panels = 5, columns = panels * kPanel;
  Random random(43);
  for (const SchemeName& one : kSchemeNames)
    for (int64_t tokens : {1, 2, 3, 4, 5, 8, 9, 17, 37}) {
      const int64_t rows = 2 * tokens, stride = panel_layout(one.scheme, groups * kGroup).bytes;
      const bool gemv = rows <= kernels.gemv_tokens;
      std::vector<uint8_t> w;
      for (int64_t p = 0; p < panels; ++p) {
        const std::vector<uint8_t> panel = random_weights(one.scheme, groups, random);
        w.insert(w.end(), panel.begin(), panel.end());
      }
      QuantizedRows quantized(rows, groups, false, random);
      const int64_t block = gemv ? gemv_block_of(kernels, one.scheme, rows) : kernels.gemm_block;
      Activations x = quantized.in_blocks(block);
      if (!gemv && !has_offsets(one.scheme)) x.group_sums = nullptr;
      std::vector<float> scales(static_cast<size_t>(rows));
      for (float& scale : scales) scale = random.uniform(0.001f, 0.1f);
      x.scales = scales.data();

      std::vector<float> each(size_t(rows * columns)), expected(size_t(tokens * columns));
      const TileGrid whole{panels, panels, rows, rows};
      multiply_tile(kernels, whole, one.scheme, w.data(), stride, x, 0,
                    [&](int64_t row, int64_t panel, int64_t count, const float* acc) {
                      std::copy_n(acc, count * kPanel, &each[size_t(row * columns + panel * kPanel)]);
                    });
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t c = 0; c < columns; ++c)
          expected[size_t(t * columns + c)] =
              sum(product(each[size_t(2 * t * columns + c)], scales[size_t(2 * t)]),
                  product(each[size_t((2 * t + 1) * columns + c)], scales[size_t(2 * t + 1)]));

      x.digits = 2;
      for (int round = 0; round < 4; ++round) {
        TileGrid grid = whole;
        const int64_t unit = std::max<int64_t>(block, 2);
        if (round > 0) grid.panel_step = 1 + random.below(panels);
        if (round > 0 && !gemv) grid.token_step = unit * (1 + random.below(ceil_div(rows, unit)));
        std::vector<float> actual(expected.size(), -7.0f);
        std::vector<int> written(expected.size());
        for (int64_t tile = 0; tile < grid.count(); ++tile)
          multiply_token_tile(
              kernels, grid, one.scheme, w.data(), stride, x, tile,
              [&](int64_t token, int64_t panel, int64_t count, const float* acc, float scale) {
                for (int64_t i = 0; i < count * kPanel; ++i) {
                  const size_t at = size_t(token * columns + panel * kPanel + i);
                  actual[at] = acc[i] * scale;
                  ++written[at];
                }
              });
        const bool once = std::all_of(written.begin(), written.end(), [](int n) { return n == 1; });
        report.expect(once && same_floats(actual, expected),
                      text("%s two digits in tiles of %ld x %ld, scheme %s tokens %ld", name,
                           long(grid.panel_step), long(grid.token_step), one.name, long(tokens)));
      }
    }
}

}  // namespace

void test_digits(const Variant& tested, Report& report) {
  test_rounding_errors(*tested.linear, tested.name, report);
  test_rotation(*tested.linear, tested.name, report);
  test_add_digits(*tested.linear, tested.name, report);
  test_even_steps(*tested.linear, tested.name, report);
  test_token_tiles(*tested.linear, tested.name, report);
}

}  // namespace armllm_test
