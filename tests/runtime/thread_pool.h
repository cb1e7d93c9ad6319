// A pool of std::thread in the place of torch's, and random delays.
#pragma once

#include <cstdint>

namespace team_test {

uint64_t random_bits();  // of the calling thread's own generator
int64_t random_below(int64_t n);
void dawdle();                            // waits for a random time, usually none
void set_torch_threads(int64_t threads);  // what torch::stable::get_num_threads returns to the caller
void seed(uint64_t first);                // for threads that have not drawn numbers yet

}  // namespace team_test
