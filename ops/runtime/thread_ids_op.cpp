// team_threads: ids of the team's threads, to tell them from the process's other threads.
#include <sys/syscall.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "runtime/task_set.h"

namespace armllm {
namespace {

// Linux thread ids; the calling thread's id comes first.  The pool belongs to the calling thread: another
// thread has its own workers.
std::vector<int64_t> team_threads() {
  std::vector<int64_t> ids(team_size(), 0);
  torch::stable::parallel_for(0, static_cast<int64_t>(ids.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ids[i] = syscall(SYS_gettid);
  });
  return ids;
}

}  // namespace
}  // namespace armllm

STABLE_TORCH_LIBRARY_IMPL(armllm, CompositeExplicitAutograd, m) {
  m.impl("team_threads", TORCH_BOX(&armllm::team_threads));
}
