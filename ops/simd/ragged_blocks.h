// Iteration over a row in blocks of sixteen lanes, the last of which may be ragged.
#pragma once

#include "simd/simd.h"

// GCC does not inline a lambda with several call sites, and its vector arguments would then pass through
// memory.
#define ARMLLM_INLINE __attribute__((always_inline))

namespace armllm::ARMLLM_VARIANT {
namespace {

template <typename T>
ARMLLM_INLINE inline F32 load_lanes(const T* p, int lanes) {
  return lanes == kLanes ? load(p) : load_partial(p, lanes);
}

template <typename T>
ARMLLM_INLINE inline void store_lanes(T* p, F32 v, int lanes) {
  if (lanes == kLanes) {
    store(p, v);
  } else {
    store_partial(p, v, lanes);
  }
}

// Calls visit(offset, lanes); `lanes` is kLanes except in the ragged block.
template <typename Visit>
ARMLLM_INLINE inline void for_blocks(int64_t n, Visit visit) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) visit(i, kLanes);
  if (i < n) visit(i, static_cast<int>(n - i));
}

// Calls visit(offset, lanes, part): whole block b belongs to part b % 4 and the ragged block to part 3, so
// that four sums are in flight.  Parts are literals at every call: a computed index would keep the sums in
// memory.
template <typename Visit>
ARMLLM_INLINE inline void for_blocks_in_parts(int64_t n, Visit visit) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    visit(i, kLanes, 0);
    visit(i + kLanes, kLanes, 1);
    visit(i + 2 * kLanes, kLanes, 2);
    visit(i + 3 * kLanes, kLanes, 3);
  }
  const int64_t whole = (n - i) / kLanes;
  if (whole > 0) visit(i, kLanes, 0);
  if (whole > 1) visit(i + kLanes, kLanes, 1);
  if (whole > 2) visit(i + 2 * kLanes, kLanes, 2);
  i += whole * kLanes;
  if (i < n) visit(i, static_cast<int>(n - i), 3);
}

}  // namespace
}  // namespace armllm::ARMLLM_VARIANT
