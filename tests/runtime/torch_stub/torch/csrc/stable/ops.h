// Stand-in for torch's header of this name.  Torch's thread pool is OpenMP's, which ThreadSanitizer does not
// understand; this pool consists of std::thread and synchronizes as little as OpenMP promises to: a fork
// before the first call of the function, a join after the last.
#pragma once

#include <cstdint>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace torch::stable {

uint32_t get_num_threads();
void run_parallel(int64_t begin, int64_t end, const std::function<void(int64_t, int64_t)>& f);

template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t, const F& f) {
  run_parallel(begin, end, f);
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace torch::stable

#define STD_TORCH_CHECK(condition, ...)                 \
  do {                                                  \
    if (!(condition)) torch::stable::fail(__VA_ARGS__); \
  } while (false)
