#include "collective/gather_columns.h"

#include <algorithm>
#include <cstring>

namespace armllm {
namespace {

constexpr int64_t kTileBytes = 32 << 10;

}  // namespace

// All ranks divide the rows alike, whatever number of columns each of them has.
int64_t GatherColumns::rows_per_round() const {
  const int64_t most = *std::max_element(args.columns.begin(), args.columns.end());
  return std::max<int64_t>(1, args.communicator->buffer_bytes() / (most * size_of(args.x.type)));
}

GatherColumns::Round GatherColumns::round(int phase) const {
  Round r;
  r.first = phase / 2 * rows_per_round();
  r.rows = std::min(rows_per_round(), args.rows - r.first);
  const int64_t most = *std::max_element(args.columns.begin(), args.columns.end());
  r.tile_rows = std::max<int64_t>(1, kTileBytes / (most * size_of(args.x.type)));
  r.row_tiles = ceil_div(r.rows, r.tile_rows);
  return r;
}

int64_t GatherColumns::tiles(int phase) const {
  const Round r = round(phase);
  if (r.rows <= 0) return 0;
  Communicator& communicator = *args.communicator;
  if (phase % 2 == 0) {
    number_ = communicator.begin();
    return r.row_tiles;
  }
  // A network sends as many bytes for every rank.
  const int64_t most = *std::max_element(args.columns.begin(), args.columns.end());
  communicator.publish(number_, r.rows * most * size_of(args.x.type));
  return r.row_tiles * (communicator.ranks() - 1);
}

void GatherColumns::tile(int phase, int64_t index) {
  const Round r = round(phase);
  phase % 2 == 0 ? send(r, index) : receive(r, index);
}

void GatherColumns::send(const Round& r, int64_t index) const {
  const int64_t rank = args.communicator->rank(), column = first_column(args.columns, rank);
  const int64_t bytes = args.columns[rank] * size_of(args.x.type);
  char* to = args.communicator->buffer(rank, number_);
  const int64_t end = std::min((index + 1) * r.tile_rows, r.rows);
  for (int64_t i = index * r.tile_rows; i < end; ++i) {
    const char* from = args.x.row(r.first + i);
    std::memcpy(to + i * bytes, from, bytes);
    if (char* place = args.out.at(r.first + i, column); place != from) std::memcpy(place, from, bytes);
  }
}

void GatherColumns::receive(const Round& r, int64_t index) const {
  const int64_t ranks = args.communicator->ranks();
  const int64_t rank = (args.communicator->rank() + 1 + index / r.row_tiles) % ranks;
  args.communicator->wait_for(rank, number_);
  const int64_t column = first_column(args.columns, rank), bytes = args.columns[rank] * size_of(args.x.type);
  const char* from = args.communicator->buffer(rank, number_);
  const int64_t begin = index % r.row_tiles * r.tile_rows, end = std::min(begin + r.tile_rows, r.rows);
  for (int64_t i = begin; i < end; ++i)
    std::memcpy(args.out.at(r.first + i, column), from + i * bytes, bytes);
}

}  // namespace armllm
