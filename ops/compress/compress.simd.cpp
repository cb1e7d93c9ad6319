#include "compress/compress.h"

#include "simd/exp.h"
#include "simd/ragged_blocks.h"

namespace armllm::ARMLLM_VARIANT {

extern const CompressKernels compress;

namespace {

// Σ softmax(gate + bias) · kv of each channel.
template <typename T>
void pool(const CompressPart& p) {
  for_blocks(p.size, [&](int64_t i, int lanes) ARMLLM_INLINE {
    const auto gate = [&](int64_t row) ARMLLM_INLINE {
      return load_lanes(reinterpret_cast<const T*>(p.gate[row]) + i, lanes) +
             load_lanes(p.bias[row] + i, lanes);
    };
    F32 most = gate(0);
    for (int64_t row = 1; row < p.rows; ++row) most = max(gate(row), most);
    F32 total = zero(), sum = zero();
    for (int64_t row = 0; row < p.rows; ++row) {
      const F32 weight = exp(gate(row) - most);
      total = total + weight;
      sum = fma(weight, load_lanes(reinterpret_cast<const T*>(p.kv[row]) + i, lanes), sum);
    }
    store_lanes(p.pooled + i, sum / total, lanes);
  });
}

void normalize(const CompressPart& p) {
  F32 squares = zero();
  for_blocks(p.size, [&](int64_t i, int lanes) ARMLLM_INLINE {
    const F32 x = load_lanes(p.pooled + i, lanes);
    squares = fma(x, x, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(p.size);
  const F32 factor = set1(1.0f / __builtin_sqrtf(mean + p.eps));
  for_blocks(p.size, [&](int64_t i, int lanes) ARMLLM_INLINE {
    store_lanes(p.pooled + i, load_lanes(p.weight + i, lanes) * (load_lanes(p.pooled + i, lanes) * factor),
                lanes);
  });
}

float element(const char* row, DType type, int64_t i) {
  float lanes[kLanes];
  switch (type) {
    case DType::f32:
      return reinterpret_cast<const float*>(row)[i];
    case DType::bf16:
      store(lanes, load_partial(reinterpret_cast<const bf16*>(row) + i, 1));
      break;
    case DType::f16:
      store(lanes, load_partial(reinterpret_cast<const f16*>(row) + i, 1));
      break;
  }
  return lanes[0];
}

// Rotates the adjacent pairs of the last channels.
void rotate(const CompressPart& p) {
  float* last = p.pooled + p.size - 2 * p.pairs;
  for (int64_t i = 0; i < p.pairs; ++i) {
    const float cos = element(p.cos, p.cos_type, i), sin = element(p.sin, p.sin_type, i);
    const float even = last[2 * i], odd = last[2 * i + 1];
    last[2 * i] = even * cos - odd * sin;
    last[2 * i + 1] = odd * cos + even * sin;
  }
}

template <typename T>
void write(const CompressPart& p) {
  T* out = reinterpret_cast<T*>(p.out);
  for_blocks(p.size, [&](int64_t i, int lanes)
                         ARMLLM_INLINE { store_lanes(out + i, load_lanes(p.pooled + i, lanes), lanes); });
}

// Calls one of a template's instances for the three types of floats.
#define ARMLLM_BY_TYPE(type, function) \
  switch (type) {                      \
    case DType::f32:                   \
      function<float>(p);              \
      break;                           \
    case DType::bf16:                  \
      function<bf16>(p);               \
      break;                           \
    case DType::f16:                   \
      function<f16>(p);                \
      break;                           \
  }

void compress_window(const CompressPart& p) {
  ARMLLM_BY_TYPE(p.type, pool)
  normalize(p);
  rotate(p);
  ARMLLM_BY_TYPE(p.out_type, write)
}

}  // namespace

const CompressKernels compress = {compress_window};

}  // namespace armllm::ARMLLM_VARIANT
