// One split of keys for a run of query rows, and writing keys and values to the cache.
#include "attention/attention.h"
#include "kernel_test.h"

namespace armllm_test {
namespace {

using namespace armllm;

constexpr int64_t kBlock = 16, kHeads = 2, kBlocks = 20;

struct Range {
  int64_t begin, end;
};

CacheType cache_of(DType type) { return static_cast<CacheType>(type); }

// Dimensions and positions that the layout pads.
int64_t cache_elements(CacheType type, int64_t blocks, int64_t size, bool keys) {
  return blocks * kHeads * kBlock * (keys ? round_up(size, group_of(type)) : size);
}

void test_attend(const AttentionKernels& tested, const AttentionKernels& truth, const char* name,
                 Report& report) {
  Random random(21);
  for (DType type : kTypes)
    for (int64_t head_size : {16, 64, 80})
      for (int64_t value_size : {head_size, int64_t(24)})
        for (int64_t rows : {int64_t(1), int64_t(3), tested.tile_rows})
          for (Range split : {Range{0, 1}, Range{0, 37}, Range{0, 256}, Range{256, 301}})
            for (int kind = 0; kind < 3; ++kind) {
              Values k(type, cache_elements(cache_of(type), kBlocks, head_size, true), random),
                  v(type, cache_elements(cache_of(type), kBlocks, value_size, false), random);
              Values q(DType::f32, rows * head_size, random, 1.0f);
              std::vector<int32_t> blocks;
              for (int64_t b = 0; b < kBlocks; ++b) blocks.push_back(int32_t((b * 7 + 3) % kBlocks));
              std::vector<int64_t> first, last;
              for (int64_t r = 0; r < rows; ++r) {
                last.push_back(kind == 0 ? split.end
                                         : split.begin + random.below(split.end - split.begin + 1));
                first.push_back(kind == 2 ? std::max<int64_t>(0, last.back() - 9) : 0);
              }
              AttentionArgs args;
              args.k_cache = k.data();
              args.v_cache = v.data();
              args.cache_type = cache_of(type);
              args.q = q.rows(head_size);
              args.q_heads = args.kv_heads = kHeads;
              args.head_size = head_size;
              args.value_size = value_size;
              args.block_size = kBlock;
              args.window = kind == 2 ? 9 : 0;
              args.softcap = kind == 1 ? 5.0f : 0.0f;
              Values maximum[2] = {Values(DType::f32, rows), Values(DType::f32, rows)},
                     sum[2] = {maximum[0], maximum[0]};
              const int64_t stride = value_stride(value_size);
              Values values[2] = {Values(DType::f32, rows * stride), Values(DType::f32, rows * stride)};
              for (int i = 0; i < 2; ++i) {
                std::vector<float> scores(size_t(rows * kScoreStride)),
                    panel(size_t(panel_floats(head_size)));
                std::vector<char> query(size_t(rows * query_bytes(head_size))),
                    weights(size_t(rows * kWeightBytes)), edges(size_t(edge_bytes(value_size)));
                AttentionTile tile;
                tile.query = query.data();
                tile.weights = weights.data();
                tile.edges = edges.data();
                tile.rows = rows;
                tile.first = first.data();
                tile.last = last.data();
                tile.split_begin = split.begin;
                tile.blocks = blocks.data();
                tile.kv_head = 1;
                tile.maximum = static_cast<float*>(maximum[i].data());
                tile.sum = static_cast<float*>(sum[i].data());
                tile.values = static_cast<float*>(values[i].data());
                tile.scores = scores.data();
                tile.panel = panel.data();
                for (int64_t r = 0; r < rows; ++r) (i ? truth : tested).load_query(args, r, 0, tile, r);
                (i ? truth : tested).attend(args, tile);
              }
              report.expect(maximum[0].same(maximum[1]) && sum[0].same(sum[1]) && values[0].same(values[1]),
                            text("%s attend type %d head %ld value %ld rows %ld split %ld-%ld kind %d", name,
                                 int(type), long(head_size), long(value_size), long(rows), long(split.begin),
                                 long(split.end), kind));
            }
}

void test_ends(const AttentionKernels& tested, const AttentionKernels& truth, const char* name,
               Report& report) {
  Random random(23);
  for (DType type : kTypes)
    for (int64_t size : {16, 40, 128})
      for (int kind = 0; kind < 3; ++kind) {
        Values q(type, 2 * kHeads * size, random), loaded[2] = {Values(DType::f32, query_bytes(size) / 4),
                                                                Values(DType::f32, query_bytes(size) / 4)};
        Values sinks(DType::f32, kHeads, random), part(DType::f32, value_stride(size), random);
        Values values(DType::f32, value_stride(size), random), merged[2] = {values, values};
        Values out[2] = {Values(type, 2 * kHeads * size), Values(type, 2 * kHeads * size)};
        float maximum[2] = {kind == 2 ? kNothing : 1.5f, kind == 2 ? kNothing : 1.5f};
        float sum[2] = {kind == 2 ? 0.0f : 3.0f, kind == 2 ? 0.0f : 3.0f};
        for (int i = 0; i < 2; ++i) {
          const AttentionKernels& kernels = i ? truth : tested;
          AttentionArgs args;
          args.q = q.rows(kHeads * size);
          args.out = out[i].rows(kHeads * size);
          args.head_size = args.value_size = size;
          args.scale = 0.3f;
          args.sinks = kind == 1 ? static_cast<const float*>(sinks.data()) : nullptr;
          AttentionTile tile;
          tile.query = loaded[i].data();
          kernels.load_query(args, 1, 1, tile, 0);
          float* row = static_cast<float*>(merged[i].data());
          kernels.merge(&maximum[i], &sum[i], row, 2.25f, kind == 2 ? 0.0f : 1.25f,
                        static_cast<const float*>(part.data()), size);
          kernels.finish(args, 1, 1, maximum[i], sum[i], row);
        }
        report.expect(loaded[0].same(loaded[1]),
                      text("%s load_query type %d size %ld", name, int(type), long(size)));
        report.expect(
            merged[0].same(merged[1]) && sum[0] == sum[1] && maximum[0] == maximum[1] && out[0].same(out[1]),
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

}  // namespace

void test_attention(const Variant& tested, const Variant& truth, Report& report) {
  test_attend(*tested.attention, *truth.attention, tested.name, report);
  test_ends(*tested.attention, *truth.attention, tested.name, report);
  test_write(*tested.attention, *truth.attention, tested.name, report);
}

}  // namespace armllm_test
