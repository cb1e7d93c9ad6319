#include "runtime/task_set.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <vector>

#include "runtime/task_times.h"
#include "runtime/types.h"
#include "runtime/work_ranges.h"
#include "runtime/worker_governor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace armllm {
namespace {

constexpr int kSpinsBeforeYield = 2000;

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");  // `yield` is a no-op on Neoverse; `isb` does stall the pipeline
#endif
}

constexpr int64_t kUnknown = -1;

struct alignas(64) PhaseCounter {
  std::atomic<int64_t> tiles{kUnknown};
  std::atomic<uint64_t> empty{0};  // bit set of exhausted ranges, see WorkRanges
  alignas(64) std::atomic<int64_t> done{0};
};

// Waits until every tile of the phase is done.  Counts tiles instead of workers, so that any number of
// workers may take part: a nested call has a single thread, and the system may wake a worker late.
void wait_for(const PhaseCounter& counter, int64_t tiles) {
  int spins = 0;
  while (counter.done.load(std::memory_order_acquire) < tiles) {
    if (++spins < kSpinsBeforeYield) {
      pause_cpu();
    } else {
      sched_yield();  // cores may be shared, and a pure spin could occupy the core of the thread we wait for
    }
  }
}

// Returns the phase's number of tiles, as computed by the first worker that arrives.  A worker that the
// system wakes late must not call TaskSet::tiles again.  The phase may be over by then, and the scratch that
// the number depends on may belong to a later op.
int64_t agreed_tiles(PhaseCounter& counter, const TaskSet& set, int phase) {
  int64_t known = counter.tiles.load(std::memory_order_acquire);
  if (known != kUnknown) return known;
  const int64_t counted = set.tiles(phase);
  return counter.tiles.compare_exchange_strong(known, counted, std::memory_order_acq_rel) ? counted : known;
}

void set_if_first(std::atomic<Nanoseconds>& when) {
  Nanoseconds none = 0;
  when.compare_exchange_strong(none, monotonic_time(), std::memory_order_relaxed);
}

// Prefetches a set's arguments while the previous set runs, because a model's weights evict them from the
// caches.
void prefetch(const TaskSet& set) {
  constexpr int kBytes = 320;
  const char* begin = reinterpret_cast<const char*>(&set);
  for (const char* at = begin; at < begin + kBytes; at += 64) __builtin_prefetch(at);
}

// State that all workers of a call share.
struct SharedState {
  PhaseCounter* counters;  // one per phase
  WorkRanges& ranges;
};

// Computes tiles of a phase until none is left; returns how many this worker computed.
int64_t compute_tiles(TaskSet& set, int phase, int64_t tiles, int64_t worker, int64_t number,
                      const SharedState& shared) {
  const int64_t size = ceil_div(tiles, WorkRanges::kMaxPieces),
                pieces = size <= 1 ? tiles : ceil_div(tiles, size);
  int64_t computed = 0;
  while (true) {
    const int64_t piece = shared.ranges.take(worker, number, pieces, shared.counters[number].empty);
    if (piece == WorkRanges::kNone) return computed;
    const int64_t end = std::min(tiles, (piece + 1) * size);
    for (int64_t index = piece * size; index < end; ++index, ++computed) set.tile(phase, index);
  }
}

void work(TaskSet* const* sets, int64_t count, int64_t worker, const SharedState& shared, TaskTime* times) {
  int64_t number = 0;  // index of the phase, counted over all sets
  for (int64_t s = 0; s < count; ++s) {
    TaskSet& set = *sets[s];
    if (s + 1 < count) prefetch(*sets[s + 1]);
    const int phases = set.phases();
    if (times != nullptr) set_if_first(times[s].began);
    for (int phase = 0; phase < phases; ++phase, ++number) {
      PhaseCounter& counter = shared.counters[number];
      const int64_t tiles = agreed_tiles(counter, set, phase);
      const Nanoseconds began = times == nullptr ? 0 : monotonic_time();
      const int64_t computed = compute_tiles(set, phase, tiles, worker, number, shared);
      if (computed != 0) counter.done.fetch_add(computed, std::memory_order_acq_rel);
      if (times != nullptr) times[s].worked.fetch_add(monotonic_time() - began, std::memory_order_relaxed);
      wait_for(counter, tiles);
    }
    if (times != nullptr) set_if_first(times[s].ended);
  }
}

// Time that the calling thread was ready to run but had no core, from Linux's schedstat.
class RunDelay {
 public:
  RunDelay() : file_(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}
  ~RunDelay() {
    if (file_ >= 0) close(file_);
  }
  RunDelay(const RunDelay&) = delete;
  RunDelay& operator=(const RunDelay&) = delete;

