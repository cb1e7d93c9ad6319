// Linear kernels on work cut into several calls, by tokens, panels, rows or columns: the bits must equal
// those of one call.
#include "kernel_test_panels.h"
#include "linear/tile_grid.h"

namespace armllm_test {
namespace {

constexpr int kRounds = 3;  // random cuts, after a cut into single units

std::vector<uint8_t> panels_of(Scheme scheme, int64_t groups, int64_t count, int64_t stride, Random& random) {
  std::vector<uint8_t> all;
  for (int64_t p = 0; p < count; ++p) {
    const std::vector<uint8_t> panel = random_panel(scheme, groups, false, random);
    all.insert(all.end(), panel.begin(), panel.end());
    all.resize(size_t((p + 1) * stride), 0xee);
  }
  return all;
}

// Tokens one at a time, and in every count that gemv accepts.
void test_gemv_parts(const LinearKernels& kernels, const char* name, Report& report) {
  constexpr int64_t tokens = 19;
  Random random(31);
  for (const auto& [scheme, scheme_name] : kernel_schemes())
    for (int64_t groups : {3, 13}) {
      const std::vector<uint8_t> panel = random_panel(scheme, groups, false, random);
      QuantizedRows rows(tokens, groups, false, random);
      std::vector<float> alone(size_t(tokens * kPanel));
      const Activations single = rows.in_blocks(1);
      for (int64_t t = 0; t < tokens; ++t)
        kernels.gemv(scheme, panel.data(), single, t, 1, &alone[size_t(t * kPanel)]);
      for (int count = 2; count <= kGemvTokens; ++count) {
        const int64_t block = gemv_block_of(kernels, scheme, count);
        const Activations x = rows.in_blocks(block);
        for (int64_t first = 0; first + count <= tokens; first += block) {
          std::vector<float> out(size_t((count + 1) * kPanel), -7.0f);
          kernels.gemv(scheme, panel.data(), x, first, count, out.data());
          report.expect(
              std::memcmp(out.data(), &alone[size_t(first * kPanel)], size_t(count * kPanel * 4)) == 0 &&
                  out[size_t(count * kPanel)] == -7.0f,
              text("%s gemv of tokens %ld + %d, scheme %s groups %ld", name, long(first), count, scheme_name,
                   long(groups)));
        }
      }
    }
}

// One call of unpack and gemm: `count` panels against the tokens from `first` on.
struct Product {
  const LinearKernels& kernels;
  Scheme scheme;
  const std::vector<uint8_t>& panels;
  int64_t stride;  // bytes from panel to panel
  Activations x;

