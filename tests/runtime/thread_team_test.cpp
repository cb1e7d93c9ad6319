// Runs random task sets on thread teams, for ThreadSanitizer.
//
//   thread_team_test RUNS SEED    RUNS: runs of each calling thread
//
// A tile reads the results of the whole previous phase and writes its own, both without atomics, so that each
// memory order that is too weak shows as a data race.  Phases reuse the memory of earlier phases, as the
// instructions of a plan do.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/task_set.h"
#include "runtime/task_times.h"
#include "runtime/work_ranges.h"
#include "thread_pool.h"

namespace team_test {
namespace {

using armllm::TaskSet;
using armllm::WorkRanges;

constexpr int64_t kMostTiles = 3000;
constexpr int64_t kReads = 20000;  // most values that a phase reads, or few per tile

std::atomic<int64_t> failures{0}, phases_run{0};

void expect(bool ok, const char* what) {
  if (!ok && failures.fetch_add(1) < 20) std::printf("FAILED %s\n", what);
}

uint64_t mixed(uint64_t a, uint64_t b) {
  a = (a ^ b) * 0x9e3779b97f4a7c15ull;
  return a ^ a >> 29;
}

struct Phase {
  int64_t tiles, inputs;  // inputs: number of results of the last phase that had tiles
  int64_t number;         // of the phases that have tiles; even and odd phases write to different buffers
  bool counted;           // tiles() reads the number from memory, where the previous phase wrote it
  int64_t next_tiles;     // what this phase writes there
  int64_t throws;         // tile that throws, or −1
};

// Memory of a calling thread, used by all of its runs.
struct Memory {
  struct Cell {
    uint64_t value = 0;
    int64_t phase = -1;  // the phase that wrote the value
  };
  std::vector<Cell> cells[2] = {std::vector<Cell>(kMostTiles), std::vector<Cell>(kMostTiles)};
  int64_t tiles = 0;
  std::atomic<int64_t> computed{0};

  void compute(const Phase& phase, int64_t index) {
    const std::vector<Cell>& from = cells[(phase.number + 1) % 2];
    const int64_t reads = phase.inputs * phase.tiles <= kReads
                              ? phase.inputs
                              : std::min(phase.inputs, kReads / phase.tiles + 1);
    uint64_t value = mixed(uint64_t(phase.number), uint64_t(index));
    for (int64_t i = 0; i < reads; ++i) {
      const Cell& cell = from[size_t((index + i) % phase.inputs)];
      expect(cell.phase == phase.number - 1, "the previous phase is complete");
      value = mixed(value, cell.value);
    }
    Cell& to = cells[phase.number % 2][size_t(index)];
    expect(to.phase != phase.number, "a tile runs once");
    to = {value, phase.number};
    if (index == 0) tiles = phase.next_tiles;
    computed.fetch_add(1, std::memory_order_relaxed);
  }
};

class RandomSet final : public TaskSet {
 public:
  RandomSet(Memory& memory, const Phase* begin, int64_t count, const int64_t& team)
      : memory_(memory), begin_(begin), count_(count), team_(team) {}
  int phases() const override { return int(count_); }
  int64_t tiles(int phase) const override {
    dawdle();
    const int64_t tiles = begin_[phase].counted ? memory_.tiles : begin_[phase].tiles;
    dawdle();
    return tiles;
  }
  void tile(int phase, int64_t index) override {
    dawdle();
    expect(armllm::team_size() == team_, "a worker knows the size of its team");
    if (begin_[phase].throws == index) throw std::runtime_error("a tile that fails");
    memory_.compute(begin_[phase], index);
  }

