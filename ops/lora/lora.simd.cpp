#include "lora/lora.h"

#include <type_traits>

#include "simd/ragged_blocks.h"

namespace armllm::ARMLLM_VARIANT {

extern const LoraKernels lora;

namespace {

// Calls `run` with a null pointer of the type's C++ type.
template <typename Run>
inline void with_type(DType type, Run run) {
  switch (type) {
    case DType::f32:
      return run(static_cast<const float*>(nullptr));
    case DType::bf16:
      return run(static_cast<const bf16*>(nullptr));
    case DType::f16:
      return run(static_cast<const f16*>(nullptr));
  }
}

float* sums_of(const LoraArgs& args, int64_t row) {
  return static_cast<float*>(args.scratch) + row * args.most_rank;
}

template <typename X, typename W>
void shrink_as(const LoraArgs& args, const LoraGroup& group, int64_t first_rank, int64_t ranks) {
  const W* a[kLoraRanks];
  const W* slot = reinterpret_cast<const W*>(args.a) + group.slot * args.most_rank * args.in_features;
  for (int64_t r = 0; r < kLoraRanks; ++r)  // a ragged tile repeats its last rank, and drops the results
    a[r] = slot + (first_rank + (r < ranks ? r : ranks - 1)) * args.in_features;
  for (int64_t i = 0; i < group.count; ++i) {
    const X* x = reinterpret_cast<const X*>(args.x.row(group.rows[i]));
    F32 s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
    for_blocks(args.in_features, [&](int64_t k, int lanes) ARMLLM_INLINE {
      const F32 v = load_lanes(x + k, lanes);
      s0 = fma(v, load_lanes(a[0] + k, lanes), s0);
      s1 = fma(v, load_lanes(a[1] + k, lanes), s1);
      s2 = fma(v, load_lanes(a[2] + k, lanes), s2);
      s3 = fma(v, load_lanes(a[3] + k, lanes), s3);
    });
    const float sums[kLoraRanks] = {reduce_add(s0), reduce_add(s1), reduce_add(s2), reduce_add(s3)};
    for (int64_t r = 0; r < ranks; ++r) sums_of(args, group.rows[i])[first_rank + r] = sums[r];
  }
}

// Adds to Blocks × kLanes columns of one block of B, from `first` on, or to fewer than kLanes.
template <int Blocks, typename X, typename W>
ARMLLM_INLINE inline void add_columns(const LoraArgs& args, const LoraGroup& group, int64_t first,
                                      int lanes) {
  const int64_t block = group.slot * ceil_div(args.out_features, kLoraBlock) + first / kLoraBlock;
  const W* b = reinterpret_cast<const W*>(args.b) + block * args.most_rank * kLoraBlock + first % kLoraBlock;
  const int32_t rank = args.ranks[group.slot];
  for (int64_t i = 0; i < group.count; ++i) {
    const float* sums = sums_of(args, group.rows[i]);
    X* out = reinterpret_cast<X*>(args.out.at(group.rows[i], first));
    F32 added[Blocks];
    for (F32& sum : added) sum = zero();
    for (int32_t r = 0; r < rank; ++r) {
      const F32 sum = set1(sums[r]);
      const W* row = b + r * kLoraBlock;
      for (int n = 0; n < Blocks; ++n) added[n] = fma(sum, load_lanes(row + n * kLanes, lanes), added[n]);
    }
    for (int n = 0; n < Blocks; ++n)
      store_lanes(out + n * kLanes, load_lanes(out + n * kLanes, lanes) + added[n], lanes);
  }
}

template <typename X, typename W>
void expand_as(const LoraArgs& args, const LoraGroup& group, int64_t first_column, int64_t columns) {
  constexpr int64_t kWide = 4 * kLanes;
  static_assert(kWide == kLoraBlock && kLoraColumns % kLoraBlock == 0);
  const int64_t whole = columns / kWide * kWide;
  for (int64_t c = 0; c < whole; c += kWide) add_columns<4, X, W>(args, group, first_column + c, kLanes);
  for_blocks(columns - whole, [&](int64_t c, int lanes) ARMLLM_INLINE {
    add_columns<1, X, W>(args, group, first_column + whole + c, lanes);
  });
}

void shrink(const LoraArgs& args, const LoraGroup& group, int64_t first_rank, int64_t ranks) {
  with_type(args.x.type, [&](auto x) {
    with_type(args.type, [&](auto w) {
      shrink_as<std::remove_cv_t<std::remove_pointer_t<decltype(x)>>,
                std::remove_cv_t<std::remove_pointer_t<decltype(w)>>>(args, group, first_rank, ranks);
    });
  });
}

void expand(const LoraArgs& args, const LoraGroup& group, int64_t first_column, int64_t columns) {
  with_type(args.out.type, [&](auto x) {
    with_type(args.type, [&](auto w) {
      expand_as<std::remove_cv_t<std::remove_pointer_t<decltype(x)>>,
                std::remove_cv_t<std::remove_pointer_t<decltype(w)>>>(args, group, first_column, columns);
    });
  });
}

}  // namespace

const LoraKernels lora = {shrink, expand};

}  // namespace armllm::ARMLLM_VARIANT
