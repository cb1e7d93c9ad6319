#include "activation/activation.h"

#include "common/blocks.h"
#include "common/math.h"

namespace armllm::ARMLLM_VARIANT {

extern const ActivationKernels activation;

namespace {

constexpr float kDefaultLimit = 7.0f;  // gpt-oss'

template <typename T, typename Function>
inline void gate_row(const T* gate, const T* up, T* out, int64_t n, Function function) {
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE {
    store_lanes(out + i, function(load_lanes(gate + i, lanes), load_lanes(up + i, lanes)), lanes);
  });
}

template <typename T>
void gate_with(const T* gate, const T* up, T* out, int64_t n, Activation kind, float limit) {
  switch (kind) {
    case Activation::none:
      return gate_row(gate, up, out, n, [](F32 g, F32 u) ARMLLM_INLINE { return g * u; });
    case Activation::silu:
      return gate_row(gate, up, out, n, [](F32 g, F32 u) ARMLLM_INLINE { return silu(g) * u; });
    case Activation::gelu:
      return gate_row(gate, up, out, n, [](F32 g, F32 u) ARMLLM_INLINE { return gelu(g) * u; });
    case Activation::gelu_tanh:
      return gate_row(gate, up, out, n, [](F32 g, F32 u) ARMLLM_INLINE { return gelu_tanh(g) * u; });
    case Activation::relu:  // in this order of arguments a NaN stays
      return gate_row(gate, up, out, n, [](F32 g, F32 u) ARMLLM_INLINE { return max(zero(), g) * u; });
    case Activation::swiglu_clamped: {
      const F32 high = set1(limit), low = set1(-limit);
      return gate_row(gate, up, out, n, [high, low](F32 g, F32 u) ARMLLM_INLINE {
        g = min(high, g);
        u = max(low, min(high, u));
        return (u + set1(1.0f)) * (g * sigmoid(g * set1(1.702f)));
      });
    }
  }
}

void gated(const void* gate, const void* up, void* out, DType type, int64_t n, Activation kind) {
  switch (type) {
    case DType::f32:
      return gate_with(static_cast<const float*>(gate), static_cast<const float*>(up),
                       static_cast<float*>(out), n, kind, kDefaultLimit);
    case DType::bf16:
      return gate_with(static_cast<const bf16*>(gate), static_cast<const bf16*>(up), static_cast<bf16*>(out),
                       n, kind, kDefaultLimit);
    case DType::f16:
      return gate_with(static_cast<const f16*>(gate), static_cast<const f16*>(up), static_cast<f16*>(out), n,
                       kind, kDefaultLimit);
  }
}

void gated_f32(float* gate, const float* up, int64_t n, Activation kind, float limit) {
  gate_with(gate, up, gate, n, kind, limit);
}

template <typename T>
void add_rows(const void* a, const void* b, void* y, int64_t n) {
  gate_row(static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(y), n,
           [](F32 x, F32 z) ARMLLM_INLINE { return x + z; });
}

void add(const void* a, const void* b, void* y, DType type, int64_t n) {
  switch (type) {
    case DType::f32:
      return add_rows<float>(a, b, y, n);
    case DType::bf16:
      return add_rows<bf16>(a, b, y, n);
    case DType::f16:
      return add_rows<f16>(a, b, y, n);
  }
}

}  // namespace

const ActivationKernels activation = {gated, gated_f32, add};

}  // namespace armllm::ARMLLM_VARIANT
