// Attention over one split of keys for a tile of query rows, and writes of keys and values to the cache.
#include <algorithm>

#include "kernel_test_cache.h"

namespace armllm_test {
namespace {

using namespace armllm;

struct Range {
  int64_t begin, end;
};

CacheType cache_of(DType type) { return static_cast<CacheType>(type); }

// Dimensions and positions for which the layout needs padding.
int64_t cache_elements(CacheType type, int64_t blocks, int64_t size, bool keys) {
  return blocks * kHeads * kBlock * (keys ? round_up(size, group_of(type)) : size);
}

constexpr int64_t kRank = 3, kExtent = 41;  // of a learned bias of distance

// A tile of rows against one split, including its buffers.
struct Tile {
  Values q, maximum, sum, values;
  std::vector<int64_t> first, last;
  std::vector<float> slopes;              // one a row; none without a bias
  std::vector<float> relative, profiles;  // [rows][kRank] and [kRank][kExtent]; none without a bias
  AttentionArgs args;
  const int32_t* blocks = nullptr;
  int64_t rows, split_begin;

  Tile(int64_t row_count, int64_t head_size, int64_t value_size, Random& random)
      : q(DType::f32, row_count * head_size, random, 1.0f),
        maximum(DType::f32, row_count),
        sum(DType::f32, row_count),
        values(DType::f32, row_count * value_stride(value_size)),
        rows(row_count) {
    args.q = q.rows(head_size);
    args.q_heads = args.kv_heads = kHeads;
    args.head_size = head_size;
    args.value_size = value_size;
    args.block_size = kBlock;
  }

  // Rows `from` … `from + count − 1` as a separate tile.
  void run(const AttentionKernels& kernels, int64_t from, int64_t count) {
    const int64_t room = round_up(count, 2);
    std::vector<float> scores(size_t(room * kScoreStride)), panel(size_t(panel_floats(args.head_size)));
    std::vector<char> query(size_t(room * query_bytes(args.head_size))), weights(size_t(room * kWeightBytes)),
        edges(size_t(edge_bytes(args.value_size))), split(size_t(split_bytes(args)));
    AttentionTile tile;
    tile.query = query.data();
    tile.weights = weights.data();
    tile.edges = edges.data();
    tile.split = split.data();
    tile.rows = count;
    tile.first = first.data() + from;
    tile.last = last.data() + from;
    args.slopes = slopes.empty() ? nullptr : slopes.data();
    tile.slopes = slopes.empty() ? nullptr : slopes.data() + from;
    std::vector<const float*> of_rows;
    for (int64_t r = 0; r < count; ++r) of_rows.push_back(relative.data() + (from + r) * kRank);
    args.relative = relative.empty() ? nullptr : relative.data();
    args.profiles = profiles.data();
    args.rank = kRank;
    args.extent = kExtent;
    tile.relative = relative.empty() ? nullptr : of_rows.data();
    tile.split_begin = split_begin;
    tile.blocks = blocks;
    tile.kv_head = 1;
    tile.maximum = static_cast<float*>(maximum.data()) + from;
    tile.sum = static_cast<float*>(sum.data()) + from;
    tile.values = static_cast<float*>(values.data()) + from * value_stride(args.value_size);
    tile.scores = scores.data();
    tile.panel = panel.data();
    for (int64_t r = 0; r < count; ++r) kernels.load_query(args, from + r, 0, tile, r);
    kernels.attend(args, tile);
  }

  // Padding between the rows of values is ignored.
  bool same(Tile& other) {
    if (!maximum.same(other.maximum) || !sum.same(other.sum)) return false;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = r * value_stride(args.value_size), c = 0; c < args.value_size; ++c, ++i) {
        const float a = static_cast<const float*>(values.data())[i],
                    b = static_cast<const float*>(other.values.data())[i];
        if (std::memcmp(&a, &b, sizeof a) != 0 && (a == a || b == b)) return false;
      }
    return true;
  }

