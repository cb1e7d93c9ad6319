#include "select/select_blocks.h"

#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {

extern const BlockSelectKernels block_select;

namespace {

constexpr int kHeads = 2;  // heads that read a key together
constexpr int kKeys = 4;   // keys that read a query together: with the heads, the sums that stay in registers

template <typename T>
F32 load_some(const T* from, int64_t n) {
  return n < kLanes ? load_partial(from, static_cast<int>(n)) : load(from);
}

template <typename T>
void widen_row(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load_some(from + i, n - i));
}

void load_queries(const BlockSelectArgs& a, int64_t token, float* queries) {
  const int64_t width = (a.head_size + kLanes - 1) / kLanes * kLanes;
  for (int64_t h = 0; h < a.heads; ++h) {
    const void* from = a.q.at(token, h * a.head_stride);
    switch (a.q.type) {
      case DType::f32:
        widen_row(static_cast<const float*>(from), a.head_size, queries + h * width);
        break;
      case DType::bf16:
        widen_row(static_cast<const bf16*>(from), a.head_size, queries + h * width);
        break;
      case DType::f16:
        widen_row(static_cast<const f16*>(from), a.head_size, queries + h * width);
        break;
    }
  }
}

// Products of kCount heads with kKeys keys: lane 4·i + j of sums[h] is one of four sums of key i.
template <int kCount, typename T>
void multiply(const float* queries, int64_t width, const T* keys, int64_t size, F32* sums) {
  F32 products[kCount][kKeys];
  for (int h = 0; h < kCount; ++h)
    for (int k = 0; k < kKeys; ++k) products[h][k] = zero();
  for (int64_t d = 0; d < size; d += kLanes) {
    F32 key[kKeys];
    for (int k = 0; k < kKeys; ++k) key[k] = load_some(keys + k * size + d, size - d);
    for (int h = 0; h < kCount; ++h) {
      const F32 query = load(queries + h * width + d);
      for (int k = 0; k < kKeys; ++k) products[h][k] = fma(query, key[k], products[h][k]);
    }
  }
  for (int h = 0; h < kCount; ++h)
    sums[h] = add_pairs(add_pairs(products[h][0], products[h][1]), add_pairs(products[h][2], products[h][3]));
}

// Raises the maxima of one head.  Rows without NaN, nearly all, take one comparison.
void raise(F32 products, int64_t count, float* maxima) {
  F32 known = load(maxima);
  if (count < kLanes) products = select_first(static_cast<int>(count), products, known);
  if (greater_equal_mask(products, products) == 0xffff) {
    store(maxima, select_greater(products, known, products, known));
    return;
  }
  float lanes[kLanes];
  store(lanes, products);
  for (int i = 0; i < kLanes; ++i)
    if (maxima[i] == maxima[i] && !(lanes[i] <= maxima[i])) maxima[i] = lanes[i];
}

template <int kCount, typename T>
void raise_heads(const BlockSelectArgs& a, const float* queries, const T* keys, int64_t count,
                 float* maxima) {
  const int64_t width = (a.head_size + kLanes - 1) / kLanes * kLanes;
  F32 sums[kKeyRows / kKeys][kCount];
  for (int64_t i = 0; i < kKeyRows / kKeys; ++i)
    multiply<kCount>(queries, width, keys + i * kKeys * a.head_size, a.head_size, sums[i]);
  for (int h = 0; h < kCount; ++h) {
    const F32 products = add_pairs(add_pairs(sums[0][h], sums[1][h]), add_pairs(sums[2][h], sums[3][h]));
    raise(products, count, maxima + h * kLanes);
  }
}

template <typename T>
void raise_all(const BlockSelectArgs& a, const float* queries, const T* keys, int64_t count, float* maxima) {
  const int64_t width = (a.head_size + kLanes - 1) / kLanes * kLanes;
  int64_t h = 0;
  for (; h + kHeads <= a.heads; h += kHeads)
    raise_heads<kHeads>(a, queries + h * width, keys, count, maxima + h * kLanes);
  for (; h < a.heads; ++h) raise_heads<1>(a, queries + h * width, keys, count, maxima + h * kLanes);
}

void raise_maxima(const BlockSelectArgs& a, const float* queries, const void* keys, int64_t count,
                  float* maxima) {
  switch (a.key_type) {
    case DType::f32:
      return raise_all(a, queries, static_cast<const float*>(keys), count, maxima);
    case DType::bf16:
      return raise_all(a, queries, static_cast<const bf16*>(keys), count, maxima);
    case DType::f16:
      return raise_all(a, queries, static_cast<const f16*>(keys), count, maxima);
  }
}

}  // namespace

const BlockSelectKernels block_select = {load_queries, raise_maxima};

}  // namespace armllm::ARMLLM_VARIANT
