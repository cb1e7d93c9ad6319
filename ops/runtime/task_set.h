// Parallel-for task sets: an op's work as phases of independent tiles, and the thread team that runs them.
//
// A task set never starts threads.  A team from torch's own pool runs any number of task sets, so that a
// whole model step costs one fork and join.
#pragma once

#include <cstdint>

namespace armllm {

class TaskSet {
 public:
  virtual ~TaskSet() = default;
  virtual int phases() const = 0;
  // Number of tiles of a phase.  Called once per run, after all earlier phases are complete and before any
  // tile of this phase, so the number may depend on their results.
  virtual int64_t tiles(int phase) const = 0;
  // Computes one tile.  Tiles of a phase run concurrently and in any order.
  virtual void tile(int phase, int64_t index) = 0;
  // Called when a run has ended early, because a tile of this or another set threw an exception.  A set that
  // keeps state between its tiles restores the state for the next run here.
  virtual void abandon() {}
};

// Number of threads that torch would use now.  Tile sizes may depend on it; arithmetic must not.
int64_t team_size();

// Runs the task sets on torch's pool, in order.  Each phase starts when the previous phase is complete.  An
// exception of a tile ends the run and reaches the caller.
void run(TaskSet* const* sets, int64_t count);
inline void run(TaskSet& set) {
  TaskSet* pointer = &set;
  run(&pointer, 1);
}

}  // namespace armllm
