#include "embedding/embedding.h"

#include <algorithm>
#include <cstring>

#include "dispatch/variants.h"
#include "linear/quant_linear.h"
#include "linear/scheme_arg.h"
#include "runtime/tensor_args.h"
#include "runtime/thread_scratch.h"

namespace armllm {
namespace {

constexpr int64_t kRowsPerTile = 16;
constexpr int64_t kLineBytes = 64;  // 16 rows × 4 columns
constexpr int kRestSteps = 254;     // steps of the rest per step of q

// to[k] = 254 · q + rest of one row of a panel, for scheme int6 times the multiplier of the group.
void join_int8(const uint8_t* panel, int64_t row, const int8_t* rest, int64_t width, float* to) {
  const int8_t* q = reinterpret_cast<const int8_t*>(panel + panel_layout(Scheme::i8, width).values) + 4 * row;
  for (int64_t k = 0; k < width; ++k) to[k] = float(q[k / 4 * kLineBytes + k % 4] * kRestSteps + rest[k]);
}

void join_int6(const uint8_t* panel, int64_t row, const int8_t* rest, int64_t width, float* to) {
  constexpr int kBits = 6;
  const PanelLayout layout = panel_layout(Scheme::int6, width);
  const uint8_t* group = panel + layout.values;
  for (int64_t g = 0; g < layout.groups; ++g, group += group_value_bytes(Scheme::int6)) {
    const int m = plane_multiplier(panel + layout.multipliers, kBits, g, row);
    const int64_t end = std::min(kGroup, width - g * kGroup);
    for (int64_t i = 0; i < end; ++i) {
      const int64_t k = g * kGroup + i;
      to[k] = float(m * ((wide_bits(group, kBits, row, i) - 32) * kRestSteps + rest[k]));
    }
  }
}

}  // namespace

int64_t SplitEmbedding::tiles(int) const { return ceil_div(args.tokens, kRowsPerTile); }

void SplitEmbedding::tile(int, int64_t index) {
  const SplitEmbeddingArgs& a = args;
  const auto join = a.scheme == Scheme::int6 ? join_int6 : join_int8;
  float* whole = reinterpret_cast<float*>(thread_memory(a.width * 4));
  const int64_t end = std::min(a.tokens, (index + 1) * kRowsPerTile);
  for (int64_t t = index * kRowsPerTile; t < end; ++t) {
    const int64_t id = a.ids[t];
    if (id < 0 || id >= a.vocab_size) {
      std::memset(a.out.row(t), 0, a.width * size_of(a.out.type));
      continue;
    }
    const uint8_t* panel = a.weight + id / kPanel * a.panel_stride;
    join(panel, id % kPanel, a.rest + id * a.width, a.width, whole);
    if (a.rotated) variant().linear->rotate(whole, DType::f32, a.width, whole);
    float scale;
    std::memcpy(&scale, panel + 4 * (id % kPanel), sizeof(scale));
    variant().linear->epilogue(whole, a.width, scale / kRestSteps, nullptr, DType::f32, nullptr, a.out.row(t),
                               a.out.type);
  }
}

namespace {

ScalarType type_named(const std::string& name) {
  if (name == "float32") return ScalarType::Float;
  if (name == "bfloat16") return ScalarType::BFloat16;
  if (name == "float16") return ScalarType::Half;
  STD_TORCH_CHECK(false, "split_embedding: unknown dtype '", name,
                  "'; choose from: float32, bfloat16, float16");
}

Tensor split_embedding(Tensor ids, Tensor weight, Tensor rest, std::string dtype, std::string scheme,
                       bool rotated) {
  const Scheme kind = scheme_of(scheme);
  STD_TORCH_CHECK(kind == Scheme::i8 || kind == Scheme::int6,
                  "split_embedding: scheme must be i8 or int6, not ", scheme);
  STD_TORCH_CHECK(type_of(ids) == ScalarType::Long, "split_embedding: ids must be int64");
  STD_TORCH_CHECK(rest.dim() == 2 && type_of(rest) == ScalarType::Char && rest.is_contiguous(),
                  "split_embedding: rest must be contiguous int8 of shape (vocabulary, width)");
  const int64_t vocab_size = rest.size(0), width = rest.size(1);
  STD_TORCH_CHECK(!rotated || width % kGroup == 0, "split_embedding: rotated rows need whole groups of ",
                  kGroup, " elements; the width is ", width);
  const int64_t bytes = panel_layout(kind, width).bytes;
  STD_TORCH_CHECK(weight.dim() == 2 && type_of(weight) == ScalarType::Byte &&
                      weight.size(0) == ceil_div(vocab_size, kPanel) && weight.size(1) == bytes &&
                      weight.stride(1) == 1,
                  "split_embedding: weight must be uint8 of shape (", ceil_div(vocab_size, kPanel), ", ",
                  bytes, ") for a vocabulary of ", vocab_size, " and a width of ", width);
  const Tensor flat = as_contiguous(ids);
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(width);
  Tensor out = new_tensor(rest, {sizes.data(), sizes.size()}, type_named(dtype));
  SplitEmbedding task;
  SplitEmbeddingArgs& a = task.args;
  a.weight = static_cast<const uint8_t*>(weight.data_ptr());
  a.scheme = kind;
  a.panel_stride = panel_stride_of(weight, 0, bytes, "split_embedding: weight");
  a.rest = static_cast<const int8_t*>(rest.data_ptr());
  a.ids = static_cast<const int64_t*>(flat.data_ptr());
  a.out = Rows{out.data_ptr(), width, dtype_of(out, "out")};
  a.tokens = flat.numel();
  a.width = width;
  a.rotated = rotated;
  a.vocab_size = vocab_size;
  for (int64_t t = 0; t < a.tokens; ++t)
    STD_TORCH_CHECK(a.ids[t] >= 0 && a.ids[t] < vocab_size, "split_embedding: id ", a.ids[t],
                    " is not in 0 … ", vocab_size - 1);
  run(task);
  return out;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) { m.impl("split_embedding", TORCH_BOX(&armllm::split_embedding)); }
