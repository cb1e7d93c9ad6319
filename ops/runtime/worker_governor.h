// How many threads of the team work while other processes want its cores.
//
// A phase ends with its last tile.  One displaced thread therefore holds up all others for as long as the
// system runs another process on its core: milliseconds, where a phase takes microseconds.  A team that
// leaves one core to a neighbor loses that core alone.
#pragma once

#include <algorithm>
#include <cstdint>

namespace armllm {

using Nanoseconds = int64_t;
constexpr Nanoseconds kMillisecond = 1000000;

// Detects, for one thread, that other processes keep taking its core.
class DisplacementMonitor {
 public:
  // Time between two samples of a thread; each costs a system call.
  static constexpr Nanoseconds kInterval = 5 * kMillisecond;

  bool is_due(Nanoseconds now) const { return now - last_sample_ >= kInterval; }

  // `run_delay`: time since its start that the thread was ready to run without a core.  Returns true once for
  // every stretch in which that was a large part of the time.
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
  // Displaced from 1/8 of a stretch on, as `_DISPLACED` of engine/execution/thread_team.py.  Next to one busy
  // process a thread waits half of the time, on an idle machine a hundredth.
  static constexpr int64_t kDisplacedPart = 8;

  Nanoseconds last_sample_ = -kIdleReset;
  Nanoseconds stretch_begin_ = 0;
  Nanoseconds stretch_begin_delay_ = 0;
};

// Number of active workers of a team: without the displaced threads, until a trial shows that their cores are
// free.
class WorkerGovernor {
 public:
  WorkerGovernor() = default;
  explicit WorkerGovernor(int64_t team) : team_(team), active_(team) {}

  int64_t active_workers(int64_t team) {
    if (team != team_) *this = WorkerGovernor(team);
    return active_;
  }

  // Call after work that ended at `now`, with the number of threads that found themselves displaced in it.
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
