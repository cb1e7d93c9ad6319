// Work stealing: every tile must be computed exactly once, and ranges must be contiguous.
#include <thread>

#include "kernel_test.h"
#include "runtime/work_ranges.h"

namespace armllm_test {
namespace {

using armllm::WorkRanges;

constexpr int64_t kWorkers[] = {1, 2, 3, 7, 63, 64, 65, 130};
constexpr int64_t kPieces[] = {0, 1, 2, 5, 64, 1000};

std::vector<int64_t> all_of(WorkRanges& ranges, int64_t worker, int64_t phase, int64_t pieces,
                            std::atomic<uint64_t>& empty) {
  std::vector<int64_t> taken;
  for (int64_t piece; (piece = ranges.take(worker, phase, pieces, empty)) != WorkRanges::kNone;)
    taken.push_back(piece);
  return taken;
}

bool each_taken_once(std::vector<int64_t> taken, int64_t pieces) {
  std::sort(taken.begin(), taken.end());
  for (int64_t i = 0; i < int64_t(taken.size()); ++i)
    if (taken[size_t(i)] != i) return false;
  return int64_t(taken.size()) == pieces;
}

void test_single_worker(Report& report) {
  for (int64_t workers : kWorkers)
    for (int64_t pieces : kPieces)
      for (int64_t worker : {int64_t(0), workers / 2, workers - 1}) {
        WorkRanges ranges;
        ranges.reset(workers);
        for (int64_t phase : {0, 1, 5}) {
          std::atomic<uint64_t> empty{0};
          report.expect(
              each_taken_once(all_of(ranges, worker, phase, pieces, empty), pieces),
              text("worker %ld of %ld takes all of %ld pieces", long(worker), long(workers), long(pieces)));
        }
      }
}

// Workers alternate, so that they finish together and steal no tiles.
void test_neighbors(Report& report) {
  for (int64_t workers : {2, 3, 7, 64})
    for (int64_t pieces : {int64_t(64), int64_t(1000)}) {
      WorkRanges ranges;
      ranges.reset(workers);
      std::atomic<uint64_t> empty{0};
      std::vector<std::vector<int64_t>> taken(static_cast<size_t>(workers));
      for (int64_t i = 0; i < pieces / workers; ++i)
        for (int64_t w = 0; w < workers; ++w) taken[size_t(w)].push_back(ranges.take(w, 0, pieces, empty));
      bool follow = true;
      for (const std::vector<int64_t>& mine : taken)
        for (size_t i = 1; i < mine.size(); ++i) follow = follow && mine[i] == mine[i - 1] + 1;
      report.expect(follow,
                    text("each of %ld workers takes adjacent pieces of %ld", long(workers), long(pieces)));
    }
}

// Tiles are stolen from the end of a range, so that its owner continues with adjacent tiles.
void test_stealing(Report& report) {
  WorkRanges ranges;
  ranges.reset(2);
  std::atomic<uint64_t> empty{0};
  std::vector<int64_t> helper, owner;
  owner.push_back(ranges.take(0, 0, 8, empty));
  for (int i = 0; i < 5; ++i) helper.push_back(ranges.take(1, 0, 8, empty));
  owner.push_back(ranges.take(0, 0, 8, empty));
  report.expect(helper == std::vector<int64_t>{4, 5, 6, 7, 3} && owner == std::vector<int64_t>{0, 1},
                "an idle worker steals from the end of the range of another");
}

void test_late_worker(Report& report) {
  WorkRanges ranges;
  ranges.reset(3);
  std::atomic<uint64_t> empty[2] = {};
  for (int64_t phase : {0, 1}) all_of(ranges, 0, phase, 9, empty[phase]);
  std::atomic<uint64_t> anew{0};
  report.expect(all_of(ranges, 1, 0, 9, empty[0]).empty() && all_of(ranges, 1, 0, 9, anew).empty(),
                "no worker takes tiles of a finished phase");
  ranges.reset(3);
  std::atomic<uint64_t> first{0};
  report.expect(each_taken_once(all_of(ranges, 2, 0, 9, first), 9), "phases restart after reset");
}

void test_threads(Report& report) {
  constexpr int64_t kThreads = 4, kPhases = 200;
  for (int64_t pieces : {int64_t(3), int64_t(17), int64_t(400)}) {
    WorkRanges ranges;
    ranges.reset(kThreads);
    std::vector<std::atomic<uint64_t>> empty(kPhases);
    std::vector<std::vector<int64_t>> taken(size_t(kThreads * kPhases));
    std::vector<std::thread> threads;
    for (int64_t w = 0; w < kThreads; ++w)
      threads.emplace_back([&, w] {
        for (int64_t phase = 0; phase < kPhases; ++phase)
          taken[size_t(phase * kThreads + w)] = all_of(ranges, w, phase, pieces, empty[size_t(phase)]);
      });
    for (std::thread& thread : threads) thread.join();
    bool each = true;
    for (int64_t phase = 0; phase < kPhases; ++phase) {
      std::vector<int64_t> all;
      for (int64_t w = 0; w < kThreads; ++w)
        for (int64_t piece : taken[size_t(phase * kThreads + w)]) all.push_back(piece);
      each = each && each_taken_once(all, pieces);
    }
    report.expect(each, text("threads take each of %ld pieces once", long(pieces)));
  }
}

}  // namespace

void test_work_ranges(Report& report) {
  test_single_worker(report);
  test_neighbors(report);
  test_stealing(report);
  test_late_worker(report);
  test_threads(report);
}

}  // namespace armllm_test
