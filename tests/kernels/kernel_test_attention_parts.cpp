// Attention kernels on a tile cut by rows, with splits in any order: the bits must equal those of the whole
// tile.
#include "kernel_test_cache.h"

namespace armllm_test {
namespace {

using namespace armllm;

constexpr int kRounds = 3;  // random cuts, after a cut into single rows
constexpr int64_t kLength = kBlock * kBlocks - 7;

struct Results {
  std::vector<float> maximum, sum, values;

  Results(int64_t rows, int64_t value_size)
      : maximum(size_t(rows), 7.0f),
        sum(size_t(rows), 7.0f),
        values(size_t(rows * value_stride(value_size))) {}
  bool operator==(const Results& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
    };
    return same(maximum, other.maximum) && same(sum, other.sum) && same(values, other.values);
  }
};

// Rows `from` … `from + count − 1` against one split, as a separate tile.
struct Part {
  int64_t from, count, split_begin;
  bool is_near, next_follows;

  void run(const AttentionKernels& kernels, const AttentionArgs& args, const Cache& cache,
           const std::vector<int64_t>& first, const std::vector<int64_t>& last, Results& results) const {
    const int64_t room = round_up(count, 2), stride = value_stride(args.value_size);
    std::vector<float> scores(size_t(room * kScoreStride)), panel(size_t(panel_floats(args.head_size)));
    std::vector<char> query(size_t(room * query_bytes(args.head_size))), weights(size_t(room * kWeightBytes)),
        edges(size_t(edge_bytes(args.value_size))), split(size_t(split_bytes(args)));
    std::vector<float> values(size_t(room * stride));
    AttentionTile tile;
    tile.query = query.data();
    tile.weights = weights.data();
    tile.edges = edges.data();
    tile.split = split.data();
    tile.rows = count;
    tile.first = first.data() + from;
    tile.last = last.data() + from;
    if (args.slopes != nullptr) tile.slopes = args.slopes + from;
    std::vector<const float*> relative;
    for (int64_t r = 0; r < count; ++r) relative.push_back(args.relative + (from + r) * args.rank);
    if (args.relative != nullptr) tile.relative = relative.data();
    const std::vector<const float*> biases(size_t(count), args.biases);
    std::vector<int64_t> position;  // 9 before `last`, except near the end
    for (int64_t r = 0; r < count; ++r) position.push_back(first[size_t(from + r)] + 9);
    if (args.biases != nullptr) tile.biases = biases.data(), tile.position = position.data();
    tile.split_begin = split_begin;
    tile.blocks = cache.blocks.data();
    tile.kv_head = args.latent ? 0 : 1;
    tile.is_near = is_near;
    if (next_follows)
      tile.next = SplitAhead{tile.blocks + (split_begin + kSplit) / args.block_size, 3,
                             std::min(kSplit, kLength - split_begin - kSplit), tile.kv_head};
    tile.maximum = &results.maximum[size_t(from)];
    tile.sum = &results.sum[size_t(from)];
    tile.values = values.data();
    tile.scores = scores.data();
    tile.panel = panel.data();
    for (int64_t r = 0; r < count; ++r) kernels.load_query(args, from + r, 0, tile, r);
    kernels.attend(args, tile);
    // Padding between the rows of values is ignored.
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(&results.values[size_t((from + r) * stride)], &values[size_t(r * stride)],
                  size_t(args.value_size * 4));
  }
};

void test_rows(const AttentionKernels& kernels, const char* name, const CacheKind& cache_kind, bool latent,
               Report& report) {
  Random random(51);
  const CacheType type = cache_kind.type;
  for (int64_t head_size : {cache_kind.nibbles ? 96 : 40, 64})
    for (int64_t rows : {2, 13})
      for (int kind = 0; kind < (latent ? 3 : 7); ++kind) {
        AttentionArgs args;
        std::vector<float> slopes(size_t(rows), 0.0f);
        for (int64_t r = 0; r < rows; ++r) slopes[size_t(r)] = 0.03125f * static_cast<float>(r % 5 + 1);
        if (kind == 3) args.slopes = slopes.data();
        Values relative(DType::f32, rows * 3, random, 1.0f), profiles(DType::f32, 3 * 150, random, 1.0f);
        if (kind == 4) {
          args.relative = static_cast<const float*>(relative.data());
          args.profiles = static_cast<const float*>(profiles.data());
          args.rank = 3;
          args.extent = 150;
        }
        if (kind == 6) {
          args.biases = static_cast<const float*>(profiles.data());
          args.reach = 20;
        }
        args.cache_type = type;
        args.nibbles = cache_kind.nibbles;
        args.latent = latent;
        args.int8_latents = latent && type == CacheType::i8;
        if (args.int8_latents) args.cache_type = CacheType::bf16;
        args.q_heads = args.kv_heads = latent ? 1 : kHeads;
        args.head_size = head_size;
        args.value_size = latent ? 24 : head_size;
        args.block_size = kBlock;
        args.scale = 1.0f / std::sqrt(float(head_size));
        args.window = kind == 2 ? 9 : 0;
        args.softcap = kind == 1 ? 5.0f : 0.0f;
        Values q(DType::f32, rows * args.q_heads * head_size, random, 2.0f);
        args.q = q.rows(args.q_heads * head_size);
        const Cache cache(args, random, 2.0f);
        cache.assign_to(args);
        // Tokens of a prompt; the last one attends to all positions.
        std::vector<int64_t> first, last;
        for (int64_t r = 0; r < rows; ++r) {
          last.push_back(kLength - (rows - 1 - r) * (kind == 1 ? 1 : 21));
          first.push_back(kind == 2 ? std::max<int64_t>(0, last.back() - args.window) : 0);
        }
        if (kind >= 5) {  // tokens of a whole text: each also attends to 8 positions after its own
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t position = kLength - 5 * (rows - r);
            first[size_t(r)] = position - 9;
            last[size_t(r)] = std::min<int64_t>(position + 9, kLength);
          }
        }
        for (int64_t split : {int64_t(0), kSplit}) {
          const bool follows = split + kSplit < kLength;
          Results whole(rows, args.value_size);
          Part{0, rows, split, false, false}.run(kernels, args, cache, first, last, whole);
          for (int round = 0; round <= kRounds; ++round) {
            Results parts(rows, args.value_size);
            for (int64_t r = 0; r < rows;) {
              const int64_t count = round == 0 ? 1 : 1 + random.below(rows - r);
              // Prefetch hints must not change any bit.
              Part{r, count, split, round % 2 == 1, follows && round > 1}.run(kernels, args, cache, first,
                                                                              last, parts);
              r += count;
            }
            report.expect(
                whole == parts,
                text("%s attend rows in parts, cache %d latent %d head %ld rows %ld split %ld kind "
                     "%d round %d",
                     name, int(type), int(latent), long(head_size), long(rows), long(split), kind, round));
          }
        }
      }
}

// Positions [0, 256) and [256, n) in one call each.  Merging a split with zero weight must not change any
// bit.
void test_empty_split(const AttentionKernels& kernels, const char* name, Report& report) {
  Random random(52);
  constexpr int64_t size = 40;
  Values row(DType::f32, value_stride(size), random), merged = row;
  const std::vector<float> nothing(size_t(value_stride(size)));
  const float lowest = kNothing, none = 0.0f;
  float maximum = 1.5f, sum = 3.0f;
  kernels.merge(&maximum, &sum, static_cast<float*>(merged.data()), &lowest, &none, nothing.data(), size, 1);
  report.expect(merged.same(row) && maximum == 1.5f && sum == 3.0f, text("%s merge of nothing", name));
}

}  // namespace

void test_attention_parts(const Variant& tested, Report& report) {
  for (const CacheKind& kind : kCacheKinds) test_rows(*tested.attention, tested.name, kind, false, report);
  for (CacheType type : {CacheType::f32, CacheType::bf16, CacheType::f16, CacheType::i8})
    test_rows(*tested.attention, tested.name, CacheKind{type}, true, report);
  test_empty_split(*tested.attention, tested.name, report);
}

}  // namespace armllm_test
