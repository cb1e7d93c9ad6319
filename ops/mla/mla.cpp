#include "mla/mla.h"

#include <algorithm>
#include <cstring>

#include "dispatch/variants.h"

namespace armllm {
namespace {

constexpr int64_t kTokens = 16;  // per tile of LatentWrite
constexpr int64_t kRows = 64;    // query rows per tile of the phase that joins queries

int64_t query_rows(const LatentAttention& set) {
  return set.attention.args.tokens * set.attention.args.q_heads;
}

}  // namespace

int64_t LatentAttention::tiles(int phase) const {
  if (phase > 0) return attention.tiles(phase - 1);
  return joined == nullptr ? 0 : ceil_div(query_rows(*this), kRows);
}

void LatentAttention::tile(int phase, int64_t index) {
  if (phase > 0) return attention.tile(phase - 1, index);
  const int64_t heads = attention.args.q_heads, element = size_of(attention.args.q.type);
  const int64_t end = std::min(query_rows(*this), (index + 1) * kRows);
  for (int64_t row = index * kRows; row < end; ++row) {
    char* to = static_cast<char*>(joined) + row * (latent.size + rope.size) * element;
    std::memcpy(to, latent.at(row / heads, row % heads, element), latent.size * element);
    std::memcpy(to + latent.size * element, rope.at(row / heads, row % heads, element), rope.size * element);
  }
}

int64_t LatentWrite::tiles(int) const { return ceil_div(args.tokens, kTokens); }

void LatentWrite::tile(int, int64_t index) {
  const int64_t end = std::min(args.tokens, (index + 1) * kTokens);
  for (int64_t t = index * kTokens; t < end; ++t) variant().attention->write_latent(args, t);
}

}  // namespace armllm
