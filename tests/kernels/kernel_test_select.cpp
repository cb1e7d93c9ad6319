// Scores of indexers against the scalar kernels.
#include "kernel_test.h"
#include "select/select.h"
#include "select/select_blocks.h"

namespace armllm_test {
namespace {

using namespace armllm;

float* floats(Values& values) { return reinterpret_cast<float*>(values.data()); }

void test_tokens(const SelectKernels& tested, const SelectKernels& truth, const char* name, Report& report) {
  Random random(71);
  for (DType type : kTypes)
    for (int64_t heads : {1, 4, 5})
      for (int64_t size : {1, 16, 29, 128})
        for (bool finite : {true, false}) {
          Values q(type, heads * size, random), weights(type, heads, random);
          Values keys(type, kScored * size, random);
          if (!finite) q.set(size / 2, std::nanf("")), keys.set(3 * size, INFINITY);
          Values scores[2] = {Values(DType::f32, kScored), Values(DType::f32, kScored)};
          for (int i = 0; i < 2; ++i) {
            const SelectKernels& kernels = i ? truth : tested;
            SelectArgs args;
            args.q = q.rows(heads * size);
            args.weights = weights.rows(heads);
            args.key_type = type;
            args.heads = heads;
            args.head_size = args.head_stride = size;
            args.scale = 0.3f;
            Values panel(DType::f32, kScored * size), query(DType::f32, heads * size),
                factors(DType::f32, heads);
            for (int64_t key = 0; key < kScored; ++key)
              kernels.load_key(args, static_cast<char*>(keys.data()) + key * size * size_of(type),
                               floats(panel), key);
            kernels.load_query(args, 0, floats(query), floats(factors));
            kernels.score(args, floats(query), floats(factors), floats(panel), floats(scores[i]));
          }
          report.expect(scores[0].same(scores[1]),
                        text("%s scores of tokens type %d heads %ld size %ld finite %d", name, int(type),
                             long(heads), long(size), int(finite)));
        }
}

void test_blocks(const BlockSelectKernels& tested, const BlockSelectKernels& truth, const char* name,
                 Report& report) {
  Random random(72);
  for (DType type : kTypes)
    for (int64_t heads : {1, 2, 5})
      for (int64_t size : {1, 16, 29, 128})
        for (int64_t count : {int64_t(1), int64_t(7), kKeyRows})
          for (bool finite : {true, false}) {
            const int64_t width = round_up(size, 16);
            Values q(type, heads * size, random), keys(type, 2 * kKeyRows * size, random);
            if (!finite) q.set(size / 2, std::nanf("")), keys.set(3 * size, -INFINITY);
            keys.set((kKeyRows + count) * size - 1, std::nanf(""));  // of the last counted key
            Values maxima[2] = {Values(DType::f32, heads * 16), Values(DType::f32, heads * 16)};
            for (int i = 0; i < 2; ++i) {
              const BlockSelectKernels& kernels = i ? truth : tested;
              BlockSelectArgs args;
              args.q = q.rows(heads * size);
              args.key_type = type;
              args.heads = heads;
              args.head_size = args.head_stride = size;
              Values queries(DType::f32, heads * width);
              for (int64_t lane = 0; lane < heads * 16; ++lane) maxima[i].set(lane, -INFINITY);
              kernels.load_queries(args, 0, floats(queries));
              for (int64_t part = 0; part < 2; ++part)
                kernels.raise_maxima(args, floats(queries),
                                     static_cast<char*>(keys.data()) + part * kKeyRows * size * size_of(type),
                                     part == 0 ? kKeyRows : count, floats(maxima[i]));
            }
            report.expect(maxima[0].same(maxima[1]),
                          text("%s scores of blocks type %d heads %ld size %ld count %ld finite %d", name,
                               int(type), long(heads), long(size), long(count), int(finite)));
          }
}

}  // namespace

void test_select(const Variant& tested, const Variant& truth, Report& report) {
  test_tokens(*tested.select, *truth.select, tested.name, report);
  test_blocks(*tested.block_select, *truth.block_select, tested.name, report);
}

}  // namespace armllm_test
