// Worker governor: it decides from measured times, so the tests use synthetic ones.
#include "kernel_test.h"
#include "runtime/worker_governor.h"

namespace armllm_test {
namespace {

using armllm::DisplacementMonitor;
using armllm::kMillisecond;
using armllm::WorkerGovernor;

// True if a thread that is sampled every `step` ms for 100 ms, and waits for a part of each, is found
// displaced.
bool is_displaced(double part, int64_t step, int64_t asleep = 0) {
  DisplacementMonitor monitor;
  bool displaced = false;
  int64_t now = 1000 * kMillisecond, waited = 77 * kMillisecond;
  for (int i = 0; i < 100 / step; ++i) {
    if (monitor.is_due(now)) displaced |= monitor.record(now, waited);
    now += (step + asleep) * kMillisecond;
    waited += int64_t(part * double(step * kMillisecond));
  }
  return displaced;
}

void test_watch(Report& report) {
  for (int64_t step : {1, 3, 11, 30}) {
    report.expect(is_displaced(0.5, step), "a thread that waits half of its time is displaced");
    report.expect(!is_displaced(0.02, step), "a thread that hardly waits is not displaced");
  }
  report.expect(!is_displaced(0.9, 10, 1000), "a thread that mostly sleeps is never displaced");
}

// Active workers of a team of `team` at every millisecond, while `busy` other processes run for some time.
std::vector<int64_t> sizes(int64_t team, int64_t busy, int64_t begin, int64_t end, int64_t until) {
  WorkerGovernor governor(team);
  std::vector<int64_t> active;
  int64_t stretch = 0;
  for (int64_t ms = 0; ms < until; ++ms) {
    const int64_t size = governor.active_workers(team);
    const int64_t displaced = ms >= begin && ms < end ? std::max<int64_t>(0, size + busy - team) : 0;
    stretch = displaced > 0 ? stretch + 1 : 0;
    governor.record((5000 + ms) * kMillisecond, stretch >= 20 ? displaced : 0);
    if (stretch >= 20) stretch = 0;
    active.push_back(size);
  }
  return active;
}

void test_active_workers(Report& report) {
  for (int64_t team : {2, 3, 16, 64})
    for (int64_t busy : {1, 2}) {
      const std::string name = std::to_string(team) + " threads beside " + std::to_string(busy);
      const std::vector<int64_t> active = sizes(team, busy, 1000, 6000, 12000);
      const int64_t left = std::max<int64_t>(1, team - busy);
      report.expect(*std::min_element(active.begin(), active.begin() + 1000) == team,
                    name + ": all while alone");
      report.expect(*std::min_element(active.begin(), active.end()) >= left,
                    name + ": never fewer than it must");
      const auto as_left = std::count(active.begin() + 1000, active.begin() + 6000, left);
      report.expect(as_left > 4000, name + ": mostly without those whose cores are taken");
      report.expect(*std::min_element(active.end() - 1000, active.end()) == team, name + ": all again");
    }
  WorkerGovernor governor(4);
  governor.record(5000 * kMillisecond, 3);
  report.expect(governor.active_workers(4) == 1 && governor.active_workers(8) == 8,
                "a new team begins with all");
}

}  // namespace

void test_worker_governor(Report& report) {
  test_watch(report);
  test_active_workers(report);
}

}  // namespace armllm_test
