#include "pointwise/pointwise.h"

#include "simd/exp.h"
#include "simd/ragged_blocks.h"
#include "simd/softplus.h"

namespace armllm::ARMLLM_VARIANT {

extern const PointwiseKernels pointwise;

namespace {

// ln(x): x = m · 2^n with m around 1.  0 returns −∞, negative numbers NaN, ∞ stays ∞.
ARMLLM_INLINE inline F32 log(F32 x) {
  const F32 tiny = set1(1.17549435e-38f), large = set1(8388608.0f);
  const F32 scaled = select_greater(tiny, x, x * large, x);  // denormals
  const F32 shift = select_greater(tiny, x, set1(-23.0f), zero());
  const I32 offset = bits(scaled) - set1i(0x3f3504f3);  // of √½
  const I32 n = shift_right<23>(offset);
  const F32 m = from_bits(bits(scaled) - shift_left<23>(n));
  const F32 z = (m - set1(1.0f)) / (m + set1(1.0f)), count = to_float(n) + shift;
  const F32 result = fma(count, set1(0x1.62e4p-1f), fma(count, set1(0x1.7f7d1cp-20f), twice_atanh(z)));
  const F32 infinity = from_bits(set1i(0x7f800000)), nan = from_bits(set1i(0x7fc00000));
  const F32 positive = select_greater(infinity, x, result, x);  // ∞ and NaN
  return select_greater(x, zero(), positive, select_greater(zero(), x, nan, x + -infinity));
}

// e^x − 1.  The error of u = e^x cancels in (u − 1) / ln(u), as W. Kahan found.
ARMLLM_INLINE inline F32 expm1(F32 x) {
  const F32 one = set1(1.0f), u = exp(x), less = u - one;
  const F32 near = select_greater(abs(less), zero(), less * (x / log(u)), x);  // e^x may round to 1
  return select_greater(abs(x), set1(17.0f), less, near);                      // far from 0, nothing cancels
}

// ln(1 + x), by the same cancellation.
ARMLLM_INLINE inline F32 log1p(F32 x) {
  const F32 one = set1(1.0f), u = one + x, more = u - one;
  const F32 near = select_greater(abs(more), zero(), log(u) * (x / more), x);  // 1 + x may round to 1
  return select_greater(set1(1e7f), abs(x), near, log(u));
}

// The largest whole number up to x; larger numbers than 2^23, and NaN, stay as they are.
ARMLLM_INLINE inline F32 floor(F32 x) {
  const F32 bound = set1(8388608.0f), one = set1(1.0f);
  const F32 near = to_float(round_to_int(min(bound, max(-bound, x))));
  const F32 below = select_greater(near, x, near - one, near);
  return select_greater(bound, abs(x), below, x);
}

// Equal values, or NaN if one of them is.
ARMLLM_INLINE inline F32 either(F32 x, F32 y) { return from_bits(bits(x) | bits(y)); }

template <typename Function>
ARMLLM_INLINE inline void fill(float* out, int64_t n, Function function) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, function(i));
}

template <typename T>
void load_operand(const void* data, bool repeated, int64_t n, float* out) {
  const T* from = static_cast<const T*>(data);
  if (!repeated)
    return for_blocks(
        n, [&](int64_t i, int lanes) ARMLLM_INLINE { store(out + i, load_lanes(from + i, lanes)); });
  float one[kLanes];
  store(one, load_partial(from, 1));
  fill(out, n, [&](int64_t) ARMLLM_INLINE { return set1(one[0]); });
}

void load_whole_numbers(const void* data, bool repeated, int64_t n, float* out) {
  const int64_t* from = static_cast<const int64_t*>(data);
  float found[kProgramBlock] = {};
  for (int64_t i = 0; i < n; ++i) found[i] = static_cast<float>(from[repeated ? 0 : i]);
  fill(out, n, [&](int64_t i) ARMLLM_INLINE { return load(found + i); });
}

void load_operand(const PointwiseOperand& x, const void* data, bool repeated, int64_t n, float* out) {
  if (x.whole_numbers) return load_whole_numbers(data, repeated, n, out);
  switch (x.type) {
    case DType::f32:
      return load_operand<float>(data, repeated, n, out);
    case DType::bf16:
      return load_operand<bf16>(data, repeated, n, out);
    case DType::f16:
      return load_operand<f16>(data, repeated, n, out);
  }
}

template <typename T>
void store_result(const float* from, T* out, int64_t n) {
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE { store_lanes(out + i, load(from + i), lanes); });
}

