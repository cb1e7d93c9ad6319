#include "norm/norm.h"

#include "common/blocks.h"

namespace armllm::ARMLLM_VARIANT {

extern const NormKernels norm;

namespace {

// Four sums in flight hide the latency of the addition; which sum a value belongs to depends on its place alone.
struct Sums {
  F32 part[4] = {zero(), zero(), zero(), zero()};

  float total() const { return reduce_add((part[0] + part[1]) + (part[2] + part[3])); }
};

// The row that is normalised: x, or x + residual after it was rounded to the type and written to `sum`.
template <typename T>
const T* input(const NormArgs& args, int64_t row) {
  const T* x = reinterpret_cast<const T*>(args.part(args.x, row));
  if (!args.residual) return x;
  const T* residual = reinterpret_cast<const T*>(args.residual.row(row));
  T* sum = reinterpret_cast<T*>(args.sum.row(row));
  for_blocks(args.width, [&](int64_t i, int lanes) ARMLLM_INLINE {
    store_lanes(sum + i, load_lanes(x + i, lanes) + load_lanes(residual + i, lanes), lanes);
  });
  return sum;
}

template <typename T, typename W>
void scale(const T* x, const W* weight, const NormArgs& args, float factor, T* out) {
  const F32 inverse = set1(factor), offset = set1(args.weight_offset);
  for_blocks(args.width, [&](int64_t i, int lanes) ARMLLM_INLINE {
    const F32 y = (load_lanes(x + i, lanes) * inverse) * (load_lanes(weight + i, lanes) + offset);
    store_lanes(out + i, y, lanes);
  });
}

template <typename T>
void rms_row(const NormArgs& args, int64_t row) {
  const T* x = input<T>(args, row);
  Sums squares;
  for_blocks_in_parts(args.width, [&](int64_t i, int lanes, int part) ARMLLM_INLINE {
    const F32 v = load_lanes(x + i, lanes);
    squares.part[part] = fma(v, v, squares.part[part]);
  });
  const float mean = squares.total() / static_cast<float>(args.width);
  const float inverse = 1.0f / __builtin_sqrtf(mean + args.eps);
  T* out = reinterpret_cast<T*>(args.part(args.out, row));
  switch (args.weight_type) {
    case DType::f32:
      return scale(x, static_cast<const float*>(args.weight), args, inverse, out);
    case DType::bf16:
      return scale(x, static_cast<const bf16*>(args.weight), args, inverse, out);
    case DType::f16:
      return scale(x, static_cast<const f16*>(args.weight), args, inverse, out);
  }
}

// No weight is a weight of one, no bias a bias of zero.
template <typename T, typename W>
void scale_and_shift(const T* x, const W* weight, const W* bias, int64_t width, float mean, float factor,
                     T* out) {
  const F32 centre = set1(mean), inverse = set1(factor);
  for_blocks(width, [&](int64_t i, int lanes) ARMLLM_INLINE {
    F32 y = (load_lanes(x + i, lanes) - centre) * inverse;
    if (weight != nullptr) y = y * load_lanes(weight + i, lanes);
    if (bias != nullptr) y = y + load_lanes(bias + i, lanes);
    store_lanes(out + i, y, lanes);
  });
}

template <typename T>
void layer_row(const NormArgs& args, int64_t row) {
  const T* x = input<T>(args, row);
  Sums values, squares;
  for_blocks_in_parts(args.width, [&](int64_t i, int lanes, int part) ARMLLM_INLINE {
    values.part[part] = values.part[part] + load_lanes(x + i, lanes);
  });
  const float mean = values.total() / static_cast<float>(args.width);
  // A second pass: a mean of squares less the square of the mean would cancel.
  const F32 centre = set1(mean);
  for_blocks_in_parts(args.width, [&](int64_t i, int lanes, int part) ARMLLM_INLINE {
    F32 v = load_lanes(x + i, lanes) - centre;
    if (lanes != kLanes) v = select_first(lanes, v, zero());
    squares.part[part] = fma(v, v, squares.part[part]);
  });
  const float variance = squares.total() / static_cast<float>(args.width);
  const float inverse = 1.0f / __builtin_sqrtf(variance + args.eps);
  T* out = reinterpret_cast<T*>(args.part(args.out, row));
  const auto finish = [&](auto weight, auto bias) {
    scale_and_shift(x, weight, bias, args.width, mean, inverse, out);
  };
  switch (args.weight_type) {
    case DType::f32:
      return finish(static_cast<const float*>(args.weight), static_cast<const float*>(args.bias));
    case DType::bf16:
      return finish(static_cast<const bf16*>(args.weight), static_cast<const bf16*>(args.bias));
    case DType::f16:
      return finish(static_cast<const f16*>(args.weight), static_cast<const f16*>(args.bias));
  }
}

void rms(const NormArgs& args, int64_t row) {
  switch (args.x.type) {
    case DType::f32:
      return rms_row<float>(args, row);
    case DType::bf16:
      return rms_row<bf16>(args, row);
    case DType::f16:
      return rms_row<f16>(args, row);
  }
}

void layer(const NormArgs& args, int64_t row) {
  switch (args.x.type) {
    case DType::f32:
      return layer_row<float>(args, row);
    case DType::bf16:
      return layer_row<bf16>(args, row);
    case DType::f16:
      return layer_row<f16>(args, row);
  }
}

}  // namespace

const NormKernels norm = {rms, layer};

}  // namespace armllm::ARMLLM_VARIANT
