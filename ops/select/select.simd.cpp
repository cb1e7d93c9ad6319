#include "select/select.h"

#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {

extern const SelectKernels select;

namespace {

constexpr int kHeads = 4;    // heads that read a key together
constexpr int kVectors = 2;  // vectors of keys: with the heads, the sums that stay in registers

template <typename T>
void widen_row(const T* from, int64_t n, float* to, int64_t step) {
  float lanes[kLanes];
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    store(lanes, load_partial(from + i, count));
    for (int lane = 0; lane < count; ++lane) to[(i + lane) * step] = lanes[lane];
  }
}

void widen_any(const void* from, DType type, int64_t n, float* to, int64_t step) {
  switch (type) {
    case DType::f32:
      return widen_row(static_cast<const float*>(from), n, to, step);
    case DType::bf16:
      return widen_row(static_cast<const bf16*>(from), n, to, step);
    case DType::f16:
      return widen_row(static_cast<const f16*>(from), n, to, step);
  }
}

void load_key(const SelectArgs& a, const void* key, float* panel, int64_t column) {
  widen_any(key, a.key_type, a.head_size, panel + column, kScored);
}

void load_query(const SelectArgs& a, int64_t token, float* query, float* weights) {
  for (int64_t h = 0; h < a.heads; ++h)
    widen_any(a.q.at(token, h * a.head_stride), a.q.type, a.head_size, query + h * a.head_size, 1);
  widen_any(a.weights.row(token), a.weights.type, a.heads, weights, 1);
}

// Adds the scores of some heads and of kVectors vectors of keys.
template <int kCount>
void add_heads(const SelectArgs& a, const float* query, const float* weights, const float* keys, F32* sums) {
  F32 products[kCount][kVectors];
  for (int h = 0; h < kCount; ++h)
    for (int v = 0; v < kVectors; ++v) products[h][v] = zero();
  for (int64_t d = 0; d < a.head_size; ++d) {
    F32 key[kVectors];
    for (int v = 0; v < kVectors; ++v) key[v] = load(keys + d * kScored + v * kLanes);
    for (int h = 0; h < kCount; ++h) {
      const F32 q = set1(query[h * a.head_size + d]);
      for (int v = 0; v < kVectors; ++v) products[h][v] = fma(q, key[v], products[h][v]);
    }
  }
  for (int h = 0; h < kCount; ++h)
    for (int v = 0; v < kVectors; ++v) {
      const F32 product = products[h][v] * set1(a.scale);
      const F32 positive = select_greater(zero(), product, zero(), product);  // keeps NaN, as relu does
      sums[v] = fma(set1(weights[h]), positive, sums[v]);
    }
}

void score(const SelectArgs& a, const float* query, const float* weights, const float* panel, float* scores) {
  for (int64_t i = 0; i < kScored; i += kVectors * kLanes) {
    F32 sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = zero();
    int64_t h = 0;
    for (; h + kHeads <= a.heads; h += kHeads)
      add_heads<kHeads>(a, query + h * a.head_size, weights + h, panel + i, sums);
    for (; h < a.heads; ++h) add_heads<1>(a, query + h * a.head_size, weights + h, panel + i, sums);
    for (int v = 0; v < kVectors; ++v) store(scores + i + v * kLanes, sums[v]);
  }
}

}  // namespace

const SelectKernels select = {load_key, load_query, score};

}  // namespace armllm::ARMLLM_VARIANT
