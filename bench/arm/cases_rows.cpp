// Ops that walk over rows.  `rows` × `width` elements, but for rope (those of queries and keys) and route
// (logits).
#include "dispatch/variants.h"
#include "driver.h"
#include "linear/quant_linear.h"
#include "lora/lora.h"

namespace bench {
namespace {

using torch_shim::Call;
using torch_shim::ScalarType;
using torch_shim::Tensor;

armllm::DType kernel_type(ScalarType type) {
  return type == ScalarType::Float      ? armllm::DType::f32
         : type == ScalarType::BFloat16 ? armllm::DType::bf16
                                        : armllm::DType::f16;
}

// The quantization of activations is a kernel inside other ops.
Case quantize_case(int64_t rows, int64_t width, ScalarType type) {
  const Tensor x = values({rows, width}, type);
  const int64_t groups = width / armllm::kGroup;
  const Tensor q = torch_shim::zeros({rows, width}, ScalarType::Char);
  return {[=](const Around& around) {
            around([&] {
              for (int64_t r = 0; r < rows; ++r)
                armllm::variant().linear->quantize(
                    static_cast<char*>(x.data_ptr()) + r * width * 2 * (type == ScalarType::Float ? 2 : 1),
                    kernel_type(type), width, groups, static_cast<int8_t*>(q.data_ptr()) + r * width, 8,
                    nullptr);
            });
          },
          0, double(rows * width)};
}

// One vocabulary a row; temperature 0 is greedy.
Case sample_case(int64_t rows, int64_t width, const Options& options) {
  const auto constant = [&](const std::string& key, double fallback) {
    const double value = std::stod(options.word(key, std::to_string(fallback)));
    const Tensor all = torch_shim::zeros({rows}, ScalarType::Float);
    for (int64_t r = 0; r < rows; ++r) static_cast<float*>(all.data_ptr())[r] = float(value);
    return all;
  };
  const auto integer = [&](int64_t value) {
    return integers({rows}, [=](int64_t) { return value; }, ScalarType::Long);
  };
  Call call("sample");
  call.with("logits", values({rows, width}, options.type("dtype", "bf16")));
  call.with("temperature", constant("temperature", 1)).with("top_p", constant("top_p", 1));
  call.with("min_p", constant("min_p", 0)).with("top_k", integer(options.number("top_k", 0)));
  call.with("seeds", integer(1)).with("steps", integer(2));
  return case_of(call, 0, double(rows * width));
}

// `m` rows with `adapters` adapters in turn.  Elements: those of the factors, once for each row.
Case lora_case(const Options& options) {
  const int64_t m = options.number("m", 8), n = options.number("n", 2048), k = options.number("k", 2048);
  const int64_t rank = options.number("rank", 16), slots = options.number("adapters", 1);
  const ScalarType type = options.type("dtype", "bf16");
  Call call("lora_linear");
  call.with("base", values({m, n}, type)).with("x", values({m, k}, type));
  call.with("a", values({slots, rank, k}, type));
  call.with("b", values({slots, armllm::ceil_div(n, armllm::kLoraBlock), rank, armllm::kLoraBlock}, type));
  call.with("ranks", integers({slots}, [=](int64_t) { return rank; }));
  call.with("adapters", integers({m}, [=](int64_t row) { return row % slots; }));
  return case_of(call, 0, double(m * rank * (n + k)));
}

// Elements: weights, once for each candidate.
Case search_case(int64_t rows, int64_t width) {
  constexpr int64_t kGroup = 32, kCandidates = 12;
  const int64_t groups = width / kGroup;
  Call call("search_steps");
  call.with("values", values({rows, groups, kGroup}, ScalarType::Float));
  for (const char* name : {"steps", "zeros"})
    call.with(name, values({kCandidates, rows, groups}, ScalarType::Float));
  call.with("factors", values({groups, kGroup}, ScalarType::Float), true);
  call.with("lowest", int64_t(0)).with("highest", int64_t(15));
  return case_of(call, 0, double(rows * width * kCandidates));
}

}  // namespace

Case row_case(const std::string& op, const Options& options) {
  const int64_t rows = options.number("rows", 16), width = options.number("width", 4096);
  if (op == "search_steps") return search_case(rows, width);
  const ScalarType type = options.type("dtype", "bf16");
  const double elements = double(rows * width);
  if (op == "quantize") return quantize_case(rows, width, type);
  Call call(op);
  if (op == "rms_norm" || op == "add_rms_norm" || op == "layer_norm") {
    call.with("x", values({rows, width}, type)).with("eps", 1e-6);
    call.with("weight", values({width}, type), op == "layer_norm");
    if (op == "layer_norm") call.with("bias", values({width}, type), true);
    if (op == "add_rms_norm") call.with("residual", values({rows, width}, type));
    return case_of(call, 0, elements);
  }
  if (op == "rope_") {
    const int64_t q_heads = options.number("q_heads", 32), kv_heads = options.number("kv_heads", 8);
    const int64_t size = options.number("head_size", 128);
    call.with("q", values({rows, q_heads, size}, type)).with("k", values({rows, kv_heads, size}, type));
    call.with("cos", values({rows, size / 2}, ScalarType::Float));
    call.with("sin", values({rows, size / 2}, ScalarType::Float));
    call.with("interleaved", options.number("interleaved", 0) != 0);
    return case_of(call, 0, double(rows * (q_heads + kv_heads) * size));
  }
  if (op == "gated_act") {
    call.with("gate", values({rows, width}, type)).with("up", values({rows, width}, type));
    call.with("activation", options.word("activation", "silu"));
    return case_of(call, 0, elements);
  }
  if (op == "moe_route") {
    call.with("logits", values({rows, width}, type)).with("top_k", options.number("top_k", 8));
    call.with("scoring", options.word("scoring", "softmax")).with("renormalize", true);
    return case_of(call, 0, elements);
  }
  if (op == "sample") return sample_case(rows, width, options);
  if (op == "lora_linear") return lora_case(options);
  throw std::runtime_error("no case for op " + op);
}

}  // namespace bench
