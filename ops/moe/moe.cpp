#include "moe/moe.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch/variants.h"
#include "linear/gated_epilogue.h"
#include "moe/expert_store.h"
#include "moe/group_by_expert.h"
#include "runtime/thread_scratch.h"

namespace armllm {
namespace {

// Up to this many tokens are grouped and quantized in one tile, because a barrier would cost more.
constexpr int64_t kOneTileTokens = 2;
constexpr int64_t kCombineColumns = 512;  // columns per tile of the weighted sum with few tokens
constexpr int64_t kCombineTokens = 16;    // most tokens per tile of the weighted sum

enum Phase : int { kSort, kQuantize, kGateUp, kRequantize, kDown };

// Rows of the experts that this process computes.
struct OwnRows {
  int64_t first, end;
  OwnRows(const MoeArgs& a, const MoeMemory& m) {
    const int64_t part = a.rank_experts.empty() ? 0 : a.communicator->rank();
    first = m.rank_row[part], end = m.rank_row[part + 1];
  }
  int64_t count() const { return end - first; }
};

// Address of row m of an expert.  The row's chunks of 8 bytes are 8 · x.block bytes from each other.
int8_t* row_values(const Activations& x, int64_t m) {
  return x.values + m / x.block * x.block * x.groups * kGroup + m % x.block * 8;
}

void put_row(const Activations& x, int64_t m, const int8_t* values) {
  int8_t* to = row_values(x, m);
  if (x.block == 1) {
    std::memcpy(to, values, x.groups * kGroup);
  } else {
    const int64_t stride = x.block * 8;
    const int8_t* const end = values + x.groups * kGroup;
    for (; values < end; values += 16, to += 2 * stride) {
      std::memcpy(to, values, 8);
      std::memcpy(to + stride, values + 8, 8);
    }
  }
}

void zero_row(const Activations& x, int64_t m) {
  int8_t* to = row_values(x, m);
  for (int64_t c = 0; c < x.groups * 4; ++c) std::memset(to + c * x.block * 8, 0, 8);
}

// Quantizes a token once and copies it to the rows of all its experts.
void place_token(const MoeArgs& a, const MoeMemory& m, int64_t token) {
  const LinearKernels& kernels = *variant().linear;
  const int64_t groups = m.hidden.groups, quantized_bytes = groups * (kGroup + 4);
  char* memory = thread_memory(quantized_bytes + (a.rotated ? a.hidden * int64_t(sizeof(float)) : 0));
  int8_t* values = reinterpret_cast<int8_t*>(memory);
  int32_t* group_sums = reinterpret_cast<int32_t*>(values + groups * kGroup);
  const void* row_of_token = a.x.row(token);
  if (a.rotated) {
    float* rotated = reinterpret_cast<float*>(memory + quantized_bytes);
    kernels.rotate(row_of_token, a.x.type, a.hidden, rotated);
    row_of_token = rotated;
  }
  const float scale = kernels.quantize(row_of_token, a.rotated ? DType::f32 : a.x.type, a.hidden, groups,
                                       values, 8, group_sums);
  const OwnRows own(a, m);
  for (int64_t j = 0; j < a.top_k; ++j) {
    const int64_t row = m.pair_row[token * a.top_k + j];
    if (row < own.first || row >= own.end) continue;
    const ExpertRows& e = m.expert[m.row_expert[row]];
    const Activations x = m.hidden.of(e);
    put_row(x, row - e.first_row, values);
    x.scales[row - e.first_row] = a.weigh_input ? scale * a.weights[token * a.top_k + j] : scale;
    if (x.group_sums != nullptr)
      std::memcpy(x.group_sums + (row - e.first_row) * groups, group_sums, groups * 4);
  }
}

void zero_padding(const MoeArgs& a, const MoeMemory& m, const ExpertRows& e) {
  if (!expert_share(a).has(e.expert)) return;
  const Activations x = m.hidden.of(e);
  for (int64_t row = e.rows; row < round_up(e.rows, e.block); ++row) zero_row(x, row);
}

void requantize_row(const MoeArgs& a, const MoeMemory& m, int64_t row) {
  const ExpertRows& e = m.expert[m.row_expert[row]];
  const Activations x = m.intermediate.of(e);
  const int64_t i = row - e.first_row;
  if (i >= e.rows) return zero_row(x, i);
  int32_t* group_sums = x.group_sums == nullptr ? nullptr : x.group_sums + i * x.groups;
  const LinearKernels& kernels = *variant().linear;
  const float* gated = m.gated + row * m.gated_stride;
  if (a.rotated) {  // not in place: adapters read the row as it is
    float* rotated = reinterpret_cast<float*>(thread_memory(a.intermediate * int64_t(sizeof(float))));
    kernels.rotate(gated, DType::f32, a.intermediate, rotated);
    gated = rotated;
  }
  x.scales[i] = kernels.quantize(gated, DType::f32, a.intermediate, x.groups, row_values(x, i), x.block * 8,
                                 group_sums);
}

const ExpertRows& expert_of_tile(const MoeMemory& m, int64_t ExpertRows::* first, int64_t index) {
  const ExpertRows* begin = m.expert;
  const auto before = [&](int64_t tile, const ExpertRows& e) { return tile < e.*first; };
  return *(std::upper_bound(begin, begin + m.grouping->experts, index, before) - 1);
}

// Finishes a row without a gate: each panel of up is duplicated and also used as the gate.
void finish_ungated(const GatedEpilogue& e, const float* acc, int64_t panel, int64_t panels, float x_scale,
                    int64_t row) {
  constexpr int64_t kMost = 16;
  float both[kMost * 2 * kPanel];
  for (int64_t first = 0; first < panels; first += kMost) {
    const int64_t count = std::min(kMost, panels - first);
    for (int64_t p = 0; p < 2 * count; ++p)
      std::memcpy(both + p * kPanel, acc + (first + p / 2) * kPanel, kPanel * sizeof(float));
    apply_gated_epilogue(e, both, 2 * (panel + first), 2 * count, x_scale, row);
  }
}

// Slots of the rows of an expert; null if no row of the step has an adapter.
const int32_t* slots_of(const MoeMemory& m, const ExpertRows& e) {
  return m.row_slot == nullptr || m.grouping->adapted == 0 ? nullptr : m.row_slot + e.first_row;
}

int64_t sum_tiles(const MoeArgs& a, const MoeMemory& m, int64_t AdaptedRows::* tiles) {
  return a.lora.adapters == nullptr || m.grouping->adapted == 0 ? 0
                                                                : m.adapted[m.grouping->adapted - 1].*tiles;
}

// x · Aᵀ of a group of rows, for some ranks.
void sum_tile(const MoeArgs& a, const MoeMemory& m, bool inner, int64_t index) {
  const auto tiles = inner ? &AdaptedRows::inner_tiles : &AdaptedRows::outer_tiles;
  const AdaptedRows* end = m.adapted + m.grouping->adapted;
  const AdaptedRows* rows =
      std::upper_bound(static_cast<const AdaptedRows*>(m.adapted), end, index,
                       [&](int64_t tile, const AdaptedRows& r) { return tile < r.*tiles; });
  if (rows != m.adapted) index -= rows[-1].*tiles;
  const ExpertFactors& factors = inner ? a.lora.inner : a.lora.outer;
  LoraArgs layer = expert_factors(a.lora, factors, rows->slot, rows->expert);
  layer.x = inner ? a.x : Rows{m.gated, m.gated_stride, DType::f32};
  layer.scratch = inner ? m.inner_sums : m.outer_sums;
  const int32_t* of_sums = m.adapted_row + rows->first;
  const int32_t* of_x = inner ? m.adapted_token + rows->first : of_sums;
  const int64_t first = index * kLoraRanks, left = factors.ranks[rows->slot] - first;
  variant().lora->shrink(layer, {of_x, rows->count, 0, of_sums}, first, std::min(left, kLoraRanks), nullptr);
}

// Calls visit(first, n) for ranges of columns, from a panel's first on, that lie in one block of B each.
template <typename Visit>
void for_lora_blocks(int64_t first, int64_t end, Visit visit) {
  while (first < end) {
    const int64_t next = std::min(end, (first / kLoraBlock + 1) * kLoraBlock);
    visit(first, next - first);
    first = next;
  }
}

// What is added to columns of a row before its activation, or before the results of experts are summed: a
// bias and an adapter's part.  Returns the address of the first one's in `block`.
const float* added_to(const LoraArgs& layer, const float* sums, const void* bias, DType bias_type,
                      int64_t first, int64_t n, float* block) {
  float* added = block + first % kLoraBlock;
  if (bias == nullptr) {
    std::fill(added, added + n, 0.0f);
  } else {
    variant().moe->widen(bias_at(bias, bias_type, first), bias_type, n, added);
  }
  add_block(layer, sums, first, n, block);
  return added;
}

// Finishes a row of gate and up, or of up alone, that has an adapter.
void finish_adapted(const MoeArgs& a, const GatedEpilogue& e, const LoraArgs* layers, const float* sums,
                    const float* acc, int64_t panel, int64_t panels, float x_scale, int64_t row) {
  const int64_t sides = a.gated ? 2 : 1, begin = panel / sides * kPanel;
  const int64_t end = std::min(begin + panels / sides * kPanel, e.out_features);
  for_lora_blocks(begin, end, [&](int64_t first, int64_t n) {
    float blocks[2][kLoraBlock], both[2 * kLoraBlock];
    GatedPanels p;
    p.acc = acc + (first - begin) * sides;
    p.n = n;
    p.scale = x_scale;
    p.gate_bias = added_to(layers[0], sums, e.gate_bias, e.bias_type, first, n, blocks[0]);
    p.up_bias =
        a.gated ? added_to(layers[1], sums, e.up_bias, e.bias_type, first, n, blocks[1]) : p.gate_bias;
    p.bias_type = DType::f32;
    p.activation = e.activation;
    p.limit = e.limit;
    p.up_limit = e.up_limit;
    if (!a.gated) {  // each panel of up is also the gate
      for (int64_t i = 0; i < 2 * ceil_div(n, kPanel); ++i)
        std::memcpy(both + i * kPanel, p.acc + i / 2 * kPanel, kPanel * sizeof(float));
      p.acc = both;
    }
    variant().activation->gated_panels(p, e.out.at(row, first), e.out.type);
  });
}

void gate_up_tile(const MoeArgs& a, const MoeMemory& m, int64_t index) {
  const LinearKernels& kernels = *variant().linear;
  const ExpertRows& e = expert_of_tile(m, &ExpertRows::gate_up_tile, index);
  const Activations x = m.hidden.of(e);
  const RankShare inner = inner_share(a);
  const int64_t bias = e.expert * (a.gated ? 2 : 1) * a.intermediate + inner.first;
  const int64_t index_of_weight = e.expert - expert_share(a).first;
  const GatedEpilogue epilogue{
      bias_at(a.gate_up_bias, a.bias_type, bias),
      bias_at(a.gate_up_bias, a.bias_type, bias + (a.gated ? a.intermediate : 0)),
      a.bias_type,
      a.activation,
      a.limit,
      a.up_limit,
      inner.count,
      Rows{m.gated + e.first_row * m.gated_stride + inner.first, m.gated_stride, DType::f32}};
  const int32_t* slots = slots_of(m, e);
  multiply_tile(kernels, e.gate_up, a.scheme, a.gate_up + index_of_weight * a.gate_up_expert_stride,
                a.gate_up_panel_stride, x, index - e.gate_up_tile,
                [&](int64_t row, int64_t panel, int64_t panels, const float* acc) {
                  if (slots != nullptr && slots[row] >= 0 && a.lora.inner.ranks[slots[row]] > 0) {
                    const LoraArgs layers[] = {expert_factors(a.lora, a.lora.inner, slots[row], e.expert),
                                               expert_factors(a.lora, a.lora.inner, slots[row], e.expert, 1)};
                    const float* sums = m.inner_sums + (e.first_row + row) * a.lora.inner.most_rank;
                    return finish_adapted(a, epilogue, layers, sums, acc, panel, panels, x.scales[row], row);
                  }
                  (a.gated ? apply_gated_epilogue : finish_ungated)(epilogue, acc, panel, panels,
                                                                    x.scales[row], row);
                });
}

int64_t down_tiles(const MoeMemory& m, int64_t pass) {
  return pass + 1 == m.passes.count() ? m.grouping->down_rest_tiles : m.grouping->down_tiles;
}

void down_tile(const MoeArgs& a, const MoeMemory& m, int64_t pass, int64_t index) {
  const LinearKernels& kernels = *variant().linear;
  const DownPasses& passes = m.passes;
  const bool rest = pass + 1 == passes.count();
  const auto first_tile = rest ? &ExpertRows::down_rest_tile : &ExpertRows::down_tile;
  const ExpertRows& e = expert_of_tile(m, first_tile, index);
  const Activations x = m.intermediate.of(e);
  const int64_t first_panel = pass * passes.step;
  float* out = m.down[pass % 2] + e.first_row * m.down_stride;
  const RankShare outer = outer_share(a);
  const int32_t* slots = slots_of(m, e);
  multiply_tile(
      kernels, rest ? e.down_rest : e.down, a.scheme,
      a.down + (e.expert - expert_share(a).first) * a.down_expert_stride + first_panel * a.down_panel_stride,
      a.down_panel_stride, x, index - e.*first_tile,
      [&](int64_t row, int64_t panel, int64_t panels, const float* acc) {
        const int64_t column = (first_panel + panel) * kPanel,
                      n = std::min(panels * kPanel, outer.count - column);
        float* to = out + row * m.down_stride + panel * kPanel;
        if (slots != nullptr && slots[row] >= 0 && a.lora.outer.ranks[slots[row]] > 0) {
          const LoraArgs layer = expert_factors(a.lora, a.lora.outer, slots[row], e.expert);
          const float* sums = m.outer_sums + (e.first_row + row) * a.lora.outer.most_rank;
          const void* bias = bias_at(a.down_bias, a.bias_type, e.expert * a.hidden);
          return for_lora_blocks(column, column + n, [&](int64_t first, int64_t count) {
            float block[kLoraBlock];
            const float* added = added_to(layer, sums, bias, a.bias_type, first, count, block);
            kernels.epilogue(acc + (first - column), count, x.scales[row], added, DType::f32, nullptr,
                             to + (first - column), DType::f32);
          });
        }
        kernels.epilogue(acc, n, x.scales[row],
                         bias_at(a.down_bias, a.bias_type, e.expert * a.hidden + outer.first + column),
                         a.bias_type, nullptr, to, DType::f32);
      });
}

// Division of the weighted sums of one pass into tiles of tokens × columns.
struct Combine {
  int64_t first_column, columns, token_step, column_step;
  int64_t chunks, tiles;

