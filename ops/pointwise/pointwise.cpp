// Elementwise programs of a plan.  Without a plan, torch's own operators compute them.
#include "pointwise/pointwise.h"

#include <algorithm>

#include "dispatch/variants.h"

namespace armllm {
namespace {

constexpr int64_t kTileValues = 4096;  // results of a tile
constexpr int64_t kMatricesAtOnce = 16;

int64_t tokens_per_tile(const PointwiseArgs& args) {
  const int64_t values = args.heads * args.width;
  return values >= kTileValues ? 1 : kTileValues / values;
}
int64_t heads_per_tile(const PointwiseArgs& args) {
  return args.width >= kTileValues ? 1 : kTileValues / args.width;
}
int64_t head_tiles(const PointwiseArgs& args) { return ceil_div(args.heads, heads_per_tile(args)); }

// Heads of this many adjacent columns run on their own; shorter ones, and columns that lie apart, are packed
// into blocks of several heads.
constexpr int64_t kOwnColumns = 32;

// Heads of all tokens are numbered token by token.
struct Heads {
  int64_t first, count;
};

struct Strides {
  int64_t token, head, column;
};
Strides strides_of(const PointwiseOperand& x) { return {x.token_stride, x.head_stride, x.column_stride}; }

// True if an operand's columns lie apart.
bool lie_apart(const PointwiseArgs& args) {
  const auto steps = [](int64_t stride) { return stride > 1; };
  bool apart = steps(args.out_column_stride);
  for (const PointwiseOperand& x : args.operands) apart = apart || steps(x.column_stride);
  return args.width > 1 && apart;
}

void run_head(const PointwiseArgs& args, int64_t index) {
  const int64_t token = index / args.heads, head = index % args.heads;
  PointwiseBlock block;
  block.args = &args;
  for (size_t i = 0; i < args.operands.size(); ++i) {
    const PointwiseOperand& x = args.operands[i];
    block.operands[i] = x.data + (token * x.token_stride + head * x.head_stride) * x.element_size();
    block.repeated[i] = x.column_stride == 0;
  }
  block.out = args.out + (token * args.out_stride + head * args.out_head_stride) * size_of(args.out_type);
  block.columns = args.width;
  variant().pointwise->run(block);
}

// Calls visit(element) for each element of some columns of heads, in order.
template <typename Visit>
void for_elements(const PointwiseArgs& args, Strides strides, Heads heads, int64_t column, int64_t columns,
                  Visit visit) {
  int64_t token = heads.first / args.heads, head = heads.first % args.heads;
  for (int64_t i = 0; i < heads.count; ++i) {
    int64_t element = token * strides.token + head * strides.head + column * strides.column;
    for (int64_t c = 0; c < columns; ++c, element += strides.column) visit(element);
    if (++head == args.heads) head = 0, ++token;
  }
}

template <typename T>
void pack(const PointwiseArgs& args, const PointwiseOperand& x, Heads heads, int64_t column, int64_t columns,
          char* to) {
  const T* from = reinterpret_cast<const T*>(x.data);
  T* next = reinterpret_cast<T*>(to);
  for_elements(args, strides_of(x), heads, column, columns, [&](int64_t i) { *next++ = from[i]; });
}

template <typename T>
void unpack(const PointwiseArgs& args, Heads heads, int64_t column, int64_t columns, const char* from) {
  T* to = reinterpret_cast<T*>(args.out);
  const T* next = reinterpret_cast<const T*>(from);
  const Strides strides = {args.out_stride, args.out_head_stride, args.out_column_stride};
  for_elements(args, strides, heads, column, columns, [&](int64_t i) { to[i] = *next++; });
}

// True if all elements of all tokens follow each other.
bool is_contiguous(const PointwiseArgs& args, Strides strides) {
  return (args.width == 1 || strides.column == 1) && (args.heads == 1 || strides.head == args.width) &&
         strides.token == args.heads * args.width;
}

// Runs some columns of several heads in one block.
void run_packed(const PointwiseArgs& args, Heads heads, int64_t column, int64_t columns) {
  alignas(64) char packed[kMostValues][kProgramBlock * sizeof(int64_t)];
  alignas(64) char result[kProgramBlock * sizeof(float)];
  PointwiseBlock block;
  block.args = &args;
  block.columns = heads.count * columns;
  const int64_t begin = heads.first * args.width + column;  // of operands that need no packing
  for (size_t i = 0; i < args.operands.size(); ++i) {
    const PointwiseOperand& x = args.operands[i];
    const bool one_head = args.heads == 1 || x.head_stride == 0, one_token = x.token_stride == 0;
    block.repeated[i] = one_head && one_token && (args.width == 1 || x.column_stride == 0);
    block.operands[i] = packed[i];
    if (block.repeated[i])
      block.operands[i] = x.data;
    else if (is_contiguous(args, strides_of(x)))
      block.operands[i] = x.data + begin * x.element_size();
    else if (x.element_size() == sizeof(int64_t))
      pack<int64_t>(args, x, heads, column, columns, packed[i]);
    else if (x.element_size() == sizeof(uint32_t))
      pack<uint32_t>(args, x, heads, column, columns, packed[i]);
    else
      pack<uint16_t>(args, x, heads, column, columns, packed[i]);
  }
  const Strides out = {args.out_stride, args.out_head_stride, args.out_column_stride};
  const bool in_place = is_contiguous(args, out);
  block.out = in_place ? args.out + begin * size_of(args.out_type) : result;
  variant().pointwise->run(block);
  if (in_place) return;
  if (size_of(args.out_type) == sizeof(uint32_t))
    unpack<uint32_t>(args, heads, column, columns, result);
  else
    unpack<uint16_t>(args, heads, column, columns, result);
}

}  // namespace

int64_t Pointwise::tiles(int) const {
  if (args.heads == 0 || args.width == 0) return 0;
  return ceil_div(args.tokens, tokens_per_tile(args)) * head_tiles(args);
}

void Pointwise::tile(int, int64_t index) {
  const int64_t first = index / head_tiles(args) * tokens_per_tile(args),
                first_head = index % head_tiles(args) * heads_per_tile(args);
  const int64_t tokens = std::min(tokens_per_tile(args), args.tokens - first),
                count = std::min(heads_per_tile(args), args.heads - first_head);
  const Heads heads = {first * args.heads + first_head, tokens == 1 ? count : tokens * args.heads};
  if (args.width >= kOwnColumns && !lie_apart(args)) {
    for (int64_t i = 0; i < heads.count; ++i) run_head(args, heads.first + i);
    return;
  }
  const int64_t columns = std::min(args.width, kProgramBlock), at_once = kProgramBlock / columns;
  for (int64_t i = 0; i < heads.count; i += at_once)
    for (int64_t column = 0; column < args.width; column += columns)
      run_packed(args, {heads.first + i, std::min(at_once, heads.count - i)}, column,
                 std::min(columns, args.width - column));
}

int64_t Sinkhorn::tiles(int) const { return ceil_div(args.tokens, kMatricesAtOnce); }

void Sinkhorn::tile(int, int64_t index) {
  const int64_t first = index * kMatricesAtOnce;
  variant().pointwise->sinkhorn(args, first, std::min(kMatricesAtOnce, args.tokens - first));
}

}  // namespace armllm
