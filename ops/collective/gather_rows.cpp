#include "collective/gather_rows.h"

#include <algorithm>
#include <cstring>

namespace armllm {
namespace {

constexpr int64_t kTileBytes = 32 << 10;

}  // namespace

int64_t GatherRows::most_rows() const {
  int64_t most = 0;
  for (int64_t rank = 0; rank < args.communicator->ranks(); ++rank)
    most = std::max(most, args.first[rank + 1] - args.first[rank]);
  return most;
}

// The rows of a rank that a round exchanges.
GatherRows::Part GatherRows::part(int phase, int64_t rank) const {
  const int64_t before = phase / 2 * rows_per_round(), all = args.first[rank + 1] - args.first[rank];
  return {args.first[rank] + before, std::clamp<int64_t>(all - before, 0, rows_per_round()),
          std::max<int64_t>(1, kTileBytes / row_bytes())};
}

// A rank without rows is waited for, too: whoever begins the next exchange has seen all others in this one.
int64_t GatherRows::received_tiles(int phase, int64_t rank) const {
  return std::max<int64_t>(1, part(phase, rank).tiles());
}

int64_t GatherRows::tiles(int phase) const {
  Communicator& communicator = *args.communicator;
  const int64_t most = std::min(most_rows() - phase / 2 * rows_per_round(), rows_per_round());
  if (most <= 0) return 0;
  if (phase % 2 == 0) {
    number_ = communicator.begin();
    return part(phase, communicator.rank()).tiles();
  }
  communicator.publish(number_, most * row_bytes());  // a network sends as many bytes for every rank
  int64_t tiles = 0;
  for (int64_t rank = 0; rank < communicator.ranks(); ++rank)
    if (rank != communicator.rank()) tiles += received_tiles(phase, rank);
  return tiles;
}

void GatherRows::tile(int phase, int64_t index) {
  const Communicator& communicator = *args.communicator;
  const int64_t own = communicator.rank(), bytes = row_bytes();
  int64_t rank = own;
  if (phase % 2 != 0) {  // begin with the next rank, so that not all read the first one at once
    rank = (own + 1) % communicator.ranks();
    for (int64_t count; index >= (count = received_tiles(phase, rank)); index -= count)
      rank = (rank + 1) % communicator.ranks();
    communicator.wait_for(rank, number_);
  }
  const Part p = part(phase, rank);
  char* const buffer = communicator.buffer(rank, number_);
  const int64_t end = std::min((index + 1) * p.tile_rows, p.rows);
  for (int64_t i = index * p.tile_rows; i < end; ++i) {
    char* const row = args.rows.row(p.first + i);
    rank == own ? std::memcpy(buffer + i * bytes, row, bytes) : std::memcpy(row, buffer + i * bytes, bytes);
  }
}

}  // namespace armllm
