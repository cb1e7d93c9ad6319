// Kernel families that process one row at a time: norm, rope, activation, moe.
#include "activation/activation.h"
#include "kernel_test.h"
#include "linear/dense.h"
#include "lora/lora.h"
#include "moe/moe.h"
#include "norm/norm.h"
#include "rope/rope.h"
#include "sample/sample.h"

namespace armllm_test {
namespace {

using namespace armllm;

void test_norm(const NormKernels& tested, const NormKernels& truth, const char* name, Report& report) {
  Random random(11);
  for (DType type : kTypes)
    for (DType weight_type : kTypes)
      for (int64_t width : {1, 16, 29, 96, 130})
        for (int kind = 0; kind < 4; ++kind)
          for (bool layer : {false, true}) {
            Values x(type, width, random), residual(type, width, random), weight(weight_type, width, random),
                bias(weight_type, width, random);
            if (kind == 2) x.set(width / 2, std::nanf(""));
            Values out[2] = {Values(type, width), Values(type, width)},
                   sum[2] = {Values(type, width), Values(type, width)};
            for (int i = 0; i < 2; ++i) {
              NormArgs args;
              args.x = x.rows(width);
              args.out = out[i].rows(width);
              if (kind == 1 || kind == 2) {
                args.residual = residual.rows(width);
                args.sum = sum[i].rows(width);
              }
              args.weight = layer && kind == 3 ? nullptr : weight.data();
              args.bias = layer && kind != 3 ? bias.data() : nullptr;
              args.weight_type = weight_type;
              args.rows = 1;
              args.width = width;
              args.weight_offset = kind == 1 ? 1.0f : 0.0f;
              const NormKernels& kernels = i ? truth : tested;
              (layer ? kernels.layer : kernels.rms)(args, 0);
            }
            report.expect(out[0].same(out[1]) && sum[0].same(sum[1]),
                          text("%s %s types %d %d width %ld kind %d", name, layer ? "layer" : "rms",
                               int(type), int(weight_type), long(width), kind));
          }
}

void test_rope(const RopeKernels& tested, const RopeKernels& truth, const char* name, Report& report) {
  Random random(12);
  for (DType type : kTypes)
    for (int64_t head_size : {8, 64, 72, 128})
      for (int64_t rotary : {head_size, head_size / 2, int64_t(2)})
        for (int64_t heads : {1, 3})
          for (RopePairs pairs : {RopePairs::halves, RopePairs::neighbors, RopePairs::unzipped}) {
            const Values x(type, heads * head_size, random);
            Values angles(DType::f32, rotary, random, 1.0f);
            const float* cos = static_cast<const float*>(angles.data());
            Values turned[2] = {x, x};
            for (int i = 0; i < 2; ++i)
              (i ? truth : tested)
                  .rotate(turned[i].data(), type, heads, head_size, rotary, cos, cos + rotary / 2, pairs);
            report.expect(turned[0].same(turned[1]),
                          text("%s rotate type %d head %ld rotary %ld heads %ld pairs %d", name, int(type),
                               long(head_size), long(rotary), long(heads), int(pairs)));
          }
}

void test_activation(const ActivationKernels& tested, const ActivationKernels& truth, const char* name,
                     Report& report) {
  constexpr Activation kinds[] = {
      Activation::none, Activation::silu,           Activation::gelu,         Activation::gelu_tanh,
      Activation::relu, Activation::swiglu_clamped, Activation::silu_clamped, Activation::silu_softcapped};
  Random random(13);
  for (int64_t n : {1, 16, 27, 200})
    for (float size : {1.0f, 12.0f, 300.0f})
      for (DType type : kTypes) {
        Values gate(type, n, random, size), up(type, n, random, size);
        if (n > 20)
          gate.set(3, std::nanf("")), gate.set(4, INFINITY), gate.set(5, -INFINITY), gate.set(6, -0.0f);
        for (Activation kind : kinds) {
          Values out[2] = {Values(type, n), Values(type, n)};
          for (int i = 0; i < 2; ++i)
            (i ? truth : tested).gated(gate.data(), up.data(), out[i].data(), type, n, kind);
          report.expect(out[0].same(out[1]), text("%s gated %d type %d n %ld size %g", name, int(kind),
                                                  int(type), long(n), double(size)));
          if (type != DType::f32) continue;
          Values acc(type, 2 * round_up(n, 16), random, size), scaled[2] = {Values(type, n), Values(type, n)};
          for (int i = 0; i < 2; ++i) {
            GatedPanels panels;
            panels.acc = static_cast<const float*>(acc.data());
            panels.n = n;
            panels.scale = 0.37f;
            panels.gate_bias = gate.data();
            panels.up_bias = n > 16 ? up.data() : nullptr;
            panels.activation = kind;
            (i ? truth : tested).gated_panels(panels, scaled[i].data(), type);
          }
          report.expect(scaled[0].same(scaled[1]),
                        text("%s gated_panels %d n %ld size %g", name, int(kind), long(n), double(size)));
        }
        Values sum[2] = {Values(type, n), Values(type, n)};
        for (int i = 0; i < 2; ++i) (i ? truth : tested).add(gate.data(), up.data(), sum[i].data(), type, n);
        report.expect(sum[0].same(sum[1]), text("%s add type %d n %ld", name, int(type), long(n)));
      }
}

void test_route(const MoeKernels& tested, const MoeKernels& truth, const char* name, Report& report) {
  Random random(14);
  for (DType type : kTypes)
    for (Scoring scoring : {Scoring::softmax, Scoring::sigmoid, Scoring::topk_softmax, Scoring::topk_sigmoid,
                            Scoring::sparsemixer, Scoring::sqrt_softplus})
      for (int64_t experts : {4, 8, 60, 128})
        for (int64_t top_k : {1, 2, 4})
          for (int kind = 0; kind < 4; ++kind) {
            constexpr int64_t tokens = 2;
            Values logits(type, tokens * experts, random), correction(DType::f32, experts, random, 0.5f);
            if (kind == 3)
              for (int64_t i = 0; i < tokens * experts; ++i) logits.set(i, float(random.below(3)));  // ties
            std::vector<float> weights[2];
            std::vector<int32_t> ids[2];
            for (int i = 0; i < 2; ++i) {
              weights[i].assign(size_t(tokens * top_k), -1.0f);
              ids[i].assign(size_t(tokens * top_k), -1);
              RouteArgs args;
              args.logits = logits.rows(experts);
              args.weights = weights[i].data();
              args.ids = ids[i].data();
              args.correction_bias = kind == 2 ? static_cast<const float*>(correction.data()) : nullptr;
              args.tokens = tokens;
              args.experts = experts;
              args.top_k = top_k;
              if (kind == 2 && scoring != Scoring::topk_softmax) args.groups = 4, args.top_k_groups = 4;
              args.scoring = scoring;
              args.renormalize = kind == 1;
              args.scale = kind == 2 ? 2.5f : 1.0f;
              for (int64_t t = 0; t < tokens; ++t) (i ? truth : tested).route(args, t);
            }
            report.expect(ids[0] == ids[1] &&
                              std::memcmp(weights[0].data(), weights[1].data(), weights[0].size() * 4) == 0,
                          text("%s route type %d scoring %d experts %ld top %ld kind %d", name, int(type),
                               int(scoring), long(experts), long(top_k), kind));
          }
}

void test_dense(const DenseKernels& tested, const DenseKernels& truth, const char* name, Report& report) {
  Random random(16);
  const bool dots = std::string(name) == "i8mm";  // BFMMLA products of bfloat16 round differently
  for (DType type : kTypes)
    for (DType bias_type : kTypes)
      for (int64_t k : {1, 16, 45, 128})
        for (int tokens = 1; tokens <= int(kDenseTokens); ++tokens)
          for (int outputs : {1, 5, int(kDenseOutputs)}) {
            Values x(type, (tokens + 1) * k, random), weight(type, (outputs + 1) * k, random);
            Values bias(bias_type, outputs + 1, random);
            const bool exact = type != DType::bf16 || !dots;
            const DType out_type = exact ? bias_type : DType::f32;
            Values out[2] = {Values(out_type, (tokens + 1) * (outputs + 1)),
                             Values(out_type, (tokens + 1) * (outputs + 1))};
            for (int i = 0; i < 2; ++i) {
              DenseLinearArgs args;
              args.x = x.rows(k);
              args.weight = weight.rows(k);
              args.out = out[i].rows(outputs + 1);
              args.bias = k == 45 ? nullptr : bias.data();
              args.bias_type = bias_type;
              args.tokens = tokens + 1;
              args.in_features = k;
              args.out_features = outputs + 1;
              (i ? truth : tested).tile(args, 1, tokens, 1, outputs);
            }
            report.expect(exact ? out[0].same(out[1]) : out[0].distance(out[1]) <= 1e-4f * float(k),
                          text("%s dense types %d %d k %ld tokens %d outputs %d", name, int(type),
                               int(bias_type), long(k), tokens, outputs));
          }
}

std::vector<LoraIntegers> random_integers(int64_t count, Random& random) {
  std::vector<LoraIntegers> groups(count);
  for (LoraIntegers& group : groups) {
    for (int8_t& value : group.values) value = int8_t(random.below(255) - 127);
    group.scale = random.uniform(0, 0.03f);
  }
  return groups;
}

void test_lora(const LoraKernels& tested, const LoraKernels& truth, const char* name, Report& report) {
  Random random(17);
  constexpr int64_t kRank = 5;
  const int32_t rows[] = {0, 2, 3, 5, 6, 7}, ranks[] = {3, kRank};
  constexpr int kIntegers = 3;  // after the numbers of the types
  for (DType type : kTypes)
    for (int factors = 0; factors <= kIntegers; ++factors)
      for (int64_t k : {1, 16, 45, 160})
        for (int64_t n : {7, 64, 100})
          for (int64_t count : {1, 3, 4, 6}) {
            const bool integers = factors == kIntegers;
            const DType floats = integers ? DType::f32 : DType(factors);
            Values x(type, 8 * k, random), base(type, 8 * n, random), a(floats, 2 * kRank * k, random);
            Values b(floats, 2 * kRank * round_up(n, kLoraBlock), random);
            const auto a_groups = random_integers(2 * kRank * ceil_div(k, kLoraBlock), random);
            const auto b_groups = random_integers(2 * kRank * ceil_div(n, kLoraBlock), random);
            Values out[2] = {base, base},
                   sums[2] = {Values(DType::f32, 8 * kRank), Values(DType::f32, 8 * kRank)};
            for (int i = 0; i < 2; ++i) {
              LoraArgs args;
              args.x = x.rows(k);
              args.out = out[i].rows(n);
              args.a = integers ? reinterpret_cast<const char*>(a_groups.data())
                                : static_cast<const char*>(a.data());
              args.b = integers ? reinterpret_cast<const char*>(b_groups.data())
                                : static_cast<const char*>(b.data());
              args.ranks = ranks;
              args.type = floats;
              args.integers = integers;
              args.most_rank = kRank;
              args.in_features = k;
              args.out_features = n;
              args.scratch = sums[i].data();
              const LoraGroup group = {rows, count, 1};
              const LoraKernels& kernels = i ? truth : tested;
              kernels.shrink(args, group, 0, kLoraRanks, args.a);
              kernels.shrink(args, group, kLoraRanks, kRank - kLoraRanks, nullptr);
              kernels.expand(args, group, 0, n, i ? nullptr : args.b);
            }
            report.expect(out[0].same(out[1]) && sums[0].same(sums[1]),
                          text("%s lora types %d %d k %ld n %ld rows %ld", name, int(type), factors, long(k),
                               long(n), long(count)));
          }
}

void test_look_up(const LoraKernels& tested, const LoraKernels& truth, const char* name, Report& report) {
  Random random(18);
  constexpr int64_t kTokens = 4;
  const int32_t rows[] = {0, 2}, ranks[] = {3, 19};
  const int64_t ids[] = {3, -1, 0};
  for (DType type : kTypes)
    for (int64_t slot : {0, 1}) {
      Values table(type, 2 * kTokens * ranks[1], random);
      Values sums[2] = {Values(DType::f32, 3 * ranks[1]), Values(DType::f32, 3 * ranks[1])};
      for (int i = 0; i < 2; ++i) {
        LoraArgs args;
        args.table = static_cast<const char*>(table.data());
        args.table_type = type;
        args.ids = ids;
        args.vocab_size = kTokens;
        args.ranks = ranks;
        args.most_rank = ranks[1];
        args.scratch = sums[i].data();
        (i ? truth : tested).look_up(args, {rows, 2, slot});
      }
      report.expect(sums[0].same(sums[1]),
                    text("%s lora table type %d slot %ld", name, int(type), long(slot)));
    }
}

void test_combine(const MoeKernels& tested, const MoeKernels& truth, const char* name, Report& report) {
  Random random(15);
  for (DType type : kTypes)
    for (int64_t count : {0, 1, 3, 8})
      for (int64_t n : {1, 16, 45}) {
        Values rows(DType::f32, (count + 1) * n, random), weights(DType::f32, count + 1, random);
        std::vector<const float*> x;
        for (int64_t j = 0; j < count + 1; ++j) x.push_back(static_cast<const float*>(rows.data()) + j * n);
        Values out[2] = {Values(type, n), Values(type, n)};
        for (int i = 0; i < 2; ++i)
          (i ? truth : tested)
              .combine(x.data(), static_cast<const float*>(weights.data()), count, n, out[i].data(), type);
        report.expect(out[0].same(out[1]),
                      text("%s combine type %d count %ld n %ld", name, int(type), long(count), long(n)));
      }
}

void test_widen(const MoeKernels& tested, const MoeKernels& truth, const char* name, Report& report) {
  Random random(16);
  for (DType type : kTypes)
    for (int64_t n : {1, 16, 45}) {
      Values x(type, n, random);
      if (n > 1) x.set(0, std::nanf("")), x.set(1, INFINITY);
      Values out[2] = {Values(DType::f32, n), Values(DType::f32, n)};
      for (int i = 0; i < 2; ++i)
        (i ? truth : tested).widen(x.data(), type, n, static_cast<float*>(out[i].data()));
      report.expect(out[0].same(out[1]), text("%s widen type %d n %ld", name, int(type), long(n)));
    }
}

void test_sample(const SampleKernels& tested, const SampleKernels& truth, const char* name, Report& report) {
  Random random(17);
  for (DType type : kTypes)
    for (int64_t n : {1, 15, 64, 200})
      for (float size : {1.0f, 40.0f}) {
        Values x(type, n, random, size);
        if (n > 20) x.set(3, std::nanf("")), x.set(4, -INFINITY);
        const int64_t padded = round_up(n, kSampleBlock), blocks = padded / kSampleBlock;
        const float top = truth.largest(x.data(), type, n);
        std::vector<float> weights[2], largest[2], sums[2];
        for (int i = 0; i < 2; ++i) {
          weights[i].resize(size_t(padded)), largest[i].resize(size_t(blocks)),
              sums[i].resize(size_t(blocks));
          (i ? truth : tested)
              .weigh(x.data(), type, n, top, 1.25f, 0.01f, weights[i].data(), largest[i].data(),
                     sums[i].data());
        }
        bool same = weights[0] == weights[1] && largest[0] == largest[1] && sums[0] == sums[1];
        same = same && tested.largest(x.data(), type, n) == top;
        same = same &&
               tested.first_at_least(x.data(), type, n, top) == truth.first_at_least(x.data(), type, n, top);
        same = same && tested.sum_of_exponentials(x.data(), type, n, top) ==
                           truth.sum_of_exponentials(x.data(), type, n, top);
        for (float bound : {-1.0f, 0.0f, top, -INFINITY})
          same = same &&
                 tested.count_above(x.data(), type, n, bound) == truth.count_above(x.data(), type, n, bound);
        for (float bound : {0.011f, 0.3f, 1.0f}) {
          std::vector<Candidate> candidates[2];
          for (int i = 0; i < 2; ++i) {
            candidates[i].resize(size_t(padded));
            candidates[i].resize(size_t(
                (i ? truth : tested)
                    .gather(weights[0].data(), largest[0].data(), blocks, bound, candidates[i].data())));
          }
          same = same && candidates[0].size() == candidates[1].size() && !candidates[0].empty();
          for (size_t i = 0; same && i < candidates[0].size(); ++i)
            same = candidates[0][i].weight == candidates[1][i].weight &&
                   candidates[0][i].id == candidates[1][i].id;
        }
        report.expect(same, text("%s sample type %d n %ld size %g", name, int(type), long(n), double(size)));
      }
}

}  // namespace

void test_rows(const Variant& tested, const Variant& truth, Report& report) {
  test_norm(*tested.norm, *truth.norm, tested.name, report);
  test_rope(*tested.rope, *truth.rope, tested.name, report);
  test_activation(*tested.activation, *truth.activation, tested.name, report);
  test_route(*tested.moe, *truth.moe, tested.name, report);
  test_dense(*tested.dense, *truth.dense, tested.name, report);
  test_lora(*tested.lora, *truth.lora, tested.name, report);
  test_look_up(*tested.lora, *truth.lora, tested.name, report);
  test_combine(*tested.moe, *truth.moe, tested.name, report);
  test_widen(*tested.moe, *truth.moe, tested.name, report);
  test_sample(*tested.sample, *truth.sample, tested.name, report);
}

}  // namespace armllm_test
