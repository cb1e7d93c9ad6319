// How many threads of the team work while other processes want its cores.
//
// A phase ends with its last tile, so one displaced thread holds up all others for as long as the system lets
// somebody else run on its core: milliseconds, where a phase takes microseconds.  A team that leaves one core to
// a neighbor loses that core alone.
#pragma once

#include <algorithm>
#include <cstdint>

namespace armllm {

using Nanoseconds = int64_t;
constexpr Nanoseconds kMillisecond = 1000000;

// Tells of one thread whether others keep taking its core.
class Watch {
 public:
  // How often the thread is asked: it costs a call of the system.
  static constexpr Nanoseconds kInterval = 5 * kMillisecond;

  bool is_due(Nanoseconds now) const { return now - seen_ >= kInterval; }

  // `waited`: how long the thread has been ready to run without a core since it began.  True once for every stretch
  // of which that was a good part.
  bool note(Nanoseconds now, Nanoseconds waited) {
    const bool was_away = now - seen_ > kForgetting;
    seen_ = now;
    if (!was_away && now - began_ < kStretch) return false;
    const bool displaced = !was_away && kDisplaced * (waited - waited_) > now - began_;
    began_ = now;
    waited_ = waited;
    return displaced;
  }

 private:
  static constexpr Nanoseconds kStretch = 20 * kMillisecond;
  static constexpr Nanoseconds kForgetting = 100 * kMillisecond;
  // Displaced from 1/8 of the time on: as `_DISPLACED` of engine/execution/thread_team.py.  Next to one busy process
  // a thread waits half of the time, on an idle machine a hundredth.
  static constexpr int64_t kDisplaced = 8;

  Nanoseconds seen_ = -kForgetting;
  Nanoseconds began_ = 0;
  Nanoseconds waited_ = 0;
};

// The part of a team that works: without the displaced threads, until a trial shows that they are left alone.
class Crew {
 public:
  Crew() = default;
  explicit Crew(int64_t team) : team_(team), size_(team) {}

  int64_t size(int64_t team) {
    if (team != team_) *this = Crew(team);
    return size_;
  }

  // After work that ended at `now`, in which so many threads found that they were displaced.
  void note(Nanoseconds now, int64_t displaced) {
    if (displaced > 0) {
      if (tries_) pause_ = std::min(2 * pause_, kLongestPause);
      size_ = std::max<int64_t>(1, size_ - displaced);
      tries_ = false;
      next_ = now + pause_;
    } else if (now >= next_) {
      if (tries_ || size_ == team_) pause_ = kShortestPause;
      tries_ = size_ < team_;
      if (tries_) {
        size_ = std::min(team_, size_ + std::max<int64_t>(1, (team_ - size_) / 2));
        next_ = now + kTrial;
      }
    }
  }

 private:
  static constexpr Nanoseconds kShortestPause = 100 * kMillisecond;
  static constexpr Nanoseconds kLongestPause = 800 * kMillisecond;
  static constexpr Nanoseconds kTrial = 60 * kMillisecond;

  int64_t team_ = 0;
  int64_t size_ = 0;
  bool tries_ = false;
  Nanoseconds next_ = 0;
  Nanoseconds pause_ = kShortestPause;
};

}  // namespace armllm
