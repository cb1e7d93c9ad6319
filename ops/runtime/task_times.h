// Where the time of task sets goes.
#pragma once

#include <atomic>

#include "runtime/task_set.h"
#include "runtime/worker_governor.h"

namespace armllm {

Nanoseconds monotonic_time();

struct TaskTime {
  std::atomic<Nanoseconds> began{0}, ended{0};  // of the first thread to begin it, and to find it complete
  std::atomic<Nanoseconds> worked{0};           // in tiles, of all threads together
};

// As `run`; notes the time of each set.
void run_timed(TaskSet* const* sets, int64_t count, TaskTime* times);

}  // namespace armllm
