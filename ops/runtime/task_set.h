// Parallel-for task sets: an op's work as phases of independent tiles, and the team of threads that runs
// them.
//
// A task set never starts threads.  One team, borrowed from torch's own pool, runs any number of task sets,
// so that a whole model step costs one fork and join.
#pragma once

#include <cstdint>

namespace armllm {

class TaskSet {
 public:
  virtual ~TaskSet() = default;
  virtual int phases() const = 0;
  // Number of tiles of a phase.  Called by workers once all earlier phases are complete, so it may depend on
  // what they computed; the number must be the same for every worker.
  virtual int64_t tiles(int phase) const = 0;
  // Computes one tile.  Tiles of a phase run concurrently and in any order.
  virtual void tile(int phase, int64_t index) = 0;
};

// Threads that torch would use now.  Task sets may size their tiles by it, never their arithmetic.
int64_t team_size();

// Runs the task sets in order, each phase after the one before, on torch's pool.
void run(TaskSet* const* sets, int64_t count);
inline void run(TaskSet& set) {
  TaskSet* pointer = &set;
  run(&pointer, 1);
}

}  // namespace armllm
