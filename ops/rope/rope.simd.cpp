#include "rope/rope.h"

#include "common/simd.h"

namespace armllm::ARMLLM_VARIANT {

extern const RopeKernels rope;

namespace {

struct Pair {
  F32 a, b;
};

inline Pair turn(Pair x, F32 cos, F32 sin) { return {fma(x.a, cos, -(x.b * sin)), fma(x.b, cos, x.a * sin)}; }

template <typename T>
void rotate_halves(T* x, int64_t half, const float* cos, const float* sin) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Pair y = turn({load(x + i), load(x + half + i)}, load(cos + i), load(sin + i));
    store(x + i, y.a);
    store(x + half + i, y.b);
  }
  if (i == half) return;
  const int lanes = static_cast<int>(half - i);
  const Pair y = turn({load_partial(x + i, lanes), load_partial(x + half + i, lanes)},
                      load_partial(cos + i, lanes), load_partial(sin + i, lanes));
  store_partial(x + i, y.a, lanes);
  store_partial(x + half + i, y.b, lanes);
}

// Even and odd places of 32 values that lie one after the other.
inline Pair split(F32 first, F32 second) {
  float mixed[2 * kLanes], even[kLanes], odd[kLanes];
  store(mixed, first);
  store(mixed + kLanes, second);
  for (int i = 0; i < kLanes; ++i) {
    even[i] = mixed[2 * i];
    odd[i] = mixed[2 * i + 1];
  }
  return {load(even), load(odd)};
}

inline Pair merge(F32 even_lanes, F32 odd_lanes) {
  float mixed[2 * kLanes], even[kLanes], odd[kLanes];
  store(even, even_lanes);
  store(odd, odd_lanes);
  for (int i = 0; i < kLanes; ++i) {
    mixed[2 * i] = even[i];
    mixed[2 * i + 1] = odd[i];
  }
  return {load(mixed), load(mixed + kLanes)};
}

template <typename T>
void rotate_pairs(T* x, int64_t half, const float* cos, const float* sin) {
  for (int64_t i = 0; i < half; i += kLanes, x += 2 * kLanes) {
    const int pairs = half - i < kLanes ? static_cast<int>(half - i) : kLanes;
    const int first = 2 * pairs < kLanes ? 2 * pairs : kLanes, second = 2 * pairs - first;
    const Pair in = split(load_partial(x, first), load_partial(x + (second > 0 ? kLanes : 0), second));
    const Pair y = turn(in, load_partial(cos + i, pairs), load_partial(sin + i, pairs));
    const Pair out = merge(y.a, y.b);
    store_partial(x, out.a, first);
    if (second > 0) store_partial(x + kLanes, out.b, second);
  }
}

template <typename T>
void rotate_heads(T* x, int64_t heads, int64_t head_size, int64_t half, const float* cos, const float* sin,
                  bool interleaved) {
  for (int64_t head = 0; head < heads; ++head, x += head_size) {
    if (interleaved) {
      rotate_pairs(x, half, cos, sin);
    } else {
      rotate_halves(x, half, cos, sin);
    }
  }
}

void rotate(void* x, DType type, int64_t heads, int64_t head_size, int64_t rotary, const float* cos,
            const float* sin, bool interleaved) {
  switch (type) {
    case DType::f32:
      return rotate_heads(static_cast<float*>(x), heads, head_size, rotary / 2, cos, sin, interleaved);
    case DType::bf16:
      return rotate_heads(static_cast<bf16*>(x), heads, head_size, rotary / 2, cos, sin, interleaved);
    case DType::f16:
      return rotate_heads(static_cast<f16*>(x), heads, head_size, rotary / 2, cos, sin, interleaved);
  }
}

}  // namespace

const RopeKernels rope = {rotate};

}  // namespace armllm::ARMLLM_VARIANT
