#include "lora/lora.h"

#include <algorithm>
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

// Calls `run` with a null pointer of the C++ type of the factors' numbers.
template <typename Run>
inline void with_factors(const LoraArgs& args, Run run) {
  if (args.integers) return run(static_cast<const LoraIntegers*>(nullptr));
  with_type(args.type, run);
}

float* sums_of(const LoraArgs& args, int64_t row) {
  return static_cast<float*>(args.scratch) + row * args.most_rank;
}

// Rows whose sums are in registers at once, so that a value of A or B is read and converted once for them.
#if defined(ARMLLM_VARIANT_avx512)
constexpr int kRowsAtOnce = 4;
constexpr int kOfRows = 4;  // ranks, or blocks of columns, of several rows at once
#else
constexpr int kRowsAtOnce = 2;
constexpr int kOfRows = 2;
#endif

// Numbers of a row of A, or of a row of a block of B, whose type is W.
template <typename W>
struct Factor {
  static constexpr int64_t kPerLine = 64 / sizeof(W);
  static const W* at(const char* row, int64_t column) { return reinterpret_cast<const W*>(row) + column; }
  ARMLLM_INLINE static F32 load(const char* row, int64_t column, int lanes) {
    return load_lanes(at(row, column), lanes);
  }
  // Of numbers that have no scale of their own; see below.
  ARMLLM_INLINE static F32 load_unscaled(const char* row, int64_t column, int lanes) {
    return load(row, column, lanes);
  }
  static float scaled(const char*, float value) { return value; }
};

// Integers are read as whole lanes: behind the last one of a row are zeros.
template <>
struct Factor<LoraIntegers> {
  static constexpr int64_t kPerLine = kLoraBlock;
  static const LoraIntegers& group(const char* row, int64_t column) {
    return reinterpret_cast<const LoraIntegers*>(row)[column / kLoraBlock];
  }
  static const int8_t* at(const char* row, int64_t column) {
    return group(row, column).values + column % kLoraBlock;
  }
  ARMLLM_INLINE static F32 load(const char* row, int64_t column, int) {
    return armllm::ARMLLM_VARIANT::load(at(row, column)) * set1(group(row, column).scale);
  }
  ARMLLM_INLINE static F32 load_unscaled(const char* row, int64_t column, int) {
    return armllm::ARMLLM_VARIANT::load(at(row, column));
  }
  // A value by the scale of a row of a block.
  static float scaled(const char* row, float value) { return value * group(row, 0).scale; }
};

// Prefetches what lies in the next tile where a row's column lies in this one, once for each cache line;
// `ahead` is null for none.
template <typename W>
ARMLLM_INLINE inline void prefetch(const char* ahead, const char* tile, const char* row, int64_t column) {
  constexpr int kToL2 = 2;
  if (ahead != nullptr && column % Factor<W>::kPerLine == 0)
    __builtin_prefetch(ahead + (reinterpret_cast<const char*>(Factor<W>::at(row, column)) - tile), 0, kToL2);
}

// Calls visit(first, std::integral_constant<int, n>) for n rows at a time.
template <typename Visit>
ARMLLM_INLINE inline void for_rows(int64_t count, Visit visit) {
  int64_t i = 0;
  for (; i + kRowsAtOnce <= count; i += kRowsAtOnce) visit(i, std::integral_constant<int, kRowsAtOnce>());
  if constexpr (kRowsAtOnce > 1)
    for (; i < count; ++i) visit(i, std::integral_constant<int, 1>());
}

// Of the rows a of A from the rank `first_rank` on; results past `ranks` are dropped.
template <int Tokens, int Ranks, typename X, typename W>
ARMLLM_INLINE inline void dot_ranks(const LoraArgs& args, const int32_t* rows, const int32_t* of_sums,
                                    const char* const* a, int64_t first_rank, int64_t ranks,
                                    const char* ahead) {
  const X* x[Tokens];
  F32 sums[Tokens][Ranks];
  for (int t = 0; t < Tokens; ++t) {
    x[t] = reinterpret_cast<const X*>(args.x.row(rows[t]));
    for (F32& sum : sums[t]) sum = zero();
  }
  for_blocks(args.in_features, [&](int64_t k, int lanes) ARMLLM_INLINE {
    F32 v[Ranks];
    for (int r = 0; r < Ranks; ++r) {
      v[r] = Factor<W>::load(a[r], k, lanes);
      prefetch<W>(ahead, a[0], a[r], k);
    }
    for (int t = 0; t < Tokens; ++t) {
      const F32 value = load_lanes(x[t] + k, lanes);
      for (int r = 0; r < Ranks; ++r) sums[t][r] = fma(value, v[r], sums[t][r]);
    }
  });
  for (int t = 0; t < Tokens; ++t) {
    float found[Ranks];
    for (int r = 0; r < Ranks; ++r) found[r] = reduce_add(sums[t][r]);
    for (int64_t r = 0; r < std::min<int64_t>(ranks, Ranks); ++r)
      sums_of(args, of_sums[t])[first_rank + r] = found[r];
  }
}

template <typename X, typename W>
void shrink_as(const LoraArgs& args, const LoraGroup& group, int64_t first_rank, int64_t ranks,
               const char* ahead) {
  const char* a[kLoraRanks];
  const int64_t bytes = args.row_bytes(args.in_features);
  const char* slot = args.a + group.slot * args.most_rank * bytes;
  for (int64_t r = 0; r < kLoraRanks; ++r)  // a ragged tile repeats its last rank, and drops the results
    a[r] = slot + (first_rank + (r < ranks ? r : ranks - 1)) * bytes;
  for_rows(group.count, [&](int64_t i, auto tokens) ARMLLM_INLINE {
    constexpr int kRanks = tokens == 1 ? int(kLoraRanks) : kOfRows;
    for (int r = 0; r < kLoraRanks && r < ranks; r += kRanks) {
      const char* there = i != 0 || ahead == nullptr ? nullptr : ahead + r * bytes;
      dot_ranks<tokens, kRanks, X, W>(args, group.rows + i, group.sums() + i, a + r, first_rank + r,
                                      ranks - r, there);
    }
  });
}

