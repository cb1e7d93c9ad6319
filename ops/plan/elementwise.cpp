#include "plan/elementwise.h"

#include <algorithm>
#include <cstring>

#include "activation/activation.h"
#include "dispatch/variants.h"

namespace armllm {
namespace {
constexpr int64_t kRowsPerTile = 16;

template <class T>
void reorder(const void* in, const int32_t* permutation, void* out, int64_t width) {
  const T* from = static_cast<const T*>(in);
  T* to = static_cast<T*>(out);
  for (int64_t c = 0; c < width; ++c) to[c] = from[permutation[c]];
}
}  // namespace

int64_t Embedding::tiles(int) const { return ceil_div(args.tokens, kRowsPerTile); }

void Embedding::tile(int, int64_t index) {
  const int64_t bytes = args.width * size_of(args.out.type);
  const int64_t end = std::min(args.tokens, (index + 1) * kRowsPerTile);
  for (int64_t t = index * kRowsPerTile; t < end; ++t) {
    const int64_t id = args.ids[t];
    if (id < 0 || id >= args.vocab_size) {
      std::memset(args.out.row(t), 0, bytes);
    } else {
      std::memcpy(args.out.row(t), args.table.row(id), bytes);
    }
  }
}

int64_t Add::tiles(int) const { return ceil_div(args.rows, kRowsPerTile); }

void Add::tile(int, int64_t index) {
  const ActivationKernels& kernels = *variant().activation;
  const bool plain = args.a.data != nullptr && args.row_factor.data == nullptr && args.factor == 1.0f;
  const int64_t end = std::min(args.rows, (index + 1) * kRowsPerTile);
  for (int64_t r = index * kRowsPerTile; r < end; ++r) {
    const void* a = args.a.data == nullptr ? nullptr : args.a.row(r);
    if (plain) {
      kernels.add(a, args.b.row(r), args.out.row(r), args.out.type, args.width);
    } else {
      const void* row_factor = args.row_factor.data == nullptr ? nullptr : args.row_factor.row(r);
      add_scaled(a, args.b.row(r), row_factor, args.factor, args.out.row(r), args.out.type, args.width);
    }
  }
}

int64_t Reorder::tiles(int) const { return ceil_div(args.rows, kRowsPerTile); }

void Reorder::tile(int, int64_t index) {
  const int64_t end = std::min(args.rows, (index + 1) * kRowsPerTile);
  for (int64_t r = index * kRowsPerTile; r < end; ++r) {
    if (args.out.type == DType::f32) {
      reorder<uint32_t>(args.in.row(r), args.permutation, args.out.row(r), args.width);
    } else {
      reorder<uint16_t>(args.in.row(r), args.permutation, args.out.row(r), args.width);
    }
  }
}

}  // namespace armllm
