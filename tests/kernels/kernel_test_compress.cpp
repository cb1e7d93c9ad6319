// Compressed entries against the scalar kernels.
#include "compress/compress.h"
#include "kernel_test.h"

namespace armllm_test {

using namespace armllm;

void test_compress(const Variant& tested, const Variant& truth, Report& report) {
  Random random(73);
  for (DType type : kTypes)
    for (int64_t rows : {1, 4, 8, 37})
      for (int64_t size : {1, 16, 29, 128})
        for (bool finite : {true, false}) {
          Values kv(type, rows * size, random), gate(type, rows * size, random);
          Values bias(DType::f32, rows * size, random), weight(DType::f32, size, random);
          const int64_t pairs = size / 2;
          Values cos(type, pairs + 1, random), sin(type, pairs + 1, random);
          if (!finite) kv.set(size / 2, std::nanf("")), gate.set((rows - 1) * size, INFINITY);
          std::vector<const char*> values, gates;
          std::vector<const float*> biases;
          for (int64_t row = 0; row < rows; ++row) {
            values.push_back(static_cast<char*>(kv.data()) + row * size * size_of(type));
            gates.push_back(static_cast<char*>(gate.data()) + row * size * size_of(type));
            biases.push_back(bias.floats() + row * size);
          }
          Values out[2] = {Values(type, size), Values(type, size)};
          for (int i = 0; i < 2; ++i) {
            Values pooled(DType::f32, size);
            CompressPart part;
            part.kv = values.data(), part.gate = gates.data(), part.bias = biases.data();
            part.weight = weight.floats();
            part.cos = static_cast<char*>(cos.data()), part.sin = static_cast<char*>(sin.data());
            part.out = static_cast<char*>(out[i].data());
            part.pooled = pooled.floats();
            part.rows = rows, part.size = size, part.pairs = pairs;
            part.type = part.cos_type = part.sin_type = part.out_type = type;
            part.eps = 1e-6f;
            (i ? truth : tested).compress->compress(part);
          }
          report.expect(out[0].same(out[1]), text("%s entry type %d rows %ld size %ld finite %d", tested.name,
                                                  int(type), long(rows), long(size), int(finite)));
        }
}

}  // namespace armllm_test
