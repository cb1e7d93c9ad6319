// Elementwise programs of a plan.  Without a plan, torch's own operators compute them.
#include "pointwise/pointwise.h"

#include "dispatch/variants.h"

namespace armllm {
namespace {

constexpr int64_t kTileValues = 4096;  // results of a tile

int64_t tokens_per_tile(const PointwiseArgs& args) {
  const int64_t values = args.heads * args.width;
  return values >= kTileValues ? 1 : kTileValues / values;
}
int64_t heads_per_tile(const PointwiseArgs& args) {
  return args.width >= kTileValues ? 1 : kTileValues / args.width;
}
int64_t head_tiles(const PointwiseArgs& args) { return ceil_div(args.heads, heads_per_tile(args)); }

void run_head(const PointwiseArgs& args, int64_t token, int64_t head) {
  PointwiseBlock block;
  block.args = &args;
  const int64_t count = static_cast<int64_t>(args.operands.size());
  for (int64_t column = 0; column < args.width; column += kProgramBlock) {
    for (int64_t i = 0; i < count; ++i) {
      const PointwiseOperand& x = args.operands[i];
      const int64_t element = token * x.token_stride + head * x.head_stride + (x.by_column ? column : 0);
      block.operands[i] = x.data + element * x.element_size();
    }
    block.out =
        args.out + (token * args.out_stride + head * args.out_head_stride + column) * size_of(args.out_type);
    block.columns = args.width - column < kProgramBlock ? args.width - column : kProgramBlock;
    variant().pointwise->run(block);
  }
}

}  // namespace

int64_t Pointwise::tiles(int) const {
  if (args.heads == 0 || args.width == 0) return 0;
  return ceil_div(args.tokens, tokens_per_tile(args)) * head_tiles(args);
}

void Pointwise::tile(int, int64_t index) {
  const int64_t first = index / head_tiles(args) * tokens_per_tile(args),
                first_head = index % head_tiles(args) * heads_per_tile(args);
  for (int64_t token = first; token < first + tokens_per_tile(args) && token < args.tokens; ++token)
    for (int64_t head = first_head; head < first_head + heads_per_tile(args) && head < args.heads; ++head)
      run_head(args, token, head);
}

}  // namespace armllm
