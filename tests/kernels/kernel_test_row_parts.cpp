// Row kernels on work cut into several calls, by rows, heads or columns: the bits must equal those of one
// call.
#include "activation/activation.h"
#include "kernel_test.h"
#include "linear/dense.h"
#include "moe/moe.h"
#include "norm/norm.h"
#include "rope/rope.h"
#include "sample/sample.h"

namespace armllm_test {
namespace {

using namespace armllm;

constexpr int kRounds = 3;  // random cuts, after a cut into single units

void* at(Values& values, int64_t i) { return static_cast<char*>(values.data()) + i * size_of(values.type()); }
float* floats(Values& values, int64_t i = 0) { return static_cast<float*>(at(values, i)); }

// Calls part(begin, end) for consecutive ranges of 0 … n.
template <typename Part>
void cut(int64_t n, int round, Random& random, const Part& part) {
  for (int64_t i = 0; i < n;) {
    const int64_t count = round == 0 ? 1 : 1 + random.below(n - i);
    part(i, i + count);
    i += count;
  }
}

// A row of a matrix equals the row alone; a token has two adjacent norm rows.
void test_norm_rows(const NormKernels& kernels, const char* name, Report& report) {
  Random random(41);
  constexpr int64_t rows = 6;
  for (DType type : kTypes)
    for (int64_t width : {29, 96})
      for (int64_t per_token : {1, 2})
        for (bool layer : {false, true}) {
          Values x(type, rows * width, random), residual(type, rows * width, random),
              weight(DType::f32, width, random);
          Values whole(type, rows * width), parts(type, rows * width), sums[2] = {whole, whole};
          const auto run = layer ? kernels.layer : kernels.rms;
          NormArgs args;
          args.weight = weight.data();
          args.weight_type = DType::f32;
          args.rows = rows;
          args.width = width;
          args.rows_per_token = per_token;
          args.x = x.rows(per_token * width);
          args.out = whole.rows(per_token * width);
          if (per_token == 1) {
            args.residual = residual.rows(width);
            args.sum = sums[0].rows(width);
          }
          for (int64_t r = rows; r-- > 0;) run(args, r);
          args.rows = args.rows_per_token = 1;
          for (int64_t r = 0; r < rows; ++r) {
            args.x = {at(x, r * width), width, type};
            args.out = {at(parts, r * width), width, type};
            if (args.residual) {
              args.residual = {at(residual, r * width), width, type};
              args.sum = {at(sums[1], r * width), width, type};
            }
            run(args, 0);
          }
          report.expect(whole.same(parts) && sums[0].same(sums[1]),
                        text("%s %s rows alone, type %d width %ld, %ld a token", name,
                             layer ? "layer" : "rms", int(type), long(width), long(per_token)));
        }
}

void test_heads(const RopeKernels& kernels, const char* name, Report& report) {
  Random random(42);
  constexpr int64_t heads = 7;
  for (DType type : kTypes)
    for (int64_t head_size : {24, 64})
      for (RopePairs pairs : {RopePairs::halves, RopePairs::neighbors, RopePairs::unzipped})
        for (int round = 0; round <= kRounds; ++round) {
          const int64_t rotary = head_size / 2;
          Values whole(type, heads * head_size, random), parts = whole,
                                                         angles(DType::f32, rotary, random, 1.0f);
          const float *cos = floats(angles), *sin = cos + rotary / 2;
          kernels.rotate(whole.data(), type, heads, head_size, rotary, cos, sin, pairs);
          cut(heads, round, random, [&](int64_t begin, int64_t end) {
            kernels.rotate(at(parts, begin * head_size), type, end - begin, head_size, rotary, cos, sin,
                           pairs);
          });
          report.expect(whole.same(parts), text("%s rotate heads in parts, type %d head %ld round %d", name,
                                                int(type), long(head_size), round));
        }
}

void test_columns(const Variant& tested, Report& report) {
  Random random(43);
  constexpr int64_t n = 77, panels = 5, count = 3;
  for (DType type : kTypes)
    for (int round = 0; round <= kRounds; ++round) {
      Values gate(type, n, random), up(type, n, random), residual(type, n, random), bias(type, n, random);
      Values acc(DType::f32, 2 * panels * kPanel, random), rows(DType::f32, count * n, random);
      const float weights[count] = {0.5f, -1.25f, 3.0f};
      const auto compare = [&](const char* what, int64_t size, int64_t unit, const auto& run) {
        Values whole(type, size), parts(type, size);
        run(whole, 0, size);
        cut(ceil_div(size, unit), round, random,
            [&](int64_t begin, int64_t end) { run(parts, begin * unit, std::min(end * unit, size)); });
        report.expect(whole.same(parts),
                      text("%s %s in parts, type %d round %d", tested.name, what, int(type), round));
      };
      for (Activation activation : {Activation::silu, Activation::gelu})
        compare("gated", n, 1, [&](Values& out, int64_t begin, int64_t end) {
          tested.activation->gated(at(gate, begin), at(up, begin), at(out, begin), type, end - begin,
                                   activation);
        });
      compare("add", n, 1, [&](Values& out, int64_t begin, int64_t end) {
        tested.activation->add(at(gate, begin), at(up, begin), at(out, begin), type, end - begin);
      });
      compare("gated_panels", panels * kPanel - 3, kPanel, [&](Values& out, int64_t begin, int64_t end) {
        GatedPanels p;
        p.acc = floats(acc, 2 * begin);
        p.n = end - begin;
        p.scale = 0.37f;
        p.gate_bias = p.up_bias = at(bias, begin);
        p.bias_type = type;
        tested.activation->gated_panels(p, at(out, begin), type);
      });
      compare("epilogue", n, 1, [&](Values& out, int64_t begin, int64_t end) {
        tested.linear->epilogue(floats(rows, begin), end - begin, 0.37f, at(bias, begin), type,
                                at(residual, begin), at(out, begin), type);
      });
      compare("combine", n, 1, [&](Values& out, int64_t begin, int64_t end) {
        const float* x[count];
        for (int64_t j = 0; j < count; ++j) x[j] = floats(rows, j * n + begin);
        tested.moe->combine(x, weights, count, end - begin, at(out, begin), type);
      });
    }
}

// Any tokens × any outputs.
void test_dense_parts(const DenseKernels& kernels, const char* name, Report& report) {
  Random random(44);
  constexpr int64_t tokens = 9, outputs = 37, k = 45;
  for (DType type : kTypes)
    for (int round = 0; round <= 2 * kRounds; ++round) {
      Values x(type, tokens * k, random), weight(type, outputs * k, random), bias(type, outputs, random);
      Values whole(type, tokens * outputs), parts(type, tokens * outputs);
      DenseLinearArgs args;
      args.x = x.rows(k);
      args.weight = weight.rows(k);
      args.bias = bias.data();
      args.bias_type = type;
      args.tokens = tokens;
      args.in_features = k;
      args.out_features = outputs;
      const auto run = [&](Values& out, int64_t t0, int64_t t1, int64_t o0, int64_t o1) {
        args.out = out.rows(outputs);
        for (int64_t t = t0; t < t1; t += kDenseTokens)
          for (int64_t o = o0; o < o1; o += kDenseOutputs)
            kernels.tile(args, t, int(std::min(kDenseTokens, t1 - t)), o,
                         int(std::min(kDenseOutputs, o1 - o)));
      };
      run(whole, 0, tokens, 0, outputs);
      cut(tokens, round, random, [&](int64_t t0, int64_t t1) {
        cut(outputs, round, random, [&](int64_t o0, int64_t o1) { run(parts, t0, t1, o0, o1); });
      });
      report.expect(whole.same(parts), text("%s dense in parts, type %d round %d", name, int(type), round));
    }
}

// Chunks of whole blocks, like the tiles of a row.
void test_sample_chunks(const SampleKernels& kernels, const char* name, Report& report) {
  Random random(45);
  constexpr int64_t n = 7 * kSampleBlock - 5, blocks = ceil_div(n, kSampleBlock);
  for (DType type : kTypes)
    for (int round = 0; round <= kRounds; ++round) {
      Values x(type, n, random);
      const float top = kernels.largest(x.data(), type, n);
      std::vector<float> weights[2], largest[2], sums[2];
      float most = -INFINITY;
      for (int i = 0; i < 2; ++i) {
        weights[i].resize(size_t(blocks * kSampleBlock));
        largest[i].resize(size_t(blocks));
        sums[i].resize(size_t(blocks));
        const auto part = [&](int64_t begin, int64_t end) {
          const int64_t first = begin * kSampleBlock, some = std::min(end * kSampleBlock, n) - first;
          most = std::max(most, kernels.largest(at(x, first), type, some));
          kernels.weigh(at(x, first), type, some, top, 1.25f, 0.01f, &weights[i][size_t(first)],
                        &largest[i][size_t(begin)], &sums[i][size_t(begin)]);
        };
        if (i == 0)
          part(0, blocks);
        else
          cut(blocks, round, random, part);
      }
      report.expect(most == top && weights[0] == weights[1] && largest[0] == largest[1] && sums[0] == sums[1],
                    text("%s sample in parts, type %d round %d", name, int(type), round));
    }
}

}  // namespace

void test_row_parts(const Variant& tested, Report& report) {
  test_norm_rows(*tested.norm, tested.name, report);
  test_heads(*tested.rope, tested.name, report);
  test_columns(tested, report);
  test_dense_parts(*tested.dense, tested.name, report);
  test_sample_chunks(*tested.sample, tested.name, report);
}

}  // namespace armllm_test