  void run(int64_t panel, int64_t count, int64_t first, int64_t tokens, float* out, int64_t out_stride) {
    std::vector<const uint8_t*> pointers;
    for (int64_t p = 0; p < count; ++p) pointers.push_back(&panels[size_t((panel + p) * stride)]);
    std::vector<int8_t> w(size_t(kernels.gemm_panels * x.groups * kernels.gemm_group_bytes));
    std::vector<int32_t> row_info(size_t(kernels.gemm_panels * kPanel));
    std::vector<float> scales(size_t(kernels.gemm_panels * kPanel));
    kernels.unpack(scheme, pointers.data(), int(count), x.groups, w.data(), row_info.data(), scales.data());
    kernels.gemm(w.data(), row_info.data(), scales.data(), int(count), x, first, int(tokens),
                 out + first * out_stride + panel * kPanel, out_stride);
  }
};

void test_gemm_parts(const LinearKernels& kernels, const char* name, Report& report) {
  Random random(32);
  const int64_t block = kernels.gemm_block, panels = kernels.gemm_panels;
  for (const auto& [scheme, scheme_name] : kernel_schemes())
    for (int64_t rest : {1, 2, 3, 5, 6, 7}) {  // tokens of the last block
      const int64_t groups = 1 + 2 * (rest % 2), tokens = 2 * block + rest % block;
      const int64_t stride = panel_layout(scheme, groups * kGroup).bytes, columns = panels * kPanel;
      const std::vector<uint8_t> w = panels_of(scheme, groups, panels, stride, random);
      QuantizedRows rows(tokens, groups, false, random);
      Product product{kernels, scheme, w, stride, rows.in_blocks(block)};
      product.x.group_sums = nullptr;
      std::vector<float> whole(size_t(tokens * columns)), parts;
      for (int64_t t = 0; t < tokens; t += kernels.gemm_tokens)
        product.run(0, panels, t, std::min(kernels.gemm_tokens, tokens - t), whole.data(), columns);
      for (int round = 0; round < kRounds; ++round) {
        parts.assign(whole.size(), -7.0f);
        // Prefetching must not change any bit.
        product.x.prefetch = round % 2 ? w.data() : nullptr;
        product.x.prefetch_bytes = round % 2 ? int64_t(w.size()) : 0;
        for (int64_t p = 0; p < panels;) {
          const int64_t count = round == 0 ? 1 : 1 + random.below(panels - p);
          for (int64_t t = 0; t < tokens;) {
            const int64_t blocks = round == 0 ? 1 : 1 + random.below(ceil_div(tokens - t, block)),
                          some = std::min({blocks * block, tokens - t, kernels.gemm_tokens});
            product.run(p, count, t, some, parts.data(), columns);
            t += some;
          }
          p += count;
        }
        report.expect(same_floats(whole, parts), text("%s gemm in parts, scheme %s tokens %ld round %d", name,
                                                      scheme_name, long(tokens), round));
      }
    }
}

// Tiles of any size, over rows at any place in a buffer, like those of an expert.
void test_tiles(const LinearKernels& kernels, const char* name, Report& report) {
  constexpr int64_t groups = 2, panels = 7, columns = panels * kPanel;
  Random random(33);
  for (Scheme scheme :
       {Scheme::g32i, Scheme::g64z, Scheme::row, Scheme::i8, Scheme::int6, Scheme::int3, Scheme::g32iz})
    for (int64_t tokens :
         {int64_t(1), int64_t(5), kernels.gemv_tokens, kernels.gemv_tokens + 1, int64_t(34)}) {
      const bool gemv = tokens <= kernels.gemv_tokens;
      const int64_t stride = panel_layout(scheme, groups * kGroup).bytes;
      const std::vector<uint8_t> w = panels_of(scheme, groups, panels, stride, random);
      const int64_t block = gemv ? gemv_block_of(kernels, scheme, tokens) : kernels.gemm_block;
      const int64_t first = round_up(kernels.gemm_block, block);
      QuantizedRows rows(first + tokens, groups, false, random);
      Activations x = rows.in_blocks(block);
      x.values += first * groups * kGroup;
      x.group_sums = gemv ? x.group_sums + first * groups : nullptr;
      std::vector<float> whole(size_t(tokens * columns)), parts;
      std::vector<int> written;
      for (int round = 0; round <= 2 * kRounds; ++round) {
        TileGrid grid{panels, panels, tokens, tokens};
        if (round > 0) grid.panel_step = 1 + random.below(panels);
        if (round > 0 && !gemv) grid.token_step = block * (1 + random.below(ceil_div(tokens, block)));
        parts.assign(whole.size(), -7.0f);
        written.assign(whole.size(), 0);
        for (int64_t tile = 0; tile < grid.count(); ++tile)
          multiply_tile(kernels, grid, scheme, w.data(), stride, x, tile,
                        [&](int64_t token, int64_t panel, int64_t count, const float* acc) {
                          for (int64_t i = 0; i < count * kPanel; ++i) {
                            const size_t at = size_t(token * columns + panel * kPanel + i);
                            parts[at] = acc[i];
                            ++written[at];
                          }
                        });
        if (round == 0) whole = parts;
        const bool once = std::all_of(written.begin(), written.end(), [](int n) { return n == 1; });
        report.expect(once && same_floats(whole, parts),
                      text("%s tiles of %ld x %ld, scheme %d tokens %ld", name, long(grid.panel_step),
                           long(grid.token_step), int(scheme), long(tokens)));
      }
    }
}

}  // namespace

void test_linear_parts(const Variant& tested, Report& report) {
  test_gemv_parts(*tested.linear, tested.name, report);
  test_gemm_parts(*tested.linear, tested.name, report);
  test_tiles(*tested.linear, tested.name, report);
}

}  // namespace armllm_test