  // Largest differences of the mean values and of the log sums.
  double distance(Tile& other) {
    double most = 0.0;
    const auto floats = [](Values& v) { return static_cast<const float*>(v.data()); };
    for (int64_t r = 0; r < rows; ++r) {
      const double s = floats(sum)[r], t = floats(other.sum)[r];
      if ((s == 0.0) != (t == 0.0)) return 1e30;
      if (s == 0.0) continue;
      const auto worse = [&](double d) {
        if (!(std::abs(d) <= most)) most = std::abs(d);
      };
      worse(floats(maximum)[r] + std::log(s) - floats(other.maximum)[r] - std::log(t));
      for (int64_t i = r * value_stride(args.value_size), c = 0; c < args.value_size; ++c, ++i)
        worse(floats(values)[i] / s - floats(other.values)[i] / t);
    }
    return most;
  }
};

// Tolerances relative to the scalar variant, for values and keys up to 4 and scores up to about 20.  Measured
// on this data: Arm's float16 sums are off by at most 1.53e-2, its INT8 weights by 1.6e-2 and its INT8
// queries by 1.7e-2.
double tolerance(CacheType type) {
  return type == CacheType::f32 ? 0.0 : type == CacheType::f16 ? 1.6e-2 : 4e-2;
}

void test_attend(const AttentionKernels& tested, const AttentionKernels& truth, const char* name,
                 Report& report) {
  Random random(21);
  for (const CacheKind& cache_kind : kCacheKinds)
    for (int64_t head_size : {16, 64, 80})
      for (int64_t value_size : {head_size, int64_t(24)})
        for (int64_t rows : {1, 3, 4, 13, 48})
          for (Range split : {Range{0, 1}, Range{0, 37}, Range{0, 256}, Range{256, 301}})
            for (int kind = 0; kind < 5; ++kind) {
              if (!cache_kind.holds(head_size) || !cache_kind.holds(value_size)) continue;
              const CacheType type = cache_kind.type;
              Tile tile(rows, head_size, value_size, random);
              if (kind == 3)
                for (int64_t r = 0; r < rows; ++r)
                  tile.slopes.push_back(0.03125f * static_cast<float>(r % 5 + 1));
              if (kind == 4) {
                tile.relative.resize(size_t(rows * kRank));
                tile.profiles.resize(size_t(kRank * kExtent));
                for (std::vector<float>* v : {&tile.relative, &tile.profiles})
                  for (float& x : *v) x = random.uniform(-1.0f, 1.0f);
              }
              for (int64_t r = 0; r < rows; ++r) {
                tile.last.push_back(kind == 0 ? split.end
                                              : split.begin + random.below(split.end - split.begin + 1));
                tile.first.push_back(kind == 2 ? std::max<int64_t>(0, tile.last.back() - 9) : 0);
              }
              tile.args.cache_type = type;
              tile.args.nibbles = cache_kind.nibbles;
              const Cache cache(tile.args, random, 4.0f);
              cache.assign_to(tile.args);
              tile.blocks = cache.blocks.data();
              tile.args.window = kind == 2 ? 9 : 0;
              tile.args.softcap = kind == 1 ? 5.0f : 0.0f;
              tile.args.scale = 1.0f / std::sqrt(float(head_size));
              tile.split_begin = split.begin;
              Tile other = tile, alone = tile;
              tile.run(tested, 0, rows);
              other.run(truth, 0, rows);
              for (int64_t r = 0; r < rows; ++r) alone.run(tested, r, 1);
              const std::string what =
                  text("type %d%s head %ld value %ld rows %ld split %ld-%ld kind %d", int(type),
                       cache_kind.nibbles ? " int4" : "", long(head_size), long(value_size), long(rows),
                       long(split.begin), long(split.end), kind);
              const double distance = tile.distance(other);
              report.expect(tile.same(other) || distance <= tolerance(type),
                            text("%s attend %s: off by %g", name, what.c_str(), distance));
              report.expect(tile.same(alone), text("%s attend alone %s", name, what.c_str()));
            }
}

void test_ends(const AttentionKernels& tested, const AttentionKernels& truth, const char* name,
               Report& report) {
  Random random(23);
  for (DType type : kTypes)
    for (int64_t size : {16, 40, 128})
      for (int kind = 0; kind < 3; ++kind) {
        constexpr int64_t rows = kLanes + 1;
        const int64_t width = value_stride(size);
        Values sinks(DType::f32, kHeads, random), part(DType::f32, rows * width, random);
        Values values(DType::f32, rows * width, random), merged[2] = {values, values};
        Values out[2] = {Values(type, rows * kHeads * size), Values(type, rows * kHeads * size)};
        float maximum[2][rows], sum[2][rows], m[rows], s[rows];
        for (int64_t r = 0; r < rows; ++r) {  // lower than the split's, the same, higher
          maximum[0][r] = maximum[1][r] =
              kind == 2 ? kNothing : 2.25f + 0.75f * static_cast<float>(r % 3 - 1);
          sum[0][r] = sum[1][r] = kind == 2 ? 0.0f : 3.0f;
          m[r] = 2.25f;
          s[r] = kind == 2 ? 0.0f : 1.25f;
        }
        for (int i = 0; i < 2; ++i) {
          const AttentionKernels& kernels = i ? truth : tested;
          AttentionArgs args;
          args.out = out[i].rows(kHeads * size);
          args.head_size = args.value_size = size;
          args.scale = 0.3f;
          args.sinks = kind == 1 ? static_cast<const float*>(sinks.data()) : nullptr;
          float* totals = static_cast<float*>(merged[i].data());
          kernels.merge(maximum[i], sum[i], totals, m, s, static_cast<const float*>(part.data()), size, rows);
          for (int64_t r = 0; r < rows; ++r)
            kernels.finish(args, r, 1, maximum[i][r], sum[i][r], totals + r * width);
        }
        report.expect(
            merged[0].same(merged[1]) && std::equal(sum[0], sum[0] + rows, sum[1]) &&
                std::equal(maximum[0], maximum[0] + rows, maximum[1]) && out[0].same(out[1]),
            text("%s merge and finish type %d size %ld kind %d", name, int(type), long(size), kind));
      }
}

void test_write(const AttentionKernels& tested, const AttentionKernels& truth, const char* name,
                Report& report) {
  Random random(22);
  for (DType type : kTypes)
    for (DType cache_type : kTypes)
      for (int64_t head_size : {16, 40}) {
        constexpr int64_t tokens = 5, value_size = 24;
        Values k(type, tokens * kHeads * head_size, random), v(type, tokens * kHeads * value_size, random);
        const int64_t slots[tokens] = {17, -1, 0, 31, 40};
        const int64_t keys = cache_elements(cache_of(cache_type), 3, head_size, true),
                      elements = cache_elements(cache_of(cache_type), 3, value_size, false);
        Values k_cache[2] = {Values(cache_type, keys), Values(cache_type, keys)};
        Values v_cache[2] = {Values(cache_type, elements), Values(cache_type, elements)};
        for (int i = 0; i < 2; ++i) {
          KvWriteArgs args;
          args.k = k.rows(kHeads * head_size);
          args.v = v.rows(kHeads * value_size);
          args.k_cache = k_cache[i].data();
          args.v_cache = v_cache[i].data();
          args.cache_type = cache_of(cache_type);
          args.slots = slots;
          args.tokens = tokens;
          args.kv_heads = kHeads;
          args.head_size = head_size;
          args.value_size = value_size;
          args.block_size = kBlock;
          for (int64_t t = 0; t < tokens * kHeads; ++t)
            (i ? truth : tested).write(args, t / kHeads, t % kHeads);
        }
        report.expect(
            k_cache[0].same(k_cache[1]) && v_cache[0].same(v_cache[1]),
            text("%s write types %d %d head %ld", name, int(type), int(cache_type), long(head_size)));
      }
}

void test_write_nibbles(const AttentionKernels& tested, const AttentionKernels& truth, const char* name,
                        Report& report) {
  Random random(24);
  for (DType type : kTypes)
    for (int64_t head_size : {32, 96, 128}) {
      constexpr int64_t tokens = 5, value_size = 64;
      Values k(type, tokens * kHeads * head_size, random), v(type, tokens * kHeads * value_size, random);
      const int64_t slots[tokens] = {17, -1, 0, 31, 40};
      const int64_t groups = 3 * kHeads * kBlock * kNibbleBytes / kNibbleGroup;
      std::vector<uint8_t> k_cache[2], v_cache[2];
      std::vector<float> k_scales[2], v_scales[2];
      for (int i = 0; i < 2; ++i) {
        k_cache[i].resize(size_t(groups * head_size));
        v_cache[i].resize(size_t(groups * value_size));
        k_scales[i].resize(3 * kHeads * kBlock);
        v_scales[i].resize(3 * kHeads * kBlock);
        KvWriteArgs args;
        args.k = k.rows(kHeads * head_size);
        args.v = v.rows(kHeads * value_size);
        args.k_cache = k_cache[i].data();
        args.v_cache = v_cache[i].data();
        args.k_scales = k_scales[i].data();
        args.v_scales = v_scales[i].data();
        args.cache_type = CacheType::i8;
        args.nibbles = true;
        args.slots = slots;
        args.tokens = tokens;
        args.kv_heads = kHeads;
        args.head_size = head_size;
        args.value_size = value_size;
        args.block_size = kBlock;
        for (int64_t t = 0; t < tokens * kHeads; ++t)
          (i ? truth : tested).write(args, t / kHeads, t % kHeads);
      }
      report.expect(k_cache[0] == k_cache[1] && v_cache[0] == v_cache[1] && k_scales[0] == k_scales[1] &&
                        v_scales[0] == v_scales[1] && k_scales[0][0] > 0.0f,
                    text("%s write type %d int4 head %ld", name, int(type), long(head_size)));
    }
}

}  // namespace

void test_attention(const Variant& tested, const Variant& truth, Report& report) {
  test_attend(*tested.attention, *truth.attention, tested.name, report);
  test_ends(*tested.attention, *truth.attention, tested.name, report);
  test_write(*tested.attention, *truth.attention, tested.name, report);
  test_write_nibbles(*tested.attention, *truth.attention, tested.name, report);
}

}  // namespace armllm_test
