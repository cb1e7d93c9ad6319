// Timing of task sets, for profiles.
#pragma once

#include <atomic>

#include "runtime/task_set.h"
#include "runtime/worker_governor.h"

namespace armllm {

Nanoseconds monotonic_time();

struct TaskTime {
  // When the first thread began the set, and when the first thread saw it complete.
  std::atomic<Nanoseconds> began{0}, ended{0};
  std::atomic<Nanoseconds> worked{0};  // time spent in tiles, summed over all threads
};

// Like `run`, and records the time of each set in `times`, which may be null.
void run_timed(TaskSet* const* sets, int64_t count, TaskTime* times);

}  // namespace armllm