  Nanoseconds get() const {  // 0 where the system does not report it
    char text[96];
    const ssize_t size = file_ < 0 ? -1 : pread(file_, text, sizeof text - 1, 0);
    if (size <= 0) return 0;
    text[size] = 0;
    char* second = nullptr;
    std::strtoll(text, &second, 10);
    return std::strtoll(second, nullptr, 10);
  }

 private:
  int file_;
};

// True if other processes have been taking the calling thread's core.
bool is_displaced() {
  thread_local DisplacementMonitor monitor;
  const Nanoseconds now = monotonic_time();
  if (!monitor.is_due(now)) return false;
  thread_local const RunDelay run_delay;
  return monitor.record(now, run_delay.get());
}

// Limits the threads that OpenMP starts within a scope.  torch's pool starts all its threads, including idle
// threads, and waits for each of them.  This library does not link OpenMP, so it looks up the runtime that
// torch has loaded.
class FewerThreads {
 public:
  FewerThreads(int64_t fewer, int64_t team) : team_(team) { setter()(static_cast<int>(fewer)); }
  ~FewerThreads() { setter()(static_cast<int>(team_)); }
  FewerThreads(const FewerThreads&) = delete;
  FewerThreads& operator=(const FewerThreads&) = delete;

  static bool is_possible() { return setter() != nullptr; }

 private:
  using Setter = void (*)(int);
  static Setter setter() {
    static const Setter symbol = reinterpret_cast<Setter>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    return symbol;
  }
  int64_t team_;
};

// Size of the team that the calling thread works in; 0 outside of a team.
//
// Workers must not query torch: a thread's first query resets the number of threads to a value that torch's
// libraries choose inside a team.  A worker that divides the work into other tiles than the rest of the team
// computes the wrong tiles.
thread_local int64_t current_team = 0;

class TeamScope {
 public:
  explicit TeamScope(int64_t team) : before_(current_team) { current_team = team; }
  ~TeamScope() { current_team = before_; }
  TeamScope(const TeamScope&) = delete;
  TeamScope& operator=(const TeamScope&) = delete;

 private:
  int64_t before_;
};

void run_on(int64_t threads, int64_t team, TaskSet* const* sets, int64_t count, const SharedState& shared,
            TaskTime* times, std::atomic<int64_t>& displaced) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const TeamScope scope(team);
    for (int64_t i = begin; i < end; ++i) {
      work(sets, count, i, shared, times);
      if (is_displaced()) displaced.fetch_add(1, std::memory_order_relaxed);
    }
  });
}

}  // namespace

Nanoseconds monotonic_time() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

int64_t team_size() { return current_team != 0 ? current_team : torch::stable::get_num_threads(); }

void run(TaskSet* const* sets, int64_t count) { run_timed(sets, count, nullptr); }

void run_timed(TaskSet* const* sets, int64_t count, TaskTime* times) {
  int64_t phases = 0;
  for (int64_t s = 0; s < count; ++s) phases += sets[s]->phases();
  if (phases == 0) return;
  STD_TORCH_CHECK(phases <= WorkRanges::kMaxPhases, "a step has ", phases, " phases; at most ",
                  WorkRanges::kMaxPhases, " are possible");
  thread_local WorkRanges ranges;
  thread_local std::unique_ptr<PhaseCounter[]> counters;
  thread_local int64_t capacity = 0;
  if (capacity < phases) {
    counters = std::make_unique<PhaseCounter[]>(phases);
    capacity = phases;
  }
  for (int64_t i = 0; i < phases; ++i) {
    counters[i].empty.store(0, std::memory_order_relaxed);
    counters[i].done.store(0, std::memory_order_relaxed);
    counters[i].tiles.store(kUnknown, std::memory_order_relaxed);
  }
  const SharedState shared{counters.get(), ranges};
  const int64_t team = team_size();
  const bool nothing_to_share = count == 1 && phases == 1 && sets[0]->tiles(0) <= 1;
  if (team == 1 || nothing_to_share) {
    ranges.reset(1);
    work(sets, count, 0, shared, times);
    return;
  }
  thread_local WorkerGovernor governor;
  const int64_t threads = governor.active_workers(team);
  ranges.reset(threads);
  std::atomic<int64_t> displaced{0};
  if (threads == 1) {
    work(sets, count, 0, shared, times);
  } else if (threads < team && FewerThreads::is_possible()) {
    const FewerThreads fewer(threads, team);
    run_on(threads, team, sets, count, shared, times, displaced);
  } else {
    run_on(team, team, sets, count, shared, times, displaced);
  }
  governor.record(monotonic_time(), displaced.load(std::memory_order_relaxed));
}

}  // namespace armllm
