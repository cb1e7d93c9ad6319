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
  // Number of tiles of a phase.  Workers call this after all earlier phases are complete, so the number may
  // depend on their results.  It must be the same for every worker.
  virtual int64_t tiles(int phase) const = 0;
  // Computes one tile.  Tiles of a phase run concurrently and in any order.
  virtual void tile(int phase, int64_t index) = 0;
};

// Number of threads that torch would use now.  Tile sizes may depend on it; arithmetic must not.
int64_t team_size();

// Runs the task sets on torch's pool, in order.  Each phase starts when the previous phase is complete.
void run(TaskSet* const* sets, int64_t count);
inline void run(TaskSet& set) {
  TaskSet* pointer = &set;
  run(&pointer, 1);
}

}  // namespace armllm