void compute(const PointwiseStep& step, const float* a, const float* b, const float* c, int64_t n,
             float* out) {
  switch (step.op) {
    case PointwiseOp::number:
      return fill(out, n, [&](int64_t) ARMLLM_INLINE { return set1(step.number); });
    case PointwiseOp::add:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return load(a + i) + load(b + i); });
    case PointwiseOp::subtract:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return load(a + i) - load(b + i); });
    case PointwiseOp::multiply:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return load(a + i) * load(b + i); });
    case PointwiseOp::divide:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return load(a + i) / load(b + i); });
    case PointwiseOp::maximum:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE {
        const F32 x = load(a + i), y = load(b + i);
        return either(max(x, y), max(y, x));
      });
    case PointwiseOp::minimum:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE {
        const F32 x = load(a + i), y = load(b + i);
        return either(min(x, y), min(y, x));
      });
    case PointwiseOp::negate:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return -load(a + i); });
    case PointwiseOp::absolute:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return abs(load(a + i)); });
    case PointwiseOp::exp:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return exp(load(a + i)); });
    case PointwiseOp::log:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return log(load(a + i)); });
    case PointwiseOp::sqrt:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return sqrt(load(a + i)); });
    case PointwiseOp::sigmoid:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return sigmoid(load(a + i)); });
    case PointwiseOp::silu:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE {
        const F32 x = load(a + i);
        return x / (set1(1.0f) + exp(-x));
      });
    case PointwiseOp::gelu:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return gelu(load(a + i)); });
    case PointwiseOp::tanh:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return tanh(load(a + i)); });
    case PointwiseOp::softplus:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return softplus(load(a + i)); });
    case PointwiseOp::greater:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE {
        return select_greater(load(a + i), load(b + i), set1(1.0f), zero());
      });
    case PointwiseOp::expm1:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return expm1(load(a + i)); });
    case PointwiseOp::log1p:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return log1p(load(a + i)); });
    case PointwiseOp::floor:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE { return floor(load(a + i)); });
    case PointwiseOp::select:
      return fill(out, n, [&](int64_t i) ARMLLM_INLINE {
        return select_greater(load(a + i), zero(), load(b + i), load(c + i));
      });
  }
}

void store_result(DType type, const float* from, char* out, int64_t n) {
  switch (type) {
    case DType::f32:
      return store_result(from, reinterpret_cast<float*>(out), n);
    case DType::bf16:
      return store_result(from, reinterpret_cast<bf16*>(out), n);
    case DType::f16:
      return store_result(from, reinterpret_cast<f16*>(out), n);
  }
}

// Values that are the same for all columns are computed once, in the first and longest piece.
void run(const PointwiseBlock& block) {
  alignas(64) float values[kMostValues][kProgramBlock];
  const PointwiseArgs& args = *block.args;
  const int64_t operands = static_cast<int64_t>(args.operands.size()),
                steps = static_cast<int64_t>(args.steps.size());
  bool same[kMostValues];
  for (int64_t i = 0; i < operands; ++i) same[i] = block.repeated[i];
  for (int64_t i = 0; i < steps; ++i) {
    const PointwiseStep& s = args.steps[i];
    same[operands + i] = s.op == PointwiseOp::number || (same[s.a] && same[s.b] && same[s.c]);
  }
  for (int64_t begin = 0; begin < block.columns; begin += kProgramBlock) {
    const int64_t n = block.columns - begin < kProgramBlock ? block.columns - begin : kProgramBlock;
    for (int64_t i = 0; i < operands; ++i) {
      const PointwiseOperand& x = args.operands[i];
      const int64_t offset = same[i] ? 0 : begin * x.element_size();
      if (begin == 0 || !same[i]) load_operand(x, block.operands[i] + offset, same[i], n, values[i]);
    }
    for (int64_t i = 0; i < steps; ++i) {
      const PointwiseStep& s = args.steps[i];
      if (begin > 0 && same[operands + i]) continue;
      compute(s, values[s.a], values[s.b], values[s.c], n, values[operands + i]);
    }
    store_result(args.out_type, values[operands + steps - 1], block.out + begin * size_of(args.out_type), n);
  }
}

// Divides by their sums `size` lines of `size` vectors: entry i of line j is values[j · line + i · entry].
void divide_by_sums(F32* values, int64_t size, int64_t line, int64_t entry, F32 eps) {
  for (int64_t j = 0; j < size; ++j) {
    F32* first = values + j * line;
    F32 sum = first[0];
    for (int64_t i = 1; i < size; ++i) sum = sum + first[i * entry];
    const F32 factor = set1(1.0f) / (sum + eps);
    for (int64_t i = 0; i < size; ++i) first[i * entry] = first[i * entry] * factor;
  }
}

// Lanes are tokens; those without a token hold ones.
void sinkhorn(const SinkhornArgs& args, int64_t first, int64_t tokens) {
  const int64_t size = args.size, count = size * size;
  alignas(64) float lanes[kMostMatrixRows * kMostMatrixRows][kLanes];
  for (int64_t t = 0; t < kLanes; ++t) {
    const float* x = t < tokens ? reinterpret_cast<const float*>(args.x.row(first + t)) : nullptr;
    for (int64_t i = 0; i < count; ++i) lanes[i][t] = x == nullptr ? 1.0f : x[i];
  }
  F32 values[kMostMatrixRows * kMostMatrixRows];
  for (int64_t i = 0; i < count; ++i) values[i] = load(lanes[i]);
  const F32 eps = set1(args.eps);
  divide_by_sums(values, size, 1, size, eps);
  for (int64_t round = 0; round < args.rounds; ++round) {
    divide_by_sums(values, size, size, 1, eps);
    divide_by_sums(values, size, 1, size, eps);
  }
  for (int64_t i = 0; i < count; ++i) store(lanes[i], values[i]);
  for (int64_t t = 0; t < tokens; ++t) {
    float* out = reinterpret_cast<float*>(args.out.row(first + t));
    for (int64_t i = 0; i < count; ++i) out[i] = lanes[i][t];
  }
}

}  // namespace

const PointwiseKernels pointwise = {run, sinkhorn};

}  // namespace armllm::ARMLLM_VARIANT
