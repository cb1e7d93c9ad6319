#include "activation/activation.h"

#include "simd/exp.h"
#include "simd/ragged_blocks.h"
#include "simd/sigmoid.h"

namespace armllm::ARMLLM_VARIANT {

extern const ActivationKernels activation;

namespace {

constexpr float kDefaultLimit = 7.0f;  // as in gpt-oss

template <typename T, typename Function>
inline void gate_row(const T* gate, const T* up, T* out, int64_t n, Function function) {
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE {
    store_lanes(out + i, function(load_lanes(gate + i, lanes), load_lanes(up + i, lanes)), lanes);
  });
}

// Calls `run` with the function (gate, up) → result for `kind`, in the accuracy that a result of type T
// needs.
template <typename T, typename Run>
inline void with_function(Activation kind, float limit, float up_limit, Run run) {
  constexpr Accuracy accuracy = AccuracyOf<T>::value;
  switch (kind) {
    case Activation::none:
      return run([](F32 g, F32 u) ARMLLM_INLINE { return g * u; });
    case Activation::silu:
      return run([](F32 g, F32 u) ARMLLM_INLINE { return silu_times<accuracy>(g, u); });
    case Activation::gelu:
      if (accuracy == Accuracy::f32) return run([](F32 g, F32 u) ARMLLM_INLINE { return gelu(g) * u; });
      return run([](F32 g, F32 u) ARMLLM_INLINE { return gelu_times<accuracy>(g, u); });
    case Activation::gelu_tanh:
      return run([](F32 g, F32 u) ARMLLM_INLINE { return gelu_tanh_times<accuracy>(g, u); });
    case Activation::relu:  // this order of arguments to max propagates NaN
      return run([](F32 g, F32 u) ARMLLM_INLINE { return max(zero(), g) * u; });
    case Activation::swiglu_clamped: {
      const F32 high = set1(limit), low = set1(-limit);
      return run([high, low](F32 g, F32 u) ARMLLM_INLINE {
        g = min(high, g);
        u = max(low, min(high, u));
        return times_sigmoid<accuracy>((u + set1(1.0f)) * clamp_exp_floor(g),
                                       clamp_exp_floor(g * set1(1.702f)));
      });
    }
    case Activation::silu_clamped: {
      const F32 high = set1(limit), low = set1(-limit);
      return run([high, low](F32 g, F32 u)
                     ARMLLM_INLINE { return silu_times<accuracy>(min(high, g), max(low, min(high, u))); });
    }
    case Activation::silu_softcapped: {
      const F32 gate_cap = set1(limit), up_cap = set1(up_limit);
      return run([gate_cap, up_cap](F32 g, F32 u) ARMLLM_INLINE {
        const F32 y = gate_cap * tanh(g / gate_cap) * (up_cap * tanh(u / up_cap));
        return times_sigmoid<accuracy>(y, clamp_exp_floor(g));
      });
    }
  }
}

template <typename T>
void gate_with(const T* gate, const T* up, T* out, int64_t n, Activation kind, float limit) {
  with_function<T>(kind, limit, limit, [&](auto function) { gate_row(gate, up, out, n, function); });
}

inline F32 load_as(const void* p, DType type, int64_t i, int lanes) {
  switch (type) {
    case DType::bf16:
      return load_lanes(static_cast<const bf16*>(p) + i, lanes);
    case DType::f16:
      return load_lanes(static_cast<const f16*>(p) + i, lanes);
    default:
      return load_lanes(static_cast<const float*>(p) + i, lanes);
  }
}

template <typename T>
void finish_panels(const GatedPanels& p, T* out) {
  const F32 scale = set1(p.scale);
  with_function<T>(p.activation, p.limit, p.up_limit, [&](auto function) {
    for_blocks(p.n, [&](int64_t i, int lanes) ARMLLM_INLINE {
      F32 gate = load(p.acc + 2 * i) * scale, up = load(p.acc + 2 * i + kLanes) * scale;
      if (p.gate_bias != nullptr) gate = gate + load_as(p.gate_bias, p.bias_type, i, lanes);
      if (p.up_bias != nullptr) up = up + load_as(p.up_bias, p.bias_type, i, lanes);
      store_lanes(out + i, function(gate, up), lanes);
    });
  });
}

void gated_panels(const GatedPanels& p, void* out, DType type) {
  switch (type) {
    case DType::f32:
      return finish_panels(p, static_cast<float*>(out));
    case DType::bf16:
      return finish_panels(p, static_cast<bf16*>(out));
    case DType::f16:
      return finish_panels(p, static_cast<f16*>(out));
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

const ActivationKernels activation = {gated, gated_panels, add};

}  // namespace armllm::ARMLLM_VARIANT
