#include "collective/communicator.h"

#include <sched.h>
#include <time.h>
#include <torch/headeronly/util/Exception.h>

#include "runtime/pause_cpu.h"
#include "runtime/task_times.h"

namespace armllm {
namespace {

constexpr int kSpinsBeforeYield = 4000;
constexpr int kSpinsPerCheck = 64;
constexpr Nanoseconds kAwake = 2 * 1000000;  // parts of a step differ by less
constexpr timespec kNap{0, 100000};

}  // namespace

void Communicator::publish(int64_t number, int64_t bytes) {
  if (network_ != nullptr) network_->exchange([&](int64_t rank) { return buffer(rank, number); }, bytes);
  line(1 + rank_).store(number, std::memory_order_release);
}

void Communicator::wait_for(int64_t rank, int64_t number) const {
  if (network_ != nullptr) return;  // publishing has brought all parts
  const std::atomic<int64_t>& published = line(1 + rank);
  Nanoseconds began = 0;
  for (int64_t spins = 0; published.load(std::memory_order_acquire) < number; ++spins) {
    if (spins % kSpinsPerCheck != kSpinsPerCheck - 1) {
      pause_cpu();
      continue;
    }
    const int64_t failed = line(0).load(std::memory_order_relaxed);
    STD_TORCH_CHECK(failed == 0, "tensor parallel: rank ", failed - 1, " has failed");
    if (spins < kSpinsBeforeYield) continue;
    sched_yield();  // the rank may need this core
    const Nanoseconds now = monotonic_time();
    if (began == 0) began = now;
    STD_TORCH_CHECK(now - began < timeout_ns_, "tensor parallel: rank ", rank, " has not answered for ",
                    timeout_ns_ / 1000000000, " s");
    if (now - began > kAwake) nanosleep(&kNap, nullptr);  // it is loading, or stopped
  }
}

}  // namespace armllm
