#include "runtime/task_set.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include "runtime/float_mode.h"
#include "runtime/pause_cpu.h"
#include "runtime/task_times.h"
#include "runtime/types.h"
#include "runtime/work_ranges.h"
#include "runtime/worker_governor.h"

namespace armllm {
namespace {

constexpr int kSpinsBeforeYield = 2000;

constexpr int64_t kUnknown = -1;

struct alignas(64) PhaseCounter {
  std::atomic<int64_t> tiles{kUnknown};  // set when the phase may begin
  std::atomic<uint64_t> empty{0};        // bit set of exhausted ranges, see WorkRanges
  alignas(64) std::atomic<int64_t> done{0};
};

// State that all workers of a call share.
struct alignas(64) SharedState {
  TaskSet* const* sets;
  int64_t count;
  TaskTime* times;         // may be null
  PhaseCounter* counters;  // one per phase, and one for the end
  WorkRanges& ranges;
  std::atomic<bool> failed{false};  // a tile threw an exception
  std::exception_ptr error{};       // the first one, as torch's stable ABI loses its text
};

// Lets phases begin: sets their numbers of tiles, up to the first phase that has tiles.  Arguments: the first
// of these phases, by set and phase, and as a number counted over all sets.  The caller begins the first
// phase; the worker that completes a phase begins the next.  TaskSet::tiles thus runs while no tile does.  A
// worker that the system wakes late must not call it: the scratch that the number depends on may belong to a
// later op by then.
void begin_phases(SharedState& shared, int64_t set, int phase, int64_t number) {
  for (; set < shared.count; ++set, phase = 0) {
    const int phases = shared.sets[set]->phases();
    for (; phase < phases; ++phase, ++number) {
      const int64_t tiles = shared.sets[set]->tiles(phase);
      shared.counters[number].tiles.store(tiles, std::memory_order_release);
      if (tiles != 0) return;
    }
  }
  shared.counters[number].tiles.store(0, std::memory_order_release);
}

// Waits until a phase may begin, i.e. until every tile of the previous phase is done.  Returns its number of
// tiles, or kUnknown if a tile failed, after which no phase begins.
int64_t wait_for(const PhaseCounter& counter, const std::atomic<bool>& failed) {
  int spins = 0;
  while (true) {
    const int64_t tiles = counter.tiles.load(std::memory_order_acquire);
    if (tiles != kUnknown || failed.load(std::memory_order_relaxed)) return tiles;
    if (++spins < kSpinsBeforeYield) {
      pause_cpu();
    } else {
      sched_yield();  // cores may be shared, and a pure spin could occupy the core of the thread we wait for
    }
  }
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

// Computes tiles of a phase until none is left; returns how many this worker computed.
int64_t compute_tiles(TaskSet& set, int phase, int64_t tiles, int64_t worker, int64_t number,
                      SharedState& shared) {
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

// One worker's part of a call.  The end of a phase counts tiles instead of workers, so that any number of
// workers may take part: a nested call has a single thread, and the system may wake a worker late.
void work(int64_t worker, SharedState& shared) {
  TaskTime* const times = shared.times;
  int64_t number = 0;  // index of the phase, counted over all sets
  int64_t tiles = wait_for(shared.counters[0], shared.failed);
  for (int64_t s = 0; s < shared.count; ++s) {
    TaskSet& set = *shared.sets[s];
    if (s + 1 < shared.count) prefetch(*shared.sets[s + 1]);
    const int phases = set.phases();
    if (times != nullptr) set_if_first(times[s].began);
    for (int phase = 0; phase < phases; ++phase) {
      PhaseCounter& counter = shared.counters[number];
      const Nanoseconds began = times == nullptr ? 0 : monotonic_time();
      const int64_t computed = compute_tiles(set, phase, tiles, worker, number, shared);
      if (times != nullptr) times[s].worked.fetch_add(monotonic_time() - began, std::memory_order_relaxed);
      ++number;
      if (computed != 0 && counter.done.fetch_add(computed, std::memory_order_acq_rel) + computed == tiles)
        begin_phases(shared, s, phase + 1, number);
      tiles = wait_for(shared.counters[number], shared.failed);
      if (tiles == kUnknown) return;
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

// Like `work`.  If a tile throws, the other workers stop, too: the phase of this tile will never end.
void work_or_stop(int64_t worker, SharedState& shared) {
  try {
    work(worker, shared);
  } catch (...) {
    if (!shared.failed.exchange(true, std::memory_order_relaxed)) shared.error = std::current_exception();
    throw;
  }
}

void run_on(int64_t threads, int64_t team, SharedState& shared, std::atomic<int64_t>& displaced) {
  const FloatMode mode = FloatMode::of_this_thread();
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const TeamScope team_scope(team);
    const FloatModeScope mode_scope(mode);
    for (int64_t i = begin; i < end; ++i) {
      work_or_stop(i, shared);
      if (is_displaced()) displaced.fetch_add(1, std::memory_order_relaxed);
    }
  });
}

void run_on_team(int64_t team, SharedState& shared) {
  thread_local WorkerGovernor governor;
  const int64_t threads = governor.active_workers(team);
  shared.ranges.reset(threads);
  std::atomic<int64_t> displaced{0};
  if (threads == 1) {
    work(0, shared);
  } else if (threads < team && FewerThreads::is_possible()) {
    const FewerThreads fewer(threads, team);
    run_on(threads, team, shared, displaced);
  } else {
    run_on(team, team, shared, displaced);
  }
  governor.record(monotonic_time(), displaced.load(std::memory_order_relaxed));
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
  if (capacity <= phases) {
    counters = std::make_unique<PhaseCounter[]>(phases + 1);
    capacity = phases + 1;
  }
  for (int64_t i = 0; i <= phases; ++i) {
    counters[i].empty.store(0, std::memory_order_relaxed);
    counters[i].done.store(0, std::memory_order_relaxed);
    counters[i].tiles.store(kUnknown, std::memory_order_relaxed);
  }
  SharedState shared{sets, count, times, counters.get(), ranges};
  const int64_t team = team_size();
  try {
    begin_phases(shared, 0, 0, 0);
    const bool nothing_to_share =
        count == 1 && phases == 1 && counters[0].tiles.load(std::memory_order_relaxed) <= 1;
    if (team != 1 && !nothing_to_share) return run_on_team(team, shared);
    ranges.reset(1);
    work(0, shared);
  } catch (...) {
    for (int64_t s = 0; s < count; ++s) sets[s]->abandon();
    if (shared.error) std::rethrow_exception(shared.error);
    throw;
  }
}

}  // namespace armllm
