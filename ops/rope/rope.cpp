// rope_table, rope_
#include "rope/rope.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatch/variants.h"
#include "runtime/tensor_args.h"

namespace armllm {
namespace {

constexpr int64_t kTileValues = 8192;
constexpr int64_t kTableTokens = 16;

int64_t tokens_per_tile(const RopeArgs& args) {
  return ceil_div(kTileValues, (args.q_heads + args.k_heads) * args.head_size + 1);
}

struct Heads {
  int64_t tokens, heads, size;
};

// Throws if elements of a tensor that is written share memory.
void check_no_overlap(const Tensor& t, const char* name) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t last = 0;  // distance of the farthest element of the dimensions so far
  for (const auto& [stride, size] : dims) {
    STD_TORCH_CHECK(stride > last, name,
                    " is written, but its elements overlap in memory, as in an expanded tensor; pass ", name,
                    ".contiguous()");
    last += (size - 1) * stride;
  }
}

Heads heads_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() >= 3, name, " must have shape (..., tokens, heads, head size); it has ", t.dim(),
                  " dimensions");
  int64_t tokens = 1;
  for (int64_t d = 0; d < t.dim() - 2; ++d) tokens *= t.size(d);
  return {tokens, t.size(t.dim() - 2), last_size(t)};
}

struct HeadRows {
  Rows rows;
  int64_t head_stride;
};

// Rows of tokens and the stride of their heads; nullopt if the tokens are not evenly strided.
std::optional<HeadRows> token_rows(const Tensor& t, const Heads& heads, const char* name) {
  HeadRows found{Rows{t.data_ptr(), heads.heads * heads.size, dtype_of(t, name)}, heads.size};
  if (t.numel() == 0) return found;
  const int64_t dims = t.dim();
  if (last_size(t) > 1 && t.stride(dims - 1) != 1) return std::nullopt;
  if (heads.heads > 1) found.head_stride = t.stride(dims - 2);
  int64_t step = found.rows.stride, tokens = 1;
  for (int64_t d = dims - 3; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (tokens == 1) step = t.stride(d);
    if (t.stride(d) != step * tokens) return std::nullopt;
    tokens *= t.size(d);
  }
  found.rows.stride = step;
  return found;
}

RopePairs pairs_of(bool interleaved, bool unzip) {
  STD_TORCH_CHECK(interleaved || !unzip, "unzip needs interleaved=True");
  return unzip ? RopePairs::unzipped : interleaved ? RopePairs::neighbors : RopePairs::halves;
}

Tensor table_of(const Tensor& t, int64_t tokens, const char* name) {
  STD_TORCH_CHECK(type_of(t) == ScalarType::Float, name, " must be float32");
  STD_TORCH_CHECK(t.dim() >= 2, name, " must have shape (..., tokens, rotary / 2); it has ", t.dim(),
                  " dimensions");
  STD_TORCH_CHECK(t.numel() == tokens * last_size(t), name,
                  " must have one row of rotary / 2 values per token; there are ", tokens,
                  " tokens, but the number of rows is ", row_count(t));
  return as_contiguous(t);
}

void rope_(Tensor q, Tensor k, Tensor given_cos, Tensor given_sin, bool interleaved, bool unzip) {
  const Heads q_heads = heads_of(q, "q"), k_heads = heads_of(k, "k");
  STD_TORCH_CHECK(
      q_heads.size == k_heads.size && q_heads.tokens == k_heads.tokens && type_of(q) == type_of(k),
      "q and k must agree in tokens, head size and dtype; q has ", q_heads.tokens, " tokens of head size ",
      q_heads.size, ", k has ", k_heads.tokens, " of ", k_heads.size);
  const Tensor cos = table_of(given_cos, q_heads.tokens, "cos"),
               sin = table_of(given_sin, q_heads.tokens, "sin");
  const int64_t half = last_size(cos);
  STD_TORCH_CHECK(last_size(sin) == half, "cos and sin must have the same shape");
  STD_TORCH_CHECK(2 * half <= q_heads.size, "cos must have at most head size / 2 columns: it has angles for ",
                  2 * half, " dimensions, but the head size is ", q_heads.size);
  const RopePairs pairs = pairs_of(interleaved, unzip);
  STD_TORCH_CHECK(!unzip || 2 * half <= kMostUnzipped, "unzip can rotate at most ", kMostUnzipped,
                  " dimensions of a head, not ", 2 * half);
  if (q.numel() > 0) check_no_overlap(q, "q");
  if (k.numel() > 0) check_no_overlap(k, "k");
  const std::optional<HeadRows> q_rows = token_rows(q, q_heads, "q"), k_rows = token_rows(k, k_heads, "k");
  const Tensor q_copy = q_rows ? q : as_contiguous(q), k_copy = k_rows ? k : as_contiguous(k);
  const HeadRows queries = q_rows ? *q_rows : *token_rows(q_copy, q_heads, "q"),
                 keys = k_rows ? *k_rows : *token_rows(k_copy, k_heads, "k");
  Rope rope;
  rope.args.q = queries.rows;
  rope.args.k = keys.rows;
  rope.args.q_head_stride = queries.head_stride;
  rope.args.k_head_stride = keys.head_stride;
  rope.args.cos = static_cast<const float*>(cos.data_ptr());
  rope.args.sin = static_cast<const float*>(sin.data_ptr());
  rope.args.tokens = q_heads.tokens;
  rope.args.q_heads = q_heads.heads;
  rope.args.k_heads = k_heads.heads;
  rope.args.head_size = q_heads.size;
  rope.args.rotary = 2 * half;
  rope.args.pairs = pairs;
  run(rope);
  if (!q_rows) torch::stable::copy_(q, q_copy);
  if (!k_rows) torch::stable::copy_(k, k_copy);
}

