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
  __asm__ volatile("isb" ::: "memory");  // `yield` is a no-op on Neoverse; `isb` does hold the pipeline back
#endif
}

constexpr int64_t kUnknown = -1;

struct alignas(64) PhaseCounter {
  std::atomic<int64_t> tiles{kUnknown};
  std::atomic<uint64_t> empty{0};  // shares that have nothing left
  alignas(64) std::atomic<int64_t> done{0};
};

// Waits until every tile of the phase is done.  Counting tiles rather than workers means that any number of
// workers may take part: a nested call that gets one thread, or a worker that the system wakes late, is fine.
void wait_for(const PhaseCounter& counter, int64_t tiles) {
  int spins = 0;
  while (counter.done.load(std::memory_order_acquire) < tiles) {
    if (++spins < kSpinsBeforeYield) {
      pause_cpu();
    } else {
      sched_yield();  // cloud machines have neighbors: a pure spin would hold up the very thread we wait for
    }
  }
}

// The number of tiles as the first worker found it.  A worker that the system wakes late must not ask the task set
// again: the phase may be over, and the scratch that the answer depends on may belong to a later op.
int64_t agreed_tiles(PhaseCounter& counter, const TaskSet& set, int phase) {
  int64_t known = counter.tiles.load(std::memory_order_acquire);
  if (known != kUnknown) return known;
  const int64_t counted = set.tiles(phase);
  return counter.tiles.compare_exchange_strong(known, counted, std::memory_order_acq_rel) ? counted : known;
}

void note_first(std::atomic<Nanoseconds>& when) {
  Nanoseconds none = 0;
  when.compare_exchange_strong(none, monotonic_time(), std::memory_order_relaxed);
}

// Fetches a set's arguments while the one before it is worked on: a model's weights have driven them from the caches.
void fetch(const TaskSet& set) {
  constexpr int kBytes = 320;
  const char* begin = reinterpret_cast<const char*>(&set);
  for (const char* at = begin; at < begin + kBytes; at += 64) __builtin_prefetch(at);
}

// What workers agree on.
struct Agreed {
  PhaseCounter* counters;  // of each phase
  Shares& shares;
};

// What a worker gets done of a phase.
int64_t take_tiles(TaskSet& set, int phase, int64_t tiles, int64_t worker, int64_t number,
                   const Agreed& agreed) {
  const int64_t size = ceil_div(tiles, Shares::kMostPieces),
                pieces = size <= 1 ? tiles : ceil_div(tiles, size);
  int64_t mine = 0;
  while (true) {
    const int64_t piece = agreed.shares.take(worker, number, pieces, agreed.counters[number].empty);
    if (piece == Shares::kNone) return mine;
    const int64_t end = std::min(tiles, (piece + 1) * size);
    for (int64_t index = piece * size; index < end; ++index, ++mine) set.tile(phase, index);
  }
}

void work(TaskSet* const* sets, int64_t count, int64_t worker, const Agreed& agreed, TaskTime* times) {
  int64_t number = 0;  // of the phase, of all sets
  for (int64_t s = 0; s < count; ++s) {
    TaskSet& set = *sets[s];
    if (s + 1 < count) fetch(*sets[s + 1]);
    const int phases = set.phases();
    if (times != nullptr) note_first(times[s].began);
    for (int phase = 0; phase < phases; ++phase, ++number) {
      PhaseCounter& counter = agreed.counters[number];
      const int64_t tiles = agreed_tiles(counter, set, phase);
      const Nanoseconds began = times == nullptr ? 0 : monotonic_time();
      const int64_t mine = take_tiles(set, phase, tiles, worker, number, agreed);
      if (mine != 0) counter.done.fetch_add(mine, std::memory_order_acq_rel);
      if (times != nullptr) times[s].worked.fetch_add(monotonic_time() - began, std::memory_order_relaxed);
      wait_for(counter, tiles);
    }
    if (times != nullptr) note_first(times[s].ended);
  }
}

// How long the calling thread has waited for a core, as Linux counts it.
class Waited {
 public:
  Waited() : file_(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}
  ~Waited() {
    if (file_ >= 0) close(file_);
  }
  Waited(const Waited&) = delete;
  Waited& operator=(const Waited&) = delete;

  Nanoseconds get() const {  // 0 where the system does not tell
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

// Whether others have been taking the calling thread's core.
bool is_displaced() {
  thread_local Watch watch;
  const Nanoseconds now = monotonic_time();
  if (!watch.is_due(now)) return false;
  thread_local const Waited waited;
  return watch.note(now, waited.get());
}

// Lets OpenMP start fewer threads in a block: torch's pool takes all that it has, idle ones as well, and waits for
// each of them.  The library links no OpenMP; it asks for that which torch has loaded.
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
    static const Setter found = reinterpret_cast<Setter>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    return found;
  }
  int64_t team_;
};

// The size of the team whose work the calling thread does; 0: none.
//
// Workers may not ask torch: in a thread that asks for the first time it sets the number anew, to what its libraries
// think right inside of a team, and a worker that cuts tiles otherwise than the others computes the wrong ones.
thread_local int64_t working_for = 0;

class WorkingFor {
 public:
  explicit WorkingFor(int64_t team) : before_(working_for) { working_for = team; }
  ~WorkingFor() { working_for = before_; }
  WorkingFor(const WorkingFor&) = delete;
  WorkingFor& operator=(const WorkingFor&) = delete;

 private:
  int64_t before_;
};

void run_by(int64_t threads, int64_t team, TaskSet* const* sets, int64_t count, const Agreed& agreed,
            TaskTime* times, std::atomic<int64_t>& displaced) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const WorkingFor here(team);
    for (int64_t i = begin; i < end; ++i) {
      work(sets, count, i, agreed, times);
      if (is_displaced()) displaced.fetch_add(1, std::memory_order_relaxed);
    }
  });
}

}  // namespace

Nanoseconds monotonic_time() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

int64_t team_size() { return working_for != 0 ? working_for : torch::stable::get_num_threads(); }

void run(TaskSet* const* sets, int64_t count) { run_timed(sets, count, nullptr); }

void run_timed(TaskSet* const* sets, int64_t count, TaskTime* times) {
  int64_t phases = 0;
  for (int64_t s = 0; s < count; ++s) phases += sets[s]->phases();
  if (phases == 0) return;
  STD_TORCH_CHECK(phases <= Shares::kMostPhases, "a step of ", phases, " phases is too long");
  thread_local Shares shares;
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
  const Agreed agreed{counters.get(), shares};
  const int64_t team = team_size();
  const bool nothing_to_share = count == 1 && phases == 1 && sets[0]->tiles(0) <= 1;
  if (team == 1 || nothing_to_share) {
    shares.reset(1);
    work(sets, count, 0, agreed, times);
    return;
  }
  thread_local Crew crew;
  const int64_t threads = crew.size(team);
  shares.reset(threads);
  std::atomic<int64_t> displaced{0};
  if (threads == 1) {
    work(sets, count, 0, agreed, times);
  } else if (threads < team && FewerThreads::is_possible()) {
    const FewerThreads fewer(threads, team);
    run_by(threads, team, sets, count, agreed, times, displaced);
  } else {
    run_by(team, team, sets, count, agreed, times, displaced);
  }
  crew.note(monotonic_time(), displaced.load(std::memory_order_relaxed));
}

}  // namespace armllm
