#include "moe/group_by_expert.h"

#include <algorithm>

#include "dispatch/variants.h"

namespace armllm {
namespace {

constexpr int64_t kTilesPerThread = 8;
constexpr int64_t kMostGemvPanels = 32;
constexpr int64_t kMostGemmSteps = 4;  // most multiples of gemm_panels per tile
constexpr int64_t kMostRows = 256;     // rows per gemm tile; their INT8 values fit in L2 with the weights
constexpr int64_t kFewestRows = 64;    // with this many rows, unpacking is a few percent of a tile's time
// Bytes of `down` results per pass; two passes fit in the last-level cache with the weights.
constexpr int64_t kPassBytes = int64_t{4} << 20;
constexpr int64_t kPassPanels =
    24;  // a pass has a multiple of this; a multiple of every variant's gemm_panels

int64_t largest_block() {
  int64_t block = 1;
  for (const Variant& v : all_variants()) block = std::max(block, v.linear->gemm_block);
  return block;
}

}  // namespace

int64_t most_rows(const MoeArgs& a) {
  static const int64_t block = largest_block();
  const int64_t pairs = a.tokens * a.top_k;
  const int64_t long_ones = std::min(a.experts, pairs / (kGemvTokens + 1));
  // Experts with many rows pad to whole blocks; gemv may pad the others to an even number of rows.
  return pairs + long_ones * (block - 1) + std::min(a.experts, pairs / 2);
}

namespace {

DownPasses passes_of(const MoeArgs& a, int64_t rows) {
  const int64_t panels = ceil_div(outer_share(a).count, kPanel),
                column_bytes = rows * kPanel * int64_t(sizeof(float));
  if (column_bytes * panels <= kPassBytes) return {panels, panels};
  return {panels,
          std::min(panels, std::max<int64_t>(kPassBytes / column_bytes / kPassPanels, 1) * kPassPanels)};
}

class Carver {
 public:
  explicit Carver(void* start) : start_(static_cast<char*>(start)) {}
  template <typename T>
  T* take(int64_t count) {
    char* here = start_ + used_;
    used_ += round_up(count * int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(here);
  }
  QuantRows take_rows(int64_t rows, int64_t features, Scheme scheme) {
    QuantRows q{};
    q.groups = ceil_div(features, kGroup);
    q.sums = has_offsets(scheme);
    q.values = take<int8_t>(rows * q.row_bytes());
    q.scales = take<float>(rows);
    q.group_sums = take<int32_t>(rows * q.groups);
    return q;
  }
  int64_t used() const { return used_; }
  int64_t most_used() const { return std::max(used_, most_); }
  // Frees all allocations made since used() returned `used`.
  void back_to(int64_t used) {
    most_ = most_used();
    used_ = used;
  }

 private:
  char* start_;
  int64_t used_ = 0, most_ = 0;
};

// Panels per tile, for experts with few rows (gemv) and with many rows (gemm).
struct Steps {
  int64_t gemv, gemm;
};

struct AllSteps {
  Steps gate_up, down;
  int64_t rows;  // of a gemm tile
};

AllSteps steps_for(const MoeArgs& a, const MoeMemory& m, const LinearKernels& kernels, int64_t gate_up_panels,
                   int64_t down_panels) {
  const int64_t threads = m.grouping->threads, wanted = threads * kTilesPerThread;
  const RankShare own = expert_share(a);
  const auto gemm_chunks = [&](int64_t step) {
    int64_t chunks = 0;
    for (int64_t e = own.first; e < own.first + own.count; ++e)
      if (m.count[e] > kernels.gemv_tokens) chunks += ceil_div(m.count[e], step);
    return chunks;
  };
  int64_t gemv_experts = 0;
  for (int64_t e = own.first; e < own.first + own.count; ++e)
    gemv_experts += m.count[e] > 0 && m.count[e] <= kernels.gemv_tokens;

  const int64_t widest = round_up(kernels.gemm_panels, 2);
  int64_t rows = round_up(kMostRows, kernels.gemm_tokens);
  if (gemm_chunks(rows) * ceil_div(down_panels, widest) < wanted)
    rows = round_up(kFewestRows, kernels.gemm_tokens);
  const int64_t chunks = gemm_chunks(rows);
  const auto steps = [&](int64_t panels, int64_t multiple) {
    const int64_t gemv = std::clamp<int64_t>(gemv_experts * panels / wanted, 1, kMostGemvPanels);
    // Narrow gemm tiles are slower, but idle threads cost more; wide tiles profit from the prefetcher.
    const int64_t all = (gemv_experts + chunks) * panels,
                  share = std::max<int64_t>(ceil_div(all, threads), 1);
    const int64_t wide = std::clamp<int64_t>(all / wanted / widest, 1, kMostGemmSteps) * widest;
    return Steps{round_up(gemv, multiple), std::min(wide, round_up(share, multiple))};
  };
  return {steps(gate_up_panels, a.gated ? 2 : 1), steps(down_panels, 1), rows};
}

}  // namespace

// Parts of the experts that are laid out one after another.
int64_t parts_of(const MoeArgs& a) { return std::max<int64_t>(1, int64_t(a.rank_experts.size())); }

DownPasses down_passes(const MoeArgs& a) { return passes_of(a, most_rows(a)); }

MoeMemory MoeMemory::at(const MoeArgs& a, void* scratch) {
  const int64_t pairs = a.tokens * a.top_k, rows = most_rows(a);
  Carver carve(scratch);
  MoeMemory m{};
  m.grouping = carve.take<Grouping>(1);
  m.expert = carve.take<ExpertRows>(std::min(a.experts, pairs));
  m.count = carve.take<int64_t>(a.experts);
  m.next_row = carve.take<int64_t>(a.experts);
  m.pair_row = carve.take<int32_t>(pairs);
  m.row_expert = carve.take<int32_t>(rows);
  m.rank_row = carve.take<int64_t>(parts_of(a) + 1);
  m.intermediate = carve.take_rows(rows, a.intermediate, a.scheme);
  m.gated_stride = round_up(a.intermediate, kPanel);
  m.passes = passes_of(a, rows);
  m.down_stride = m.passes.step * kPanel;
  if (a.lora.adapters != nullptr) {
    m.row_slot = carve.take<int32_t>(rows);
    m.row_token = carve.take<int32_t>(rows);
    m.adapted_row = carve.take<int32_t>(pairs);
    m.adapted_token = carve.take<int32_t>(pairs);
    m.adapted = carve.take<AdaptedRows>(pairs);
    m.inner_sums = carve.take<float>(rows * a.lora.inner.most_rank);
    m.outer_sums = carve.take<float>(rows * a.lora.outer.most_rank);
  }
  // Long prompts need tens of megabytes here, so `down` shares memory with `hidden` and `gated`, which are no
  // longer needed when `down` is written.
  const int64_t shared = carve.used();
  m.hidden = carve.take_rows(rows, a.hidden, a.scheme);
  m.gated = carve.take<float>(rows * m.gated_stride);
  carve.back_to(shared);
  for (int64_t p = 0; p < 2 && p < m.passes.count(); ++p) m.down[p] = carve.take<float>(rows * m.down_stride);
  m.bytes = carve.most_used();
  return m;
}

namespace {

void group_adapted(const MoeArgs& a, const MoeMemory& m) {
  Grouping& g = *m.grouping;
  const ExpertAdapters& lora = a.lora;
  std::fill(m.row_slot, m.row_slot + g.rows, -1);
  for (int64_t token = 0; token < std::min(a.tokens, lora.listed); ++token) {
    const int32_t slot = lora.adapters[token];
    if (slot < 0 || (lora.inner.ranks[slot] == 0 && lora.outer.ranks[slot] == 0)) continue;
    for (int64_t p = token * a.top_k; p < (token + 1) * a.top_k; ++p) {
      if (m.pair_row[p] < 0) continue;
      m.row_slot[m.pair_row[p]] = slot;
      m.row_token[m.pair_row[p]] = int32_t(token);
    }
  }
  int64_t count = 0, inner_tiles = 0, outer_tiles = 0;
  for (int64_t i = 0; i < g.experts; ++i) {
    const ExpertRows& e = m.expert[i];
    int64_t first = count;
    for (int64_t row = e.first_row; row < e.first_row + e.rows; ++row)
      if (m.row_slot[row] >= 0) m.adapted_row[count++] = int32_t(row);
    std::sort(m.adapted_row + first, m.adapted_row + count, [&](int32_t one, int32_t other) {
      const int32_t slot = m.row_slot[one], other_slot = m.row_slot[other];
      return slot != other_slot ? slot < other_slot : one < other;
    });
    while (first < count) {
      const int32_t slot = m.row_slot[m.adapted_row[first]];
      int64_t end = first;
      for (; end < count && end < first + kLoraRows && m.row_slot[m.adapted_row[end]] == slot; ++end)
        m.adapted_token[end] = m.row_token[m.adapted_row[end]];
      inner_tiles += ceil_div(lora.inner.ranks[slot], kLoraRanks);
      outer_tiles += ceil_div(lora.outer.ranks[slot], kLoraRanks);
      m.adapted[g.adapted++] = {e.expert, slot, first, end - first, inner_tiles, outer_tiles};
      first = end;
    }
  }
}

}  // namespace

void group_pairs(const MoeArgs& a, const MoeMemory& m) {
  const LinearKernels& kernels = *variant().linear;
  const int64_t pairs = a.tokens * a.top_k;
  const int64_t gate_up_panels = (a.gated ? 2 : 1) * ceil_div(inner_share(a).count, kPanel);
  const DownPasses& passes = m.passes;
  const auto known = [&](int32_t id) { return id >= 0 && id < a.experts; };

  std::fill(m.count, m.count + a.experts, 0);
  for (int64_t p = 0; p < pairs; ++p)
    if (known(a.ids[p])) ++m.count[a.ids[p]];

  Grouping& g = *m.grouping;
  g = Grouping{};
  g.threads = team_size();
  const AllSteps steps = steps_for(a, m, kernels, gate_up_panels, passes.step);
  const RankShare own = expert_share(a);
  // Long tiles come first: a thread that starts a long tile last would keep all others waiting.
  const auto lay_out = [&](bool gemm, int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      const int64_t rows = m.count[e];
      if (rows == 0 || (rows > kernels.gemv_tokens) != gemm) continue;
      ExpertRows& x = m.expert[g.experts];
      x.expert = e;
      x.first_row = g.rows;
      x.rows = rows;
      x.block = gemm ? kernels.gemm_block : gemv_block_of(kernels, a.scheme, rows);
      const int64_t row_step = gemm ? steps.rows : rows;
      x.gate_up = TileGrid{gate_up_panels, gemm ? steps.gate_up.gemm : steps.gate_up.gemv, rows, row_step};
      x.down = TileGrid{passes.step, gemm ? steps.down.gemm : steps.down.gemv, rows, row_step};
      x.down_rest = x.down;
      x.down_rest.panels = passes.of(passes.count() - 1);
      x.gate_up_tile = g.gate_up_tiles;
      x.down_tile = g.down_tiles;
      x.down_rest_tile = g.down_rest_tiles;
      if (own.has(e)) {
        g.gate_up_tiles += x.gate_up.count();
        g.down_tiles += x.down.count();
        g.down_rest_tiles += x.down_rest.count();
      }
      m.next_row[e] = g.rows;
      const int64_t padded = round_up(rows, x.block);
      std::fill(m.row_expert + g.rows, m.row_expert + g.rows + padded, int32_t(g.experts));
      g.rows += padded;
      ++g.experts;
    }
  };
  // All ranks lay out the rows of all experts alike, and those of a rank's experts side by side.
  int64_t begin = 0;
  m.rank_row[0] = 0;
  for (int64_t rank = 0; rank < parts_of(a); ++rank) {
    const int64_t end = a.rank_experts.empty() ? a.experts : begin + a.rank_experts[rank];
    for (const bool gemm : {true, false}) lay_out(gemm, begin, end);
    begin = end;
    m.rank_row[rank + 1] = g.rows;
  }
  for (int64_t p = 0; p < pairs; ++p) m.pair_row[p] = known(a.ids[p]) ? int32_t(m.next_row[a.ids[p]]++) : -1;
  if (a.lora.adapters != nullptr) group_adapted(a, m);
}

}  // namespace armllm
