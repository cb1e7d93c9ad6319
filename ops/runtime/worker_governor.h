// Controls the number of active threads while other processes use the team's cores.
//
// A phase ends with its last tile.  A displaced thread therefore blocks all others while the system runs
// another process on its core: milliseconds, where a phase takes microseconds.  A team that leaves a core to
// the other process loses only that core.
#pragma once

#include <algorithm>
#include <cstdint>

namespace armllm {

using Nanoseconds = int64_t;
constexpr Nanoseconds kMillisecond = 1000000;

// Detects that other processes keep taking the core of a thread.  Each thread has its own monitor.
class DisplacementMonitor {
 public:
  // Time between two samples of a thread; each sample costs a system call.
  static constexpr Nanoseconds kInterval = 5 * kMillisecond;

  bool is_due(Nanoseconds now) const { return now - last_sample_ >= kInterval; }

  // `run_delay` is the total time that the thread was ready to run but had no core.  Returns true once for
  // every stretch of time in which the thread waited for a large part.
  bool record(Nanoseconds now, Nanoseconds run_delay) {
    const bool was_idle = now - last_sample_ > kIdleReset;
    last_sample_ = now;
    if (!was_idle && now - stretch_begin_ < kStretch) return false;
    const bool displaced =
        !was_idle && kDisplacedPart * (run_delay - stretch_begin_delay_) > now - stretch_begin_;
    stretch_begin_ = now;
    stretch_begin_delay_ = run_delay;
    return displaced;
  }

 private:
  static constexpr Nanoseconds kStretch = 20 * kMillisecond;
  static constexpr Nanoseconds kIdleReset = 100 * kMillisecond;
  // A thread counts as displaced if it waits for at least 1/8 of a stretch, as `_DISPLACED` of
  // engine/execution/thread_team.py.  A thread that shares its core with one busy process waits half of the
  // time; on an idle machine it waits a hundredth.
  static constexpr int64_t kDisplacedPart = 8;

  Nanoseconds last_sample_ = -kIdleReset;
  Nanoseconds stretch_begin_ = 0;
  Nanoseconds stretch_begin_delay_ = 0;
};

// Decides the number of active workers of a team.  Displaced threads are left out until a trial shows that
// their cores are free again.
class WorkerGovernor {
 public:
  WorkerGovernor() = default;
  explicit WorkerGovernor(int64_t team) : team_(team), active_(team) {}

  int64_t active_workers(int64_t team) {
    if (team != team_) *this = WorkerGovernor(team);
    return active_;
  }

  // Call after work that ended at `now`, with the number of threads that were displaced during it.
  void record(Nanoseconds now, int64_t displaced) {
    if (displaced > 0) {
      if (in_trial_) pause_ = std::min(2 * pause_, kLongestPause);
      active_ = std::max<int64_t>(1, active_ - displaced);
      in_trial_ = false;
      next_change_ = now + pause_;
    } else if (now >= next_change_) {
      if (in_trial_ || active_ == team_) pause_ = kShortestPause;
      in_trial_ = active_ < team_;
      if (in_trial_) {
        active_ = std::min(team_, active_ + std::max<int64_t>(1, (team_ - active_) / 2));
        next_change_ = now + kTrial;
      }
    }
  }

 private:
  static constexpr Nanoseconds kShortestPause = 100 * kMillisecond;
  static constexpr Nanoseconds kLongestPause = 800 * kMillisecond;
  static constexpr Nanoseconds kTrial = 60 * kMillisecond;

  int64_t team_ = 0;
  int64_t active_ = 0;
  bool in_trial_ = false;
  Nanoseconds next_change_ = 0;
  Nanoseconds pause_ = kShortestPause;
};

}  // namespace armllm