Tensor axes_of(const Tensor& t, int64_t half, int64_t numbers) {
  STD_TORCH_CHECK(type_of(t) == ScalarType::Long && t.dim() == 1 && t.size(0) == half,
                  "axes must be int64 of shape (", half, "), as inv_freq, not of shape ", shape_of(t));
  const Tensor axes = as_contiguous(t);
  const auto* axis = static_cast<const int64_t*>(axes.data_ptr());
  for (int64_t i = 0; i < half; ++i)
    STD_TORCH_CHECK(axis[i] >= 0 && axis[i] < numbers, "axes holds ", axis[i], ", but positions has ",
                    numbers, " numbers for each token");
  return axes;
}

std::tuple<Tensor, Tensor> rope_table(Tensor given_positions, Tensor given_inv_freq, double scaling,
                                      int64_t offset, std::optional<Tensor> given_axes) {
  STD_TORCH_CHECK(type_of(given_positions) == ScalarType::Long, "positions must be int64");
  STD_TORCH_CHECK(type_of(given_inv_freq) == ScalarType::Float && given_inv_freq.dim() == 1,
                  "inv_freq must be float32 with one dimension");
  const Tensor positions = as_contiguous(given_positions);
  const Tensor inv_freq = as_contiguous(given_inv_freq);
  STD_TORCH_CHECK(!given_axes || (positions.dim() > 0 && last_size(positions) > 0),
                  "positions must have shape (..., tokens, numbers) where axes is given, not ",
                  shape_of(positions));
  const int64_t numbers = given_axes ? last_size(positions) : 1;
  const int64_t tokens = positions.numel() / numbers, half = inv_freq.numel();
  const Tensor axes = given_axes ? axes_of(*given_axes, half, numbers) : Tensor();
  Tensor cos = new_tensor(inv_freq, {tokens, half});
  Tensor sin = new_tensor(inv_freq, {tokens, half});
  RopeTable table;
  table.args.positions = static_cast<const int64_t*>(positions.data_ptr());
  table.args.inv_freq = static_cast<const float*>(inv_freq.data_ptr());
  table.args.cos = static_cast<float*>(cos.data_ptr());
  table.args.sin = static_cast<float*>(sin.data_ptr());
  table.args.tokens = tokens;
  table.args.half = half;
  table.args.numbers = numbers;
  if (given_axes) table.args.axes = static_cast<const int64_t*>(axes.data_ptr());
  table.args.scaling = static_cast<float>(scaling);
  table.args.offset = offset;
  run(table);
  return {cos, sin};
}

}  // namespace

int64_t Rope::tiles(int) const { return ceil_div(args.tokens, tokens_per_tile(args)); }

void Rope::tile(int, int64_t index) {
  const RopeKernels& kernels = *variant().rope;
  const int64_t first = index * tokens_per_tile(args), last = first + tokens_per_tile(args);
  for (int64_t token = first; token < last && token < args.tokens; ++token) {
    const float* cos = args.cos + token * (args.rotary / 2);
    const float* sin = args.sin + token * (args.rotary / 2);
    kernels.rotate(args.q.row(token), args.q.type, args.q_heads, args.q_head_stride, args.rotary, cos, sin,
                   args.pairs);
    if (args.k)
      kernels.rotate(args.k.row(token), args.k.type, args.k_heads, args.k_head_stride, args.rotary, cos, sin,
                     args.pairs);
  }
}

int64_t RopeTable::tiles(int) const { return ceil_div(args.tokens, kTableTokens); }

// The angle is a float32 product, as in the models.  Its cosine and sine are computed in double and rounded
// once, because the float32 functions differ between C libraries.
void RopeTable::tile(int, int64_t index) {
  const int64_t first = index * kTableTokens, last = first + kTableTokens;
  for (int64_t token = first; token < last && token < args.tokens; ++token) {
    const int64_t* positions = args.positions + token * args.numbers;
    for (int64_t i = 0; i < args.half; ++i) {
      const int64_t axis = args.axes ? args.axes[i] : 0;
      const float position = static_cast<float>(positions[axis] + args.offset);
      const double angle = position * args.inv_freq[i];
      args.cos[token * args.half + i] = static_cast<float>(std::cos(angle)) * args.scaling;
      args.sin[token * args.half + i] = static_cast<float>(std::sin(angle)) * args.scaling;
    }
  }
}

}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CPU, m) {
  m.impl("rope_table", TORCH_BOX(&armllm::rope_table));
  m.impl("rope_", TORCH_BOX(&armllm::rope_));
}
