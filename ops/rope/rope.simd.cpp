#include "rope/rope.h"

#include "simd/simd.h"

namespace armllm::ARMLLM_VARIANT {

extern const RopeKernels rope;

namespace {

struct Pair {
  F32 a, b;
};

inline Pair turn(Pair x, F32 cos, F32 sin) { return {fnma(x.b, sin, x.a * cos), fma(x.a, sin, x.b * cos)}; }

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

template <typename T>
void rotate_pairs(T* x, int64_t half, const float* cos, const float* sin) {
  int64_t i = 0;
  Pair in;
  for (; i + kLanes <= half; i += kLanes) {
    load_pairs(x + 2 * i, in.a, in.b);
    const Pair y = turn(in, load(cos + i), load(sin + i));
    store_pairs(x + 2 * i, y.a, y.b);
  }
  if (i == half) return;
  const int pairs = static_cast<int>(half - i);
  T last[2 * kLanes] = {};
  __builtin_memcpy(last, x + 2 * i, 2 * pairs * sizeof(T));
  load_pairs(last, in.a, in.b);
  const Pair y = turn(in, load_partial(cos + i, pairs), load_partial(sin + i, pairs));
  store_pairs(last, y.a, y.b);
  __builtin_memcpy(x + 2 * i, last, 2 * pairs * sizeof(T));
}

template <typename T>
void rotate_unzipping(T* x, int64_t half, const float* cos, const float* sin) {
  T before[kMostUnzipped + 2 * kLanes];
  __builtin_memcpy(before, x, 2 * half * sizeof(T));
  __builtin_memset(before + 2 * half, 0, 2 * kLanes * sizeof(T));
  for (int64_t i = 0; i < half; i += kLanes) {
    const int lanes = static_cast<int>(half - i < kLanes ? half - i : kLanes);
    Pair in;
    load_pairs(before + 2 * i, in.a, in.b);
    const Pair y = turn(in, load_partial(cos + i, lanes), load_partial(sin + i, lanes));
    store_partial(x + i, y.a, lanes);
    store_partial(x + half + i, y.b, lanes);
  }
}

template <typename T>
void rotate_heads(T* x, int64_t heads, int64_t head_stride, int64_t half, const float* cos, const float* sin,
                  RopePairs pairs) {
  for (int64_t head = 0; head < heads; ++head, x += head_stride) {
    switch (pairs) {
      case RopePairs::halves:
        rotate_halves(x, half, cos, sin);
        break;
      case RopePairs::neighbors:
        rotate_pairs(x, half, cos, sin);
        break;
      case RopePairs::unzipped:
        rotate_unzipping(x, half, cos, sin);
        break;
    }
  }
}

void rotate(void* x, DType type, int64_t heads, int64_t head_stride, int64_t rotary, const float* cos,
            const float* sin, RopePairs pairs) {
  switch (type) {
    case DType::f32:
      return rotate_heads(static_cast<float*>(x), heads, head_stride, rotary / 2, cos, sin, pairs);
    case DType::bf16:
      return rotate_heads(static_cast<bf16*>(x), heads, head_stride, rotary / 2, cos, sin, pairs);
    case DType::f16:
      return rotate_heads(static_cast<f16*>(x), heads, head_stride, rotary / 2, cos, sin, pairs);
  }
}

}  // namespace

const RopeKernels rope = {rotate};

}  // namespace armllm::ARMLLM_VARIANT
