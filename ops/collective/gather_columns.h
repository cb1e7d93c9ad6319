// The all-gather of tensor parallel ranks: each has some columns of the same rows, and gets all of them.
#pragma once

#include <memory>
#include <vector>

#include "collective/communicator.h"
#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

struct GatherArgs {
  Rows x;    // this rank's columns
  Rows out;  // those of all ranks, one after another; of the type of x
  int64_t rows = 0;
  std::shared_ptr<Communicator> communicator;
  std::vector<int64_t> columns;  // of each rank
};

inline int64_t first_column(const std::vector<int64_t>& columns, int64_t rank) {
  int64_t column = 0;
  for (int64_t r = 0; r < rank; ++r) column += columns[r];
  return column;
}

// Rows that do not fit the buffers at once are exchanged in several rounds of two phases: the rank copies its
// columns to its buffer, then those of the others from theirs.
class GatherColumns final : public TaskSet {
 public:
  GatherArgs args;
  int phases() const override { return phases_of(args.rows); }
  // Phases of this number of rows; a set that begins with fewer rows than it may have counts those.
  int phases_of(int64_t rows) const { return int(2 * ceil_div(rows, rows_per_round())); }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;

 private:
  struct Round {
    int64_t first, rows, tile_rows, row_tiles;
  };
  Round round(int phase) const;
  int64_t rows_per_round() const;
  void send(const Round& round, int64_t index) const;
  void receive(const Round& round, int64_t index) const;

  mutable int64_t number_ = 0;  // of the current exchange
};

}  // namespace armllm