 private:
  Memory& memory_;
  const Phase* begin_;
  int64_t count_;
  const int64_t& team_;
};

int64_t random_tiles() {
  const int64_t kind = random_below(20);
  if (kind == 0) return 0;
  if (kind < 6) return 1 + random_below(3);
  if (kind < 18) return 1 + random_below(20);
  return kind < 19 ? 1 + random_below(200) : 1 + random_below(kMostTiles);
}

// The phases of one run; `number` is that of the first.
std::vector<Phase> random_phases(int64_t count, int64_t number) {
  std::vector<Phase> phases;
  int64_t inputs = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool counted = i > 0 && phases.back().tiles > 0 && random_below(2) == 0;
    phases.push_back({random_tiles(), inputs, number, counted, -7, -1});
    if (counted) phases[phases.size() - 2].next_tiles = phases.back().tiles;
    if (phases.back().tiles == 0) continue;
    inputs = phases.back().tiles;
    ++number;
  }
  return phases;
}

// Runs of one calling thread.
class Caller {
 public:
  void run() {
    team_ = random_below(150) == 0 ? 70 : int64_t("\1\2\2\2\3\4\5"[random_below(7)]);
    set_torch_threads(team_);
    const std::vector<Phase> phases = make_phases();
    std::vector<std::unique_ptr<RandomSet>> sets;
    std::vector<TaskSet*> pointers;
    for (size_t i = 0; i < phases.size();) {
      const size_t some = std::min(phases.size() - i, size_t(random_below(5)));
      sets.push_back(std::make_unique<RandomSet>(memory_, phases.data() + i, int64_t(some), team_));
      pointers.push_back(sets.back().get());
      i += some;
    }
    bool threw = false;
    try {
      if (random_below(2) == 0) {
        armllm::run(pointers.data(), int64_t(pointers.size()));
      } else {
        std::vector<armllm::TaskTime> times(pointers.size());
        armllm::run_timed(pointers.data(), int64_t(pointers.size()), times.data());
      }
    } catch (const std::runtime_error&) {
      threw = true;
    }
    check(phases, threw);
  }

 private:
  std::vector<Phase> make_phases() {
    std::vector<Phase> phases = random_phases(1 + random_below(24), number_);
    number_ += int64_t(phases.size()) + 2;
    if (random_below(10) == 0) {
      Phase& fails = phases[size_t(random_below(int64_t(phases.size())))];
      if (fails.tiles > 0) fails.throws = random_below(fails.tiles);
    }
    return phases;
  }

  void check(const std::vector<Phase>& phases, bool threw) {
    int64_t tiles = 0;
    bool throws = false;
    const Phase* last = nullptr;
    for (const Phase& phase : phases) {
      tiles += phase.tiles;
      throws = throws || phase.throws >= 0;
      if (phase.tiles > 0) last = &phase;
    }
    phases_run += int64_t(phases.size());
    expect(threw == throws, "a run throws if a tile does");
    const int64_t computed = memory_.computed.exchange(0);
    if (throws || last == nullptr) return;
    expect(computed == tiles, "every tile runs");
    std::vector<Memory::Cell> found(memory_.cells[last->number % 2].begin(),
                                    memory_.cells[last->number % 2].begin() + last->tiles);
    for (const Phase& phase : phases)
      for (int64_t i = 0; i < phase.tiles; ++i) expected_.compute(phase, i);
    for (int64_t i = 0; i < last->tiles; ++i)
      expect(found[size_t(i)].value == expected_.cells[last->number % 2][size_t(i)].value,
             "a team computes what a single thread does");
  }

  Memory memory_, expected_;
  int64_t team_ = 1;
  int64_t number_ = 0;
};

// More tiles than WorkRanges has pieces.
class HugeSet final : public TaskSet {
 public:
  explicit HugeSet(int64_t tiles) : ran(size_t(tiles)) {}
  int phases() const override { return 1; }
  int64_t tiles(int) const override { return int64_t(ran.size()); }
  void tile(int, int64_t index) override { ++ran[size_t(index)]; }
  std::vector<uint8_t> ran;
};

void test_huge_phase() {
  set_torch_threads(3);
  for (int64_t tiles : {WorkRanges::kMaxPieces, WorkRanges::kMaxPieces + 1}) {
    HugeSet set(tiles);
    armllm::run(set);
    expect(std::all_of(set.ran.begin(), set.ran.end(), [](uint8_t times) { return times == 1; }),
           "each tile of a huge phase runs once");
  }
}

class ManyPhases final : public TaskSet {
 public:
  int phases() const override { return int(WorkRanges::kMaxPhases) + 1; }
  int64_t tiles(int) const override { return 1; }
  void tile(int, int64_t) override {}
};

void test_too_many_phases() {
  ManyPhases set;
  bool threw = false;
  try {
    armllm::run(set);
  } catch (const std::runtime_error&) {
    threw = true;
  }
  expect(threw, "too many phases are refused");
}

}  // namespace
}  // namespace team_test

int main(int count, char** arguments) {
  using namespace team_test;
  const int64_t runs = count > 1 ? std::atoll(arguments[1]) : 100;
  seed(count > 2 ? uint64_t(std::atoll(arguments[2])) * 1000 : 0);
  test_huge_phase();
  test_too_many_phases();
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([runs] {
      Caller caller;
      for (int64_t run = 0; run < runs; ++run) caller.run();
    });
  for (std::thread& caller : callers) caller.join();
  std::printf("%ld phases, %ld failures\n", long(phases_run.load()), long(failures.load()));
  return failures.load() == 0 ? 0 : 1;
}
