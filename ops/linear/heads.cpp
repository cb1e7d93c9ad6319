#include "linear/heads.h"

#include "dispatch/variants.h"
#include "linear/tile_grid.h"

namespace armllm {
namespace {

// All heads together keep the threads busy, so tiles may be larger than in a single layer: small ones only
// add claiming costs.
TileGrid grid_of(const QuantHeadsArgs& a) {
  constexpr int64_t kTilesPerThread = 4;
  const LinearKernels& kernels = *variant().linear;
  const int64_t panels = ceil_div(a.out_features, kPanel);
  TileGrid grid = TileGrid::plan(kernels, panels, a.panel_stride, a.tokens, 1);
  if (a.tokens <= kernels.gemv_tokens)
    grid.panel_step = std::clamp<int64_t>(panels * a.heads / (team_size() * kTilesPerThread), 1, panels);
  return grid;
}

Activations activations_of(const QuantHeadsArgs& a, int64_t head) {
  char* scratch = static_cast<char*>(a.scratch) + head * activation_bytes(a.tokens, a.in_features);
  return activations_in(scratch, a.tokens, a.in_features, Scheme::i8, *variant().linear);
}

int64_t tiles_of_head(const QuantHeadsArgs& a, int phase) {
  return phase == 0 ? ceil_div(a.tokens, quantize_step(activations_of(a, 0), a.tokens)) : grid_of(a).count();
}

}  // namespace

int64_t QuantHeads::scratch_bytes(const QuantHeadsArgs& args) {
  return args.heads * activation_bytes(args.tokens, args.in_features);
}

int64_t QuantHeads::tiles(int phase) const { return args.heads * tiles_of_head(args, phase); }

void QuantHeads::tile(int phase, int64_t index) {
  const QuantHeadsArgs& a = args;
  const LinearKernels& kernels = *variant().linear;
  const int64_t tiles = tiles_of_head(a, phase), head = index / tiles;
  const Activations x = activations_of(a, head);
  if (phase == 0) {
    const Rows rows = a.head_of_x(head);
    return quantize_tile(
        x, a.tokens, index % tiles, [&](int64_t t, int8_t* q, int64_t stride, int32_t* sums) {
          return kernels.quantize(rows.row(t), rows.type, a.in_features, x.groups, q, stride, sums);
        });
  }
  const Rows out = a.head_of_out(head);
  multiply_tile(kernels, grid_of(a), Scheme::i8, a.weight + head * a.head_stride, a.panel_stride, x,
                index % tiles, [&](int64_t token, int64_t panel, int64_t panels, const float* acc) {
                  const int64_t first = panel * kPanel, n = std::min(panels * kPanel, a.out_features - first);
                  kernels.epilogue(acc, n, x.scales[token], nullptr, DType::f32, nullptr,
                                   out.at(token, first), out.type);
                });
}

DenseLinear DenseHeads::head(int64_t index) const {
  DenseLinear one;
  one.args.x = args.head_of_x(index);
  one.args.out = args.head_of_out(index);
  one.args.weight = Rows{args.weight.row(index * args.out_features), args.weight.stride, args.weight.type};
  one.args.tokens = args.tokens;
  one.args.in_features = args.in_features;
  one.args.out_features = args.out_features;
  return one;
}

int64_t DenseHeads::tiles(int phase) const { return args.heads * head(0).tiles(phase); }

void DenseHeads::tile(int phase, int64_t index) {
  const int64_t tiles = head(0).tiles(phase);
  head(index / tiles).tile(phase, index % tiles);
}

}  // namespace armllm
