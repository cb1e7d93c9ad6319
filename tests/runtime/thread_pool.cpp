// The thread pool and the clocks that thread_team_test gives to ops/runtime/task_set.cpp.
#include "thread_pool.h"

#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace team_test {
namespace {

std::atomic<uint64_t> seeds{0};
thread_local int64_t threads_of_torch = 1;
thread_local bool in_parallel = false;

// Threads of one caller.  They live as long as the caller: task_set.cpp has thread_local variables.
class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Runs job(0) on the caller and job(1) … job(count − 1) on other threads.
  void run(int64_t count, const std::function<void(int64_t)>& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      count_ = count;
      running_ = count - 1;
      ++generation_;
      while (int64_t(threads_.size()) < count - 1)
        threads_.emplace_back(
            [this, index = int64_t(threads_.size()) + 1, seen = generation_ - 1] { loop(index, seen); });
    }
    changed_.notify_all();
    job(0);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void loop(int64_t index, int64_t seen) {
    while (true) {
      const std::function<void(int64_t)>* job = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return over_ || generation_ != seen; });
        if (over_) return;
        seen = generation_;
        if (index >= count_) continue;
        job = job_;
      }
      (*job)(index);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--running_ == 0) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
  const std::function<void(int64_t)>* job_ = nullptr;
  int64_t count_ = 0, running_ = 0, generation_ = 0;
  bool over_ = false;
};

}  // namespace

uint64_t random_bits() {
  thread_local uint64_t state = (seeds.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15ull;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

int64_t random_below(int64_t n) { return int64_t(random_bits() % uint64_t(n)); }

void dawdle() {
  const int64_t kind = random_below(200);
  if (kind < 2) std::this_thread::sleep_for(std::chrono::microseconds(random_below(300)));
  if (kind < 12) std::this_thread::yield();
  for (int64_t i = kind < 40 ? random_below(2000) : 0; i > 0; --i) asm volatile("" ::: "memory");
}

void set_torch_threads(int64_t threads) { threads_of_torch = threads; }

void seed(uint64_t first) { seeds = first; }

}  // namespace team_test

namespace torch::stable {

using namespace team_test;

uint32_t get_num_threads() { return uint32_t(in_parallel ? 3 : threads_of_torch); }

// Divides the range as at::parallel_for does, among any number of threads: OpenMP may start fewer.
void run_parallel(int64_t begin, int64_t end, const std::function<void(int64_t, int64_t)>& f) {
  if (end <= begin) return;
  thread_local Pool pool;
  const int64_t most = std::min(end - begin, threads_of_torch),
                count = random_below(4) != 0 ? most : 1 + random_below(most),
                step = (end - begin + count - 1) / count;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(count));
  pool.run(count, [&](int64_t index) {
    in_parallel = true;
    dawdle();
    try {
      if (begin + index * step < end) f(begin + index * step, std::min(end, begin + (index + 1) * step));
    } catch (...) {
      errors[size_t(index)] = std::current_exception();
    }
    dawdle();
    in_parallel = false;
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace torch::stable

// task_set.cpp finds this function by its name, as it finds OpenMP's.
extern "C" void omp_set_num_threads(int threads) { team_test::set_torch_threads(threads); }

// Clock and /proc/thread-self/schedstat of task_set.cpp, so that the worker governor is busy: time flies, and
// threads are displaced at random.  The linker's --wrap redirects the calls.
extern "C" {
std::chrono::steady_clock::time_point __wrap__ZNSt6chrono3_V212steady_clock3nowEv() {
  thread_local std::chrono::nanoseconds now{1};
  now += std::chrono::microseconds(team_test::random_below(12000));
  return std::chrono::steady_clock::time_point(now);
}

ssize_t __wrap_pread(int, void* to, size_t size, off_t) {
  thread_local long long delay = 0;
  if (team_test::random_below(8) == 0) delay += 30 * 1000 * 1000;
  return std::snprintf(static_cast<char*>(to), size, "1 %lld 1", delay);
}
}