// Adds to Blocks × kLanes columns of the block b of B, from `first` on, or to fewer than kLanes.
template <int Tokens, int Blocks, typename X, typename W>
ARMLLM_INLINE inline void add_columns(const LoraArgs& args, const int32_t* rows, const char* b, int32_t rank,
                                      int64_t first, int lanes, const char* ahead) {
  const int64_t bytes = args.row_bytes(kLoraBlock);
  const float* sums[Tokens];
  F32 added[Tokens][Blocks];
  for (int t = 0; t < Tokens; ++t) {
    sums[t] = sums_of(args, rows[t]);
    for (F32& sum : added[t]) sum = zero();
  }
  for (int32_t r = 0; r < rank; ++r) {
    F32 v[Blocks];
    const char* row = b + r * bytes;
    for (int n = 0; n < Blocks; ++n) {
      const int64_t column = first % kLoraBlock + n * kLanes;
      v[n] = Factor<W>::load_unscaled(row, column, lanes);
      prefetch<W>(ahead, b, row, column);
    }
    for (int t = 0; t < Tokens; ++t) {
      const F32 sum = set1(Factor<W>::scaled(row, sums[t][r]));
      for (int n = 0; n < Blocks; ++n) added[t][n] = fma(sum, v[n], added[t][n]);
    }
  }
  for (int t = 0; t < Tokens; ++t) {
    X* out = reinterpret_cast<X*>(args.out.at(rows[t], first));
    for (int n = 0; n < Blocks; ++n)
      store_lanes(out + n * kLanes, load_lanes(out + n * kLanes, lanes) + added[t][n], lanes);
  }
}

template <int Blocks, typename X, typename W>
ARMLLM_INLINE inline void add_group(const LoraArgs& args, const LoraGroup& group, int64_t first, int lanes,
                                    const char* ahead) {
  const int64_t block = group.slot * ceil_div(args.out_features, kLoraBlock) + first / kLoraBlock;
  const char* b = args.b + block * args.most_rank * args.row_bytes(kLoraBlock);
  for_rows(group.count, [&](int64_t i, auto tokens) ARMLLM_INLINE {
    constexpr int kBlocks = tokens == 1 || Blocks < kOfRows ? Blocks : kOfRows;
    for (int n = 0; n < Blocks; n += kBlocks)
      add_columns<tokens, kBlocks, X, W>(args, group.rows + i, b, args.ranks[group.slot], first + n * kLanes,
                                         lanes, i == 0 ? ahead : nullptr);
  });
}

template <typename X, typename W>
void expand_as(const LoraArgs& args, const LoraGroup& group, int64_t first_column, int64_t columns,
               const char* ahead) {
  constexpr int64_t kWide = 4 * kLanes;
  static_assert(kWide == kLoraBlock && kLoraColumns % kLoraBlock == 0);
  const int64_t whole = columns / kWide * kWide;
  for (int64_t c = 0; c < whole; c += kWide) {
    const char* block =
        ahead == nullptr ? nullptr : ahead + c / kLoraBlock * args.most_rank * args.row_bytes(kLoraBlock);
    add_group<4, X, W>(args, group, first_column + c, kLanes, block);
  }
  for_blocks(columns - whole, [&](int64_t c, int lanes) ARMLLM_INLINE {
    add_group<1, X, W>(args, group, first_column + whole + c, lanes, nullptr);
  });
}

template <typename W>
void look_up_as(const LoraArgs& args, const LoraGroup& group) {
  const W* table = reinterpret_cast<const W*>(args.table) + group.slot * args.vocab_size * args.most_rank;
  for (int64_t i = 0; i < group.count; ++i) {
    const int32_t row = group.rows[i];
    const W* from = table + args.ids[row] * args.most_rank;
    float* to = sums_of(args, row);
    for_blocks(args.ranks[group.slot], [&](int64_t r, int lanes) ARMLLM_INLINE {
      store_lanes(to + r, load_lanes(from + r, lanes), lanes);
    });
  }
}

void look_up(const LoraArgs& args, const LoraGroup& group) {
  with_type(args.table_type,
            [&](auto w) { look_up_as<std::remove_cv_t<std::remove_pointer_t<decltype(w)>>>(args, group); });
}

void shrink(const LoraArgs& args, const LoraGroup& group, int64_t first_rank, int64_t ranks,
            const char* ahead) {
  with_type(args.x.type, [&](auto x) {
    with_factors(args, [&](auto w) {
      shrink_as<std::remove_cv_t<std::remove_pointer_t<decltype(x)>>,
                std::remove_cv_t<std::remove_pointer_t<decltype(w)>>>(args, group, first_rank, ranks, ahead);
    });
  });
}

void expand(const LoraArgs& args, const LoraGroup& group, int64_t first_column, int64_t columns,
            const char* ahead) {
  with_type(args.out.type, [&](auto x) {
    with_factors(args, [&](auto w) {
      expand_as<std::remove_cv_t<std::remove_pointer_t<decltype(x)>>,
                std::remove_cv_t<std::remove_pointer_t<decltype(w)>>>(args, group, first_column, columns,
                                                                      ahead);
    });
  });
}

}  // namespace

const LoraKernels lora = {shrink, look_up, expand};

}  // namespace armllm::ARMLLM_VARIANT
