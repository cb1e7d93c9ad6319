#include "norm/norm.h"

#include "simd/ragged_blocks.h"

namespace armllm::ARMLLM_VARIANT {

extern const NormKernels norm;

namespace {

// Four independent sums hide the latency of the addition.  The sum of a value depends only on its column.
struct Sums {
  F32 part[4];

  Sums() : part{zero(), zero(), zero(), zero()} {}  // GCC's pragma target passes over implicit constructors

  float total() const { return reduce_add((part[0] + part[1]) + (part[2] + part[3])); }
};

// Calls make(x, y, even, odd) for every 32 values of two rows and stores `even` and `odd`.
template <typename Make>
ARMLLM_INLINE inline void for_pairs(const bf16* x, const bf16* y, bf16* out, int64_t n, Make make) {
  constexpr int64_t kPairs = 2 * kLanes;
  F32 even, odd;
  int64_t i = 0;
  for (; i + kPairs <= n; i += kPairs) {
    make(x + i, y + i, even, odd);
    store_pairs(out + i, even, odd);
  }
  if (i == n) return;
  const size_t bytes = (n - i) * sizeof(bf16);
  bf16 last[kPairs] = {}, other[kPairs] = {};
  __builtin_memcpy(last, x + i, bytes);
  __builtin_memcpy(other, y + i, bytes);
  make(last, other, even, odd);
  store_pairs(last, even, odd);
  __builtin_memcpy(out + i, last, bytes);
}

// Adds n values to the sums.  Their first column is a multiple of 64.  float32 and float16 are processed in
// blocks of 16, bfloat16 in pairs, because Arm sums products of bfloat16 pairs without widening.
template <typename T, typename Add, typename AddPairs>
ARMLLM_INLINE inline void accumulate(Sums& sums, const T* x, int64_t n, Add add, AddPairs) {
  for_blocks_in_parts(n, [&](int64_t i, int lanes, int part) ARMLLM_INLINE {
    sums.part[part] = add(load_lanes(x + i, lanes), sums.part[part]);
  });
}
template <typename Add, typename AddPairs>
ARMLLM_INLINE inline void accumulate(Sums& sums, const bf16* x, int64_t n, Add, AddPairs add_pairs) {
  constexpr int64_t kPairs = 2 * kLanes;
  int64_t i = 0;
  for (; i + 2 * kPairs <= n; i += 2 * kPairs) {
    add_pairs(x + i, sums.part[0], sums.part[1]);
    add_pairs(x + i + kPairs, sums.part[2], sums.part[3]);
  }
  if (i + kPairs <= n) {
    add_pairs(x + i, sums.part[0], sums.part[1]);
    i += kPairs;
  }
  if (i < n) {
    bf16 last[kPairs] = {};
    __builtin_memcpy(last, x + i, (n - i) * sizeof(bf16));
    add_pairs(last, sums.part[2], sums.part[3]);
  }
}
template <typename T>
ARMLLM_INLINE inline void accumulate_squares(Sums& sums, const T* x, int64_t n) {
  accumulate(
      sums, x, n, [](F32 v, F32 sum) ARMLLM_INLINE { return fma(v, v, sum); },
      [](const T* p, F32& even, F32& odd) ARMLLM_INLINE { add_squares(p, even, odd); });
}
template <typename T>
ARMLLM_INLINE inline void accumulate_values(Sums& sums, const T* x, int64_t n) {
  accumulate(
      sums, x, n, [](F32 v, F32 sum) ARMLLM_INLINE { return v + sum; },
      [](const T* p, F32& even, F32& odd) ARMLLM_INLINE { add_values(p, even, odd); });
}

template <typename T>
ARMLLM_INLINE inline void add_row(const T* x, const T* residual, T* sum, int64_t n) {
  for_blocks(n, [&](int64_t i, int lanes) ARMLLM_INLINE {
    store_lanes(sum + i, load_lanes(x + i, lanes) + load_lanes(residual + i, lanes), lanes);
  });
}
ARMLLM_INLINE inline void add_row(const bf16* x, const bf16* residual, bf16* sum, int64_t n) {
  for_pairs(x, residual, sum, n, [](const bf16* a, const bf16* b, F32& even, F32& odd) ARMLLM_INLINE {
    sum_pairs(a, b, even, odd);
  });
}

// Calls visit(first, count) for the pieces of the row to normalize and returns that row.  The row is x, or
// x + residual, rounded to T and written to `sum`.
template <typename T, typename Visit>
ARMLLM_INLINE inline const T* walk(const NormArgs& args, int64_t row, Visit visit) {
  const T* x = reinterpret_cast<const T*>(args.part(args.x, row));
  if (!args.residual) {
    visit(x, args.width);
    return x;
  }
  // Short enough to still be in L1 when visit reads it, long enough that its stores are complete by then.
  constexpr int64_t kPiece = 512;
  const T* residual = reinterpret_cast<const T*>(args.residual.row(row));
  T* sum = reinterpret_cast<T*>(args.sum.row(row));
  for (int64_t first = 0; first < args.width; first += kPiece) {
    const int64_t count = args.width - first < kPiece ? args.width - first : kPiece;
    add_row(x + first, residual + first, sum + first, count);
    visit(static_cast<const T*>(sum + first), count);
  }
  return sum;
}

template <typename T, typename W>
void scale(const T* x, const W* weight, const NormArgs& args, float factor, T* out) {
  const F32 inverse = set1(factor), offset = set1(args.weight_offset);
  if (args.weight_offset == 0.0f) {
    for_blocks(args.width, [&](int64_t i, int lanes) ARMLLM_INLINE {
      store_lanes(out + i, (load_lanes(x + i, lanes) * inverse) * load_lanes(weight + i, lanes), lanes);
    });
    return;
  }
  for_blocks(args.width, [&](int64_t i, int lanes) ARMLLM_INLINE {
    const F32 y = (load_lanes(x + i, lanes) * inverse) * (load_lanes(weight + i, lanes) + offset);
    store_lanes(out + i, y, lanes);
  });
}

// Multiplies x by weight first: products of bfloat16 are exact, and Arm computes them without widening.
void scale(const bf16* x, const bf16* weight, const NormArgs& args, float factor, bf16* out) {
  if (args.weight_offset != 0.0f) return scale<bf16, bf16>(x, weight, args, factor, out);
  const F32 inverse = set1(factor);
  for_pairs(x, weight, out, args.width, [&](const bf16* a, const bf16* b, F32& even, F32& odd) ARMLLM_INLINE {
    multiply_pairs(a, b, even, odd);
    even = even * inverse;
    odd = odd * inverse;
  });
}

template <typename T>
void rms_row(const NormArgs& args, int64_t row) {
  Sums squares;
  const T* x = walk<T>(
      args, row, [&](const T* piece, int64_t n) ARMLLM_INLINE { accumulate_squares(squares, piece, n); });
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

// Without weight the factor is 1; without bias the term is 0.
template <typename T, typename W>
void scale_and_shift(const T* x, const W* weight, const W* bias, int64_t width, float mean, float factor,
                     T* out) {
  const F32 center = set1(mean), inverse = set1(factor);
  if (weight != nullptr && bias != nullptr) {
    for_blocks(width, [&](int64_t i, int lanes) ARMLLM_INLINE {
      const F32 y = (load_lanes(x + i, lanes) - center) * inverse;
      store_lanes(out + i, fma(y, load_lanes(weight + i, lanes), load_lanes(bias + i, lanes)), lanes);
    });
    return;
  }
  for_blocks(width, [&](int64_t i, int lanes) ARMLLM_INLINE {
    F32 y = (load_lanes(x + i, lanes) - center) * inverse;
    if (weight != nullptr) y = y * load_lanes(weight + i, lanes);
    if (bias != nullptr) y = y + load_lanes(bias + i, lanes);
    store_lanes(out + i, y, lanes);
  });
}

template <typename T>
void layer_row(const NormArgs& args, int64_t row) {
  Sums values, squares;
  const T* x = walk<T>(args, row,
                       [&](const T* piece, int64_t n) ARMLLM_INLINE { accumulate_values(values, piece, n); });
  const float mean = values.total() / static_cast<float>(args.width);
  // A second pass, because E[x²] − E[x]² would cancel.
  const F32 center = set1(mean);
  for_blocks_in_parts(args.width, [&](int64_t i, int lanes, int part) ARMLLM_INLINE {
    F32 v = load_lanes(x + i, lanes) - center;
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
