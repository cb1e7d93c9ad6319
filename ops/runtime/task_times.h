// Timing of task sets, for profiles.
#pragma once

#include <atomic>

#include "runtime/task_set.h"
#include "runtime/worker_governor.h"

namespace armllm {

Nanoseconds monotonic_time();

struct TaskTime {
  std::atomic<Nanoseconds> began{0}, ended{0};  // the first thread to begin it, and to find it complete
  std::atomic<Nanoseconds> worked{0};           // in tiles, sum over all threads
};

// `run` that also records the time of each set; `times` may be null.
void run_timed(TaskSet* const* sets, int64_t count, TaskTime* times);

}  // namespace armllm
