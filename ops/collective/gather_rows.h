// The all-gather of tensor parallel ranks that each have some rows: every rank gets those of all.
#pragma once

#include <memory>

#include "collective/communicator.h"
#include "runtime/task_set.h"
#include "runtime/types.h"

namespace armllm {

struct GatherRowsArgs {
  Rows rows;                       // of all ranks; each has written its own
  int64_t columns = 0;             // of a row
  const int64_t* first = nullptr;  // [ranks + 1]: the first row of each rank, and the end
  std::shared_ptr<Communicator> communicator;
};

// Rows that do not fit the buffers at once are exchanged in several rounds of two phases: the rank copies its
// rows to its buffer, then those of the others from theirs.  A row of `columns` fits a buffer.
class GatherRows final : public TaskSet {
 public:
  GatherRowsArgs args;
  int phases() const override { return phases_of(*args.communicator, row_bytes(), most_rows()); }
  // Phases if no rank has more than this number of rows.
  static int phases_of(const Communicator& communicator, int64_t row_bytes, int64_t rows) {
    return int(2 * ceil_div(rows, communicator.buffer_bytes() / row_bytes));
  }
  int64_t tiles(int phase) const override;
  void tile(int phase, int64_t index) override;

 private:
  struct Part {
    int64_t first, rows, tile_rows;
    int64_t tiles() const { return ceil_div(rows, tile_rows); }
  };
  Part part(int phase, int64_t rank) const;
  int64_t received_tiles(int phase, int64_t rank) const;
  int64_t row_bytes() const { return args.columns * size_of(args.rows.type); }
  int64_t rows_per_round() const { return args.communicator->buffer_bytes() / row_bytes(); }
  int64_t most_rows() const;

  mutable int64_t number_ = 0;  // of the current exchange
};

}  // namespace armllm