  Combine(const MoeArgs& a, const MoeMemory& m, int64_t pass) {
    const DownPasses& passes = m.passes;
    first_column = pass * passes.step * kPanel;
    columns = std::min(passes.step * kPanel, outer_share(a).count - first_column);
    const bool few = a.tokens < 2 * m.grouping->threads;
    column_step = few ? kCombineColumns : columns;
    token_step = few ? 1 : std::clamp<int64_t>(a.tokens / (8 * m.grouping->threads), 1, kCombineTokens);
    chunks = ceil_div(columns, column_step);
    tiles = ceil_div(a.tokens, token_step) * chunks;
  }
};

bool is_identity(const MoeArgs& a, int32_t id) {
  return id >= a.experts && id < a.experts + a.identity_experts;
}

// Columns of a token as float32: its own, or converted to `memory`.
const float* floats_of(const Rows& x, int64_t token, int64_t column, int64_t n, float* memory) {
  if (x.type == DType::f32) return reinterpret_cast<const float*>(x.at(token, column));
  variant().moe->widen(x.at(token, column), x.type, n, memory);
  return memory;
}

void combine_tile(const MoeArgs& a, const MoeMemory& m, int64_t pass, int64_t index) {
  const Combine c(a, m, pass);
  const int64_t first = index % c.chunks * c.column_step, n = std::min(c.column_step, c.columns - first);
  const int64_t begin = index / c.chunks * c.token_step, end = std::min(begin + c.token_step, a.tokens);
  const bool converts = a.identity_experts > 0 && a.x.type != DType::f32;
  const float** rows =
      reinterpret_cast<const float**>(thread_memory(a.top_k * 12 + (converts ? n : 0) * sizeof(float)));
  float* weights = reinterpret_cast<float*>(rows + a.top_k);
  float* converted = weights + a.top_k;
  const int64_t x_column = outer_share(a).first + c.first_column + first;
  for (int64_t token = begin; token < end; ++token) {
    int64_t count = 0;
    const float* x = nullptr;  // the token itself
    for (int64_t p = token * a.top_k; p < (token + 1) * a.top_k; ++p) {
      if (is_identity(a, a.ids[p])) {
        if (x == nullptr) x = floats_of(a.x, token, x_column, n, converted);
        rows[count] = x;
        weights[count++] = a.weights[p];
        continue;
      }
      if (m.pair_row[p] < 0) continue;
      rows[count] = m.down[pass % 2] + m.pair_row[p] * m.down_stride + first;
      weights[count++] = a.weigh_input ? 1.0f : a.weights[p];
    }
    variant().moe->combine(rows, weights, count, n, a.out.at(token, c.first_column + first), a.out.type);
  }
}

// Phase kDown + p computes pass p of `down` and the weighted sums of the previous pass.
int64_t down_phase_tiles(const MoeArgs& a, const MoeMemory& m, int64_t pass) {
  const int64_t down = pass < m.passes.count() ? down_tiles(m, pass) : 0;
  return down + (pass > 0 ? Combine(a, m, pass - 1).tiles : 0);
}

void down_phase_tile(const MoeArgs& a, const MoeMemory& m, int64_t pass, int64_t index) {
  const int64_t down = pass < m.passes.count() ? down_tiles(m, pass) : 0;
  if (index < down) return down_tile(a, m, pass, index);
  combine_tile(a, m, pass - 1, index - down);
}

// Reads experts with rows that are not in memory.
void require_experts(const MoeArgs& a, const MoeMemory& m) {
  if (open_expert_stores.load(std::memory_order_relaxed) == 0) return;
  const RankShare own = expert_share(a);
  std::vector<int64_t> experts;
  for (int64_t e = 0; e < m.grouping->experts; ++e)
    if (own.has(m.expert[e].expert)) experts.push_back(m.expert[e].expert - own.first);
  require_stored(a.gate_up, experts);
}

int64_t requantize_step(const MoeMemory& m, const OwnRows& own) {
  return std::clamp<int64_t>(own.count() / (8 * m.grouping->threads), 1, 16);
}

int64_t requantize_tiles(const MoeArgs& a, const MoeMemory& m) {
  const OwnRows own(a, m);
  return ceil_div(own.count(), requantize_step(m, own));
}

int64_t quantize_tiles(const MoeArgs& a, const MoeMemory& m) {
  return a.tokens <= kOneTileTokens ? 0 : a.tokens + m.grouping->experts;
}

}  // namespace

int64_t QuantMoe::scratch_bytes(const MoeArgs& args) { return MoeMemory::at(args, nullptr).bytes; }

// The columns of act(gate) · up that ranks compute are gathered before they are quantized.
int QuantMoe::gather_phases() const {
  if (args.inner_columns.empty()) return 0;
  gather_.args.communicator = args.communicator;
  gather_.args.columns = args.inner_columns;
  gather_.args.x.type = gather_.args.out.type = DType::f32;
  return gather_.phases_of(most_rows(args));
}

// A pass of `down`, and the exchanges of its rows.
int QuantMoe::phases_of_pass() const {
  if (args.rank_experts.empty()) return 1;
  const int64_t columns = std::min(down_passes(args).step * kPanel, args.hidden);
  return 1 + GatherRows::phases_of(*args.communicator, columns * int64_t(sizeof(float)), most_rows(args));
}

int QuantMoe::phases() const {
  return kDown + gather_phases() + int(down_passes(args).count()) * phases_of_pass() + 1;
}

int64_t QuantMoe::tiles(int phase) const {
  if (args.tokens == 0) return 0;
  const MoeMemory m = MoeMemory::at(args, args.scratch);
  const int gathering = phase - kRequantize, rounds = phase < kRequantize ? 0 : gather_phases();
  if (gathering >= 0 && gathering < rounds) {
    gather_.args.rows = m.grouping->rows;
    gather_.args.x = Rows{m.gated + inner_share(args).first, m.gated_stride, DType::f32};
    gather_.args.out = Rows{m.gated, m.gated_stride, DType::f32};
    return gather_.tiles(gathering);
  }
  const int at = phase - rounds - kDown, each = at < 0 ? 1 : phases_of_pass();
  if (at >= 0 && at % each != 0) {
    const int64_t pass = at / each, left = args.hidden - pass * m.passes.step * kPanel;
    gather_rows_.args = {Rows{m.down[pass % 2], m.down_stride, DType::f32},
                         std::min(m.passes.step * kPanel, left), m.rank_row, args.communicator};
    return gather_rows_.tiles(at % each - 1);
  }
  switch (phase - rounds) {
    case kSort:
      check_adapters(args.lora, args.tokens);
      return 1;
    case kQuantize:
      return quantize_tiles(args, m) + sum_tiles(args, m, &AdaptedRows::inner_tiles);
    case kGateUp:
      return m.grouping->gate_up_tiles;
    case kRequantize:
      return requantize_tiles(args, m) + sum_tiles(args, m, &AdaptedRows::outer_tiles);
    default:
      return down_phase_tiles(args, m, at / each);
  }
}

void QuantMoe::tile(int phase, int64_t index) {
  const MoeMemory m = MoeMemory::at(args, args.scratch);
  const int gathering = phase - kRequantize;
  const int rounds =
      phase < kRequantize || args.inner_columns.empty() ? 0 : gather_.phases_of(most_rows(args));
  if (gathering >= 0 && gathering < rounds) return gather_.tile(gathering, index);
  const int at = phase - rounds - kDown, each = at < 0 ? 1 : phases_of_pass();
  if (at >= 0 && at % each != 0) return gather_rows_.tile(at % each - 1, index);
  switch (phase - rounds) {
    case kSort:
      group_pairs(args, m);
      require_experts(args, m);
      if (args.tokens > kOneTileTokens) return;
      for (int64_t t = 0; t < args.tokens; ++t) place_token(args, m, t);
      for (int64_t e = 0; e < m.grouping->experts; ++e) zero_padding(args, m, m.expert[e]);
      return;
    case kQuantize:
      if (index >= quantize_tiles(args, m)) return sum_tile(args, m, true, index - quantize_tiles(args, m));
      return index < args.tokens ? place_token(args, m, index)
                                 : zero_padding(args, m, m.expert[index - args.tokens]);
    case kGateUp:
      return gate_up_tile(args, m, index);
    case kRequantize: {
      if (index >= requantize_tiles(args, m))
        return sum_tile(args, m, false, index - requantize_tiles(args, m));
      const OwnRows own(args, m);
      const int64_t step = requantize_step(m, own), begin = own.first + index * step;
      for (int64_t row = begin; row < std::min(begin + step, own.end); ++row) requantize_row(args, m, row);
      return;
    }
    default:
      return down_phase_tile(args, m, at / each, index);
  }
}

}  // namespace armllm
