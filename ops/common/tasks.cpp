#include "common/tasks.h"

#include <sched.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <memory>
#include <vector>

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
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> tiles{kUnknown};
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
      sched_yield();  // cloud machines have neighbours: a pure spin would hold up the very thread we wait for
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

void work(TaskSet* const* sets, int64_t count, PhaseCounter* counters) {
  for (int64_t s = 0; s < count; ++s) {
    TaskSet& set = *sets[s];
    const int phases = set.phases();
    for (int phase = 0; phase < phases; ++phase, ++counters) {
      const int64_t tiles = agreed_tiles(*counters, set, phase);
      int64_t mine = 0;
      while (true) {
        const int64_t index = counters->next.fetch_add(1, std::memory_order_relaxed);
        if (index >= tiles) break;
        set.tile(phase, index);
        ++mine;
      }
      if (mine != 0) counters->done.fetch_add(mine, std::memory_order_acq_rel);
      wait_for(*counters, tiles);
    }
  }
}

}  // namespace

int64_t team_size() { return torch::stable::get_num_threads(); }

void run(TaskSet* const* sets, int64_t count) {
  int64_t phases = 0;
  for (int64_t s = 0; s < count; ++s) phases += sets[s]->phases();
  if (phases == 0) return;
  thread_local std::unique_ptr<PhaseCounter[]> counters;
  thread_local int64_t capacity = 0;
  if (capacity < phases) {
    counters = std::make_unique<PhaseCounter[]>(phases);
    capacity = phases;
  }
  for (int64_t i = 0; i < phases; ++i) {
    counters[i].next.store(0, std::memory_order_relaxed);
    counters[i].done.store(0, std::memory_order_relaxed);
    counters[i].tiles.store(kUnknown, std::memory_order_relaxed);
  }
  PhaseCounter* shared = counters.get();
  const int64_t threads = team_size();
  const bool nothing_to_share = count == 1 && phases == 1 && sets[0]->tiles(0) <= 1;
  if (threads == 1 || nothing_to_share) {
    work(sets, count, shared);
    return;
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(sets, count, shared);
  });
}

}  // namespace armllm
